"""The output of a batch job: one line per row, appended when the row is done.

Only the file itself says which rows are done:

    {"custom_id": "a", "response": {...}, "error": null}       answered: custom_id a
    {"custom_id": "b", "response": null, "error": {"line": 7}} refused: line 7
    {"custom_id": "c", "respo                                  cut off by a kill: removed on resume

A line also has hashes of its row and model (marks.py), so that a later run recognizes stale
answers. `forget` removes stale answers: it writes a copy, and replaces the file with it at the end.

A line goes to the operating system in one write as soon as its row is done, so a kill of this
process cannot lose it. The file is synced to the disk (fsync) every few seconds and at the end:
after a power failure, the answers of the last seconds are lost and made again.
"""

import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import count
from pathlib import Path
from stat import S_ISREG
from time import monotonic

from mainstem.batch.done import Done, Entry, read_entry
from mainstem.batch.files import (
    STANDARD,
    FileFault,
    Pack,
    buffered,
    new_pack,
    unpack_error,
    unpacker,
)
from mainstem.core.errors import InvalidRequest
from mainstem.core.files import remove_leftovers, replacing

SYNC_S = 5.0
COPY_BYTES = 1 << 16  # written at once when lines are copied


class Existing(Enum):
    """What to do if the output exists and is not empty."""

    REFUSE = "refuse"
    RESUME = "resume"
    OVERWRITE = "overwrite"


class AnswerFile:
    """Appends rows to the output. An existing file does not change before `start` or `forget`.

    Raises InvalidRequest on opening and FileFault afterwards. A lock keeps other processes out.
    """

    def __init__(self, name: str, existing: Existing) -> None:
        self.name = name
        self.done = Done()
        self.num_appended = 0
        self._pack: Pack | None = new_pack(name)
        self._is_started = False
        self._is_copied = False  # _copy made a new file, which has only whole lines
        self._is_ours = name != STANDARD and not os.path.lexists(name)  # this process creates it
        self._end = 0  # in bytes: where the last whole line of the file ends
        self._synced_s = monotonic()
        self._raw = self._open(existing)

    def _open(self, existing: Existing) -> io.FileIO:
        if self.name == STANDARD:
            if existing is Existing.RESUME:
                raise InvalidRequest("--resume", "standard output cannot be resumed")
            return io.FileIO(1, "wb", closefd=False)
        path = Path(self.name)
        if not path.parent.is_dir():
            raise InvalidRequest("-o", f"the folder {path.parent} does not exist")
        try:
            raw = io.FileIO(path, "ab")
        except OSError as error:
            raise InvalidRequest(self.name, error.strerror or str(error)) from None
        try:
            _lock(raw)
            if os.fstat(raw.fileno()).st_size > 0:
                if existing is Existing.REFUSE:
                    raise InvalidRequest(
                        self.name, "holds answers already; use --resume or --overwrite"
                    )
                if existing is Existing.RESUME:
                    self.done = _read_done(self.name)
        except BaseException:
            raw.close()
            raise
        return raw

    def forget(self, is_stale: Callable[[Entry], bool]) -> int:
        """Remove entries, so that their rows are answered again; returns their number.

        The file is replaced when its copy is complete: a kill leaves the old one or the new one.
        """
        kept, num_stale = Done(), 0

        def is_kept(line: bytes) -> bool:
            nonlocal num_stale
            entry = read_entry(line)
            if is_stale(entry):
                num_stale += 1
                return False
            kept.note(entry, len(line))
            return True

        try:
            self._copy(is_kept)
        except OSError as error:
            raise self._fault(error) from None
        self.done = kept
        return num_stale

    def start(self) -> None:
        """Prepare the file for appending: cut off an incomplete last line, or empty a file that is
        overwritten."""
        self._is_started, self._is_ours = True, False
        if self.name == STANDARD or not _is_regular(self._raw):
            return  # a pipe or a device cannot be truncated
        if self._is_copied:
            return
        try:
            if self._pack is not None and self.done.num_bytes:
                self._copy(lambda line: True)  # an incomplete compressed stream cannot be continued
            else:
                self._end = self.done.num_bytes
                self._raw.truncate(self._end)
        except OSError as error:
            raise self._fault(error) from None

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row; after this a kill cannot lose it."""
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write(data if self._pack is None else self._pack.line(data))
        self.num_appended += 1
        if monotonic() - self._synced_s > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Sync everything to the disk."""
        self._synced_s = monotonic()
        try:
            os.fsync(self._raw.fileno())
        except OSError as error:
            if _is_regular(self._raw):  # a pipe or terminal has no disk
                raise self._fault(error) from None

    def finish(self) -> None:
        """End the file properly and sync it. After a fault, do nothing."""
        if not self._is_started:
            return
        self._is_started = False
        if self._pack is not None:
            self._write(self._pack.end())
        self.sync()

    def close(self) -> None:
        """Close the file. A file that was created here and never started is removed."""
        self._raw.close()
        if self._is_ours:
            Path(self.name).unlink(missing_ok=True)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._raw.write(view) or 0 :]
        except OSError as error:
            self._cut()
            raise self._fault(error) from None
        self._end += len(data)

    def _cut(self) -> None:
        """Remove a partly written line, if possible."""
        if self.name != STANDARD and _is_regular(self._raw):
            try:
                self._raw.truncate(self._end)
            except OSError:
                return  # the incomplete line will be cut off on resume

    def _fault(self, error: OSError) -> FileFault:
        self._is_started = False
        num_rows = self.done.num_answered + self.done.num_failed + self.num_appended
        reason = error.strerror or error
        return FileFault(
            f"cannot write {self.name}: {reason}; the {num_rows} rows written before are safe"
        )

    def _copy(self, is_kept: Callable[[bytes], bool]) -> None:
        """Copy whole lines to a new file, which then replaces this one."""
        target = Path(self.name).resolve()  # if the name is a link, replace what it points to
        remove_leftovers(target)
        # the old file is closed last: the lock on it keeps other runs out
        with self._raw as old, io.FileIO(self.name, "rb") as packed, replacing(target) as file:
            os.fchmod(file.fileno(), os.fstat(old.fileno()).st_mode)
            # a copy of the descriptor, since `replacing` closes `file`
            self._raw, self._end = io.FileIO(os.dup(file.fileno()), "wb"), 0
            _lock(self._raw)
            self._pack = new_pack(self.name)
            stream = buffered(packed, unpacker(self.name))
            lines = (line for _, line in _whole_lines(stream) if is_kept(line))
            for data in _in_chunks(lines):
                self._write(data if self._pack is None else self._pack.line(data))
        self._is_copied = True


