"""The output of a batch job: a line per row, appended when it is known, safe against a kill.

Nothing but the file itself says what is done:

    {"custom_id": "a", "response": {...}, "error": null}       answered: custom_id a
    {"custom_id": "b", "response": null, "error": {"line": 7}} refused: line 7
    {"custom_id": "c", "respo                                  torn by a kill: cut off on resume

A line goes to the operating system in one piece as soon as it is known, which a kill of this
process cannot undo. It goes to the disk (fsync) every few seconds and at the end: after a power
failure the last seconds are answered again.
"""

import fcntl
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from stat import S_ISREG
from time import monotonic
from types import TracebackType

from mainstem.batch.files import (
    STANDARD,
    FileFault,
    Pack,
    buffered,
    new_pack,
    unpack_error,
    unpacker,
)
from mainstem.batch.idset import IdSet
from mainstem.core.errors import InvalidRequest

SYNC_S = 5.0


class Existing(Enum):
    """What to do with an output that is there and not empty."""

    REFUSE = "refuse"
    RESUME = "resume"
    OVERWRITE = "overwrite"


@dataclass(slots=True)
class Done:
    """What an earlier run has written."""

    answered: IdSet = field(default_factory=IdSet)  # custom ids
    failed_lines: IdSet = field(default_factory=IdSet)  # line numbers as text
    num_answered: int = 0
    num_failed: int = 0
    num_bytes: int = 0  # of whole lines, unpacked


class AnswerFile:
    """Appends rows to the output. Nothing on the disk changes before `start`.

    Raises InvalidRequest on opening and FileFault afterwards; one process at a time holds a file.
    """

    def __init__(self, name: str, existing: Existing) -> None:
        self.name = name
        self.done = Done()
        self.num_appended = 0
        self._pack: Pack | None = new_pack(name)
        self._is_started = False
        self._is_ours = name != STANDARD and not os.path.lexists(name)  # made here, still empty
        self._end = 0  # of the last whole line in the file
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
                        self.name, "holds answers already; say --resume or --overwrite"
                    )
                if existing is Existing.RESUME:
                    self.done = _read_done(self.name)
        except BaseException:
            raw.close()
            raise
        return raw

    def start(self) -> None:
        """Make the file ready for appending: torn ends are cut, what is to be replaced goes."""
        self._is_started, self._is_ours = True, False
        if self.name == STANDARD or not _is_regular(self._raw):
            return  # a pipe or a device takes what comes
        try:
            if self._pack is not None and self.done.num_bytes:
                self._repack()
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
        """Bring everything to the disk."""
        self._synced_s = monotonic()
        try:
            os.fsync(self._raw.fileno())
        except OSError as error:
            if _is_regular(self._raw):  # a pipe or terminal has no disk
                raise self._fault(error) from None

    def finish(self) -> None:
        """End the file properly and bring it to the disk; nothing to do after a fault."""
        if not self._is_started:
            return
        self._is_started = False
        if self._pack is not None:
            self._write(self._pack.end())
        self.sync()

    def close(self) -> None:
        """Let go of the file as it is; one that was made here and never started goes again."""
        self._raw.close()
        if self._is_ours:
            Path(self.name).unlink(missing_ok=True)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Take back a line that was written in part, where that is possible."""
        if self.name != STANDARD and _is_regular(self._raw):
            try:
                self._raw.truncate(self._end)
            except OSError:
                return  # the torn line will be cut on resume

    def _fault(self, error: OSError) -> FileFault:
        self._is_started = False
        num_rows = self.done.num_answered + self.done.num_failed + self.num_appended
        reason = error.strerror or error
        return FileFault(
            f"cannot write {self.name}: {reason}; the {num_rows} rows written before are safe"
        )

    def _repack(self) -> None:
        """Copy whole lines to a fresh file: a compressed stream that was cut cannot go on."""
        assert self._pack is not None
        fresh_name = f"{self.name}.part"
        fresh = io.FileIO(fresh_name, "wb")
        _lock(fresh)
        old, self._raw = self._raw, fresh
        left = self.done.num_bytes
        try:
            with io.FileIO(self.name, "rb") as packed:
                stream = buffered(packed, unpacker(self.name))
                while left:
                    data = stream.read1(min(left, 1 << 16))
                    left -= len(data)
                    self._write(self._pack.line(data))
            os.fsync(fresh.fileno())
            os.replace(fresh_name, self.name)
        except BaseException:
            os.unlink(fresh_name)
            raise
        finally:
            old.close()


def _is_regular(raw: io.FileIO) -> bool:
    return S_ISREG(os.fstat(raw.fileno()).st_mode)


def _lock(raw: io.FileIO) -> None:
    try:
        fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequest(str(raw.name), "another run is writing to it") from None
    except OSError:
        return  # a file system without locks; two runs at once are then the user's to avoid


def _read_done(name: str) -> Done:
    """What the whole lines of an output say; an end that a kill tore off is left out."""
    done = Done()
    with io.FileIO(name, "rb") as raw:
        stream = buffered(raw, unpacker(name))
        number = 0
        try:
            while (line := stream.readline()).endswith(b"\n"):
                number += 1
                _note(done, line, name, number)
                done.num_bytes += len(line)
        except EOFError:
            pass  # a compressed file that a kill cut off; its last line with it
        except (OSError, unpack_error(name)) as error:
            raise InvalidRequest(name, f"cannot be read after line {number}: {error}") from None
    return done


def _note(done: Done, line: bytes, name: str, number: int) -> None:
    try:
        row = json.loads(line)
        custom_id, error = row["custom_id"], row["error"]
        is_answer = row["response"] is not None and isinstance(custom_id, str)
        failed_line = None if is_answer else int(error["line"])
    except (ValueError, KeyError, TypeError):
        reason = f"line {number} is not of a batch output; cannot resume"
        raise InvalidRequest(name, reason) from None
    if failed_line is None:
        done.answered.add(custom_id)
        done.num_answered += 1
    else:
        done.failed_lines.add(str(failed_line))
        done.num_failed += 1
