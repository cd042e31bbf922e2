"""Chooses which columns of a table come first in its prompts, so that rows share the most tokens.

    prompt of a row:   value of column a | value of column b | value of column c

Rows run sorted, so rows that agree in the first columns share the tokens of these values. The rows
that agree in a set of columns S form groups, whatever the order within S. If column c comes after
the columns S, its value is computed once per group of S and c together. All values of a column may
begin alike (at least with its name); this prefix is computed once per group of S. That saves

    saving(S, c) = spare(S) * prefix of c
                   + sum over groups of (S, c) of (rows - 1) * other tokens of the group's value

where spare(S) is the number of rows minus that of groups. So the best order is found set by set,
not permutation by permutation:

    best(S) = max over c in S of  best(S without c) + saving(S without c, c)

Only groups of two rows or more are kept (a row that is alone shares nothing more), which makes
deep sets cheap. A column that others determine does not divide groups; this is seen exactly, since
all rows are compared. With many columns, an order is found greedily and improved window by window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Int64s

EXACT_WORK = 300_000_000  # rows times sets of columns; above this the order is found greedily
EXACT_COLUMNS = 12
WINDOW = 5  # columns that are put in the best order together, after the greedy choice
MANY_PICKS = 32  # values that `order_rows` gives an order of their own, at each level
LEAST_PART = 64  # rows; fewer are not given an order of their own
NONE = -1
LEVELS = 2  # how often the rows of a value may be divided again


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One column of a table: which rows have equal values, and how long each value is."""

    codes: Int64s  # [rows] a number for each value, from 0; equal for equal values
    tokens: Int64s  # [values] tokens of each value in a prompt
    prefix: int = 0  # tokens that all values begin with

    def __post_init__(self) -> None:
        if self.prefix < 0 or (len(self.tokens) and self.prefix > int(self.tokens.min())):
            raise InvalidRequest("prefix", "must not be longer than a value")
        if len(self.codes) and int(self.codes.max(initial=0)) >= len(self.tokens):
            raise InvalidRequest("tokens", "must have an entry for every value")

    def of(self, rows: Int64s) -> "Column":
        """The column of a part of the rows."""
        values, codes = np.unique(self.codes[rows], return_inverse=True)
        return Column(codes, self.tokens[values], self.prefix)


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """An order of columns, and the tokens of the columns that rows compute in it."""

    columns: tuple[int, ...]
    computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RowOrders:
    """An order of columns for each row: row r has `orders[of_row[r]]`."""

    orders: list[tuple[int, ...]]
    of_row: Int64s
    computed_tokens: int


def choose_order(columns: Sequence[Column]) -> ColumnOrder:
    """The order of columns with the fewest tokens to compute. Ties keep the given order.

    The best one is found if there are at most EXACT_COLUMNS columns and 2**columns * rows is at
    most EXACT_WORK; columns that determine each other count as one.
    """
    search = _Search(columns)
    return _measured(search, search.best_order())


def given_order(columns: Sequence[Column]) -> ColumnOrder:
    """The tokens that rows compute with the columns as they are given."""
    return _measured(_Search(columns), range(len(columns)))


def order_rows(columns: Sequence[Column]) -> RowOrders:
    """An order for each row: rows with a value that saves much begin with this value's column, and
    have the best order of the other columns for themselves (greedy group recursion). All rows get
    one order if that saves as much."""
    whole = choose_order(columns)
    num_rows = len(columns[0].codes) if columns else 0
    of_row = np.zeros(num_rows, dtype=np.int64)
    if not num_rows:
        return RowOrders([whole.columns], of_row, whole.computed_tokens)
    parts = _divide(columns, np.arange(num_rows), (), LEVELS)
    computed = sum(part.computed for part in parts)
    if computed >= whole.computed_tokens:
        return RowOrders([whole.columns], of_row, whole.computed_tokens)
    for number, part in enumerate(parts):
        of_row[part.rows] = number
    return RowOrders([part.order for part in parts], of_row, computed)


