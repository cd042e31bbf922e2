"""Every kind of block gives the GPU runner, under Triton's interpreter, the CPU's tokens."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.events import EventBus
from mainstem.core.request import SamplingParams
from mainstem.engine.build import join
from mainstem.models.spec import ModelSpec
from mainstem.runner.cpu_load import load_cpu_runner
from tests.models.ranks import Thread, run_ranks
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config
from tests.runner.test_gpu import answers

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
QUICK = ("PhiForCausalLM", "Qwen2MoeForCausalLM")  # LayerNorm, parallel; experts


def prompts() -> list[list[int]]:
    """Two that share a page, longer than the windows."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 96, 17).tolist()
    return [head + rng.integers(3, 96, count).tolist() for count in (3, 6)]


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; see test_interpreter.py",
)


@interpreted
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_same_tokens_as_on_the_cpu(name: str) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"))
    found = answers(join(runner, facts, config, EventBus()), prompts(), GREEDY)
    cpu_runner, facts = load_cpu_runner(origin, config)
    assert found == answers(join(cpu_runner, facts, config, EventBus()), prompts(), GREEDY)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_have_the_tokens_of_one_cpu(name: str) -> None:
    check_two_ranks(RECIPES[name], prompts())


@interpreted
def test_two_ranks_norm_over_the_heads_of_both() -> None:
    """What OLMo 2 does, and the norm behind attention, in one layer."""
    spec = RECIPES["Olmo2ForCausalLM"]
    check_two_ranks(replace(spec, layers=spec.layers[:1]), [prompts()[0][:5]])


def check_two_ranks(spec: ModelSpec, given: list[list[int]]) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(spec), a_config()

    def run(ranks: Thread) -> list[list[int]]:
        runner, facts = load_gpu_runner(origin, config, torch.device("cpu"), ranks)
        return answers(join(runner, facts, config, EventBus()), given, GREEDY)

    first, second = run_ranks(2, run)
    assert first == second
    cpu_runner, facts = load_cpu_runner(origin, config)
    assert first == answers(join(cpu_runner, facts, config, EventBus()), given, GREEDY)
