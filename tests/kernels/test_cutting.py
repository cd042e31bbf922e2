"""The estimate that chooses a cut, and the cut of the example in `cutting.py`."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.kernels.attention.cutting import Work, _small_us, _step_us, cut_spans
from mainstem.kernels.attention.plan import make_plan
from mainstem.kernels.attention.shape import Shape
from mainstem.kernels.attention.tuning import HOPPER_SPLIT
from mainstem_bench.workloads import AttentionCase, Run, grouped, own_runs

pytestmark = pytest.mark.torch

SHAPE = Shape(4, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
PACE = HOPPER_SPLIT.pace
NOTHING = Work(0.0, 0.0, 0.0, 0.0, 0.0)


def large(units: int, unit_us: float = 30.0) -> Work:
    return Work(units, units * unit_us, unit_us, rows=0.0, keys=units * 2000.0)


def small(units: int, steps: int = 16, rows: float = 0.0) -> Work:
    unit_us = PACE.small_us + steps * 64 * PACE.small_key_us
    return Work(units, units * unit_us, unit_us, rows, keys=units * steps * 64.0)


def alone_us(work: Work) -> float:
    return _small_us(work, SHAPE)


def step_us(of_large: Work, of_small: Work, sms: int) -> float:
    return _step_us(of_large, of_small, sms, SHAPE)


def test_many_small_units_are_as_fast_as_the_memory() -> None:
    work = small(264 * 20)
    assert alone_us(work) == pytest.approx(work.keys / PACE.reads, rel=0.02)


def test_a_few_small_units_are_not_limited_by_memory() -> None:
    work = small(20)
    assert alone_us(work) == pytest.approx(work.longest_us)


def test_large_units_alone_take_the_time_of_their_rounds() -> None:
    assert step_us(large(264), NOTHING, 132) == pytest.approx(60.0, rel=0.1)
    assert step_us(large(265), NOTHING, 132) == pytest.approx(90.0, rel=0.1)


@pytest.mark.parametrize("units", [100, 264, 1000, 4000])
@pytest.mark.parametrize("sms", [8, 64, 131, 132])
def test_large_and_small_units_take_at_least_as_long_as_either_alone(units: int, sms: int) -> None:
    both = step_us(large(sms), small(units), sms)
    assert both >= alone_us(small(units)) - 1e-9
    assert both >= step_us(large(sms), NOTHING, sms) - 1e-9


def test_large_and_small_units_take_less_than_the_sum_of_both() -> None:
    """64 multiprocessors have large units, so 136 programs of small ones begin at once."""
    apart = step_us(large(64), NOTHING, 64) + alone_us(small(2000))
    assert step_us(large(64), small(2000), 64) < 0.97 * apart


def test_a_long_small_unit_begins_at_once_if_some_multiprocessor_has_no_large_ones() -> None:
    """One of 264 small units takes 100 us. It runs after large units of 30 us if they take all
    multiprocessors, and beside them if they leave two."""
    uneven = small(264, steps=4)._replace(longest_us=100.0)
    after = step_us(large(132), uneven, 132)
    beside = step_us(large(130), uneven, 130)
    assert after > beside + 25.0


def test_partials_cost_time() -> None:
    assert alone_us(small(264, rows=1e5)) > alone_us(small(264))


def test_a_shared_prefix_is_cut_for_the_multiprocessors() -> None:
    """The example in the module's docstring: 2 tiles of rows x 4 stretches x 8 KV heads."""
    cut = cut_spans(AttentionCase("64", (Run(tuple(range(64)), 2048),)).spans(), SHAPE)
    assert (cut.of.num_large, cut.of.row_tiles[0], cut.parts[0], cut.stretches[0]) == (1, 2, 4, 512)
    assert cut.sms == 64


def test_long_prefixes_are_cut_into_several_units_for_each_multiprocessor() -> None:
    """4 groups of 32 sequences share 10,000 keys each: 2 tiles of rows x 3 stretches x 8 KV heads,
    which is 10 % faster on an H200 than one stretch on 64 multiprocessors."""
    shape = Shape(8, 8, 16, num_programs=264, tiles=HOPPER_SPLIT)
    cut = cut_spans(AttentionCase("4x10000+600", grouped(128, 4, 10000, 600)).spans(), shape)
    large = cut.parts[: cut.of.num_large]
    assert (large.tolist(), cut.sms) == ([3.0] * 4, 112)


@pytest.mark.parametrize(
    ("batch", "keys", "is_cut"),
    [(64, 200, False), (128, 300, False), (32, 300, True), (16, 300, True)],
)
def test_short_decodes_are_not_cut_if_that_saves_the_merge(
    batch: int, keys: int, is_cut: bool
) -> None:
    """On an H200 the first two are 1.3 and 1.4 us faster so, and the others 6 and 9 us slower."""
    plan = make_plan(AttentionCase("own", own_runs([keys] * batch)).spans(), SHAPE)
    assert plan.launches == (False, is_cut)
    assert (plan.num_units[1] > 2 * batch) == is_cut


def test_tokens_in_two_spans_always_need_the_merge() -> None:
    """So not cutting their own keys saves no launch."""
    runs = (*(Run((2 * i, 2 * i + 1), 64) for i in range(32)), *own_runs([200] * 64))
    assert make_plan(AttentionCase("pairs", runs).spans(), SHAPE).launches.merge
