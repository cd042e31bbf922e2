"""With few windowed parts, preemption and tiers, models with windows answer as with all pages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import EngineConfig, Fetch, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.core.step import Runner
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.origin import Origin
from tests.builders import a_request, run_all
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config

MODELS = ("Gemma3ForCausalLM", "GptOssForCausalLM")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


LoadRunner = Callable[[Origin, EngineConfig, int], tuple[Runner, RunnerFacts]]


def on_a_cpu(origin: Origin, config: EngineConfig, num_parts: int) -> tuple[Runner, RunnerFacts]:
    return load_cpu_runner(origin, config, num_parts=num_parts)


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [a_request(ids, name=str(i), sampling=GREEDY) for i, ids in enumerate(prompts)]
    found = run_all(engine, requests)
    return [found.tokens[str(i), 0] for i in range(len(prompts))]


@pytest.mark.parametrize("name", MODELS)
def test_conversations_with_few_parts_and_tiers(name: str, tmp_path: Path) -> None:
    check_conversations(name, tmp_path, on_a_cpu)


def check_conversations(name: str, folder: Path, load: LoadRunner) -> None:
    """Four conversations at once over 9 windowed parts; between turns, the device forgets all."""
    rng = np.random.default_rng(3)
    head = rng.integers(3, 96, 21).tolist()
    said = [head + rng.integers(3, 96, count).tolist() for count in (3, 40, 60, 30)]
    bus = EventBus()
    counters = Counters().attach(bus)

    def an_engine(config: EngineConfig, num_parts: int, bus: EventBus) -> Engine:
        runner, facts = load(RecipeOrigin(RECIPES[name]), config, num_parts)
        assert facts.num_parts == num_parts
        return join(runner, facts, config, bus)

    whole = an_engine(a_config(), 0, EventBus())
    store = StoreConfig(host_gb=0.01, disk_dir=str(folder), fetch=Fetch.ALWAYS)
    few = an_engine(replace(a_config(), store=store), 9, bus)
    for _turn in range(3):
        right = answers(whole, said)
        assert answers(few, said) == right
        said = [
            [*a, *b, *rng.integers(3, 96, 5).tolist()] for a, b in zip(said, right, strict=True)
        ]
        few._store.flush()
        few._store.clear_device()
    assert sum(counters.loaded_pages.values()) > 0
    assert few._store.parts is not None
    assert few._store.parts.num_evicted > 0
    few.close()
    whole.close()
