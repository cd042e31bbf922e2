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


def test_a_smaller_job_has_the_first_prompts_of_the_larger_one() -> None:
    job = replace(OFFLINE_JOBS["industry"], groups=5)
    small = replace(job, num_requests=7)
    assert small.group_sizes() == [3, 3, 1]
    assert small.prompts(30_000) == job.prompts(30_000)[:7]
