"""Windowed parts of pages may be anywhere, and pages out of the window need none. (The engine
gives no windowed parts here, so that the tests may.)"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import Fetch, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.engine.build import join
from mainstem.models.spec import KvShape
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.page_parts import in_windowed_parts, layout_of, page_parts
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config
from tests.runner.steps import Seq, Work, a_step
from tests.runner.test_gpu import answers
from tests.runner.window_parts import LastWindow, PartedRunner, anywhere, one_by_one

MODELS = ("Gemma3ForCausalLM", "GptOssForCausalLM", "Gemma 4 with inputs of layers")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    head = rng.integers(3, 96, 21).tolist()
    return [head + rng.integers(3, 96, count).tolist() for count in (3, 60, 30)]


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_where_windowed_parts_are(name: str) -> None:
    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    runner, facts = load_cpu_runner(origin, config)
    right = answers(join(runner, facts, config, EventBus()), prompts(), GREEDY)
    num_parts = facts.num_pages + 70
    runner, facts = load_cpu_runner(origin, config, num_parts=num_parts)
    assert (facts.num_parts, facts.window) == (num_parts, 14)
    parted = PartedRunner(runner, anywhere(facts.num_pages, num_parts))
    engine = join(runner, replace(facts, num_parts=0), config, EventBus(), lambda _: parted)
    assert answers(engine, prompts(), GREEDY) == right


@pytest.mark.parametrize("name", MODELS)
def test_pages_out_of_the_window_need_no_windowed_part(name: str) -> None:
    """Chunks of 24 tokens and a window of 14 need 4 parts, whatever the length."""
    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    runner, facts = load_cpu_runner(origin, config)
    right = one_by_one(join(runner, facts, config, EventBus()), prompts(), 20)
    runner, facts = load_cpu_runner(origin, config, num_parts=4)
    last = LastWindow(facts.num_pages, 4, 14)
    parted = PartedRunner(runner, last)
    engine = join(runner, replace(facts, num_parts=0), config, EventBus(), lambda _: parted)
    assert one_by_one(engine, prompts(), 20) == right
    assert last.num_given_back > 8


def test_slots_and_pages_are_translated() -> None:
    works = [Work(Seq(0, [5, 6, 7], [2]), 3)]
    step = replace(
        a_step(works, 4, 96),
        copy_from=np.array([5, 6]),
        copy_to=np.array([8, 13]),
        move_from=np.array([1, 2], np.int32),
        move_to=np.array([3, 0], np.int32),
        move_by=np.array([-4, -4], np.int32),
        window_parts=np.array([4, 0, 3, 4], np.int32),
    )
    found = in_windowed_parts(step, 4)
    assert found.write_slots.tolist() == [12, 13, 14]
    assert (found.copy_from.tolist(), found.copy_to.tolist()) == ([1, 2], [12, 17])
    assert (found.move_from.tolist(), found.move_to.tolist()) == ([0, 3], [4, 4])
    same = replace(step, window_parts=None)
    assert in_windowed_parts(same, 4) is same


def test_layers_of_one_kind_are_in_one_part() -> None:
    spec = RECIPES["Gemma 4 with inputs of layers"]
    small, large = KvShape(1, 64), KvShape(1, 128)
    found = [(part.shape, part.is_windowed, part.layers) for part in page_parts(spec)]
    assert found == [(large, False, (1,)), (small, True, (0,))]
    assert (spec.num_full_layers, len(spec.windowed)) == (1, 1)
    assert (spec.kv_elements_per_token, spec.windowed_kv_elements) == (384, 128)
    never_exceeded = [(part.shape, part.is_windowed) for part in page_parts(spec.at_context(14))]
    assert never_exceeded == [(small, False), (large, False)]
    assert layout_of(RECIPES["GraniteForCausalLM"]) == b""
    assert layout_of(spec) == b":parts (1,);(0,)"


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma 4 with inputs of layers"])
def test_pages_of_two_parts_are_the_same_after_a_restart(name: str, tmp_path: Path) -> None:
    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    runner, facts = load_cpu_runner(origin, config)
    right = answers(join(runner, facts, config, EventBus()), prompts(), GREEDY)
    store = StoreConfig(host_gb=0.01, disk_dir=str(tmp_path), disk_gb=0.1, fetch=Fetch.ALWAYS)
    config, counters = replace(config, store=store), []
    for _ in range(2):
        bus = EventBus()
        counters.append(Counters().attach(bus))
        runner, facts = load_cpu_runner(origin, config)
        engine = join(runner, facts, config, bus)
        assert answers(engine, prompts(), GREEDY) == right
        engine.close()
    assert counters[1].loaded_pages["disk"] + counters[1].prefetched_pages > 3
