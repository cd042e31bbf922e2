"""Segment files. Each has room for the same number of records, and a record for one page.

    0000.pages | record 0 | record 1 | ... | record n-1 |     0001.pages | record n | ...

Every record begins at a multiple of ALIGNMENT, so reads and writes can bypass the system's cache
(O_DIRECT) if the file system and the size of a page allow it. Only the index knows which page a
record holds.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

ALIGNMENT = 4096
SEGMENT_BYTES = 256 << 20


class SegmentFiles:
    """Reads and writes records by number; a segment is created when it is first written.

    Several threads may read and write, but never the same record at once.
    """

    def __init__(self, folder: Path, page_bytes: int) -> None:
        self._folder = folder
        self._page_bytes = page_bytes
        self.record_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self.records_per_segment = max(1, SEGMENT_BYTES // self.record_bytes)
        self._files: dict[int, int] = {}
        self._lock = Lock()
        self._direct = getattr(os, "O_DIRECT", 0) if page_bytes % ALIGNMENT == 0 else 0

    def read(self, record: int, *buffers: memoryview) -> None:
        """Read consecutive records, beginning with this one, into the buffers; raises OSError, or
        EOFError if the file is too short."""
        segment, offset = self._place(record)
        file = self._open(segment, is_new=False)
        left = list(buffers)
        while left:
            count = os.preadv(file, left, offset)
            if count == 0 or (self._direct and count % ALIGNMENT):
                raise EOFError(f"segment {segment} ends before record {record}")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def are_neighbours(self, record: int, other: int) -> bool:
        """Whether one read can fill the buffers of both records, in this order."""
        has_gap = self.record_bytes != self._page_bytes
        return other == record + 1 and other % self.records_per_segment != 0 and not has_gap

    def write(self, record: int, buffer: memoryview) -> None:
        """Write a record; it is durable after `sync`."""
        segment, offset = self._place(record)
        file = self._open(segment, is_new=True)
        done = 0
        while done < len(buffer):
            done += os.pwritev(file, [buffer[done:]], offset + done)

    def sync(self, records: list[int]) -> None:
        """Return when these records are on the disk."""
        for segment in sorted({self._place(record)[0] for record in records}):
            os.fdatasync(self._open(segment, is_new=True))

    def cut(self, num_records: int) -> None:
        """Delete everything after the first `num_records`."""
        last, end = self._place(num_records)
        for path in self._folder.glob("[0-9]*.pages"):
            segment = int(path.stem)
            if segment > last or (segment == last and end == 0):
                path.unlink(missing_ok=True)
            elif segment == last and path.stat().st_size > end:
                os.truncate(path, end)

    def find_cut_off(self, records: Iterable[int]) -> dict[int, str]:
        """Return the records that the files do not hold, each with the reason: `missing` or
        `truncated`."""
        sizes = {int(path.stem): path.stat().st_size for path in self._folder.glob("[0-9]*.pages")}
        found: dict[int, str] = {}
        for record in records:
            segment, offset = self._place(record)
            size = sizes.get(segment)
            if size is None:
                found[record] = "missing"
            elif size < offset + self._page_bytes:
                found[record] = "truncated"
        return found

    def shorten(self, num_bytes: int) -> None:
        """Cut `num_bytes` off the last segments; this truncates some records."""
        for path in sorted(self._folder.glob("*.pages"), reverse=True):
            size = path.stat().st_size
            os.truncate(path, max(0, size - num_bytes))
            num_bytes -= size
            if num_bytes <= 0:
                return

    def remove_all(self) -> int:
        """Delete every segment; returns how many there were."""
        self.close()
        found = list(self._folder.glob("*.pages"))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _place(self, record: int) -> tuple[int, int]:
        segment, index = divmod(record, self.records_per_segment)
        return segment, index * self.record_bytes

    def _open(self, segment: int, is_new: bool) -> int:
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                file = self._files[segment] = self._open_file(segment, is_new)
            return file

    def _open_file(self, segment: int, is_new: bool) -> int:
        path = self._folder / f"{segment:04}.pages"
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_new else 0)
        try:
            return os.open(path, flags | self._direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0  # the file system does not support O_DIRECT
            return os.open(path, flags, 0o600)
