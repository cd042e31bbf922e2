"""Every kind of block gives the same tokens on the GPU runner (interpreted) as on a CPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
import torch

from mainstem.core.config import EngineConfig, Quantize, Siblings
from mainstem.core.events import EventBus
from mainstem.core.request import SamplingParams
from mainstem.core.step import Step
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.kernels.attention.plan import Launches
from mainstem.models.block import Gate
from mainstem.models.spec import ModelSpec
from mainstem.runner import states
from mainstem.runner.cpu_load import load_cpu_runner
from tests.builders import a_request, run_all
from tests.models.ranks import Thread, run_ranks
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config, can_split
from tests.runner.recorded_graphs import Recorder
from tests.runner.steps import num_folds, num_with_rows, record_steps
from tests.runner.test_gpu import answers
from tests.runner.window_parts import PartedRunner, anywhere

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
# LayerNorm with parallel blocks; experts and recurrent layers; layers of one part
QUICK = (
    "PhiForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "NemotronHForCausalLM",
)


def prompts() -> list[list[int]]:
    """Two prompts that share a page and are longer than the windows."""
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
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"))
    found = answers(join(runner, facts, config, EventBus()), prompts(), GREEDY)
    cpu_runner, facts = load_cpu_runner(origin, config)
    assert found == answers(join(cpu_runner, facts, config, EventBus()), prompts(), GREEDY)


@interpreted
@pytest.mark.parametrize(
    "name",
    ["Qwen3_5MoeForCausalLM", pytest.param("GraniteMoeHybridForCausalLM", marks=pytest.mark.slow)],
)
def test_siblings_with_rows_have_the_tokens_of_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three folds: it has 16 rows and more tokens after the state."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config, greedy = RecipeOrigin(RECIPES[name]), a_config(), replace(GREEDY, max_tokens=4)
    sched = replace(config.sched, siblings=Siblings.ON)
    config = replace(config, cache=replace(config.cache, states=8), sched=sched)
    given, steps = [*prompts(), [*prompts()[0][:17], 7, *prompts()[1][4:17]]], list[Step]()
    monkeypatch.setattr(states, "MOST_ROWS", 0)
    cpu_runner, facts = load_cpu_runner(origin, config)
    right = answers(join(cpu_runner, facts, config, EventBus()), given, greedy)
    monkeypatch.setattr(states, "MOST_ROWS", 16)
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"))
    record_steps(runner, steps)
    assert answers(join(runner, facts, config, EventBus()), given, greedy) == right
    assert num_with_rows(steps) == 2
    assert num_folds(steps) == 1


@interpreted
def test_graphs_with_rows_give_the_same_tokens_and_write_nothing_when_they_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured again after a sleep, when the slots of the last step are somebody else's."""
    from mainstem.runner import graphs  # noqa: PLC0415
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(RECIPES["GraniteMoeHybridForCausalLM"]), a_config()
    greedy = replace(GREEDY, max_tokens=4)
    sched = replace(config.sched, siblings=Siblings.ON)
    config = replace(config, cache=replace(config.cache, states=8), sched=sched)
    given, steps = [*prompts(), [*prompts()[0][:17], 7, *prompts()[1][4:17]]], list[Step]()
    monkeypatch.setattr(states, "MOST_ROWS", 16)
    cpu_runner, facts = load_cpu_runner(origin, config)
    right = answers(join(cpu_runner, facts, config, EventBus()), given, greedy)
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"))
    assert runner.states is not None
    captured: list[graphs.StepGraphs] = []

    def capture() -> None:
        for has_rows in (False, True):
            recorded = Recorder(monkeypatch).wrap(partial(runner._pieces, has_rows=has_rows))
            kinds, layers = runner._attention.kinds_of_steps[:1], origin.spec.page_layers
            captured.append(graphs.StepGraphs((1, 4), kinds, recorded, layers))
        runner._graphs, runner._row_graphs = captured[-2:]

    with torch.inference_mode():
        capture()
    record_steps(runner, steps)
    assert answers(join(runner, facts, config, EventBus()), given, greedy) == right
    assert num_with_rows(steps) == 2
    assert num_folds(steps) == 1
    used = runner.states.pieces[: -runner.states.pages_per_state]
    before = used.clone()
    with torch.inference_mode():
        capture()
    assert torch.equal(used, before)


