"""On a card, siblings that read one state together answer as a CPU does with a state for each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import (  # noqa: E402
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    SchedConfig,
    Siblings,
)
from mainstem.core.request import SamplingParams  # noqa: E402
from mainstem.core.step import Runner, Step  # noqa: E402
from mainstem.engine.build import build_engine  # noqa: E402
from mainstem.engine.engine import Engine  # noqa: E402
from tests.builders import Collector, a_request, run_all  # noqa: E402
from tests.gpu.test_stored_states_gpu import CONFIGS, PAGE  # noqa: E402
from tests.models.checkpoints import write_checkpoint  # noqa: E402
from tests.runner.steps import num_with_rows, record_steps  # noqa: E402

GROUPS, SIBLINGS, ALONE = 3, 7, 3
STEM = 3 * PAGE + 5
ANSWER = 70  # sequences fold, at different steps
# limits of the mean and of the largest error of a logprob
LIMITS = {DType.FP32: (2e-3, 5e-2), DType.BF16: (0.1, 1.0)}


@contextmanager
def an_engine(
    folder: Path, device: Device, dtype: DType, siblings: Siblings, steps: list[Step]
) -> Iterator[Engine]:
    def watch(runner: Runner) -> Runner:
        record_steps(runner, steps)
        return runner

    config = EngineConfig(
        ModelConfig(device=device, dtype=dtype),
        CacheConfig(page_size=PAGE, kv_tokens=8192, states=60),
        SchedConfig(chunk_tokens=256, siblings=siblings),
    )
    engine = build_engine(folder, config, around=watch)
    try:
        yield engine
    finally:
        engine.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return [int(each) for each in rng.integers(3, 500, count)]

    groups = [some(STEM) for _ in range(GROUPS)]
    counts = [int(rng.integers(1, 40)) for _ in range(SIBLINGS)]
    together = [stem + some(count) for stem in groups for count in counts]
    return together + [some(STEM) for _ in range(ALONE)]


def ask(engine: Engine, asked: list[list[int]], sampling: SamplingParams) -> Collector:
    requests = [
        a_request(prompt, name=str(number), sampling=sampling, expected_tokens=1)
        for number, prompt in enumerate(asked)
    ]
    return run_all(engine, requests)


def answer_logprobs(found: Collector, number: int) -> list[float]:
    own = [output for output in found.outputs if output.request_id == str(number)]
    return [record.logprob for output in own for record in output.logprobs]


def wanted_logprobs(folder: Path, dtype: DType, asked: list[list[int]]) -> list[list[float]]:
    """Of the last `ANSWER` tokens of each prompt, one prompt after another on a CPU."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with an_engine(folder, Device.CPU, dtype, Siblings.OFF, []) as engine:
        found = [ask(engine, [prompt], scored).outputs for prompt in asked]
    every = [
        [each.prompt_logprobs for each in outputs if each.prompt_logprobs] for outputs in found
    ]
    return [[place.logprob for place in places[-ANSWER:] if place] for (places,) in every]


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", ["delta rule", "mamba 2"])
def test_siblings_answer_as_alone_on_a_cpu(name: str, dtype: DType, tmp_path: Path) -> None:
    write_checkpoint(CONFIGS[name], tmp_path, std=0.1)
    steps = list[Step]()
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
    asked = prompts()
    with an_engine(tmp_path, Device.CUDA, dtype, Siblings.ON, steps) as engine:
        first, second = (
            ask(engine, asked, greedy) for _ in range(2)
        )  # the second time from memory
    assert num_with_rows(steps) >= GROUPS * SIBLINGS // 2
    for found in first, second:
        both = [prompt + found.tokens[str(i), 0] for i, prompt in enumerate(asked)]
        wanted = np.array(wanted_logprobs(tmp_path, DType.FP32, both))
        apart = np.abs([answer_logprobs(found, i) for i in range(len(asked))] - wanted)
        mean, worst = LIMITS[dtype]
        if dtype is not DType.FP32:  # random recurrent layers amplify rounding, on a CPU too
            rounded = np.abs(np.array(wanted_logprobs(tmp_path, dtype, both)) - wanted)
            mean, worst = max(mean, 1.5 * rounded.mean()), max(worst, 1.5 * rounded.max())
        print(f"{name}, {dtype.value}: mean {apart.mean():.2g}, largest {apart.max():.2g}")
        assert apart.mean() < mean
        assert apart.max() < worst
