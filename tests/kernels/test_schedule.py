"""The plan of a step: every key of every row is in exactly one unit."""

import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from mainstem.core.step import Spans
from mainstem.kernels import AttentionLimits
from mainstem.kernels.attention import layout, ops
from mainstem.kernels.attention import plan as plans
from mainstem.kernels.attention.cutting import ways_to_cut
from mainstem.kernels.attention.ops import HEAD_DIMS
from mainstem.kernels.attention.shape import Shape, tiles_for_rounded
from mainstem.kernels.attention.tuning import (
    HOPPER,
    HOPPER_SPLIT,
    HOPPER_VERY_WIDE_HEADS,
    HOPPER_WIDE_HEADS,
    SPLIT_TILES,
    TUNED_CARD,
    Tiles,
    choose_tiles,
    expands_rounded,
    for_rounded_pages,
)
from mainstem.kernels.attention.unshare import unshare
from mainstem.kernels.attention.window import clip_spans
from mainstem_bench.cuts import random_step
from mainstem_bench.heads import random_shapes
from mainstem_bench.kernel import seen_spans
from mainstem_bench.workloads import (
    AttentionCase,
    Run,
    kernel_cases,
    mixed_cases,
)
from tests.work import instructions

pytestmark = pytest.mark.torch

CASES = {case.name: case for case in (*kernel_cases(), mixed_cases()[0])}