def _is_regular(raw: io.FileIO) -> bool:
    return S_ISREG(os.fstat(raw.fileno()).st_mode)


def _lock(raw: io.FileIO) -> None:
    try:
        fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequest(str(raw.name), "another run is writing to it") from None
    except OSError:
        return  # a file system without locks; users must avoid two runs at once there


def _in_chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines in chunks of COPY_BYTES or a little more; the last chunk may be smaller."""
    held = bytearray()
    for line in lines:
        held += line
        if len(held) >= COPY_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _read_done(name: str) -> Done:
    """Read the whole lines of an output; an incomplete last line is ignored."""
    done = Done()
    with io.FileIO(name, "rb") as raw:
        stream, number = buffered(raw, unpacker(name)), 0
        try:
            for number, line in _whole_lines(stream):
                try:
                    done.note(read_entry(line), len(line))
                except ValueError:
                    reason = f"line {number} is not a line of a batch output; cannot resume"
                    raise InvalidRequest(name, reason) from None
        except (OSError, unpack_error(name)) as error:
            raise InvalidRequest(name, f"cannot be read after line {number}: {error}") from None
    return done


def _whole_lines(stream: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Whole lines and their numbers, up to the place where a kill cut the file off."""
    try:
        for number in count(1):
            line = stream.readline()
            if not line.endswith(b"\n"):
                return
            yield number, line
    except EOFError:
        return  # a kill cut off the compressed file within its last line