# --- groups of rows ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Groups of two or more rows that agree in some columns."""

    rows: Int64s  # group after group
    starts: Int64s  # [groups + 1] where each group begins in `rows`

    @property
    def spare(self) -> int:
        """Rows that find everything computed by another row of their group."""
        return len(self.rows) - (len(self.starts) - 1)

    def divide(self, column: Column) -> "_Groups":
        """The groups of rows that also agree in `column`."""
        if not len(self.rows):
            return self
        sizes = np.diff(self.starts)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        keys = numbers * len(column.tokens) + column.codes[self.rows]
        order = np.argsort(keys)
        keys = keys[order]
        is_first = np.ones(len(keys), dtype=np.bool_)
        is_first[1:] = keys[1:] != keys[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(firsts, append=len(keys))
        kept = counts > 1
        starts = np.zeros(int(kept.sum()) + 1, dtype=np.int64)
        np.cumsum(counts[kept], out=starts[1:])
        return _Groups(self.rows[order[np.repeat(kept, counts)]], starts)

    def saving(self, column: Column) -> int:
        """Tokens of `column`, in which the rows of each group agree, that are not computed, without
        its prefix."""
        tokens = column.tokens[column.codes[self.rows[self.starts[:-1]]]] - column.prefix
        return int((tokens * (np.diff(self.starts) - 1)).sum())


def _all_rows(num_rows: int) -> _Groups:
    if num_rows < 2:
        return _Groups(np.zeros(0, np.int64), np.zeros(1, np.int64))
    return _Groups(np.arange(num_rows), np.array([0, num_rows]))


# --- one order for all rows ----------------------------------------------------------------------


class _Search:
    """Looks for the best order of some columns."""

    def __init__(self, columns: Sequence[Column]) -> None:
        if len({len(column.codes) for column in columns}) > 1:
            raise InvalidRequest("columns", "must have the same number of rows")
        self.columns = columns
        self.num_rows = len(columns[0].codes) if columns else 0
        self.root = _all_rows(self.num_rows)
        self._room = EXACT_WORK  # rows that may still be sorted to improve a greedy order

    def best_order(self) -> list[int]:
        units = self._units()
        is_small = len(units) <= EXACT_COLUMNS and self.num_rows << len(units) <= EXACT_WORK
        found = self._exact(self.root, units) if is_small else self._improved(self._greedy(units))
        return [column for unit in found for column in unit]

    def _units(self) -> list[tuple[int, ...]]:
        """Columns that determine each other, together: they divide rows in the same way, so each
        belongs right after the other."""
        units: list[list[int]] = []
        for number, column in enumerate(self.columns):
            for unit in units:
                if _determine_each_other(self.columns[unit[0]], column):
                    unit.append(number)
                    break
            else:
                units.append([number])
        # only the first of a unit is computed by groups that it divides
        return [
            tuple(sorted(unit, key=lambda number: -self.columns[number].prefix)) for unit in units
        ]

    def _divide(self, groups: _Groups, unit: tuple[int, ...]) -> _Groups:
        self._room -= len(groups.rows)
        return groups.divide(self.columns[unit[0]])

    def _saving(self, groups: _Groups, unit: tuple[int, ...]) -> int:
        """What a unit saves, without the prefix of its first column; the rows of each group agree
        in the unit."""
        others = sum(self.columns[number].prefix for number in unit[1:])
        return groups.spare * others + sum(groups.saving(self.columns[each]) for each in unit)

    def _prefix(self, unit: tuple[int, ...]) -> int:
        return self.columns[unit[0]].prefix

    def _exact(self, root: _Groups, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The best order of `units` for rows that already agree as in `root`."""
        savings: dict[
            int, list[int]
        ] = {}  # by set of units, as bits: `_saving` of each as the last
        spare = {0: root.spare}

        def visit(groups: _Groups, chosen: int, next_unit: int) -> None:
            for place in range(next_unit, len(units)):
                divided = self._divide(groups, units[place])
                if not len(divided.rows):
                    continue  # no larger set saves anything
                together = chosen | 1 << place
                spare[together] = divided.spare
                savings[together] = [
                    self._saving(divided, unit) if together >> other & 1 else 0
                    for other, unit in enumerate(units)
                ]
                visit(divided, together, place + 1)

        visit(root, 0, 0)
        best, last = [0] * (1 << len(units)), [NONE] * (1 << len(units))
        none = [0] * len(units)
        for chosen in range(1, len(best)):
            saved = savings.get(chosen, none)
            # on a tie, the unit that was given last stays last
            for end in reversed(range(len(units))):
                before = chosen & ~(1 << end)
                if before == chosen:
                    continue
                total = best[before] + saved[end]
                total += spare.get(before, 0) * self._prefix(units[end])
                if last[chosen] == NONE or total > best[chosen]:
                    best[chosen], last[chosen] = total, end
        order: list[tuple[int, ...]] = []
        left = len(best) - 1
        while left:
            order.append(units[last[left]])
            left &= ~(1 << last[left])
        return order[::-1]

    def _greedy(self, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Choose unit after unit: the one whose own saving and the saving it leaves to the others
        are largest, as if the others divided rows independently of it."""
        lengths = {unit: self._mean_tokens(unit) for unit in units}
        order: list[tuple[int, ...]] = []
        groups, left = self.root, list(units)
        while left and len(groups.rows):
            divided = {unit: self._divide(groups, unit) for unit in left}
            wishes = {unit: lengths[unit] * each.spare for unit, each in divided.items()}

            def score(
                unit: tuple[int, ...],
                divided: dict[tuple[int, ...], _Groups] = divided,
                wishes: dict[tuple[int, ...], float] = wishes,
                spare: int = groups.spare,
            ) -> float:
                others = sum(wishes.values()) - wishes[unit]
                own = self._saving(divided[unit], unit) + spare * self._prefix(unit)
                return own + others * divided[unit].spare / spare

            chosen = max(left, key=score)
            order.append(chosen)
            left.remove(chosen)
            groups = divided[chosen]
        return order + left

    def _mean_tokens(self, unit: tuple[int, ...]) -> float:
        columns = [self.columns[number] for number in unit]
        return sum(_num_tokens(column) for column in columns) / max(1, self.num_rows)

    def _improved(self, order: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Put each window of neighbouring units into its best order, again and again, until nothing
        changes or EXACT_WORK is done."""
        self._room = EXACT_WORK
        is_changed = True
        while is_changed and self._room > 0:
            is_changed = False
            groups = self.root
            for begin in range(max(1, len(order) - WINDOW + 1)):
                if not len(groups.rows) or self._room <= 0:
                    break
                window = order[begin : begin + WINDOW]
                better = self._exact(groups, window)
                if better != window and self._saved(groups, better) > self._saved(groups, window):
                    order[begin : begin + WINDOW] = better
                    is_changed = True
                groups = self._divide(groups, order[begin])
        return order

    def _saved(self, groups: _Groups, order: Sequence[tuple[int, ...]]) -> int:
        saved = 0
        for unit in order:
            saved += groups.spare * self._prefix(unit)
            groups = self._divide(groups, unit)
            saved += self._saving(groups, unit)
        return saved

    def saved(self, order: Sequence[int]) -> int:
        """Tokens that are not computed with the columns in this order."""
        return self._saved(self.root, [(column,) for column in order])


def _measured(search: _Search, order: Sequence[int]) -> ColumnOrder:
    total = sum(_num_tokens(column) for column in search.columns)
    return ColumnOrder(tuple(order), total - search.saved(order), total)


def _num_tokens(column: Column) -> int:
    counts = np.bincount(column.codes, minlength=len(column.tokens))
    return int((counts * column.tokens).sum())


def _determine_each_other(one: Column, other: Column) -> bool:
    """Whether rows have equal values in both columns or in neither."""
    return _determines(one, other) and _determines(other, one)


def _determines(one: Column, other: Column) -> bool:
    """Whether rows with equal values of `one` have equal values of `other`."""
    found = np.zeros(len(one.tokens), dtype=np.int64)
    found[one.codes] = other.codes
    return bool((found[one.codes] == other.codes).all())


# --- an order for each row -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _OrderedPart:
    rows: Int64s
    order: tuple[int, ...]
    computed: int  # tokens, if the rows of other parts share nothing with these


def _divide(
    columns: Sequence[Column], rows: Int64s, front: tuple[int, ...], levels: int
) -> list[_OrderedPart]:
    """Divide rows that agree in the columns `front`: rows with a dear value become a part of their
    own, again and again."""
    parts: list[_OrderedPart] = []
    left = [number for number in range(len(columns)) if number not in front]
    for _ in range(MANY_PICKS):
        pick = _dearest_value(columns, rows, left) if levels and len(left) > 1 else None
        if pick is None:
            break
        number, code = pick
        has_value = columns[number].codes[rows] == code
        parts += _divide(columns, rows[has_value], (*front, number), levels - 1)
        rows = rows[~has_value]
    if len(rows):
        parts.append(_part(columns, rows, front, left))
    return parts


def _dearest_value(
    columns: Sequence[Column], rows: Int64s, left: Sequence[int]
) -> tuple[int, int] | None:
    """The column and code of the value that saves most if its rows begin with it; None if there are
    too few rows, or one value for all."""
    if len(rows) < LEAST_PART:
        return None
    best, found = 0, None
    for number in left:
        column = columns[number]
        counts = np.bincount(column.codes[rows], minlength=len(column.tokens))
        savings = (counts - 1) * column.tokens
        code = int(savings.argmax())
        if counts[code] >= LEAST_PART and savings[code] > best:
            best, found = int(savings[code]), (number, code)
    return found


def _part(
    columns: Sequence[Column], rows: Int64s, front: tuple[int, ...], left: Sequence[int]
) -> _OrderedPart:
    rest = choose_order([columns[number].of(rows) for number in left])
    shared = sum(int(columns[number].tokens[columns[number].codes[rows[0]]]) for number in front)
    order = (*front, *(left[place] for place in rest.columns))
    return _OrderedPart(rows, order, shared + rest.computed_tokens)