@interpreted
@pytest.mark.parametrize("name", ["Qwen3_5MoeForCausalLM", "FalconH1ForCausalLM"])
def test_prompts_of_models_with_recurrent_layers_have_graphs_around_their_recurrences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second model has layers with attention and a recurrence side by side."""
    from mainstem.runner import graphs  # noqa: PLC0415
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    cpu_runner, facts = load_cpu_runner(origin, config)
    right = answers(join(cpu_runner, facts, config, EventBus()), prompts(), GREEDY)
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"))
    steps = list[Step]()
    record_steps(runner, steps)
    kinds, layers = runner._attention.kinds_of_steps[:1], origin.spec.page_layers
    recorder, replayed = Recorder(monkeypatch), list[int]()
    with torch.inference_mode():
        made = graphs.StepGraphs((16, 24), kinds, recorder.wrap(runner._prompt_pieces), layers)
    num_recurrent = sum(state is not None for state in origin.spec.state_layers[:-1])
    assert recorder.num_captured == 2 * (num_recurrent + 1)
    runner._prompt_graphs, replay = made, made.replay

    def note(size: int, launches: Launches, gate: Gate) -> None:
        replayed.append(size)
        replay(size, launches, gate)

    monkeypatch.setattr(made, "replay", note)
    assert answers(join(runner, facts, config, EventBus()), prompts(), GREEDY) == right
    with_prompts = [step for step in steps if step.num_decodes < step.num_tokens]
    assert len(replayed) == len(with_prompts) > 0


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma 4 with inputs of layers"])
def test_windowed_parts_may_be_anywhere(name: str) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = RecipeOrigin(RECIPES[name]), a_config()
    cpu_runner, facts = load_cpu_runner(origin, config)
    right = answers(join(cpu_runner, facts, config, EventBus()), prompts(), GREEDY)
    num_parts = facts.num_pages + 70
    runner, facts = load_gpu_runner(origin, config, torch.device("cpu"), num_parts=num_parts)
    assert facts.num_parts == num_parts
    parted = PartedRunner(runner, anywhere(facts.num_pages, num_parts))
    engine = join(runner, replace(facts, num_parts=0), config, EventBus(), lambda _: parted)
    assert answers(engine, prompts(), GREEDY) == right


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if can_split(RECIPES[name], 2)])
def test_two_ranks_have_the_tokens_of_one_cpu(name: str) -> None:
    check_two_ranks(RECIPES[name], prompts())


@interpreted
def test_two_ranks_normalize_over_the_heads_of_both() -> None:
    """OLMo 2 does this. One layer, with the norm after attention."""
    spec = RECIPES["Olmo2ForCausalLM"]
    check_two_ranks(replace(spec, layers=spec.layers[:1]), [prompts()[0][:5]])


def check_two_ranks(spec: ModelSpec, given: list[list[int]]) -> None:
    found = on_ranks(a_config(), spec, lambda engine: answers(engine, given, GREEDY))
    cpu_runner, facts = load_cpu_runner(RecipeOrigin(spec), a_config())
    assert found == answers(join(cpu_runner, facts, a_config(), EventBus()), given, GREEDY)


def on_ranks(config: EngineConfig, spec: ModelSpec, ask: Callable[[Engine], T]) -> T:
    """The answers of two ranks, which must be equal."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    def run(ranks: Thread) -> T:
        runner, facts = load_gpu_runner(RecipeOrigin(spec), config, torch.device("cpu"), ranks)
        return ask(join(runner, facts, config, EventBus()))

    first, second = run_ranks(2, run)
    assert first == second
    return first


def prompt_logprobs(engine: Engine) -> list[float]:
    sampling = replace(GREEDY, max_tokens=1, prompt_logprobs=1)
    (output,) = run_all(engine, [a_request(prompts()[0], sampling=sampling)]).outputs
    return [record.logprob for record in output.prompt_logprobs or () if record is not None]


@interpreted
@pytest.mark.slow
def test_ranks_quantize_their_parts_to_fp8() -> None:
    """The difference to fp32 is less than twice that of fp8 on one device."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    spec, exact = RECIPES["GraniteForCausalLM"], a_config()
    config = replace(exact, model=replace(exact.model, quantize=Quantize.FP8))
    cpu_runner, facts = load_cpu_runner(RecipeOrigin(spec), exact)
    right = prompt_logprobs(join(cpu_runner, facts, exact, EventBus()))
    runner, facts = load_gpu_runner(RecipeOrigin(spec), config, torch.device("cpu"))
    whole = prompt_logprobs(join(runner, facts, config, EventBus()))
    found = on_ranks(config, spec, prompt_logprobs)
    off, usual = (float(np.abs(np.subtract(x, right)).mean()) for x in (found, whole))
    assert 0 < off < 2 * usual


@interpreted
@pytest.mark.slow
def test_deterministic_ranks_answer_the_same_alone_and_in_a_batch() -> None:
    spec, config = RECIPES["Olmo2ForCausalLM"], a_config()
    config = replace(config, model=replace(config.model, deterministic=True))
    sampling = replace(GREEDY, logprobs=1)

    def logprobs(given: list[list[int]]) -> list[float]:
        """Logprobs of the sampled tokens, not rounded."""

        def ask(engine: Engine) -> list[float]:
            requests = [
                a_request(ids, name=str(n), sampling=sampling) for n, ids in enumerate(given)
            ]
            outputs = sorted(run_all(engine, requests).outputs, key=lambda each: each.request_id)
            return [record.logprob for each in outputs for record in each.logprobs]

        return on_ranks(config, spec, ask)

    assert logprobs(prompts()) == [each for ids in prompts() for each in logprobs([ids])]
