"""A table in one file or several, and the file that gets its rows with their answers."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from mainstem.batch.files import STANDARD, FileFault
from mainstem.core.errors import InvalidRequest
from mainstem.core.files import replacing
from mainstem.tables.arrow import (
    ArrowFile,
    ArrowWriter,
    inferred_schema,
    text_schema,
    with_answers,
)
from mainstem.tables.asking import Kind
from mainstem.tables.cells import MISSING
from mainstem.tables.formats import Format, files_of, format_of
from mainstem.tables.results import Outcomes
from mainstem.tables.text import (
    JsonLinesFile,
    JsonLinesWriter,
    Row,
    SeparatedFile,
    SeparatedWriter,
)

if TYPE_CHECKING:
    import pyarrow as pa

Part = SeparatedFile | JsonLinesFile | ArrowFile


class FileTable:
    """A table in files of one format, one after the other. It may be read again and again."""

    def __init__(self, names: Sequence[str], kind: Format, limit: int | None = None) -> None:
        """Only the first `limit` rows are read. Raises InvalidRequest if the files cannot be read,
        or have different columns."""
        self.kind, self._limit = kind, limit
        self._states = {name: _state_of(name) for name in names}
        self._parts = [_part(name, kind) for name in names]
        first = self._parts[0]
        columns = dict.fromkeys(name for part in self._parts for name in part.columns)
        self.columns = tuple(columns)
        for part in self._parts[1:] if kind is not Format.JSON_LINES else ():
            if set(part.columns) != set(first.columns):
                odd = sorted(set(part.columns) ^ set(first.columns))[0]
                reason = f"has other columns than {first.name}: only one has {odd!r}"
                raise InvalidRequest(part.name, reason)
        if isinstance(first, ArrowFile):
            self._check_types(first)

    @classmethod
    def open(cls, name: str, limit: int | None = None) -> "FileTable":
        """A file, the table files of a folder, or the files that match a pattern."""
        names = files_of(name)
        kinds = {format_of(each) for each in names}
        if len(kinds) > 1:
            listed = ", ".join(sorted(kind.value for kind in kinds))
            raise InvalidRequest(name, f"holds files of several formats: {listed}")
        return cls(names, kinds.pop(), limit)

    def has_file(self, path: Path) -> bool:
        """Whether one of the files is this one."""
        return path.exists() and any(path.samefile(part.name) for part in self._parts)

    def check_unchanged(self) -> None:
        """Raise FileFault if a file has changed since the table was opened: answers would be
        written beside other rows."""
        for name, state in self._states.items():
            if _state_of(name) != state:
                advice = "the answers are kept, and --resume uses those of rows that are the same"
                raise FileFault(f"{name} has changed while the job ran; {advice}")

    def _check_types(self, first: ArrowFile) -> None:
        for part in self._parts[1:]:
            assert isinstance(part, ArrowFile)
            for name in self.columns:
                kinds = [each.schema.field(name).type for each in (first, part)]
                if kinds[0] != kinds[1]:
                    reason = f"the column {name!r} is {kinds[1]}, and {kinds[0]} in {first.name}"
                    raise InvalidRequest(part.name, reason)

    def __iter__(self) -> Iterator[Row]:
        return islice(self._all_rows(), self._limit)

    def _all_rows(self) -> Iterator[Row]:
        for part in self._parts:
            if part.columns == self.columns:
                yield from part
                continue
            places = [
                part.columns.index(name) if name in part.columns else None for name in self.columns
            ]
            for row in part:
                yield [MISSING if place is None else row[place] for place in places]

    @property
    def schema(self) -> "pa.Schema":
        """The types of the columns, for Parquet and Arrow outputs."""
        first = self._parts[0]
        if isinstance(first, ArrowFile):
            return first.schema
        if self.kind is Format.JSON_LINES:
            return inferred_schema(self.columns, iter(self))
        return text_schema(self.columns)

    def batches(self) -> "Iterator[pa.RecordBatch] | None":
        """The rows as Arrow batches, unchanged; None if the table is not an Arrow one."""
        if not isinstance(self._parts[0], ArrowFile):
            return None
        return self._batches()

    def _batches(self) -> "Iterator[pa.RecordBatch]":
        left = sys.maxsize if self._limit is None else self._limit
        for part in self._parts:
            assert isinstance(part, ArrowFile)
            for batch in part.batches():
                if not left:
                    return
                yield batch.select(list(self.columns)).slice(0, left)
                left -= min(left, batch.num_rows)


def _state_of(name: str) -> tuple[int, int] | None:
    """The size and time of a file; None if there is none."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _part(name: str, kind: Format) -> Part:
    if kind is Format.JSON_LINES:
        return JsonLinesFile(name)
    return SeparatedFile(name, kind) if kind.is_text else ArrowFile(name, kind)


# --- out -----------------------------------------------------------------------------------------


class _Writer(Protocol):
    def write(self, cells: Row) -> None: ...
    def close(self) -> None: ...


def write_answers(
    table: FileTable, outcomes: Outcomes, answers: Mapping[str, Kind], name: str, kind: Format
) -> None:
    """Write the table with the answers' columns, in the table's order. A file appears only when it
    is complete; raises FileFault if it cannot be written."""
    table.check_unchanged()
    try:
        if name == STANDARD:
            sys.stdout.flush()
            _write(table, outcomes, answers, sys.stdout.buffer, (name, kind))
            sys.stdout.buffer.flush()
            return
        with replacing(Path(name)) as file:
            _write(table, outcomes, answers, file, (name, kind))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        # the last three: a value does not fit the type of its column in an Arrow output
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileFault(f"cannot write {name}: {reason}; the answers are kept") from None


def _write(
    table: FileTable,
    outcomes: Outcomes,
    answers: Mapping[str, Kind],
    file: BinaryIO,
    target: tuple[str, Format],
) -> None:
    kind = target[1]
    batches = None if kind.is_text else table.batches()
    if batches is not None:
        out = ArrowWriter(file, with_answers(table.schema, answers), kind)
        out.write_batches(batches, outcomes.of, answers)
        out.close()
        return
    writer = _writer(table, answers, file, target)
    for number, row in enumerate(table, 1):
        writer.write([*row, *outcomes.of(number)])
    writer.close()


def _writer(
    table: FileTable, answers: Mapping[str, Kind], file: BinaryIO, target: tuple[str, Format]
) -> _Writer:
    name, kind = target
    columns = (*table.columns, *answers)
    if kind is Format.JSON_LINES:
        return JsonLinesWriter(file, columns, name)
    if kind.is_text:
        return SeparatedWriter(file, columns, kind, name)
    return ArrowWriter(file, with_answers(table.schema, answers), kind)
