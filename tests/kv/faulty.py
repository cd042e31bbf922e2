"""Segment files that fail on request."""

import errno
from collections import deque
from pathlib import Path
from time import sleep
from typing import ClassVar

from mainstem.kv.bytes.segments import SegmentFiles

SLOW_S = 0.02


class FaultyFiles(SegmentFiles):
    """Each read or write takes the next planned fault, if any (see READ_FAULTS, WRITE_FAULTS)."""

    reads: ClassVar[deque[str]] = deque()
    writes: ClassVar[deque[str]] = deque()
    READ_FAULTS = ("eio", "flip", "short", "gone", "slow")
    WRITE_FAULTS = ("eio", "full", "flip", "slow")

    def __init__(self, folder: Path, page_bytes: int) -> None:
        super().__init__(folder, page_bytes)

    def read(self, record: int, *buffers: memoryview) -> None:
        fault = self.reads.popleft() if self.reads else None
        _raise(fault)
        super().read(record, *buffers)
        if fault == "flip":
            buffers[-1][0] ^= 1

    def write(self, record: int, buffer: memoryview) -> None:
        fault = self.writes.popleft() if self.writes else None
        _raise(fault)
        if fault == "flip":  # the disk stores other bytes than it was given
            damaged = bytearray(buffer)
            damaged[-1] ^= 1
            super().write(record, memoryview(damaged))
        else:
            super().write(record, buffer)

    @classmethod
    def reset(cls) -> None:
        cls.reads.clear()
        cls.writes.clear()


def _raise(fault: str | None) -> None:
    if fault == "eio":
        raise OSError(errno.EIO, "input/output error")
    if fault == "full":
        raise OSError(errno.ENOSPC, "no space left on device")
    if fault == "short":
        raise EOFError("the file ends too early")
    if fault == "gone":
        raise FileNotFoundError(errno.ENOENT, "no such file")
    if fault == "slow":
        sleep(SLOW_S)
