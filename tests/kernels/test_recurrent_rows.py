"""Rows beside states on a CPU agree with the token-by-token reference, and with states that are
written after every token."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mainstem.kernels.recurrent import cpu, reference
from mainstem.kernels.recurrent.rows import SIBLINGS, LayerRows, pack_rows, row_width
from mainstem.kernels.recurrent.segments import Segments, make_segments
from tests.kernels.recurrent import (
    CASES,
    ROW_SLOTS,
    ROW_STEPS,
    Case,
    Part,
    Shape,
    a_convolution,
    a_delta_rule,
    a_mamba_scan,
    a_row_decode,
    a_step,
    assert_near,
    assert_rows_as_reference,
    assert_same,
    with_rows,
)

pytestmark = pytest.mark.torch

ROOM = 16


def the_step(name: str) -> Segments:
    parts, num_decodes = ROW_STEPS[name]
    return a_step(*parts, num_decodes=num_decodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(ROW_STEPS))
def test_every_step_agrees_with_the_reference(
    name: str, operation: str, dtype: torch.dtype
) -> None:
    case = with_rows(CASES[operation](the_step(name), dtype), Shape(), ROOM)
    assert_rows_as_reference(case, cpu)


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 1, 16, 16), Shape(3, 3, 8, 40), Shape(2, 6, 24, 16)],
    ids=["one head", "odd dims", "three values a key"],
)
def test_heads_of_all_kinds(shape: Shape) -> None:
    for make in (a_delta_rule, a_mamba_scan):
        case = make(the_step("mixed"), shape=shape)
        assert_rows_as_reference(with_rows(case, shape, ROOM), cpu)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_convolutions_of_all_kinds(kernel: int) -> None:
    case = a_convolution(the_step("mixed"), kernel=kernel, has_bias=False, activation=False)
    assert_rows_as_reference(with_rows(case, Shape(), ROOM), cpu)


@pytest.mark.parametrize("strength", [3.0, 6.0, 12.0])
def test_decays_that_underflow_leave_zeros(strength: float) -> None:
    for make in (a_delta_rule, a_mamba_scan):
        case = make(the_step("mixed"), strength=strength)
        # sums are in fp32, so a decay after a sum of -1000 has an error of 6e-5
        tolerance = {torch.float32: 5e-4}
        assert_rows_as_reference(with_rows(case, Shape(), ROOM), cpu, tolerance)


@pytest.mark.parametrize("siblings", [1, SIBLINGS, SIBLINGS + 1, 64])
def test_a_base_has_any_number_of_readers(siblings: int) -> None:
    random = np.random.default_rng(siblings)
    counts = random.integers(0, ROOM, siblings)
    parts = [a_row_decode(5, n, int(count)) for n, count in enumerate(counts)]
    case = a_delta_rule(a_step(*parts, num_decodes=siblings))
    some = with_rows(case, Shape(), ROOM)
    assert some.rows is not None
    many = LayerRows(*(part.repeat(6, *[1] * (part.dim() - 1)) for part in some.rows))
    sums = -torch.rand(many.sums.shape, generator=torch.Generator().manual_seed(0)).cumsum(-1)
    values = many.values.nan_to_num(0.5)
    many = many._replace(keys=many.keys.nan_to_num(0.1), values=values, sums=sums)
    assert_rows_as_reference(replace(some, rows=many), cpu)


class Twin:
    """One sequence of each operation, token by token: with rows, and with states of its own."""

    def __init__(self, operation: str, tokens: int, room: int) -> None:
        self._whole = CASES[operation](a_step(Part((tokens,), 2, (8,))))
        self._states = self._whole.states
        empty = with_rows(CASES[operation](a_step(a_row_decode(2, 0, 0))), Shape(), room)
        assert empty.rows is not None
        self.rows = LayerRows(*(part.fill_(float("nan")) for part in empty.rows))
        self.right, _ = self._whole.run(reference)

    def run(self, first: int, *parts: Part, num_decodes: int) -> Tensor:
        step = a_step(*parts, num_decodes=num_decodes)
        tokens = int(step.starts[-1])
        length = self._whole.out_shape[0]
        args = {
            name: value[first : first + tokens]
            if isinstance(value, Tensor) and len(value) == length
            else value
            for name, value in self._whole.args.items()
        }
        args["segments"] = step
        shape = (tokens, *self._whole.out_shape[1:])
        case = Case(self._whole.name, args, self._states, self._whole.dtype, shape, self.rows)
        out, self._states, rows = case.run_rows(cpu)
        assert rows is not None
        self.rows = rows
        return out


@pytest.mark.parametrize("operation", list(CASES))
def test_a_prompt_becomes_rows_then_decodes_and_folds(operation: str) -> None:
    """7 prompt tokens, 4 decodes of which the last one folds, 2 with the new state as the base, 1
    that writes it in place, 1 that is plain."""
    twin = Twin(operation, 15, ROOM)
    outs = [twin.run(0, Part((7,), 2, (-1,), 3), num_decodes=0)]
    outs += [twin.run(n, a_row_decode(2, 3, n), num_decodes=1) for n in (7, 8, 9)]
    outs.append(twin.run(10, a_row_decode(2, 3, 10, write=9), num_decodes=1))
    outs += [twin.run(11 + n, a_row_decode(9, 3, n), num_decodes=1) for n in range(2)]
    outs.append(twin.run(13, a_row_decode(9, 3, 2, write=9), num_decodes=1))
    outs.append(twin.run(14, Part((1,), 9, (9,)), num_decodes=1))
    assert_near(torch.cat(outs), twin.right, 2e-5)


@pytest.mark.parametrize("operation", ["delta_rule", "mamba_scan"])
def test_a_row_that_is_not_counted_is_forgotten(operation: str) -> None:
    twin = Twin(operation, 9, ROOM)
    twin.run(0, Part((5,), 2, (-1,), 3), num_decodes=0)
    twin.run(8, a_row_decode(2, 3, 5), num_decodes=1)  # another token
    outs = [twin.run(n, a_row_decode(2, 3, n), num_decodes=1) for n in (5, 6, 7, 8)]
    assert_near(torch.cat(outs), twin.right[5:], 2e-5)


@pytest.mark.parametrize("operation", list(CASES))
def test_prompts_longer_than_a_tile_become_rows(operation: str) -> None:
    twin = Twin(operation, 131, 144)
    out = twin.run(0, Part((130,), 2, (-1,), 3), num_decodes=0)
    last = twin.run(130, a_row_decode(2, 3, 130), num_decodes=1)
    assert_near(torch.cat((out, last)), twin.right, 5e-5)


def test_a_prompt_longer_than_a_slot_is_refused() -> None:
    twin = Twin("delta_rule", 17, ROOM)
    with pytest.raises(AssertionError, match="more tokens than a slot"):
        twin.run(0, Part((17,), 2, (-1,), 3), num_decodes=0)


def pack(parts: list[Part]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    slots, counts, reads, writes = np.array(
        [(part.row_slot, part.count, part.read, part.writes[0]) for part in parts], np.int32
    ).T
    return pack_rows(slots, counts, reads, writes)


def test_groups_have_one_base_and_at_most_so_many_members() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        num_seqs = int(random.integers(1, 90))
        slots = random.permutation(num_seqs) * random.choice([1, 1, 1, -1], num_seqs)
        parts = [a_row_decode(int(random.integers(-1, 4)), max(int(slot), -1), 1) for slot in slots]
        packed = pack(parts)
        assert packed.shape == (6, row_width(num_seqs))
        num_groups, num_writers = packed[5, :2]
        starts = packed[3, : num_groups + 1]
        assert starts[0] == 0
        assert (packed[3, num_groups:] == starts[-1]).all()
        members = packed[2, : starts[-1]]
        writers = packed[4, :num_writers]
        assert sorted([*members, *writers]) == list(range(num_seqs))
        assert all((parts[n].row_slot >= 0) == (n in members) for n in range(num_seqs))
        bases: list[int] = []
        for start, end in pairwise(starts):
            of_group = {parts[n].read for n in members[start:end]}
            assert 0 < end - start <= SIBLINGS
            assert len(of_group) == 1
            bases += of_group
        for base in set(bases):
            readers = sum(parts[n].read == base for n in members)
            assert bases.count(base) == -(-readers // SIBLINGS)


def test_steps_that_break_the_rules_are_refused() -> None:
    def refused(match: str, *parts: Part, num_decodes: int = 0) -> None:
        with pytest.raises(AssertionError, match=match):
            a_step(*parts, num_decodes=num_decodes)

    row, own = a_row_decode(2, 0, 3), a_row_decode(2, 1, 3, write=2)
    refused("have one row slot", row, a_row_decode(3, 0, 1), num_decodes=2)
    refused("that is read is written", row, Part((1,), 2, (2,)), num_decodes=2)
    refused("that is read is written", row, Part((9,), 5, (2,)), num_decodes=1)
    refused("that is read is written", row, own, num_decodes=2)
    a_step(own, num_decodes=1)
    refused("follow rows", Part((4,), 2, (-1,), 0, 1))
    refused("several segments", Part((4, 1), 2, (-1, -1), 0))
    refused("writes a state", Part((4,), 2, (9,), 0))


def test_steps_without_rows_have_none() -> None:
    starts, slot, nothing = (np.array(part, np.int32) for part in ([0, 1], [8], [-1]))
    assert make_segments(starts, slot, starts, slot, 1, rows=(nothing, nothing)).rows is None
    assert make_segments(starts, slot, starts, slot, 1).rows is None
    assert a_step(a_row_decode(1, ROW_SLOTS - 1, 0), num_decodes=1).rows is not None


def test_rows_are_written_where_they_belong() -> None:
    case = with_rows(a_delta_rule(the_step("siblings")), Shape(), ROOM)
    assert case.rows is not None
    rows = case.run_rows(cpu)[2]
    assert rows is not None
    for slot, count in enumerate((0, 1, 7, 15)):
        for found, before in zip(rows[1:], case.rows[1:], strict=True):
            assert_same(found[slot, :, :count], before[slot, :, :count])
            assert found[slot, :, count].isfinite().all()
    assert_same(rows.keys[4:], case.rows.keys[4:])
