"""The least time of attention over spans, and Eq. 10 of RelayAttention."""

import numpy as np
import pytest

from mainstem.core.step import Spans
from mainstem.plan.cost import H200
from mainstem_bench.floors import relay_speedup, span_floor_s


@pytest.mark.parametrize(
    ("system", "context", "batch", "expected"),
    [
        (0, 128, 32, 130 / 135),  # nothing to share: there is only the extra traffic
        (2048, 128, 1, 2178 / 2183),
        (2048, 128, 32, 2178 / 199),
        (512, 256, 4, 770 / 391),
    ],
)
def test_relay_speedup_agrees_with_equation_10(
    system: int, context: int, batch: int, expected: float
) -> None:
    assert relay_speedup(system, context, batch) == pytest.approx(expected)


def test_relay_speedup_tends_to_the_batch_size_for_long_prompts() -> None:
    assert relay_speedup(1e9, 128, 16) == pytest.approx(16, rel=1e-3)


def test_the_floor_counts_each_key_once() -> None:
    spans = Spans(
        query_starts=np.array([0, 2, 3], np.int32),
        query_rows=np.array([0, 1, 0], np.int32),
        page_starts=np.array([0, 1, 2], np.int32),
        page_ids=np.array([0, 1], np.int32),
        key_tokens=np.array([10, 5], np.int32),
        is_causal=np.array([False, True]),
        key_positions=np.array([0, 10], np.int32),
    )
    floor = span_floor_s(H200, spans, heads=32, kv_heads=8, head_dim=128)
    moved = 15 * 4096 + 2 * 2 * 32 * 128 * 2
    assert floor == pytest.approx(moved / H200.bytes_per_s)