def seeds(count: int, long: set[int]) -> list[object]:
    """Seeds of random steps; those in `long` run only in `make test-full`."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in long else n for n in range(count)]


def shape_of(case: AttentionCase, tiles: Tiles, fixed_stretch: int | None = None) -> Shape:
    return Shape(
        group=case.heads // case.kv_heads,
        kv_heads=case.kv_heads,
        page_size=case.page_size,
        num_programs=264,
        tiles=tiles,
        fixed_stretch=fixed_stretch,
    )


LARGE, SMALL = 0, 1
SHARE_FIELDS = (  # where a share of large units begins and ends, and one of small units
    [layout.SHARE_LARGE_BEGIN, layout.SHARE_LARGE_END],
    [layout.SHARE_SMALL_BEGIN, layout.SHARE_SMALL_END],
)
PIECE_FIELDS = (
    layout.PIECE_ENTRY,
    layout.PIECE_ROW_BEGIN,
    layout.PIECE_ROW_END,
    layout.PIECE_PAGES_AT,
    layout.PIECE_KEY_BEGIN,
    layout.PIECE_KEY_END,
    layout.PIECE_FIRST_LIMIT,
    layout.PIECE_STRETCH,
)


def check(case: AttentionCase, shape: Shape) -> None:
    spans = case.spans()
    check_plan(plans.make_plan(spans, shape), spans, shape)


def check_plan(plan: plans.KernelPlan, spans: Spans, shape: Shape) -> None:
    """Count (row, key) pairs per KV head and collect the slots of Partials, as the kernel would."""
    ints = plan.ints
    small_at, large_at = ints[layout.HEADER_SMALL_PIECES], ints[layout.HEADER_LARGE_PIECES]
    entries_at, num_entries = ints[layout.HEADER_ENTRIES], ints[layout.HEADER_NUM_ENTRIES]
    merges_at, num_merges = ints[layout.HEADER_MERGES], ints[layout.HEADER_NUM_MERGES]
    pages_at = ints[layout.HEADER_PAGE_IDS]
    table = ints[layout.HEADER_INTS :][: shape.num_programs * layout.SHARE_INTS]
    table = table.reshape(shape.num_programs, layout.SHARE_INTS)
    shares = np.array([[*table[:, begin], table[-1, end]] for begin, end in SHARE_FIELDS])
    for begin, end in SHARE_FIELDS:
        assert (table[:-1, end] == table[1:, begin]).all()
    assert (np.diff(shares) >= 0).all()
    assert ints[pages_at:-1].tolist() == spans.page_ids.tolist()
    entry_rows = layout.ENTRY_ROWS if shape.has_windows else layout.PLAIN_ENTRY_ROWS
    entries = ints[entries_at:merges_at].reshape(entry_rows, num_entries)
    if spans.first_keys is not None:
        assert entries[layout.ENTRY_FIRST_KEY].tolist() == spans.first_keys.tolist()
    tokens = _first_tokens(spans)
    pairs = np.zeros((shape.kv_heads, len(spans)), np.int64)
    written: list[tuple[int, int]] = []
    for kind, (order_at, pieces_at, heads) in enumerate(
        (
            (ints[layout.HEADER_LARGE_ORDER], large_at, 1),
            (ints[layout.HEADER_SMALL_ORDER], small_at, shape.fold),
        )
    ):
        per_piece = shape.kv_heads // heads
        units = ints[order_at:][: shares[kind][-1]]
        _check_first_units(ints, kind, table, units, pieces_at, per_piece, shape)
        if kind == SMALL:  # the other small units are in the queue
            units = np.concatenate((units, _queued_units(ints, pieces_at, per_piece, shape)))
        assert len(np.unique(units)) == len(units)
        for unit in units.tolist():
            piece = ints[pieces_at + unit // per_piece * layout.PIECE_INTS :][: layout.PIECE_INTS]
            entry, row_begin, row_end, page, key_begin, key_end, limit, stretch = (
                int(piece[field]) for field in PIECE_FIELDS
            )
            assert key_begin % shape.page_size == 0
            first_page = ints[pages_at + page + key_begin // shape.page_size]
            assert piece[layout.PIECE_FIRST_PAGE] == first_page
            span = int(np.searchsorted(spans.query_starts, entry, side="right")) - 1
            assert piece[layout.PIECE_FIRST_TOKEN] == tokens[span]
            queries = np.arange(row_begin, row_end) // shape.group
            seen = np.minimum(limit + queries + 1, key_end) - key_begin
            head = unit % per_piece * heads
            pairs[head : head + heads, span] += int(np.maximum(seen, 0).sum())
            slots = entries[layout.ENTRY_SLOT, entry + np.unique(queries)]
            assert (slots < 0).all() or (slots >= 0).all(), "a unit has both outputs and Partials"
            written += [(int(slot) + stretch, head) for slot in slots if slot >= 0]
    queries = np.diff(spans.query_starts).astype(np.int64)
    hidden = np.where(spans.is_causal, queries * (queries - 1) // 2, 0)
    right = (queries * spans.key_tokens - hidden) * shape.group
    assert (pairs == right).all()
    merges = ints[merges_at:pages_at].reshape(layout.MERGE_ROWS, num_merges)
    counted = zip(merges[layout.MERGE_SLOT], merges[layout.MERGE_PARTIALS], strict=True)
    slots_of = [slot for first, count in counted for slot in range(first, first + count)]
    assert {slot for slot, _ in written} == set(slots_of)
    assert plan.num_slots == len(slots_of)


def _check_first_units(
    ints: np.ndarray, kind: int, table: np.ndarray, units: np.ndarray, pieces_at: int,
    per_piece: int, shape: Shape,
) -> None:  # fmt: skip
    """A share's copy of its first unit equals the fields in orders and pieces."""
    begin_at, end_at = SHARE_FIELDS[kind]
    for share in table[table[:, begin_at] < table[:, end_at]]:
        begin, end = share[begin_at], share[end_at]
        first = int(units[begin])
        piece = ints[pieces_at + first // per_piece * layout.PIECE_INTS :][: layout.PIECE_INTS]
        unit = share[(layout.SHARE_FIRST_LARGE, layout.SHARE_FIRST_SMALL)[kind] :]
        assert unit[: layout.PIECE_KV_HEAD].tolist() == piece[: layout.PIECE_KV_HEAD].tolist()
        assert unit[layout.PIECE_KV_HEAD] == first % per_piece * (shape.kv_heads // per_piece)
        if kind == SMALL:
            assert share[layout.SHARE_SECOND_SMALL] == units[min(begin + 1, end - 1)]


def _first_tokens(spans: Spans) -> list[int]:
    """The first token that pieces of each span hold; -1 if its tokens are not neighbours."""
    rows_of = np.split(spans.query_rows, spans.query_starts[1:-1])
    return [int(rows[0]) if len(rows) and (np.diff(rows) == 1).all() else -1 for rows in rows_of]


def _queued_units(ints: np.ndarray, pieces_at: int, per_piece: int, shape: Shape) -> np.ndarray:
    """The queued units, numbered as in an order."""
    units = ints[ints[layout.HEADER_QUEUE] : ints[layout.HEADER_LARGE_ORDER]].reshape(
        -1, layout.PIECE_INTS
    )
    assert len(units) == max(ints[layout.HEADER_NUM_QUEUED], 1)
    units = units[: ints[layout.HEADER_NUM_QUEUED]]
    pieces = ints[pieces_at : ints[layout.HEADER_ENTRIES]].reshape(-1, layout.PIECE_INTS)
    by_piece = {tuple(piece[: layout.PIECE_KV_HEAD]): i for i, piece in enumerate(pieces.tolist())}
    assert len(by_piece) == len(pieces)
    return np.array(
        [
            by_piece[*unit[: layout.PIECE_KV_HEAD]] * per_piece
            + unit[layout.PIECE_KV_HEAD] // (shape.kv_heads // per_piece)
            for unit in units.tolist()
        ],
        np.int32,
    )


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize("name", list(CASES))
def test_every_row_and_key_is_computed_once(name: str, tiles: Tiles) -> None:
    case = CASES[name]
    check(case, shape_of(case, tiles))


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_small_unit_fits_its_tile(page_size: int, tiles: Tiles) -> None:
    for kv_heads in range(1, 65):
        for group in range(1, 129):
            shape = Shape(group, kv_heads, page_size, num_programs=264, tiles=tiles)
            assert kv_heads % shape.fold == 0
            keys = 16 if tiles.divides_pages else page_size
            assert shape.tiles.small_k % (shape.fold * keys) == 0
            assert shape.small_rows * shape.fold <= shape.small_q
            assert shape.small_rows >= group or group > shape.small_q


def _loads(case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """The load of each program in keys x heads, by large and by small units; nothing is queued."""
    shape = shape_of(case, replace(HOPPER_SPLIT, queued_share=0.0))
    ints = plans.make_plan(case.spans(), shape).ints
    table = ints[layout.HEADER_INTS :][: shape.num_programs * layout.SHARE_INTS]
    table = table.reshape(shape.num_programs, layout.SHARE_INTS)
    loads = np.zeros((2, shape.num_programs), np.int64)
    large = (layout.HEADER_LARGE_PIECES, layout.HEADER_LARGE_ORDER, 1)
    small = (layout.HEADER_SMALL_PIECES, layout.HEADER_SMALL_ORDER, shape.fold)
    for kind, (at, order, heads) in enumerate((large, small)):
        for program, (begin, end) in enumerate(table[:, SHARE_FIELDS[kind]]):
            units = ints[ints[order] + begin : ints[order] + end]
            for piece in units // (shape.kv_heads // heads):
                fields = ints[ints[at] + piece * layout.PIECE_INTS :]
                keys = fields[layout.PIECE_KEY_END] - fields[layout.PIECE_KEY_BEGIN]
                loads[kind, program] += keys * heads
    return loads[0], loads[1]


@pytest.mark.parametrize("is_ragged", [False, True])
def test_large_units_take_multiprocessors_and_small_ones_what_is_left(is_ragged: bool) -> None:
    rng = random.Random(0)
    own = [Run((row,), rng.randint(1, 512) if is_ragged else 256) for row in range(256)]
    large, small = _loads(AttentionCase("both", (Run(tuple(range(64)), 2048), *own)))
    busy = int(np.count_nonzero(large))
    assert not large[132:].any()
    assert 8 < busy < 132
    early, late = small[: 264 - 2 * busy], small[264 - 2 * busy :]
    assert 0 < late.mean() < 0.95 * early.mean()
    assert early.max() < 1.5 * early.mean()
    large, small = _loads(AttentionCase("small", tuple(own)))
    assert not large.any()
    assert small.max() < 1.35 * small.mean()
    large, small = _loads(AttentionCase("large", (Run(tuple(range(256)), 2048),)))
    assert not small.any()
    assert np.count_nonzero(large) == 128


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_are_covered(seed: int) -> None:
    rng = random.Random(seed)
    runs, row = [], 0
    for _ in range(rng.randint(1, 6)):
        members = rng.choice([1, 1, 3, 20, 90])
        rows = tuple(range(row, row + members))
        if rng.random() < 0.7:
            runs.append(Run(rows, rng.randint(0, 3000)))
        if rng.random() < 0.3:  # a prompt
            runs.append(Run(rows, members + rng.randint(0, 900), is_causal=True))
        else:
            runs += [Run((r,), rng.randint(0, 400)) for r in rows if rng.random() < 0.9]
        row += members
    if not runs:
        runs.append(Run((0,), 1))
    heads, kv_heads = rng.choice([(32, 8), (32, 32), (28, 4), (9, 3), (16, 1)])
    page_size = rng.choice([16, 32, 64])
    case = AttentionCase("random", tuple(runs), heads, kv_heads, page_size=page_size)
    check(case, shape_of(case, HOPPER))
    check(case, shape_of(case, HOPPER_SPLIT))
    check(case, shape_of(case, HOPPER, fixed_stretch=256))


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize("seed", seeds(12, {8, 9, 10, 11}))
def test_ways_to_cut_give_complete_plans(seed: int, tiles: Tiles) -> None:
    case = random_step(random.Random(seed))
    case = replace(case, page_size=(16, 16, 32, 64)[seed % 4])
    spans, shape = case.spans(), shape_of(case, tiles)
    ways = ways_to_cut(spans, shape)
    for way in ways[::5]:
        check_plan(plans.plan_cut(spans, way.cut(), shape), spans, shape)
    assert len(ways) > 1


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize(
    "runs",
    [(Run((), 10), Run((), 5000)), (Run((), 5000), Run((0,), 9000)), (Run((0,), 0),)],
    ids=["no queries", "one query", "no keys"],
)
def test_tiny_steps_have_a_plan(runs: tuple[Run, ...], tiles: Tiles) -> None:
    case = AttentionCase("odd", runs)
    check(case, shape_of(case, tiles))


def test_as_many_pieces_as_spans_need_not_be_one_piece_per_span() -> None:
    case = AttentionCase("two and none", (Run((), 10), Run((0,), 300)))
    shape = shape_of(case, HOPPER, fixed_stretch=256)
    assert len(plans.make_plan(case.spans(), shape).pieces.span) == 2
    check(case, shape)


def test_large_units_take_few_multiprocessors_if_small_units_take_long() -> None:
    """32 sequences of 8,000 keys share 2,000: up to half of 132 multiprocessors get large units."""
    runs = [Run((row,), 8000) for row in range(32)]
    case = AttentionCase("long", (*runs, Run(tuple(range(32)), 2000)))
    ints = plans.make_plan(case.spans(), shape_of(case, HOPPER_SPLIT)).ints
    table = ints[layout.HEADER_INTS :][: 264 * layout.SHARE_INTS].reshape(264, -1)
    begin, end = (table[:, field] for field in SHARE_FIELDS[LARGE])
    assert 0 < np.count_nonzero(begin < end) <= 66


def test_the_largest_step_of_an_engine_fits_its_buffers() -> None:
    """A step of 8,192 tokens, 1,600 of them decodes, over prefixes of up to three levels. Its
    Partials fit once prompts no longer share."""
    runs = [Run(tuple(range(8192)), 512), Run(tuple(range(4096)), 512)]
    runs += [Run(tuple(range(1600 * i // 4, 1600 * (i + 1) // 4)), 2000) for i in range(4)]
    runs += [Run((row,), 200) for row in range(1600)]
    runs += [
        Run(tuple(range(first, min(first + 600, 8192))), min(600, 8192 - first), is_causal=True)
        for first in range(1600, 8192, 600)
    ]
    case = AttentionCase("largest", tuple(runs))
    spans, shape = case.spans(), shape_of(case, HOPPER)
    limits = AttentionLimits(max_tokens=8192, max_pages=1 << 22, max_entries=7 * 8192)
    shared = plans.make_plan(spans, shape)
    assert shared.num_slots > limits.partials()
    fewer = plans.make_plan(unshare(spans, case.page_size, least_queries=16), shape)
    assert fewer.num_slots <= limits.partials()
    partial_bytes = limits.partials() * case.heads * case.head_dim * 4
    assert partial_bytes == 256 << 20
    assert shared.ints.nbytes < 4 << 20


@pytest.mark.parametrize(
    ("heads", "kv_heads", "prompt", "keys", "decodes"),
    [(8, 1, 512, 65536, 64), (8, 1, 1024, 32768, 64), (12, 2, 512, 16384, 0)],
)
def test_longer_units_leave_fewer_partials(
    heads: int, kv_heads: int, prompt: int, keys: int, decodes: int
) -> None:
    """Cuts with too many Partials are left out, as long as there are others."""
    runs = [Run((row,), 2000) for row in range(decodes)]
    runs.append(Run(tuple(range(decodes, decodes + prompt)), keys, is_causal=True))
    case = AttentionCase("prompt", tuple(runs), heads, kv_heads)
    spans, shape = case.spans(), shape_of(case, HOPPER_SPLIT)
    fine = plans.make_plan(spans, shape)
    most = fine.num_slots * 2 // 3
    fitting = plans.make_plan(spans, replace(shape, max_partials=most))
    uncut = plans.make_plan(spans, replace(shape, can_cut=False))
    assert uncut.num_slots < fitting.num_slots <= most


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
def test_a_large_step_takes_no_more_python_to_plan_than_a_small_one(tiles: Tiles) -> None:
    small, large = plan_work(96, 6, tiles), plan_work(1600, 100, tiles)
    assert large < 2 * small


def plan_work(batch: int, groups: int, tiles: Tiles) -> int:
    """Instructions of Python to plan `batch` decodes, in `groups` of a common prefix."""
    degree = batch // groups
    runs = [Run(tuple(range(g * degree, (g + 1) * degree)), 2000) for g in range(groups)]
    runs += [Run((row,), 250, is_causal=True) for row in range(batch)]
    case = AttentionCase("many", tuple(runs))
    spans, shape = case.spans(), shape_of(case, tiles)
    return instructions(lambda: plans.make_plan(spans, shape))


def _grouped(group_of: int, prefix: int, own: int = 100, tokens: int = 64) -> AttentionCase:
    rows = [tuple(range(i, i + group_of)) for i in range(0, tokens, group_of)]
    return AttentionCase(
        "grouped",
        (*(Run((row,), own) for row in range(tokens)), *(Run(group, prefix) for group in rows)),
    )


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        (AttentionCase("own", tuple(Run((row,), 256) for row in range(64))), (False, False)),
        (AttentionCase("one", (Run((0,), 32768),)), (False, True)),
        (_grouped(4, 1000), (False, True)),
        (_grouped(64, 20_000), (True, True)),
        (AttentionCase("prompt", (Run(tuple(range(512)), 512, is_causal=True),)), (True, False)),
    ],
)
def test_a_plan_names_the_launches_that_it_needs(
    case: AttentionCase, launches: tuple[bool, bool]
) -> None:
    assert plans.make_plan(case.spans(), shape_of(case, HOPPER_SPLIT)).launches == launches


@pytest.mark.parametrize("case", [_grouped(4, 1000), _grouped(16, 100), _grouped(2, 5000)])
def test_spans_of_a_few_tokens_may_be_of_either_kind(case: AttentionCase) -> None:
    def kinds(tiles: Tiles) -> set[int]:
        return {way.of.num_large for way in ways_to_cut(case.spans(), shape_of(case, tiles))}

    assert len(kinds(HOPPER_SPLIT)) == 2
    assert 0 in kinds(HOPPER_SPLIT)
    assert len(kinds(HOPPER)) == 1, "one kernel has both kinds, so nothing is saved"


def _grown(case: AttentionCase, rng: random.Random, most: int) -> AttentionCase:
    longer = (replace(run, key_tokens=run.key_tokens + rng.randint(0, most)) for run in case.runs)
    return replace(case, runs=tuple(longer))


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize("fixed_stretch", [None, 256])
@pytest.mark.parametrize("seed", seeds(8, {3, 5, 6, 7}))
def test_a_reusable_plan_holds_for_a_few_keys_more(
    seed: int, fixed_stretch: int | None, tiles: Tiles
) -> None:
    rng = random.Random(seed)
    case = replace(random_step(rng), page_size=rng.choice([16, 32, 64]))
    shape = shape_of(case, tiles, fixed_stretch)
    first = plans.make_plan(case.spans(), shape)
    ints = first.ints
    held = 0
    for most in (0, 1, 3, plans.KEPT_KEYS):
        spans = _grown(case, rng, most).spans()
        if first.holds_for(spans):
            held += 1
            check_plan(first.of_step(spans), spans, shape)
    assert held
    assert np.array_equal(first.ints, ints), "nothing was overwritten"
    again = first.of_step(case.spans())
    assert np.array_equal(again.ints, ints)
    assert (again.num_slots, again.launches) == (first.num_slots, first.launches)
    check_plan(again, case.spans(), shape)


def test_a_reusable_plan_does_not_hold_for_other_steps() -> None:
    case = AttentionCase("decodes", tuple(Run((row,), 100 + row) for row in range(40)))
    spans = case.spans()
    reusable = plans.make_plan(spans, shape_of(case, HOPPER_SPLIT))
    assert reusable.holds_for(spans)
    runs = case.runs
    for other in (
        runs[:-1],
        (*runs, Run((40,), 5)),
        (replace(runs[0], rows=(1,)), *runs[1:]),
        (replace(runs[0], is_causal=True), *runs[1:]),
        (replace(runs[0], key_tokens=99), *runs[1:]),
        (replace(runs[0], key_tokens=101 + plans.KEPT_KEYS), *runs[1:]),
    ):
        assert not reusable.holds_for(replace(case, runs=other).spans())


def test_a_reusable_plan_does_not_hold_past_a_fixed_stretch() -> None:
    case = AttentionCase("one", (Run((0,), 4090),))
    reusable = plans.make_plan(case.spans(), shape_of(case, HOPPER, fixed_stretch=256))
    assert reusable.holds_for(AttentionCase("one", (Run((0,), 4096),)).spans())
    assert not reusable.holds_for(AttentionCase("one", (Run((0,), 4097),)).spans())


@pytest.mark.parametrize("tiles", [HOPPER, HOPPER_SPLIT], ids=["one kernel", "split"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_reusable_plan_holds_while_decodes_of_any_length_go_on(
    page_size: int, tiles: Tiles
) -> None:
    """In every step some of them begin a page, and some have filled their last stretch."""
    rng = random.Random(0)
    lengths = [rng.randint(0, 900) for _ in range(100)]
    prefixes = [Run(tuple(range(i, i + 10)), 1000) for i in range(0, 100, 10)]

    def step(number: int) -> AttentionCase:
        own = (Run((row,), length + number) for row, length in enumerate(lengths))
        return AttentionCase("ragged", (*prefixes, *own), page_size=page_size)

    shape = shape_of(step(0), tiles)
    reusable = plans.make_plan(step(0).spans(), shape)
    for number in range(plans.KEPT_KEYS + 1):
        spans = step(number).spans()
        assert reusable.holds_for(spans)
        check_plan(reusable.of_step(spans), spans, shape)
    assert not reusable.holds_for(step(plans.KEPT_KEYS + 1).spans())


def test_windowed_steps_are_planned_and_reused_as_windows_move_on() -> None:
    """Spans grow by a key, lose pages in front, and the prefixes lose readers."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 900) for _ in range(60)]
    prefixes = [Run(tuple(range(i, i + 10)), 512) for i in range(0, 60, 10)]
    prompt = Run(tuple(range(60, 400)), 700, is_causal=True)
    shape: Shape | None = None
    reusable: plans.KernelPlan | None = None
    made = 0
    for number in range(60):
        own = (Run((row,), length + number) for row, length in enumerate(lengths))
        case = AttentionCase("windows", (*prefixes, *own, prompt))
        shape = shape or replace(shape_of(case, HOPPER), has_windows=True)
        spans = clip_spans(case.spans(), case.positions(), 600, case.page_size)
        if reusable is None or not reusable.holds_for(spans):
            plan = plans.make_plan(spans, shape)
            made += 1
        else:
            plan = reusable.of_step(spans)
        reusable = plan
        if number % 4 == 3:
            check_plan(plan, spans, shape)
    assert made < 20


def test_hoppers_own_kernels_are_chosen_for_what_they_support(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: TUNED_CARD)
    monkeypatch.setattr(torch.version, "hip", None)
    card, half = torch.device("cuda"), torch.bfloat16
    assert choose_tiles(card, half, 128, can_split=True) is HOPPER_SPLIT
    for head_dim in HEAD_DIMS:
        found = choose_tiles(card, half, head_dim, can_split=True)
        if head_dim in SPLIT_TILES:
            assert found is SPLIT_TILES[head_dim]
        else:  # 512: the portable kernel serves them
            assert found is HOPPER_VERY_WIDE_HEADS
        for can_split in (False, True):
            assert not choose_tiles(card, torch.float32, head_dim, can_split=can_split).is_split
    for head_dim in (64, 80, 96, 128):
        assert choose_tiles(card, half, head_dim, can_split=False) is HOPPER
    assert choose_tiles(card, half, 256, can_split=False) is HOPPER_WIDE_HEADS


def test_rounded_pages_are_expanded_only_where_hoppers_kernels_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    card, half = torch.device("cuda"), torch.bfloat16
    found = [head_dim for head_dim in HEAD_DIMS if expands_rounded(card, half, head_dim)]
    assert found == list(SPLIT_TILES)
    assert not expands_rounded(card, torch.float32, 128)
    assert not expands_rounded(torch.device("cpu"), half, 128)
    capability = (8, 9)
    assert not expands_rounded(card, half, 128)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "page_size", "is_direct"),
    [
        (4, 8, 128, 16, True),
        (1, 32, 128, 16, True),
        (7, 4, 128, 16, True),
        (8, 2, 128, 16, True),
        (16, 1, 64, 16, True),
        (8, 8, 64, 64, True),
        (32, 8, 64, 16, False),  # a warp has keys of two pages
        (32, 8, 64, 32, True),
        (71, 1, 64, 16, False),
        (71, 1, 64, 64, True),
        (4, 8, 80, 16, False),
        (2, 4, 256, 16, False),
    ],
)
def test_hoppers_kernels_read_rounded_pages_if_a_warps_keys_have_one_scale(
    group: int, kv_heads: int, head_dim: int, page_size: int, is_direct: bool
) -> None:
    """Otherwise the portable kernel does."""
    split = SPLIT_TILES[head_dim]
    tiles = tiles_for_rounded(split, group, kv_heads, head_dim, page_size)
    assert tiles.is_split == is_direct
    if is_direct:
        shape = Shape(group, kv_heads, page_size, 264, tiles)
        keys = tiles.small_k // (shape.fold * shape.splits)  # of a warp
        assert page_size % keys == 0
        assert tiles.pace.reads == 2 * split.pace.reads


def test_wide_heads_have_their_own_tiles_without_hoppers_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three stages of 64 keys of 256 numbers do not fit together with the queries."""
    monkeypatch.setattr(ops, "_hopper", lambda: None)
    card = torch.device("cuda")
    for head_dim, tiles in ((128, HOPPER), (256, HOPPER_WIDE_HEADS)):
        assert ops._with_kernel(SPLIT_TILES[head_dim], card, head_dim, 16) == (tiles, None)


def test_prefixes_in_fp8_get_more_multiprocessors() -> None:
    """Their keys take longer, and own tokens half of the bytes, so that they would end first."""
    case = CASES["gqa32/8 B1024 64x2000+250"]

    def multiprocessors(tiles: Tiles) -> float:
        shape = shape_of(case, tiles)
        return min(ways_to_cut(case.spans(), shape), key=lambda way: way.us).sms

    assert multiprocessors(for_rounded_pages(HOPPER_SPLIT)) > multiprocessors(HOPPER_SPLIT)


def test_spans_are_cut_into_fewer_units_to_avoid_a_second_round() -> None:
    """Two long sequences: 270 units on 264 programs would need a second round, 240 need one."""
    runs = Run((0,), 16828), Run((1,), 17422)
    _, small = _loads(AttentionCase("two", runs, 64, 8))
    assert small.max() < 1.25 * small.mean()


def test_no_program_has_two_long_units_if_others_have_short_ones() -> None:
    """272 units, 24 of them short: no program has two of the 248 long ones."""
    own = (Run((row,), keys) for row, keys in enumerate((4306, 15922, 21011, 20360, 2176, 100)))
    case = AttentionCase("few short", (*own, Run((2, 3), 1500), Run((4, 5), 500)), 32, 32)
    _, small = _loads(case)
    assert small.max() < 1.3 * small.mean()


@pytest.mark.parametrize("index", range(8))
def test_every_row_and_key_of_other_head_layouts_is_computed_once(index: int) -> None:
    case = list(random_shapes(5, 8))[index]
    tiles, spans = SPLIT_TILES[case.head_dim], seen_spans(case)
    shape = replace(
        shape_of(case, tiles), num_programs=132 * tiles.programs_per_sm, has_windows=True
    )
    check_plan(plans.make_plan(spans, shape), spans, shape)


@pytest.mark.parametrize(
    ("group", "kv_heads", "fold", "splits", "rows"),
    [
        (4, 8, 4, 1, 16),
        (16, 4, 4, 1, 16),
        (8, 2, 2, 2, 16),
        (13, 1, 1, 4, 16),
        (20, 2, 2, 1, 32),
        (20, 1, 1, 2, 32),
        (40, 1, 1, 1, 64),
        (71, 1, 1, 1, 64),
        (2, 3, 1, 4, 16),
    ],
)
def test_warps_that_heads_do_not_need_take_parts_of_their_keys(
    group: int, kv_heads: int, fold: int, splits: int, rows: int
) -> None:
    shape = Shape(group, kv_heads, 16, num_programs=264, tiles=HOPPER_SPLIT)
    assert (shape.fold, shape.splits, shape.small.rows) == (fold, splits, rows)
    assert Shape(group, kv_heads, 16, num_programs=264, tiles=HOPPER).splits == 1
