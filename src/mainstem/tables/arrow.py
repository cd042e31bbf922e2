"""Tables in Parquet and Arrow files, in and out. pyarrow comes with the extra `tables`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.tables.asking import Kind
from mainstem.tables.cells import MISSING, is_empty, json_value, readable
from mainstem.tables.formats import Format
from mainstem.tables.text import Row, check_names, shown_text

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4096


def arrow() -> Any:
    """The package pyarrow; raises ConfigError if it is not installed."""
    try:
        import pyarrow  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        advice = "pip install 'mainstem[tables]', or use CSV or JSON lines"
        raise ConfigError(f"Parquet and Arrow need pyarrow: {advice}") from None
    return pyarrow


class ArrowFile:
    """A Parquet file, or an Arrow file (Feather version 2)."""

    def __init__(self, name: str, kind: Format) -> None:
        """Raises InvalidRequest if the file cannot be read."""
        self.name, self._kind, self._pa = name, kind, arrow()
        with self._open() as source:
            self.schema: pa.Schema = self._schema(source)
        self.columns = tuple(self.schema.names)
        check_names(name, self.columns)

    def __iter__(self) -> Iterator[Row]:
        for batch in self.batches():
            yield from rows_of(batch)

    def batches(self) -> "Iterator[pa.RecordBatch]":
        """The file, some rows at a time."""
        with self._open() as source:
            try:
                if self._kind is Format.PARQUET:
                    import pyarrow.parquet as pq  # noqa: PLC0415  # an extra

                    yield from pq.ParquetFile(source).iter_batches(BATCH_ROWS)
                    return
                file = self._pa.ipc.open_file(source)
                for number in range(file.num_record_batches):
                    batch = file.get_batch(number)
                    for begin in range(0, batch.num_rows, BATCH_ROWS):
                        yield batch.slice(begin, BATCH_ROWS)
            except (self._pa.ArrowException, OSError) as error:
                raise self._unreadable(error) from None

    def _open(self) -> Any:
        try:
            return self._pa.OSFile(self.name, "rb")
        except OSError as error:
            raise InvalidRequest(self.name, error.strerror or str(error)) from None

    def _schema(self, source: Any) -> "pa.Schema":
        try:
            if self._kind is Format.PARQUET:
                import pyarrow.parquet as pq  # noqa: PLC0415  # an extra

                return pq.ParquetFile(source).schema_arrow
            return self._pa.ipc.open_file(source).schema
        except (self._pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> InvalidRequest:
        return InvalidRequest(self.name, f"cannot be read as {self._kind.value}: {error}")


def rows_of(batch: "pa.RecordBatch") -> Iterator[Row]:
    """The rows of a batch; text that is not UTF-8 is refused, since Arrow's texts must be."""
    columns = []
    for column, name in zip(batch.columns, batch.schema.names, strict=True):
        try:
            columns.append(column.to_pylist())
        except (UnicodeDecodeError, ValueError, OverflowError) as error:
            raise InvalidRequest(name, f"a cell cannot be read: {error}") from None
    if not columns:
        return
    yield from zip(*columns, strict=True)


class ArrowWriter:
    """Writes Parquet or an Arrow file. Columns of the input keep their types."""

    def __init__(self, file: BinaryIO, schema: "pa.Schema", kind: Format) -> None:
        self._pa, self._schema = arrow(), schema
        self._held: list[list[object]] = [[] for _ in schema]
        if kind is Format.PARQUET:
            import pyarrow.parquet as pq  # noqa: PLC0415  # an extra

            self._writer: Any = pq.ParquetWriter(file, schema)
        else:
            self._writer = self._pa.ipc.new_file(file, schema)

    def write(self, cells: Row) -> None:
        """Append a row."""
        for column, value in zip(self._held, cells, strict=True):
            column.append(value)
        if len(self._held[0]) >= BATCH_ROWS:
            self._flush()

    def write_batches(
        self,
        batches: "Iterator[pa.RecordBatch]",
        answers_of: Callable[[int], Row],
        answers: Mapping[str, Kind],
    ) -> None:
        """Append rows as they are, with the cells of their answers; rows count from 1."""
        number = 0
        for batch in batches:
            rows = [answers_of(number + place) for place in range(1, batch.num_rows + 1)]
            number += batch.num_rows
            found = [
                array_of(self._pa, [row[place] for row in rows], arrow_type(kind))
                for place, kind in enumerate(answers.values())
            ]
            arrays = [*batch.columns, *found]
            self._writer.write_batch(self._pa.record_batch(arrays, schema=self._schema))

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._held or not self._held[0]:
            return
        arrays = [
            array_of(self._pa, values, field.type)
            for values, field in zip(self._held, self._schema, strict=True)
        ]
        self._writer.write_batch(self._pa.record_batch(arrays, schema=self._schema))
        self._held = [[] for _ in self._schema]


def array_of(pa: Any, values: Sequence[object], kind: Any) -> Any:
    """Values as an array of a type; texts of other values if the type is text."""
    plain = [_plain(value) for value in values]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        plain = [None if is_empty(value) else readable(shown_text(value)) for value in plain]
    return pa.array(plain, kind)


def _plain(value: object) -> object:
    """A cell with None for no value; "not a number" stays."""
    if isinstance(value, list | dict):
        return json_value(value)
    return None if value is MISSING else value


def inferred_schema(columns: Sequence[str], rows: Iterator[Row]) -> "pa.Schema":
    """A schema for rows without types (JSON lines): the type that fits all cells of a column, or
    text."""
    pa = arrow()
    found: list[Any] = [pa.null()] * len(columns)
    held: list[list[object]] = [[] for _ in columns]

    def widen() -> None:
        for place, values in enumerate(held):
            found[place] = _wider(pa, found[place], values)
            values.clear()

    for number, row in enumerate(rows, 1):
        for values, value in zip(held, row, strict=True):
            values.append(None if is_empty(value) else json_value(value))
        if number % BATCH_ROWS == 0:
            widen()
    widen()
    kinds = [pa.string() if pa.types.is_null(kind) else kind for kind in found]
    return pa.schema(list(zip(columns, kinds, strict=True)))


def _wider(pa: Any, before: Any, values: Sequence[object]) -> Any:
    """A type for the values of `before` and for these."""
    if pa.types.is_string(before):
        return before
    with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
        now = pa.array(values).type
        pair = [pa.schema([("x", kind)]) for kind in (before, now)]
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    return pa.string()


def text_schema(columns: Sequence[str]) -> "pa.Schema":
    """A schema for rows of texts (CSV)."""
    pa = arrow()
    return pa.schema([(column, pa.string()) for column in columns])


def with_answers(schema: "pa.Schema", answers: Mapping[str, Kind]) -> "pa.Schema":
    """The schema with the answers' columns after the others."""
    pa = arrow()
    for name, kind in answers.items():
        schema = schema.append(pa.field(name, arrow_type(kind)))
    return schema


def arrow_type(kind: Kind) -> Any:
    """The Arrow type of a column of answers."""
    pa = arrow()
    return {
        Kind.TEXT: pa.string(),
        Kind.INTEGER: pa.int64(),
        Kind.NUMBER: pa.float64(),
        Kind.BOOLEAN: pa.bool_(),
        Kind.JSON: pa.string(),
    }[kind]
