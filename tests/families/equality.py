"""One check for every family: a tiny random model answers as transformers does.

Greedy tokens and their logprobs are compared, in fp32 on the CPU. Requests run alone, batched, over
a shared prefix, with prompts in chunks, and preempted. Norms' gains and biases are random, too.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedConfig
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.request import Output, Request, SamplingParams, TokenLogprobs
from mainstem.core.step import Runner
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.runner.cpu import CpuRunner
from tests.builders import a_request, run_all
from tests.models.checkpoints import STD, write_checkpoint
from tests.runner.steps import spoil_pages

# Sums of fp32 in another order may differ by up to 1e-4 in most of these models (that is how far
# transformers' fp32 is from its fp64 at most). Gelu and its approximation differ by more.
LEAST_TOLERANCE = 3e-4
# Recurrent layers of random models amplify rounding. Then the tolerance is what rounding does to
# transformers' own answer (`_rounding`), twice: once for its rounding, once for ours.
MOST_TOLERANCE = 2e-3  # a model that needs more proves nothing
ROUNDINGS = 4
PAGE = 4
PREFIX_TOKENS = 5 * PAGE + 1  # all prompts begin with them
OWN_TOKENS = (3, 24, 9, 0)
ANSWER_TOKENS = 12
CONTEXT = PREFIX_TOKENS + max(OWN_TOKENS) + ANSWER_TOKENS  # tokens of the longest request
TOP = 4  # logprobs compared at each position
# it warns of kernels for recurrent layers that are not installed
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer of transformers to a prompt."""

    prompt: list[int]
    answer: list[int]
    logprobs: torch.Tensor  # [prompt + answer - 1, vocab]: row i predicts token i + 1
    tolerance: float


def check_family(
    config: PreTrainedConfig,
    folder: Path,
    *,
    max_model_len: int | None = None,
    std: float = STD,
) -> None:
    """Write a random model of this config to `folder` and compare its answers. Every prompt has at
    least PREFIX_TOKENS, so that a window or original context of fewer tokens has an effect.
    `std`: of the weights; smaller ones make a model that amplifies rounding less."""
    model = write_checkpoint(config, folder, std=std)
    with_room = _engine(folder, max_model_len, kv_tokens=16 * CONTEXT, chunk_tokens=512)
    prompts = _prompts(model.config.vocab_size)
    requests = [_request(p, i, b"alone", prompt_logprobs=TOP) for i, p in enumerate(prompts)]
    outputs = [output for each in requests for output in run_all(with_room, [each]).outputs]
    expected = _all_expected(model, prompts, outputs)
    _check("alone", outputs, expected)
    salts = [b"batched %d" % index for index in range(len(expected))]
    requests = [_request(e.prompt, i, salts[i]) for i, e in enumerate(expected)]
    _check("batched", run_all(with_room, requests).outputs, expected)
    requests = [_request(e.prompt, i, b"shared") for i, e in enumerate(expected)]
    outputs = run_all(with_room, requests).outputs
    _check("shared", outputs, expected)
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= len(expected) - 1
    with_room.close()
    _check_chunked_and_preempted(folder, max_model_len, expected)


def check_batch(model: PreTrainedModel, folder: Path) -> None:
    """The model in `folder` gives the same answers as `model`, all requests at once."""
    engine = _engine(folder, None, kv_tokens=16 * CONTEXT, chunk_tokens=512)
    prompts = _prompts(model.config.vocab_size)
    requests = [_request(prompt, i, b"") for i, prompt in enumerate(prompts)]
    outputs = run_all(engine, requests).outputs
    _check("batched", outputs, _all_expected(model, prompts, outputs))
    engine.close()


def _all_expected(
    model: PreTrainedModel, prompts: Sequence[list[int]], outputs: Sequence[Output]
) -> list[Expected]:
    """The answers in `outputs` are those of transformers if each token is its choice after all
    tokens before it: one pass over a whole answer shows that."""
    answers = [_answer(outputs, index) for index in range(len(prompts))]
    tables = [_logprobs(model, *both) for both in zip(prompts, answers, strict=True)]
    for index, (answer, table) in enumerate(zip(answers, tables, strict=True)):
        assert len(answer) == ANSWER_TOKENS
        assert answer == table[-len(answer) :].argmax(dim=-1).tolist(), f"answer {index}"
    tolerance = max(LEAST_TOLERANCE, 2 * _rounding(model, prompts[0], answers[0], tables[0]))
    assert tolerance < MOST_TOLERANCE, f"rounding changes answers by {tolerance:.1e}: smaller std"
    every = zip(prompts, answers, tables, strict=True)
    return [Expected(prompt, answer, table, tolerance) for prompt, answer, table in every]


