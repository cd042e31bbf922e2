"""With `deterministic`, models with recurrent layers answer with the same bits alone, from kept
states, in a batch, with prompts cut otherwise, and after preemption (interpreted)."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedConfig
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.request import Delivery, SamplingParams
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from tests.builders import a_request, run_all
from tests.runner.recipes import RECIPES, RecipeOrigin

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; see test_interpreter.py",
)
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1)
PREEMPTED_TOKENS = 20  # two answers of this length do not fit into the narrow engine
Bits = list[tuple[int, float]]  # tokens and their logprobs, not rounded


def a_config(dtype: DType, chunk_tokens: int, kv_tokens: int) -> EngineConfig:
    return EngineConfig(
        ModelConfig(dtype=dtype, deterministic=True),
        CacheConfig(page_size=16, kv_tokens=kv_tokens, states=9),
        SchedConfig(chunk_tokens=chunk_tokens),
    )


def an_engine(name: str, config: EngineConfig, device: str, bus: EventBus) -> Engine:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    runner, facts = load_gpu_runner(RecipeOrigin(RECIPES[name]), config, torch.device(device))
    return join(runner, facts, config, bus)


def ask(
    engine: Engine, prompts: dict[str, list[int]], salt: bytes, num_tokens: int
) -> tuple[dict[str, Bits], int]:
    """The answers, and how many tokens of prompts were not computed."""
    sampling = replace(SAMPLING, max_tokens=num_tokens)
    requests = [
        a_request(
            ids,
            name=name,
            sampling=sampling,
            delivery=Delivery.AT_END,
            salt=salt,
            expected_tokens=1,
        )
        for name, ids in prompts.items()
    ]
    outputs = run_all(engine, requests).outputs
    bits = {
        str(each.request_id): [
            (token, record.logprob)
            for token, record in zip(each.token_ids, each.logprobs, strict=True)
        ]
        for each in outputs
    }
    assert {len(found) for found in bits.values()} == {num_tokens}
    return bits, sum(each.num_cached_tokens for each in outputs)


def check_bits(
    name: str, num_tokens: int, dtype: DType = DType.FP32, device: str = "cpu"
) -> list[SequencePreempted]:
    """Compare answers of `num_tokens`; returns the preemptions of the narrow engine."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 96, 26).tolist()
    prompts = {str(n): head + rng.integers(3, 96, n).tolist() for n in (5, 6)}
    wide = an_engine(name, a_config(dtype, 64, 512), device, EventBus())
    alone: dict[str, Bits] = {}
    for number, ids in prompts.items():
        found, num_cached = ask(wide, {number: ids}, number.encode(), num_tokens)
        assert num_cached == 0
        alone |= found
    again, num_cached = ask(wide, prompts, b"5", 2)
    assert num_cached > len(head)
    assert again == {number: bits[:2] for number, bits in alone.items()}, "from kept states"
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    narrow = an_engine(name, a_config(dtype, 7, 80), device, bus)
    found, num_cached = ask(narrow, prompts, b"", num_tokens)
    assert found == alone, "in a batch"
    assert num_cached > 0
    return preempted


@interpreted
def test_a_convolution_answers_with_the_same_bits_in_any_batch() -> None:
    check_bits("Lfm2MoeForCausalLM", 3)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Lfm2MoeForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM"]
)
def test_recurrent_layers_answer_with_the_same_bits_in_any_batch(name: str) -> None:
    assert check_bits(name, PREEMPTED_TOKENS), "the pool should have been too small"
