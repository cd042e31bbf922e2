"""Memory that the engine's process and its ranks see alike. It has no name, and is gone with the
last process that has it open.

Pages are saved to one, each rank's part beside the others'. In another one ranks find each other's
addresses.
"""

import mmap
import os
import sys

from mainstem.core.errors import ConfigError


class SharedMemory:
    """A descriptor that children inherit; it has no size until `resize`."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise ConfigError("tensor_parallel above 1 needs Linux")
        self.fd = os.memfd_create("mainstem-ranks")

    def resize(self, num_bytes: int) -> memoryview:
        """The memory; a page of it costs nothing until it is written."""
        os.ftruncate(self.fd, num_bytes)
        return memoryview(mmap.mmap(self.fd, num_bytes))

    def close(self) -> None:
        os.close(self.fd)
