"""The outputs of a rank for some requests, and how outputs are compared."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Quantize,
    SchedConfig,
)
from mainstem.core.events import EventBus
from mainstem.core.request import Output, SamplingParams
from mainstem.engine.build import join
from mainstem.models.collectives import ALONE, Collectives
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import Origin, folder_origin, for_rank
from tests.builders import a_request, run_all

TOLERANCE = 1e-4
TOP = 4


def a_config(quantize: Quantize = Quantize.NONE) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(dtype=DType.FP32, quantize=quantize),
        cache=CacheConfig(page_size=4, kv_tokens=512),
        sched=SchedConfig(chunk_tokens=16),
    )


def outputs(
    folder: Path, ranks: Collectives = ALONE, quantize: Quantize = Quantize.NONE
) -> list[Output]:
    """Outputs for two prompts with a common prefix, longer than the layers' windows, of which the
    second is computed in chunks; then for a short prompt alone."""
    config = a_config(quantize)
    origin: Origin = folder_origin(folder)
    if not ranks.shard.is_whole:
        origin = for_rank(origin)
    runner, facts = load_cpu_runner(origin, config, ranks)
    engine = join(runner, facts, config, EventBus())
    rng = np.random.default_rng(3)
    head = rng.integers(3, facts.vocab_size, 13).tolist()
    prompts = [head + rng.integers(3, facts.vocab_size, count).tolist() for count in (2, 9)]
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=TOP, prompt_logprobs=TOP)
    requests = [a_request(ids, name=str(n), sampling=sampling) for n, ids in enumerate(prompts)]
    found = run_all(engine, requests).outputs
    found += run_all(engine, [a_request(head[:3], name="lone", sampling=sampling)]).outputs
    engine.close()
    return found


def check_same(found: Sequence[Output], expected: Sequence[Output], tolerance: float) -> None:
    assert [(o.request_id, list(o.token_ids)) for o in found] == [
        (o.request_id, list(o.token_ids)) for o in expected
    ]
    for mine, other in zip(found, expected, strict=True):
        records = [*mine.logprobs, *(mine.prompt_logprobs or ())]
        others = [*other.logprobs, *(other.prompt_logprobs or ())]
        for one, two in zip(records, others, strict=True):
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                assert one.logprob == pytest.approx(two.logprob, abs=tolerance)
                assert one.top_logprobs == pytest.approx(two.top_logprobs, abs=tolerance)
