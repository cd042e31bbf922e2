"""The order of the columns that {row} lists: read from the whole table before the first prompt.

    table --scan--> which cells are equal, how long each is --plan/columns.py--> an order

Cells are compared by 64-bit hashes: a collision could only cost some sharing. A column's values
are tokenized if they are among its first SAMPLED_VALUES different ones; the lengths of the others
are estimated from their characters.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Protocol

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Int64s
from mainstem.plan.columns import Column, choose_order, given_order, order_rows
from mainstem.tables.cells import MISSING, cell_text, readable
from mainstem.tables.prompts import field_line, no_such_column
from mainstem.tables.text import Row
from mainstem.text.tokenizer import Tokenizer

SAMPLED_VALUES = 4096  # of a column; more different values are not tokenized
SAMPLED_CHARS = 1 << 21  # of a column, all its tokenized values together
LONGEST_SAMPLED = 1 << 15  # characters of a value
ROWS_AT_ONCE = 8192
CHARS_PER_TOKEN = 4.0  # assumed if no value of a column is tokenized


class Reorder(Enum):
    """Which orders of fields {row} may have."""

    COLUMNS = "columns"  # one for all rows
    ROWS = "rows"  # each row may have its own
    NONE = "none"  # as given


class TableReader(Protocol):
    """A table: its columns, and its rows, which may be read again and again."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True, slots=True, eq=False)
class FieldOrder:
    """The fields of {row}, in order, for each row of a table; and the tokens of these fields that
    are computed: in this order, in the given order, and without sharing."""

    orders: list[tuple[str, ...]]
    of_row: Int64s | None = None  # None: all rows have the first order
    computed_tokens: int = 0
    given_tokens: int = 0
    total_tokens: int = 0
    given: tuple[str, ...] = ()

    def of(self, row: int) -> tuple[str, ...]:
        """The fields of a row, which is counted from 0."""
        return self.orders[0 if self.of_row is None else int(self.of_row[row])]

    def to_text(self) -> str:
        """A line or two for the user."""
        total = max(1, self.total_tokens)
        if len(self.orders) > 1:
            order = f"{len(self.orders)} orders of {', '.join(self.given)}"
        else:
            order = ", ".join(self.orders[0])
            if self.orders[0] != self.given:
                order += f" (given: {', '.join(self.given)})"
        computed, given = self.computed_tokens, self.given_tokens
        return (
            f"fields: {order}\n"
            f"tokens of fields: {self.total_tokens:,}, computed {computed:,} "
            f"({1 - computed / total:.1%} saved); in the given order {given:,} "
            f"({1 - given / total:.1%} saved): {given / max(1, computed):.2f}x"
        )


def checked_fields(fields: Sequence[str] | None, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that {row} lists; all columns if none were named."""
    if fields is None:
        return tuple(columns)
    for name in fields:
        if name not in columns:
            raise no_such_column("--fields", name, columns)
    if len(set(fields)) < len(fields):
        raise InvalidRequest("--fields", "names a column twice")
    return tuple(fields)


@dataclass(slots=True)
class _ColumnScan:
    """What is read of one column."""

    name: str
    hashes: list[Int64s] = field(default_factory=list)
    sizes: list[Int64s] = field(default_factory=list)
    sample: dict[str, None] = field(default_factory=dict)
    num_chars: int = 0

    def add(self, cells: Iterable[object]) -> None:
        texts = [_line(self.name, cell) for cell in cells]
        self.hashes.append(np.fromiter(map(hash, texts), np.int64, len(texts)))
        self.sizes.append(np.fromiter(map(len, texts), np.int64, len(texts)))
        if len(self.sample) >= SAMPLED_VALUES or self.num_chars >= SAMPLED_CHARS:
            return
        for text in dict.fromkeys(texts):
            is_full = len(self.sample) >= SAMPLED_VALUES or self.num_chars >= SAMPLED_CHARS
            if is_full:
                return
            if len(text) <= LONGEST_SAMPLED and text not in self.sample:
                self.sample[text] = None
                self.num_chars += len(text)

    def column(self, tokenizer: Tokenizer) -> Column:
        """The column with the tokens of its values."""
        hashes, sizes = np.concatenate(self.hashes), np.concatenate(self.sizes)
        values, firsts, codes = np.unique(hashes, return_index=True, return_inverse=True)
        del hashes
        chars = sizes[firsts]
        lines = [readable(text) for text in self.sample]
        frame = len(tokenizer.encode(""))  # begin and end tokens of a prompt
        encoded = tokenizer.encode_batch(lines)
        counts = np.array([len(ids) - frame for ids in encoded], np.int64)
        rate = counts.sum() / max(1, self.num_chars) if len(counts) else 1 / CHARS_PER_TOKEN
        tokens = np.maximum(1, np.rint(chars * rate)).astype(np.int64)
        tokens[chars == 0] = 0
        known = np.fromiter(map(hash, self.sample), np.int64, len(lines))
        tokens[np.searchsorted(values, known)] = counts
        prefix = _common(min(encoded), max(encoded)) if len(encoded) > 1 else 0
        prefix = max(0, min(prefix - frame, int(tokens.min())))
        return Column(codes.astype(np.int64), tokens, prefix)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _line(name: str, cell: object) -> str:
    """The line of a cell in {row}; nothing for a field that the row lacks, or without a text."""
    if cell is MISSING:
        return ""
    try:
        return field_line(name, cell_text(cell))
    except InvalidRequest:
        return ""  # the row will be an error


def count_rows(table: TableReader) -> int:
    """Read a whole table once, which raises the error of a row that cannot be read."""
    return sum(1 for _ in table)


def scan(
    table: TableReader, fields: Sequence[str], tokenizer: Tokenizer
) -> tuple[int, list[Column]]:
    """Read a whole table once; returns the number of rows, and the columns of `fields`."""
    places = [table.columns.index(name) for name in fields]
    scans = [_ColumnScan(name) for name in fields]
    num_rows, rows = 0, iter(table)
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        num_rows += len(chunk)
        for each, place in zip(scans, places, strict=True):
            each.add([row[place] for row in chunk])
    if not num_rows:
        return 0, []
    return num_rows, [each.column(tokenizer) for each in scans]


def order_fields(
    fields: tuple[str, ...], columns: Sequence[Column], reorder: Reorder
) -> FieldOrder:
    """The order of the fields for all rows."""
    given = given_order(columns)
    found = given
    if reorder is Reorder.ROWS and columns:
        by_row = order_rows(columns)
        return FieldOrder(
            [tuple(fields[place] for place in order) for order in by_row.orders],
            by_row.of_row,
            by_row.computed_tokens,
            given.computed_tokens,
            given.total_tokens,
            fields,
        )
    if reorder is Reorder.COLUMNS:
        found = choose_order(columns)
    order = tuple(fields[place] for place in found.columns) if columns else fields
    return FieldOrder(
        [order],
        None,
        found.computed_tokens,
        given.computed_tokens,
        given.total_tokens,
        fields,
    )