def _rounding(
    model: PreTrainedModel, prompt: list[int], answer: list[int], table: torch.Tensor
) -> float:
    """How far logprobs move if every weight changes by up to 2^-23 of itself, its last bit."""
    generator, far = torch.Generator().manual_seed(0), 0.0
    for _ in range(ROUNDINGS):
        rounded = copy.deepcopy(model)
        with torch.no_grad():
            for weight in rounded.parameters():
                change = torch.rand(weight.shape, generator=generator) - 0.5
                weight.mul_(1 + change * 2**-22)
        moved = _logprobs(rounded, prompt, answer) - table
        far = max(far, float(moved.abs().max()))
    return far


def _check_chunked_and_preempted(
    folder: Path, max_model_len: int | None, expected: Sequence[Expected]
) -> None:
    """Run with chunks that end inside pages, and a pool that holds hardly more than one request.
    Priorities keep the requests in this order: in another one, all might fit."""
    preempted: list[SequencePreempted] = []
    bus = EventBus()
    bus.subscribe(SequencePreempted, preempted.append)
    narrow = _engine(folder, max_model_len, kv_tokens=CONTEXT + PAGE, chunk_tokens=7, bus=bus)
    requests = [
        replace(_request(e.prompt, i, b""), expected_tokens=1, priority=i)
        for i, e in enumerate(expected)
    ]
    _check("chunked and preempted", run_all(narrow, requests).outputs, expected)
    assert preempted, "the pool should have been too small"
    narrow.close()


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, vocab_size, PREFIX_TOKENS).tolist()
    return [prefix + rng.integers(3, vocab_size, count).tolist() for count in OWN_TOKENS]


def _answer(outputs: Sequence[Output], index: int) -> list[int]:
    """The tokens of request `index`."""
    own = [output for output in outputs if output.request_id == str(index)]
    return [token_id for output in own for token_id in output.token_ids]


def _logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _engine(
    folder: Path,
    max_model_len: int | None,
    *,
    kv_tokens: int,
    chunk_tokens: int,
    bus: EventBus | None = None,
) -> Engine:
    config = EngineConfig(
        model=ModelConfig(dtype=DType.FP32),
        cache=CacheConfig(page_size=PAGE, kv_tokens=kv_tokens),
        sched=SchedConfig(chunk_tokens=chunk_tokens, max_model_len=max_model_len),
    )
    return build_engine(folder, config, bus, around=_with_dirty_pages)


def _with_dirty_pages(runner: Runner) -> Runner:
    assert isinstance(runner, CpuRunner)
    spoil_pages(runner)
    return runner


def _request(
    prompt: list[int],
    index: int,
    salt: bytes,
    *,
    prompt_logprobs: int | None = None,
) -> Request:
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        logprobs=TOP,
        prompt_logprobs=prompt_logprobs,
    )
    return a_request(prompt, name=str(index), sampling=sampling, salt=salt)


def _check(mode: str, outputs: Sequence[Output], expected: Sequence[Expected]) -> None:
    for index, each in enumerate(expected):
        own = [output for output in outputs if output.request_id == str(index)]
        answer = _answer(own, index)
        assert answer == each.answer, f"{mode}: answer {index}"
        records = [record for output in own for record in output.logprobs]
        assert len(records) == len(answer)
        of_prompt = own[0].prompt_logprobs or ()
        _check_logprobs(mode, records, each.logprobs[-len(answer) :], each.tolerance)
        _check_logprobs(mode, of_prompt[1:], each.logprobs, each.tolerance)


def _check_logprobs(
    mode: str, records: Sequence[TokenLogprobs | None], table: torch.Tensor, tolerance: float
) -> None:
    """Compare the first records with the first rows."""
    for record, row in zip(records, table, strict=False):
        assert record is not None
        ids = torch.tensor([record.token_id, *record.top_ids])
        found = torch.tensor([record.logprob, *record.top_logprobs])
        far = float((found - row[ids]).abs().max())
        assert far < tolerance, f"{mode}: a logprob is {far:.1e} off"
