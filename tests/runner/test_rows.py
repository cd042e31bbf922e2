"""Siblings that read one state answer as if each had a state of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    SchedConfig,
    Share,
    Siblings,
)
from mainstem.core.request import SamplingParams
from mainstem.core.step import Runner, StateUse, Step
from mainstem.engine.build import build_engine, load_folder
from mainstem.engine.engine import Engine
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.recurrence import DecodeStates
from mainstem.runner.states import rows_for, rows_that_fit
from mainstem_bench.shapes import SHAPES
from tests.builders import Collector, a_request, run_all
from tests.families.test_mamba import GRANITE, MAMBA
from tests.families.test_qwen_hybrid import HYBRID
from tests.models.checkpoints import SMALL, write_checkpoint
from tests.runner.steps import num_with_rows, record_steps

PAGE = 4
STEM = 5 * PAGE + 1  # prompts part in the middle of a page
OWN_TOKENS = (3, 9, 1, 6, 12, 3)
ANSWER = 14  # some sequences fold, others do not
TOLERANCE = 1e-3  # as in tests/families/equality.py: these models amplify rounding
CONFIGS: dict[str, PreTrainedConfig] = {
    "delta rule": Qwen3_5TextConfig(
        **HYBRID | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    ),
    "mamba 2": GraniteMoeHybridConfig(**GRANITE | {"mamba_d_state": 64}, num_local_experts=0),
    "beside attention": FalconH1Config(**SMALL, **MAMBA | {"mamba_d_state": 64}, mamba_d_ssm=96),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_checkpoint(CONFIGS[request.param], folder, std=0.2)
    return folder


@contextmanager
def an_engine(
    folder: Path,
    steps: list[Step],
    *,
    kv_tokens: int = 2000,
    chunk_tokens: int = 512,
    num_states: int = 30,
    share: Share = Share.READS,
) -> Iterator[Engine]:
    """Appends the steps that run. States and rows begin as NaN."""

    def watch(runner: Runner) -> Runner:
        assert isinstance(runner, CpuRunner)
        assert runner.states is not None
        runner.states.pieces.fill_(0xFF)
        record_steps(runner, steps)
        return runner

    config = EngineConfig(
        model=ModelConfig(dtype=DType.FP32),
        cache=CacheConfig(page_size=PAGE, kv_tokens=kv_tokens, states=num_states),
        sched=SchedConfig(chunk_tokens=chunk_tokens, share=share),
    )
    engine = build_engine(folder, config, around=watch)
    try:
        yield engine
    finally:
        engine.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 199, STEM).tolist()
    return [stem + rng.integers(3, 199, count).tolist() for count in OWN_TOKENS]


def answers(engine: Engine, asked: list[list[int]], first: int = 0) -> Collector:
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=1)
    requests = [
        a_request(prompt, name=str(number), sampling=sampling, expected_tokens=1)
        for number, prompt in enumerate(asked, first)
    ]
    return run_all(engine, requests)


def logprobs_of(found: Collector, number: int) -> list[float]:
    own = [output for output in found.outputs if output.request_id == str(number)]
    return [record.logprob for output in own for record in output.logprobs]


def test_siblings_answer_as_alone_without_rows(folder: Path) -> None:
    """All at once, with prompts in chunks, with pages for one sequence, with few states, and
    without rows."""
    alone = list[Collector]()
    for number, prompt in enumerate(prompts()):
        steps = list[Step]()
        with an_engine(folder, steps, share=Share.STORAGE) as engine:
            alone.append(answers(engine, [prompt], number))
    ways: list[tuple[dict[str, Any], int]] = [
        ({}, 5),
        ({"chunk_tokens": 7}, 1),
        ({"kv_tokens": STEM + max(OWN_TOKENS) + ANSWER + PAGE}, 0),
        ({"num_states": 3}, 0),
        ({"num_states": 6}, 1),
        ({"share": Share.STORAGE}, 0),
    ]
    for settings, least in ways:
        steps = []
        with an_engine(folder, steps, **settings) as engine:
            for _again in range(2):  # the second time from what the first has kept
                found = answers(engine, prompts())
                for number, expected in enumerate(alone):
                    key = str(number), 0
                    assert found.tokens[key] == expected.tokens[key], (settings, number)
                    far = np.subtract(logprobs_of(found, number), logprobs_of(expected, number))
                    assert np.abs(far).max() < TOLERANCE, (settings, number)
        assert num_with_rows(steps) >= least, settings
    assert num_with_rows(steps) == 0, "states are read together, and must not be"


def test_answers_to_one_prompt_are_alike(folder: Path) -> None:
    steps = list[Step]()
    sampling = SamplingParams(n=4, temperature=0.0, max_tokens=ANSWER)
    with an_engine(folder, steps) as engine:
        found = run_all(engine, [a_request(prompts()[1], name="r", sampling=sampling)])
    assert len({tuple(tokens) for tokens in found.tokens.values()}) == 1
    assert num_with_rows(steps) == 3


def test_a_state_has_room_for_the_rows_of_a_sequence() -> None:
    """Qwen3.6-27B: a row has the keys of 16 heads and the values of 48, in 16 bits or in 32."""
    spec = SHAPES["qwen36-27b"]
    page_bytes = 16 * spec.kv_elements_per_token * 2
    found = rows_that_fit(spec, torch.bfloat16, torch.bfloat16, page_bytes)
    assert (found.per_state, found.num_rows) == (1, 128)
    in_fp32 = rows_that_fit(spec, torch.bfloat16, torch.float32, page_bytes)
    assert (in_fp32.per_state, in_fp32.num_rows) == (2, 32)


def test_convolutions_without_a_matrix_have_no_rows(tmp_path: Path) -> None:
    write_checkpoint(Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]), tmp_path)
    cache = CacheConfig(page_size=PAGE, kv_tokens=200)
    runner, facts, _ = load_folder(
        tmp_path, EngineConfig(model=ModelConfig(dtype=DType.FP32), cache=cache)
    )
    runner.close()
    assert facts.num_states > 0
    assert facts.row_slots_per_state == 0


def test_deterministic_models_have_no_rows() -> None:
    """Rows round otherwise than states, so bits would depend on other sequences."""
    spec = SHAPES["qwen36-27b"]
    page_bytes = 16 * spec.kv_elements_per_token * 2
    cases = [
        (Siblings.AUTO, True, False, 128), (Siblings.AUTO, True, True, 0),
        (Siblings.AUTO, False, False, 0), (Siblings.ON, False, False, 128),
        (Siblings.ON, False, True, 0), (Siblings.OFF, True, False, 0),
    ]  # fmt: skip
    for siblings, by_default, is_deterministic, num_rows in cases:
        config = EngineConfig(
            ModelConfig(deterministic=is_deterministic), sched=SchedConfig(siblings=siblings)
        )
        dtype = torch.bfloat16
        found = rows_for(config, spec, dtype, dtype, page_bytes, by_default=by_default)
        assert found.num_rows == num_rows


@pytest.mark.parametrize("size", [1, 4, 8])
def test_graphs_are_captured_over_padding_of_their_size(size: int) -> None:
    """Also after steps: nothing of them is left, and no sequence is named after the last one."""
    slots, numbers = DecodeStates(8, 24, torch.device("cpu")), np.arange(8, dtype=np.int32)
    minus = np.full(8, -1, np.int32)
    use = StateUse(numbers, numbers, minus, numbers, numbers, numbers)
    slots.send(type("OnlyStates", (), {"states": use})(), 8)
    slots.clear(size)
    found = slots.segments(size, has_rows=True)
    assert found.reads.tolist() == found.writes.tolist() == [24] * size
    assert found.rows is not None
    assert found.rows.slots[:size].tolist() == [-1] * size
    assert found.rows.counts[:size].tolist() == [0] * size
    assert found.rows.sizes[:2].tolist() == [0, size]
    assert found.rows.writers[:size].tolist() == list(range(size))
    assert int(found.rows.group_starts[0]) == 0


def test_graphs_have_the_rows_of_their_step() -> None:
    """Padding has none, and those of the step before are gone."""
    slots, numbers = DecodeStates(8, 24, torch.device("cpu")), np.arange(4, dtype=np.int32)
    parts = np.array(
        [
            [(6, 4, 2), (1, 0, 3), (-1, -1, -1), (3, 5, 3)],
            [(2, -1, 9), (4, 0, 15), (-1, 5, 7), (3, 5, 3)],  # one row, one fold
        ],
        np.int32,
    )
    for (rows, counts, writes, reads), num_members, num_groups in zip(
        parts, (3, 1), (2, 1), strict=True
    ):
        use = StateUse(reads, numbers, writes, numbers, rows, counts)
        step = type("OnlyStates", (), {"states": use})()
        slots.send(step, 4)
        found = slots.segments(4, has_rows=True).rows
        assert found is not None
        assert found.slots[:4].tolist() == [*rows, -1]
        assert found.counts[:4].tolist() == [*counts, 0]
        assert found.sizes[:2].tolist() == [num_groups, 4 - num_members]
        of_members = reads[found.members[:num_members].numpy()].tolist()
        assert of_members == sorted(of_members)
        assert int(found.group_starts[num_groups]) == num_members
    assert slots.segments(4).rows is None
