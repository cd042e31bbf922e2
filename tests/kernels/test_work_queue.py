"""Which steps have a work queue, and where plans record it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.kernels.attention import layout
from mainstem.kernels.attention import plan as plans
from mainstem.kernels.attention.shape import Shape
from mainstem.kernels.attention.tuning import HOPPER_SPLIT
from mainstem_bench.workloads import AttentionCase, Run

pytestmark = pytest.mark.torch


def _own(batch: int, keys: int) -> tuple[Run, ...]:
    return tuple(Run((row,), keys) for row in range(batch))


def _num_queued(runs: tuple[Run, ...]) -> int:
    shape = Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(AttentionCase("queue", runs).spans(), shape).ints
    return int(ints[layout.HEADER_NUM_QUEUED])


@pytest.mark.parametrize(
    ("batch", "keys", "is_queued"),
    [
        (132, 512, False),  # one unit for each program
        (300, 600, True),  # three units for some programs, two for most
        (700, 100, True),  # five for each
        (20, 300, False),  # fewer units than programs
    ],
)
def test_units_are_queued_if_some_programs_have_several(
    batch: int, keys: int, is_queued: bool
) -> None:
    assert (_num_queued(_own(batch, keys)) > 0) == is_queued


def test_units_after_large_ones_are_queued() -> None:
    assert _num_queued((Run(tuple(range(64)), 2048), *_own(256, 300))) > 0


def test_a_step_of_prompts_only_has_no_queue() -> None:
    assert _num_queued((Run(tuple(range(600)), 600, True),)) == 0


def test_the_plan_says_where_the_queue_is() -> None:
    case = AttentionCase("shared", (Run(tuple(range(256)), 2048), *_own(256, 256)))
    shape = Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(case.spans(), shape).ints
    at, count = ints[layout.HEADER_QUEUE], ints[layout.HEADER_NUM_QUEUED]
    assert count > 0
    assert at + count * layout.PIECE_INTS == ints[layout.HEADER_LARGE_ORDER]


def test_a_first_unit_names_its_first_token_if_tokens_are_neighbours() -> None:
    rows = tuple(range(10, 74)), (*range(74, 137), 139), (*range(140, 204),)[::-1]
    runs = [Run(each, 2048) for each in rows]
    case = AttentionCase("shared", (*runs, *_own(204, 100)))
    spans, shape = case.spans(), Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(spans, shape).ints
    table = ints[layout.HEADER_INTS : ints[layout.HEADER_QUEUE]].reshape(264, -1)
    table = table[table[:, layout.SHARE_LARGE_BEGIN] < table[:, layout.SHARE_LARGE_END]]
    entries = table[:, layout.SHARE_FIRST_LARGE + layout.PIECE_ENTRY].tolist()
    tokens = table[:, layout.SHARE_FIRST_LARGE + layout.PIECE_FIRST_TOKEN].tolist()
    told = dict(zip(entries, tokens, strict=True))
    assert told == {0: 10, 64: -1, 128: -1}
