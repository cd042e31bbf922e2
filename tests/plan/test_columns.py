"""The order of a table's columns, compared with every permutation."""

from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.errors import InvalidRequest
from mainstem.plan import columns as module
from mainstem.plan.columns import Column, choose_order, given_order, order_rows

Rows = list[list[int]]


def computed(table: list[Column], orders: list[tuple[int, ...]]) -> int:
    """Tokens that rows compute, each with its own order of columns, by a set of all prefixes."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    total = 0
    for row, order in enumerate(orders):
        path: tuple[tuple[int, int], ...] = ()
        for number in order:
            column = table[number]
            code = int(column.codes[row])
            begin, path = (*path, (number, -1)), (*path, (number, code))
            if begin not in seen:
                seen.add(begin)
                total += column.prefix
            if path not in seen:
                seen.add(path)
                total += int(column.tokens[code]) - column.prefix
    return total


def a_table(values: Rows, tokens: Rows) -> list[Column]:
    """Columns of values 0, 1, ...; `tokens` has the length of each value, by column."""
    rows = zip(values, tokens, strict=True)
    return [Column(np.array(codes, np.int64), np.array(sizes, np.int64)) for codes, sizes in rows]


@st.composite
def tables(draw: st.DrawFn) -> list[Column]:
    num_columns, num_rows = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    values: Rows = []
    for _ in range(num_columns):
        column = draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows))
        is_determined = draw(st.booleans())
        if values and is_determined:
            column = [code // 2 for code in values[-1]]  # the last column determines this one
        values.append(column)
    sizes = st.lists(st.integers(8, 50), min_size=5, max_size=5)
    table = a_table(values, [draw(sizes) for _ in values])
    return [replace(column, prefix=draw(st.integers(0, 8))) for column in table]


@given(tables())
@settings(max_examples=150)
def test_no_permutation_computes_less(table: list[Column]) -> None:
    found = choose_order(table)
    num_rows = len(table[0].codes)
    costs = {
        order: computed(table, [order] * num_rows) for order in permutations(range(len(table)))
    }
    assert found.computed_tokens == costs[found.columns] == min(costs.values())
    assert given_order(table).computed_tokens == costs[tuple(range(len(table)))]


@given(tables())
@settings(max_examples=100)
def test_an_order_for_each_row_is_counted_right_or_too_high(table: list[Column]) -> None:
    found = order_rows(table)
    orders = [found.orders[number] for number in found.of_row.tolist()]
    assert all(sorted(order) == list(range(len(table))) for order in orders)
    assert computed(table, orders) <= found.computed_tokens <= choose_order(table).computed_tokens


def random_table(seed: int, num_columns: int, num_rows: int) -> list[Column]:
    rng = np.random.default_rng(seed)
    table = []
    for _ in range(num_columns):
        num_values = int(rng.choice([1, 3, 10, 50, num_rows]))
        codes = rng.integers(0, num_values, num_rows)
        table.append(Column(codes, rng.integers(1, 100, num_values)))
    return table


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_order_is_near_the_best_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(seed, 8, 400)
    best = choose_order(table).computed_tokens
    monkeypatch.setattr(module, "EXACT_COLUMNS", 0)
    assert choose_order(table).computed_tokens <= 1.02 * best


def test_many_columns_take_no_more_than_the_bounded_work() -> None:
    table = random_table(1, 30, 300)
    assert sorted(choose_order(table).columns) == list(range(30))


def test_columns_that_determine_each_other_stay_together() -> None:
    codes = [[0, 0, 1, 1, 2, 2], [5, 5, 3, 3, 4, 4]]
    other = [0, 1, 0, 1, 0, 1]
    table = a_table([codes[0], other, codes[1]], [[9] * 3, [30, 30], [9] * 6])
    order = choose_order(table).columns
    assert abs(order.index(0) - order.index(2)) == 1


def test_equal_orders_keep_the_given_one() -> None:
    unique = list(range(8))
    table = a_table([unique, unique, unique], [[4] * 8] * 3)
    assert choose_order(table).columns == (0, 1, 2)
    assert choose_order([]).columns == ()


def test_rows_with_a_dear_value_get_an_order_of_their_own() -> None:
    """Half of the rows repeat in the first column, the other half in the second."""
    half = 100
    first = [0] * half + list(range(1, half + 1))
    second = list(range(1, half + 1)) + [0] * half
    table = a_table([first, second], [[200] * (half + 1), [200] * (half + 1)])
    found = order_rows(table)
    assert found.orders[found.of_row[0]] == (0, 1)
    assert found.orders[found.of_row[-1]] == (1, 0)
    assert found.computed_tokens < 0.7 * choose_order(table).computed_tokens


def test_a_column_without_tokens_for_a_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must have an entry for every value"):
        Column(np.array([0, 3]), np.array([1, 1]))
    with pytest.raises(InvalidRequest, match="must not be longer than a value"):
        Column(np.array([0]), np.array([1]), prefix=2)
    with pytest.raises(InvalidRequest, match="same number of rows"):
        choose_order([Column(np.zeros(2, np.int64), np.ones(1, np.int64)), *a_table([[0]], [[1]])])


def test_large_numbers_of_values_do_not_overflow() -> None:
    table = random_table(3, 6, 3000)
    assert prod(len(column.tokens) for column in table) > 1e9
    found = choose_order(table)
    assert 0 < found.computed_tokens <= found.total_tokens
