"""Models with sliding windows in the whole engine: greedy tokens equal transformers', alone, in
a batch, over shared prefixes, in chunks and after preemption. Four prompts are longer than the
window, and one grows beyond it.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mainstem.core.config import CacheConfig, EngineConfig, SchedConfig, Share
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from tests.builders import a_request, run_all
from tests.models.checkpoints import VOCAB, make_checkpoint
from tests.runner.steps import spoil_pages

NEW_TOKENS = 20
MODELS = ("mistral window", "qwen2, some windows")  # windows in every layer, and in some
Made = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(request.param, folder)


def prompts() -> list[list[int]]:
    """Four share 41 tokens, two of them 20 more; one is shorter than the window."""
    rng = np.random.default_rng(2)

    def some(count: int) -> list[int]:
        return [int(token) for token in rng.integers(3, VOCAB, count)]

    head, stem = some(41), some(20)
    return [
        head + some(3), head + some(37), head + stem + some(1), head + stem + some(26), some(9),
    ]  # fmt: skip


def an_engine(
    folder: Path, cache: CacheConfig, sched: SchedConfig, bus: EventBus | None = None
) -> Engine:
    config = EngineConfig(cache=cache, sched=sched)
    runner, facts = load_cpu_runner(folder_origin(folder), config)
    spoil_pages(runner)
    return join(runner, facts, config, bus or EventBus())


def answers(engine: Engine, of: list[list[int]]) -> list[list[int]]:
    """Answers to prompts that are submitted together."""
    requests = [
        a_request(ids, NEW_TOKENS, name=str(i), expected_tokens=1) for i, ids in enumerate(of)
    ]
    found = run_all(engine, requests)
    return [found.tokens[str(i), 0] for i in range(len(of))]


@pytest.fixture(scope="module")
def expected(made: Made) -> list[list[int]]:
    """Greedy answers of transformers, without a cache."""
    _, model = made
    found = []
    for prompt in prompts():
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize(
    ("cache", "sched"),
    [
        (CacheConfig(page_size=8, kv_tokens=1024), SchedConfig()),
        (CacheConfig(page_size=8, kv_tokens=1024), SchedConfig(share=Share.NONE)),
        (CacheConfig(page_size=16, kv_tokens=1024), SchedConfig(chunk_tokens=11)),
    ],
    ids=["batched and shared", "batched", "in chunks"],
)
def test_answers_are_those_of_transformers(
    made: Made, expected: list[list[int]], cache: CacheConfig, sched: SchedConfig
) -> None:
    assert answers(an_engine(made[0], cache, sched), prompts()) == expected


def test_prompts_that_run_alone_get_the_same_answers(made: Made, expected: list[list[int]]) -> None:
    engine = an_engine(made[0], CacheConfig(page_size=16, kv_tokens=512), SchedConfig())
    assert [answers(engine, [prompt])[0] for prompt in prompts()] == expected


def test_preempted_sequences_give_the_same_answers(made: Made, expected: list[list[int]]) -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    engine = an_engine(made[0], CacheConfig(page_size=8, kv_tokens=240), SchedConfig(), bus)
    assert answers(engine, prompts()) == expected
    assert preempted, "the pool should have been too small"
