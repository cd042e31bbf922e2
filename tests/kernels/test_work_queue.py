"""Which steps have a work queue, and which spans of it are cut once more."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.kernels.attention import layout
from mainstem.kernels.attention import plan as plans
from mainstem.kernels.attention.cutting import Cut, Shape, cut_spans, unit_us
from mainstem.kernels.attention.tuning import HOPPER_SPLIT
from mainstem.kernels.attention.work_queue import queue_units
from mainstem_bench.workloads import AttentionCase, Run

pytestmark = pytest.mark.torch


def _own(batch: int, keys: int) -> tuple[Run, ...]:
    return tuple(Run((row,), keys) for row in range(batch))


def _cut(case: AttentionCase, max_partials: int | None = None) -> Cut:
    shape = Shape(
        case.heads // case.kv_heads, case.kv_heads, case.page_size, num_programs=264,
        tiles=HOPPER_SPLIT, max_partials=max_partials,
    )  # fmt: skip
    spans = case.spans()
    return queue_units(cut_spans(spans, shape), spans.key_tokens, shape)


@pytest.mark.parametrize(
    ("batch", "keys", "is_queued"),
    [
        (132, 512, False),  # a unit for each program
        (256, 4096, False),  # two for nearly each
        (300, 600, True),  # three for some, two for most
        (700, 100, True),  # five
        (20, 300, False),  # not enough for one each
    ],
)
def test_even_shares_are_assigned(batch: int, keys: int, is_queued: bool) -> None:
    assert (_cut(AttentionCase("own", _own(batch, keys))).queued_share > 0) == is_queued


def test_all_units_after_large_ones_are_queued() -> None:
    cut = _cut(AttentionCase("shared", (Run(tuple(range(64)), 2048), *_own(64, 40))))
    assert cut.num_large_spans
    assert cut.queued_share > 0


def test_prompts_alone_have_no_queue() -> None:
    assert _cut(AttentionCase("prompt", (Run(tuple(range(600)), 600, True),))).queued_share == 0


def test_some_long_spans_are_cut_once_more() -> None:
    cut = _cut(AttentionCase("own", _own(300, 600)))
    again = cut.parts > 1
    assert 0.05 < again.mean() < 0.3
    assert set(cut.parts.tolist()) == {1, 3}
    assert (cut.stretches[again] % 32 == 0).all()


def test_no_short_span_is_cut_once_more_if_nothing_else_is_merged() -> None:
    cut = _cut(AttentionCase("own", _own(300, 128)))
    assert cut.queued_share > 0
    assert (cut.parts == 1).all()


def test_no_span_is_cut_once_more_if_partials_would_not_fit() -> None:
    case = AttentionCase("own", _own(300, 600))
    cut = _cut(case, max_partials=310)
    assert cut.queued_share > 0
    assert (cut.parts == 1).all()
    assert (_cut(case, max_partials=1000).parts > 1).any()


def test_units_of_different_lengths_are_not_cut_once_more() -> None:
    runs = tuple(Run((row,), 100 + 5 * row) for row in range(300))
    cut = _cut(AttentionCase("ragged", runs))
    assert (cut.parts == 1).all()


def test_spans_are_whole_beside_long_large_units() -> None:
    cut = _cut(AttentionCase("long", (Run(tuple(range(64)), 32768), *_own(64, 256))))
    assert cut.num_large < 132
    parts = cut.parts[cut.num_large_spans :]
    assert set(parts.tolist()) == {1, 4}
    assert (parts == 4).sum() == 8
    assert (cut.stretches[cut.num_large_spans :] % 32 == 0).all()


def _large_us(case: AttentionCase) -> list[float]:
    """What every multiprocessor has to do, of large units."""
    group = case.heads // case.kv_heads
    shape = Shape(group, case.kv_heads, case.page_size, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(case.spans(), shape).ints
    shares = ints[layout.HEADER_INTS : ints[layout.HEADER_QUEUE]].reshape(264, -1)[:132]
    order = ints[ints[layout.HEADER_LARGE_ORDER] : ints[layout.HEADER_SMALL_ORDER]]
    pieces = ints[ints[layout.HEADER_LARGE_PIECES] : ints[layout.HEADER_SMALL_PIECES]].reshape(
        -1, layout.PIECE_INTS
    )
    keys = (pieces[:, layout.PIECE_KEY_END] - pieces[:, layout.PIECE_KEY_BEGIN])[
        order // case.kv_heads
    ]
    us = unit_us(keys.astype(np.float64), True, shape)
    begins, ends = shares[:, layout.SHARE_LARGE_BEGIN], shares[:, layout.SHARE_LARGE_END]
    return [float(us[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]


def test_large_units_are_a_tile_shorter_where_small_ones_leave_the_room() -> None:
    """Seven of 36 tiles and one of 4, instead of seven of 37, of 16 spans x heads."""
    case = AttentionCase("long", (Run(tuple(range(64)), 32768), *_own(64, 256)))
    cut = _cut(case)
    assert (cut.stretches[0], cut.parts[0], cut.num_large) == (36 * 128, 8, 115)
    us = sorted(_large_us(case))
    assert us[-112] == us[-1]
    assert 0 < us[-115] < us[-113] < us[-112]


def test_rests_go_to_multiprocessors_without_other_units() -> None:
    groups = tuple(Run(tuple(range(first, first + 16)), 51667) for first in range(0, 64, 16))
    case = AttentionCase("groups", (*groups, *_own(64, 64)), 16, 8)
    cut = _cut(case)
    shape = Shape(2, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    assert (cut.num_large, cut.parts[0]) == (130, 5)
    assert max(_large_us(case)) == unit_us(cut.stretches[:1], True, shape)[0]


@pytest.mark.parametrize("own", [270, 300])  # small units would take longer than large ones
def test_large_units_stay_if_small_ones_need_the_room(own: int) -> None:
    cut = _cut(AttentionCase("long", (Run(tuple(range(64)), 32768), *_own(64, own))))
    assert cut.num_large == 112


def test_spans_without_keys_stay_whole() -> None:
    own = tuple(Run((row,), 0 if row % 9 else 256) for row in range(64))
    cut = _cut(AttentionCase("long", (Run(tuple(range(64)), 32768), *own)))
    assert (cut.stretches > 0).all()
    assert (cut.parts[1:][np.arange(64) % 9 > 0] == 1).all()


@pytest.mark.parametrize(
    ("prefix", "own"),
    [(32768, 1024), (4096, 256)],  # small units would take longer than large ones; are too few
)
def test_spans_are_cut_if_all_programs_are_needed(prefix: int, own: int) -> None:
    cut = _cut(AttentionCase("long", (Run(tuple(range(64)), prefix), *_own(64, own))))
    assert cut.num_large_spans
    assert set(cut.parts[cut.num_large_spans :].tolist()) != {1, 4}


def test_the_plan_says_where_the_queue_is() -> None:
    case = AttentionCase("shared", (Run(tuple(range(256)), 2048), *_own(256, 256)))
    shape = Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(case.spans(), shape).ints
    at, count = ints[layout.HEADER_QUEUE], ints[layout.HEADER_NUM_QUEUED]
    assert count > 0
    assert at + count * layout.PIECE_INTS == ints[layout.HEADER_LARGE_ORDER]
    assert ints[layout.HEADER_NUM_CLAIMERS] == 264


def test_late_programs_claim_nothing_if_others_finish_all_units() -> None:
    case = AttentionCase("shared", (Run(tuple(range(64)), 32768), *_own(64, 256)))
    shape = Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    ints = plans.make_plan(case.spans(), shape).ints
    table = ints[layout.HEADER_INTS : ints[layout.HEADER_QUEUE]].reshape(264, -1)
    is_early = table[:, layout.SHARE_SMALL_BEGIN] < table[:, layout.SHARE_SMALL_END]
    assert ints[layout.HEADER_NUM_CLAIMERS] == np.count_nonzero(is_early) == 34
    assert ints[layout.HEADER_NUM_QUEUED] > 0


def test_a_share_holds_the_first_token_of_neighbours() -> None:
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
