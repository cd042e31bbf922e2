"""Tables in CSV, TSV and JSON lines, in and out. Files may end in .gz or .zst.

Bytes that are not UTF-8 are kept: a cell has them as surrogates, which CSV and TSV outputs turn
back into the same bytes.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from mainstem.batch.files import FileFault, buffered, new_pack, unpack_error, unpacker
from mainstem.core.errors import InvalidRequest
from mainstem.tables.cells import MISSING, cell_text, has_bytes_only, json_value, readable
from mainstem.tables.formats import Format

LARGEST_CELL = (1 << 31) - 1  # more than this is not a table
SEPARATORS = {Format.CSV: ",", Format.TSV: "\t"}
PACK_BYTES = 1 << 16

Row = Sequence[object]  # cells in the order of the columns


def open_text(name: str) -> io.TextIOWrapper:
    """A file, decompressed, as text. Raises InvalidRequest if it cannot be opened."""
    new_unpack = unpacker(name)
    try:
        raw = io.FileIO(name, "rb")
    except OSError as error:
        raise InvalidRequest(name, error.strerror or str(error)) from None
    stream = buffered(raw, new_unpack)
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")


def check_names(name: str, columns: Sequence[str]) -> None:
    """Raise InvalidRequest unless the columns have different names, all of them UTF-8."""
    if not columns:
        raise InvalidRequest(name, "is empty: it has no columns")
    for column in columns:
        if readable(column) != column or "\0" in column:
            reason = f"the column {readable(column)!r} is not UTF-8; save the file as UTF-8"
            raise InvalidRequest(name, reason)
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise InvalidRequest(name, f"two columns have the same name, {twice[0]!r}; rename one")


# --- CSV and TSV ---------------------------------------------------------------------------------


class SeparatedFile:
    """A CSV or TSV file: a header, then rows. All cells are texts."""

    def __init__(self, name: str, kind: Format) -> None:
        """Raises InvalidRequest if there is no usable header."""
        self.name, self._separator = name, SEPARATORS[kind]
        csv.field_size_limit(LARGEST_CELL)
        with open_text(name) as file:
            header = next(self._lines(file), None)
        self.columns = tuple(header or ())
        check_names(name, self.columns)

    def __iter__(self) -> Iterator[Row]:
        """Raises InvalidRequest for a row that has more or fewer cells than the header."""
        with open_text(self.name) as file:
            lines = self._lines(file)
            next(lines)
            for number, row in enumerate(lines, 1):
                if len(row) != len(self.columns):
                    reason = (
                        f"row {number} has {len(row)} cells, and the header has "
                        f"{len(self.columns)}; a text with {self._separator!r} or line ends must "
                        'be in double quotes ("...")'
                    )
                    raise InvalidRequest(self.name, reason)
                yield row

    def _lines(self, file: io.TextIOWrapper) -> Iterator[list[str]]:
        """Rows that are not blank, the header first."""
        reader = csv.reader(file, delimiter=self._separator, strict=True)
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise InvalidRequest(self.name, f"line {reader.line_num}: {error}") from None
        except (OSError, EOFError, unpack_error(self.name)) as error:
            reason = f"cannot be read after line {reader.line_num}: {error}"
            raise FileFault(f"{self.name} {reason}") from None


class SeparatedWriter:
    """Writes CSV or TSV."""

    def __init__(self, file: BinaryIO, columns: Sequence[str], kind: Format, name: str) -> None:
        self._out = _PackedText(file, name)
        self._writer = csv.writer(self._out, delimiter=SEPARATORS[kind], lineterminator="\n")
        self._writer.writerow(columns)

    def write(self, cells: Row) -> None:
        """Append a row."""
        texts = (shown_text(value) for value in cells)
        self._writer.writerow([text if has_bytes_only(text) else readable(text) for text in texts])

    def close(self) -> None:
        """Write what is left."""
        self._out.end()


def shown_text(value: object) -> str:
    """A cell as text in an output: bytes, too."""
    return (
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else cell_text(value)
    )


# --- JSON lines ----------------------------------------------------------------------------------


class JsonLinesFile:
    """JSON objects, one a line; the columns are the fields of all of them."""

    def __init__(self, name: str) -> None:
        """Reads the whole file; raises InvalidRequest for a line that is not an object."""
        self.name = name
        columns: dict[str, None] = {}
        for row in self._objects():
            columns |= dict.fromkeys(row)
        self.columns = tuple(columns)
        check_names(name, self.columns)

    def __iter__(self) -> Iterator[Row]:
        for row in self._objects():
            yield [row.get(column, MISSING) for column in self.columns]

    def _objects(self) -> Iterator[dict[str, object]]:
        number = 0
        with open_text(self.name) as file:
            try:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._object(line, number)
            except (OSError, EOFError, unpack_error(self.name)) as error:
                reason = f"cannot be read after line {number}: {error}"
                raise FileFault(f"{self.name} {reason}") from None

    def _object(self, line: str, number: int) -> dict[str, object]:
        try:
            row = json.loads(line, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(self.name, f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InvalidRequest(self.name, f"line {number} is not a JSON object")
        return row


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object; raises ValueError if two of its fields have the same name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two fields are named {next(n for n in names if names.count(n) > 1)!r}")
    return found


class JsonLinesWriter:
    """Writes JSON lines; a field that a row does not have is left out."""

    def __init__(self, file: BinaryIO, columns: Sequence[str], name: str) -> None:
        self._out = _PackedText(file, name)
        self._columns = columns

    def write(self, cells: Row) -> None:
        """Append a row."""
        given = zip(self._columns, cells, strict=True)
        row = {name: _json(value) for name, value in given if value is not MISSING}
        self._out.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Write what is left."""
        self._out.end()


def _json(value: object) -> object:
    return shown_text(value) if isinstance(value, bytes) else json_value(value)


class _PackedText:
    """Text into a binary file, compressed if its name says so."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._pack = file, new_pack(name)
        self._held = io.StringIO()

    def write(self, text: str) -> int:
        size = self._held.write(text)
        if self._held.tell() > PACK_BYTES:
            self._flush()
        return size

    def end(self) -> None:
        self._flush()
        if self._pack is not None:
            self._file.write(self._pack.end())

    def _flush(self) -> None:
        data = self._held.getvalue().encode("utf-8", "surrogateescape")
        self._file.write(data if self._pack is None else self._pack.line(data))
        self._held = io.StringIO()
