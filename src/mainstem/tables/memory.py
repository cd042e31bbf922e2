"""Tables in memory: of pandas, polars and Arrow, and lists of dictionaries."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mainstem.core.errors import InvalidRequest
from mainstem.tables.arrow import array_of, arrow, arrow_type, rows_of
from mainstem.tables.asking import Kind
from mainstem.tables.cells import MISSING, cell_text
from mainstem.tables.text import Row, check_names

PANDAS_TYPES = {Kind.INTEGER: "Int64", Kind.NUMBER: "Float64", Kind.BOOLEAN: "boolean"}


class MemoryTable:
    """A table of another library; `given` is not changed."""

    def __init__(self, given: Any) -> None:
        """Raises InvalidRequest for a value that is not a table, and for column names that are not
        texts or not different."""
        self._given = given
        self.library = _library(given)
        names = self._names()
        odd = next((name for name in names if not isinstance(name, str)), None)
        if odd is not None:
            raise InvalidRequest("table", f"names of columns must be texts, got {odd!r}")
        self.columns = tuple(names)
        if names or len(given):
            check_names("table", names)

    def __iter__(self) -> Iterator[Row]:
        given = self._given
        if self.library == "pandas":
            cells = [given[name].astype(object) for name in self.columns]
            present = [column.where(column.notna(), None).tolist() for column in cells]
            yield from zip(*present, strict=True)
        elif self.library == "polars":
            yield from given.iter_rows()
        elif self.library == "pyarrow":
            for batch in given.to_batches():
                yield from rows_of(batch)
        else:
            for row in given:
                yield [row.get(name, MISSING) for name in self.columns]

    def _names(self) -> list[Any]:
        if self.library == "pyarrow":
            return list(self._given.schema.names)
        if self.library == "list":
            return list(dict.fromkeys(name for row in self._given for name in row))
        return list(self._given.columns)

    def with_answers(self, answers: Mapping[str, Kind], cells: Sequence[Row]) -> Any:
        """A table of the same kind, with new columns; `cells` has those of each row."""
        found = {name: [row[place] for row in cells] for place, name in enumerate(answers)}
        given = self._given
        if self.library == "pandas":
            import pandas as pd  # noqa: PLC0415  # the caller has it

            made = {
                name: pd.Series(values, index=given.index, dtype=PANDAS_TYPES.get(kind, object))
                for (name, kind), values in zip(answers.items(), found.values(), strict=True)
            }
            return given.assign(**made)
        if self.library == "polars":
            return given.with_columns(_polars_series(answers, found))
        if self.library == "pyarrow":
            table = arrow().Table.from_batches(given.to_batches(), given.schema)
            for name, kind in answers.items():
                column = array_of(arrow(), found[name], arrow_type(kind))
                table = table.append_column(name, column)
            return table
        rows = zip(given, cells, strict=True)
        return [{**row, **dict(zip(answers, new, strict=True))} for row, new in rows]


def _library(given: Any) -> str:
    """Which library made a table; raises InvalidRequest if it is not one."""
    kind = type(given)
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    if name in ("pandas.DataFrame", "polars.DataFrame"):
        return kind.__module__.partition(".")[0]
    if name in ("pyarrow.Table", "pyarrow.RecordBatch"):
        if kind.__name__ == "RecordBatch":
            raise InvalidRequest("table", "is a RecordBatch; use pyarrow.Table.from_batches([it])")
        return "pyarrow"
    if isinstance(given, list) and all(isinstance(row, Mapping) for row in given):
        return "list"
    if isinstance(given, str):
        raise InvalidRequest("table", "is a text; for files there is `mainstem map`")
    known = "a DataFrame of pandas or polars, a pyarrow.Table, or a list of dictionaries"
    raise InvalidRequest("table", f"must be {known}, got {kind.__name__}")


def _polars_series(answers: Mapping[str, Kind], found: Mapping[str, list[Any]]) -> list[Any]:
    import polars as pl  # noqa: PLC0415  # the caller has it

    kinds = {Kind.INTEGER: pl.Int64, Kind.NUMBER: pl.Float64, Kind.BOOLEAN: pl.Boolean}
    series = []
    for name, kind in answers.items():
        values = found[name]
        if kind is Kind.JSON:
            values = [None if value is None else cell_text(value) for value in values]
        series.append(pl.Series(name, values, dtype=kinds.get(kind, pl.String)))
    return series
