"""The floor and the cases of `mainstem bench recurrent`; needs no card."""

import numpy as np
import pytest

pytest.importorskip("triton")

from mainstem_bench.recurrent import Case, Measured, mean_line, own_steps, random_mixes, siblings
from mainstem_bench.recurrent_prompts import PROMPT_CASES, by_kernel_us, delta_spec, limit_us

pytestmark = pytest.mark.torch


def test_the_floor_moves_everything_once() -> None:
    state, row, token = 48 * 128 * 128 * 4, 64 * 128 * 2 + 48 * 4, 2 * 64 * 128 * 2
    assert siblings(256, 16, 8).floor_us == pytest.approx(
        1e6 * (16 * state + 256 * 8 * row + 256 * token) / 4.3e12
    )
    plain = Case("plain", ((0,), (0,)), is_plain=True)
    assert plain.floor_us == pytest.approx(1e6 * (4 * state + 2 * token) / 4.3e12)


def test_only_the_last_step_between_two_folds_writes_states() -> None:
    steps = own_steps(256, 24)
    assert [step.folds for step in steps] == [False] * 23 + [True]
    assert [step.counts[0][0] for step in steps] == list(range(24))
    assert steps[-1].floor_us > 1.8 * steps[-2].floor_us


def test_mixes_follow_from_their_seed() -> None:
    mixes = random_mixes(24, 0)
    assert mixes == random_mixes(24, 0)
    assert mixes != random_mixes(24, 1)
    sizes = {len(group) for mix in mixes for group in mix.counts}
    counts = np.concatenate([group for mix in mixes for group in mix.counts])
    assert {1, 2, 16} <= sizes
    assert max(sizes) > 16
    assert counts.min() == 0
    assert counts.max() == 63


def test_steps_in_a_row_are_judged_by_their_sum_and_mixes_one_by_one() -> None:
    class Timed:
        def measure(self, case: Case) -> Measured:
            return Measured(2 * case.floor_us if case.folds else case.floor_us, 0.001)

    steps = own_steps(4, 2)
    line = mean_line(Timed(), "steps", steps, 1.3, 0.0)  # type: ignore[arg-type]
    floors = [step.floor_us for step in steps]
    assert line["share"] == round((floors[0] + 2 * floors[1]) / sum(floors), 2)
    assert line["is_within_bar"] is False


def test_the_limit_of_prompts_is_the_arithmetic_of_two_products() -> None:
    # 27B: 10,240 convolved columns, a gate of 6,144 and two numbers for each of 48 heads
    columns = 10_240 + 6_144 + 96
    flops = 2 * 4_096 * 5_120 * (columns + 6_144)
    found = limit_us(delta_spec("qwen36-27b"), 5_120, 4_096)
    assert found == pytest.approx(1e6 * flops / 666e12)
    assert [sum(case.lengths) for case in PROMPT_CASES] == [4_096, 4_096, 4_024]


def test_times_of_our_kernels_are_told_apart() -> None:
    spent = [("_delta_pass_kernel", 30.0), ("nvjet_128x256", 70.0), ("_delta_pass_kernel", 34.0),
             ("nvjet_128x256", 80.0), ("Memset (Device)", 2.0)]  # fmt: skip
    assert by_kernel_us(spent, 2) == {"gemm x1": 76.0, "delta_pass x1": 32.0}
