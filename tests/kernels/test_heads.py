"""The bounds that `mainstem bench heads` compares kernels with; needs no card."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.plan.cost import Heads
from mainstem_bench.heads import (
    CARD,
    HEAD_DIMS,
    LEAST_FLOOR_US,
    MOST_RATIO,
    named_shapes,
    random_shapes,
    summary,
)
from mainstem_bench.kernel import floor_us, seen_spans
from mainstem_bench.workloads import AttentionCase, Run, own_runs

pytestmark = pytest.mark.torch


def test_equal_seeds_give_equal_shapes() -> None:
    assert list(random_shapes(3, 6)) == list(random_shapes(3, 6))
    assert list(random_shapes(3, 6)) != list(random_shapes(4, 6))


def test_random_shapes_have_all_head_dims_many_ratios_and_windows() -> None:
    shapes = list(random_shapes(0, 24))
    ratios = {case.heads // case.kv_heads for case in shapes}
    assert {case.head_dim for case in shapes} == set(HEAD_DIMS)
    assert len(ratios) >= 8
    assert max(ratios) <= MOST_RATIO
    assert sum(case.window is not None for case in shapes) == 8
    assert min(floor_us(case, CARD) for case in shapes) >= LEAST_FLOOR_US
    assert len({case.name for case in (*shapes, *named_shapes())}) == 24 + len(named_shapes())


def test_the_floor_of_a_window_counts_seen_keys_once() -> None:
    """Decodes over 6,000 keys read the last 4,096 and their queries, and write their outputs."""
    case = AttentionCase("window", own_runs([6000] * 64), window=4096)
    moved = 64 * (4096 * Heads(32, 8, 128).key_bytes + 2 * 32 * 128 * 2)
    assert floor_us(case) == pytest.approx(1e6 * moved / 4.3e12)
    # A prompt is cut into runs of queries. Pages that two runs read count once.
    prompt = AttentionCase("prompt", (Run(tuple(range(700)), 3000, is_causal=True),), window=1024)
    assert len(seen_spans(prompt)) > 1
    slow = replace(CARD, flops_per_s=float("inf"))
    keys = 700 + 1023
    moved = keys * Heads(32, 8, 128).key_bytes + 2 * 700 * 32 * 128 * 2
    assert floor_us(prompt, slow) == pytest.approx(1e6 * moved / 4.3e12, rel=0.01)


def test_a_window_longer_than_all_contexts_does_not_change_the_floor() -> None:
    case = AttentionCase("short", own_runs([300] * 64))
    assert floor_us(replace(case, window=4096)) == floor_us(case)


def test_the_mean_and_the_worst_shape_must_stay_within_bars() -> None:
    lines: list[dict[str, object]] = [{"over_floor_less_8_us": x} for x in (1.0, 2.2)]
    assert summary(lines, 0)["is_within_bar"]
    assert not summary([*lines, {"over_floor_less_8_us": 2.3}], 0)["is_within_bar"]
    total = summary([*lines, {"over_floor_less_8_us": 2.0}], 0)
    assert np.isclose(float(str(total["mean"])), 1.73)
    assert not total["is_within_bar"]
