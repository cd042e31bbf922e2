"""A seed gives the same answer alone, in a batch and after preemption.

Logits are rounded differently in each case. A tiny model is too exact to show the effect, so its
logits get errors of up to ERROR, as large as those of a large model in fp32. A draw changes with a
probability of at most 2 ERROR, on average ERROR / 3. So in 6 % of all choices of seeds one of the
1,920 draws compared here changes; with these seeds none does. Draws by inverting the distribution
change more than five times as often.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.core.step import Step
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.runner.sampler import Sampler
from mainstem_bench.shapes import SHAPES
from tests.builders import a_request

pytestmark = pytest.mark.torch

NEW_TOKENS = 24
ERROR = 1e-4
SHAPE = replace(SHAPES["tiny"], vocab_size=20_000)
PROMPTS = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (16, 40)).tolist()
KINDS = (
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=200, temperature=0.8),
    SamplingParams(min_p=0.01),
)
SAMPLING = [
    replace(KINDS[index % len(KINDS)], seed=index, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(len(PROMPTS))
]


@pytest.fixture(autouse=True, scope="module")
def rounding() -> Iterator[None]:
    exact, generator = Sampler.sample, torch.Generator().manual_seed(0)

    def sample(self: Sampler, logits: torch.Tensor, step: Step) -> torch.Tensor:
        errors = torch.rand(logits.shape, generator=generator)
        return exact(self, logits + (2 * errors - 1) * ERROR, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", sample)
        yield


def an_engine(
    kv_tokens: int = 4000, chunk_tokens: int = 512, bus: EventBus | None = None
) -> Engine:
    config = EngineConfig(
        model=ModelConfig(dtype=DType.FP32),
        cache=CacheConfig(kv_tokens=kv_tokens, page_size=4),
        sched=SchedConfig(chunk_tokens=chunk_tokens),
    )
    return build_random_engine(SHAPE, config, bus)


def answers(engine: Engine, indices: list[int]) -> list[list[int]]:
    """Answers to these prompts, submitted together. The expected length is too low, so more
    sequences start than fit."""
    for index in indices:
        request = a_request(
            PROMPTS[index], name=str(index), sampling=SAMPLING[index], expected_tokens=1
        )
        engine.submit(request)
    found: dict[int, list[int]] = {index: [] for index in indices}
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    engine.check()
    return list(found.values())


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    engine = an_engine()
    found = [answers(engine, [index])[0] for index in range(len(PROMPTS))]
    engine.close()
    assert all(len(answer) == NEW_TOKENS for answer in found)
    return found


@pytest.mark.parametrize("chunk_tokens", [512, 16])
def test_a_seed_gives_the_same_answer_in_a_batch(chunk_tokens: int, alone: list[list[int]]) -> None:
    engine = an_engine(chunk_tokens=chunk_tokens)
    everyone = list(range(len(PROMPTS)))
    assert answers(engine, everyone) == alone
    assert answers(engine, everyone[::-1]) == alone[::-1]
    engine.close()


def test_a_seed_gives_the_same_answer_after_preemption(alone: list[list[int]]) -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(kv_tokens=400, bus=bus)
    assert answers(engine, list(range(len(PROMPTS)))) == alone
    assert counters.preemptions > 0, "memory should have been too small"
    engine.close()
