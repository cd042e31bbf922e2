"""The limits of the card, and the prompts that other engines were measured with."""

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from mainstem.plan.cost import H200
from mainstem_bench.limit import ModelCost, job_floor
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OFFLINE_JOBS, shuffled

# requests per second, worked out by hand for an H200 in bf16
LIMITS = {
    "b2000-sd16": 90,
    "industry": 59,
    "b16000-sd4": 7.0,
    "b2000-1000-sd4": 23.4,
    "noshare-512": 60,
    "relay-2048": 157,
    "relay-1024": 161,
    "relay-512": 164,
    "relay-64": 166,
    "classify": 1380,
}


def limit(name: str, kv_tokens: int | None = None, gemm: float | None = None) -> float:
    job = OFFLINE_JOBS[name]
    model = ModelCost.of(SHAPES[job.model_shape], 2, gemm)
    floor = job_floor(H200, model, job, kv_tokens or job.kv_tokens)
    return sum(job.group_sizes()) / floor.total_s


@pytest.mark.parametrize("name", OFFLINE_JOBS)
def test_limits_of_an_h200_are_those_worked_out_by_hand(name: str) -> None:
    assert limit(name) == pytest.approx(LIMITS[name], rel=0.05)


def test_products_twice_as_fast_raise_the_limit_less_than_twofold() -> None:
    assert 1.4 < limit("b2000-sd16", gemm=2 * H200.flops_per_s) / limit("b2000-sd16") < 2.0


def test_less_memory_means_more_reads_of_a_prefix() -> None:
    assert limit("relay-2048", kv_tokens=2048 + 192 * 8) < 0.9 * limit("relay-2048")


@pytest.mark.parametrize(
    ("name", "count", "digest"),
    [
        ("b2000-sd16", 1600, "05e6180f02a4d5ea"),
        ("relay-512", 1000, "3a24ae88818a77c7"),
    ],
)
def test_prompts_are_those_that_other_engines_were_measured_with(
    name: str, count: int, digest: str
) -> None:
    prompts = shuffled(OFFLINE_JOBS[name].prompts(128_256))
    found = sha256()
    for prompt in prompts:
        found.update(np.array(prompt, np.int32).tobytes())
    assert (len(prompts), found.hexdigest()[:16]) == (count, digest)


def test_recurrent_layers_move_what_was_worked_out_by_hand() -> None:
    """Qwen3.6-27B: 48 layers with 16 key and 48 value heads of 128. A row is keys and values in 16
    bits, and a sum for each value head."""
    cost = ModelCost.of(SHAPES["qwen36-27b"], 2).recurrent
    assert cost is not None
    assert cost.state == 48 * 48 * 128 * 128 * 4
    assert cost.row == 48 * ((16 + 48) * 128 * 2 + 48 * 4)
    assert cost.token == 48 * 2 * (16 + 48) * 128 * 2
    assert ModelCost.of(SHAPES["llama31-8b"], 2).recurrent is None


def test_siblings_read_one_state() -> None:
    """4,000 prompts of 75 own tokens: each reads its 75 to 78 rows 4 times, and leaves 75 rows; the
    state is read with the prompts and in 4 steps, and written once."""
    job, model = OFFLINE_JOBS["classify"], ModelCost.of(SHAPES["qwen36-27b"], 2)
    cost = model.recurrent
    assert cost is not None
    rows = 4000 * (75 + 76 + 77 + 78 + 75) * cost.row
    tokens = (1200 + 4000 * 79) * cost.token
    found = job_floor(H200, model, job, kv_tokens=450_000).recurrent_s
    assert found == pytest.approx((rows + tokens + 6 * cost.state) / H200.bytes_per_s, rel=1e-3)
    alone = replace(job, groups=4000, degree=1, prefix=1200)
    assert job_floor(H200, model, alone, kv_tokens=450_000).recurrent_s > 5 * found


def test_a_small_step_takes_as_long_as_reading_the_weights() -> None:
    job, model = OFFLINE_JOBS["classify"], ModelCost.of(SHAPES["qwen36-27b"], 2)
    whole = job_floor(H200, model, job, 450_000).gemm_s
    large = job_floor(H200, model, job, 450_000, [8192] * 39).gemm_s
    assert large == pytest.approx(whole)
    weights_s = 2 * (model.size.num_params + model.size.num_head_params) / H200.bytes_per_s
    with_small = job_floor(H200, model, job, 450_000, [8192] * 39 + [1] * 10).gemm_s
    assert with_small == pytest.approx(whole + 10 * weights_s, rel=1e-3)


def test_a_step_of_one_token_reads_only_its_experts() -> None:
    job, model = OFFLINE_JOBS["classify"], ModelCost.of(SHAPES["qwen36-35b-a3b"], 2)
    size = model.size
    used = size.num_params + size.num_head_params
    one = job_floor(H200, model, job, 450_000, [10**6, 1]).gemm_s
    many = job_floor(H200, model, job, 450_000, [10**6]).gemm_s
    assert one - many == pytest.approx(used * size.bytes_per_param / H200.bytes_per_s, rel=1e-2)


def test_rows_of_a_table_follow_one_instruction_and_differ_in_length() -> None:
    prompts = OFFLINE_JOBS["classify"].prompts(248_320)
    lengths = [len(prompt) - 1200 for prompt in prompts]
    assert len(prompts) == 4000
    assert (min(lengths), max(lengths)) == (30, 120)
    assert {tuple(prompt[:1200]) for prompt in prompts} == {tuple(prompts[0][:1200])}


def test_a_smaller_job_has_the_first_prompts_of_the_larger_one() -> None:
    job = replace(OFFLINE_JOBS["industry"], groups=5)
    small = replace(job, num_requests=7)
    assert small.group_sizes() == [3, 3, 1]
    assert small.prompts(30_000) == job.prompts(30_000)[:7]
