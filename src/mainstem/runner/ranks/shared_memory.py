"""Memory that the engine's process and its ranks share. It has no name, and is freed when the last
process closes it or ends.

One such memory holds the saved pages, with the parts of all ranks side by side. Another holds the
ranks' addresses.
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
        """Set the size and return the memory; parts of it take no space until they are written."""
        os.ftruncate(self.fd, num_bytes)
        return memoryview(mmap.mmap(self.fd, num_bytes))

    def close(self) -> None:
        os.close(self.fd)
