"""Every kind of block on a card gives the logprobs that a CPU gives; run with `make test-gpu`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.config import DType
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.kernels.attention.plan import Launches
from mainstem.models.block import Gate
from mainstem.runner.cpu_load import load_cpu_runner
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config, deeper
from tests.runner.test_gpu_deterministic import PREEMPTED_TOKENS, check_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# limits of the mean and of the largest error
LIMITS = {DType.FP32: (2e-3, 1e-2), DType.BF16: (0.1, 1.0)}


def logprobs(engine: Engine, counts: Sequence[int] = (3, 6, 21, 40)) -> np.ndarray:
    """Logprobs of every token of prompts that share two pages and have `counts` more tokens,
    computed in chunks."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 96, 33).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    for index, count in enumerate(counts):
        ids = np.array(head + rng.integers(3, 96, count).tolist(), np.int32)
        engine.submit(Request(RequestId(str(index)), ids, sampling))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                places = [each.logprob for each in output.prompt_logprobs if each]
                found.setdefault(output.request_id, places)
    engine.check()
    engine.close()
    return np.concatenate([found[name] for name in sorted(found)])


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", RECIPES)
def test_logprobs_are_those_of_the_cpu(name: str, dtype: DType) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs a card

    origin, config = RecipeOrigin(deeper(RECIPES[name])), a_config(dtype)
    runner, facts = load_gpu_runner(origin, config, torch.device("cuda"))
    found = logprobs(join(runner, facts, config, EventBus()))
    wanted = logprobs_of_cpu(origin, DType.FP32)
    apart = np.abs(found - wanted)
    mean, worst = LIMITS[dtype]
    if dtype is not DType.FP32 and origin.spec.recurrences:
        # a random recurrent layer may read almost nothing from its state, and its norm makes the
        # rounding of that as large as any other output: a CPU is as far off
        rounding = np.abs(logprobs_of_cpu(origin, dtype) - wanted)
        mean, worst = max(mean, 1.5 * rounding.mean()), max(worst, 1.5 * rounding.max())
    assert apart.mean() < mean, apart.mean()
    assert apart.max() < worst, apart.max()


def logprobs_of_cpu(origin: RecipeOrigin, dtype: DType) -> np.ndarray:
    config = a_config(dtype)
    runner, facts = load_cpu_runner(origin, config)
    return logprobs(join(runner, facts, config, EventBus()))


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].recurrences])
def test_deterministic_hybrids_have_the_same_bits_in_any_batch(name: str, dtype: DType) -> None:
    check_bits(name, PREEMPTED_TOKENS, dtype, "cuda")


LARGE = tuple(range(10, 70))  # tokens of each prompt after the shared ones: a step of 2,400 tokens


@pytest.mark.parametrize("name", ["Qwen2MoeForCausalLM", "PhiForCausalLM"])
def test_large_steps_that_run_as_graphs_have_the_logprobs_of_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of more than 1,024 tokens runs as a graph that ends before the last layer."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs a card
    from mainstem.runner.graphs import FEW_TOKENS, StepGraphs  # noqa: PLC0415

    replayed: list[int] = []
    replay = StepGraphs.replay

    def keep(graphs: StepGraphs, size: int, launches: Launches, gate: Gate) -> None:
        replayed.append(size)
        replay(graphs, size, launches, gate)

    monkeypatch.setattr(StepGraphs, "replay", keep)
    origin = RecipeOrigin(deeper(RECIPES[name]))
    config = a_config()
    config = replace(
        config,
        cache=replace(config.cache, kv_tokens=8192),
        sched=replace(config.sched, chunk_tokens=4096),
    )
    runner, facts = load_gpu_runner(origin, config, torch.device("cuda"))
    found = logprobs(join(runner, facts, config, EventBus()), LARGE)
    assert max(replayed) > FEW_TOKENS
    cpu_runner, facts = load_cpu_runner(origin, config)
    wanted = logprobs(join(cpu_runner, facts, config, EventBus()), LARGE)
    apart = np.abs(found - wanted)
    mean, worst = LIMITS[DType.FP32]
    assert apart.mean() < mean, apart.mean()
    assert apart.max() < worst, apart.max()
