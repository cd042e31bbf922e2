"""A real model on a GPU gives the answers it gives on a CPU; run with `make test-gpu`.

On any machine, `python -m tests.gpu.make_expected carry` writes a part of smollm2 and a CPU's
answers into the folder `carry`, which these tests read. With `--whole` the answers are those of all
of smollm2, whose folder MAINSTEM_TEST_MODEL must name.
"""

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from mainstem.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    SchedConfig,
    Share,
)
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams, TokenLogprobs
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from tests.gpu import PART

DEVICE = Device.CUDA
ADVICE = "no weights here: python -m tests.gpu.make_expected carry"
CARRY = Path(__file__).resolve().parents[2] / "carry"
MODEL = Path(os.environ.get("MAINSTEM_TEST_MODEL", CARRY / PART))
EXPECTED = Path(os.environ.get("MAINSTEM_TEST_EXPECTED", CARRY / "expected.json"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not MODEL.is_dir() or not EXPECTED.is_file(), reason=ADVICE),
]

TIE = 1e-3  # a logit of 20 is a sum of 600 products: another order changes it by up to 2e-4
# bf16 keeps 8 bits: 30 layers of rounding in a residual stream move a logit of 20 by some tenths
BF16_MEAN, BF16_WORST = 0.1, 1.5
KV_TOKENS = 131_072
NUM_OTHERS = 200


@dataclass(frozen=True)
class Row:
    """A prompt, and a CPU's answer to it in fp32."""

    prompt_ids: list[int]
    answer_ids: list[int]
    logprobs: list[float]
    margins: list[float]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    names = ("prompt_ids", "answer_ids", "logprobs", "margins")
    return [Row(*(row[name] for name in names)) for row in json.loads(EXPECTED.read_text())]


@contextmanager
def an_engine(
    dtype: DType,
    share: Share = Share.READS,
    page_size: int = 16,
    chunk_tokens: int = 2048,
    deterministic: bool = False,
) -> Iterator[Engine]:
    config = EngineConfig(
        ModelConfig(str(MODEL), dtype, DEVICE, deterministic=deterministic),
        CacheConfig(page_size=page_size, kv_tokens=KV_TOKENS),
        SchedConfig(chunk_tokens=chunk_tokens, share=share),
    )
    engine = build_engine(MODEL, config)
    yield engine
    engine.check()
    engine.close()


@dataclass
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


def answer(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[Answer]:
    """All prompts at once."""
    for index, ids in enumerate(prompts):
        engine.submit(Request(RequestId(str(index)), np.array(ids, np.int32), sampling))
    answers = [Answer([], []) for _ in prompts]
    while engine.has_work:
        for news in engine.step():
            told = answers[int(news.request_id)]
            told.token_ids += news.token_ids
            told.logprobs += news.logprobs
            told.prompt_logprobs = news.prompt_logprobs or told.prompt_logprobs
    return answers


def greedy(row: Row, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=len(row.answer_ids), ignore_eos=True, logprobs=logprobs
    )


def is_equal_or_tied(row: Row, got: list[int]) -> bool:
    """Whether answers are equal, or first differ where the CPU's choice was within rounding."""
    assert len(got) == len(row.answer_ids)
    pairs = zip(row.answer_ids, got, row.margins, strict=True)
    return next((margin < TIE for wanted, had, margin in pairs if wanted != had), True)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"share": Share.STORAGE},
        {"share": Share.NONE},
        {"chunk_tokens": 64},
        {"page_size": 64},
    ],
    ids=str,
)
def test_fp32_answers_equal_those_of_a_cpu(rows: list[Row], setting: dict[str, object]) -> None:
    with an_engine(DType.FP32, **setting) as engine:  # type: ignore[arg-type]  # one of several
        answers = answer(engine, [row.prompt_ids for row in rows], greedy(rows[0]))
    for index, (row, got) in enumerate(zip(rows, answers, strict=True)):
        assert is_equal_or_tied(row, got.token_ids), f"prompt {index} differs and is no tie"
    num_equal = sum(row.answer_ids == got.token_ids for row, got in zip(rows, answers, strict=True))
    print(f"{num_equal} of {len(rows)} equal to the last token")
    assert num_equal >= len(rows) * 7 // 8, (
        "ties are rare; more of them mean less precision than fp32"
    )


def test_fp32_answers_are_the_same_alone_and_warm(rows: list[Row]) -> None:
    with an_engine(DType.FP32) as engine:
        for row in rows[:6] * 2:  # the second time from the cache
            got = answer(engine, [row.prompt_ids], greedy(row))[0]
            assert is_equal_or_tied(row, got.token_ids)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_logprobs_of_given_tokens_are_near_those_of_a_cpu(rows: list[Row], dtype: DType) -> None:
    """The CPU's own answers are given as prompts, so that no early difference can spread."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with an_engine(dtype) as engine:
        answers = answer(engine, [row.prompt_ids + row.answer_ids for row in rows], sampling)
    errors = []
    for row, got in zip(rows, answers, strict=True):
        records = got.prompt_logprobs[-len(row.answer_ids) :]
        assert [record and record.token_id for record in records] == row.answer_ids
        found = np.array([record.logprob for record in records if record is not None])
        errors.append(np.abs(found - row.logprobs))
    mean, worst = float(np.concatenate(errors).mean()), float(np.concatenate(errors).max())
    print(f"{dtype.value}: logprobs differ by {mean:.5f} in the mean, {worst:.4f} at most")
    allowed = (BF16_MEAN, BF16_WORST) if dtype is DType.BF16 else (TIE, 10 * TIE)
    assert mean < allowed[0]
    assert worst < allowed[1]


def test_deterministic_answers_do_not_depend_on_other_requests(rows: list[Row]) -> None:
    """Logprobs have the same bits alone, among 200 others, with and without sharing."""
    chosen = rows[::6]
    rng = random.Random(0)
    others = [rng.choice(rows) for _ in range(NUM_OTHERS)]
    others = [Row(row.prompt_ids[: rng.randint(1, 400)], [], [], []) for row in others]
    told: dict[str, list[Answer]] = {}
    for share in (Share.READS, Share.NONE):
        with an_engine(DType.BF16, share, page_size=64, deterministic=True) as engine:
            told[f"alone, share {share.value}"] = [
                answer(engine, [row.prompt_ids], greedy(row, 0))[0] for row in chosen
            ]
            engine.clear_cache()
            crowd = [row.prompt_ids for row in (*chosen, *others)]
            in_crowd = answer(engine, crowd, greedy(chosen[0], 0))
            told[f"in a crowd, share {share.value}"] = in_crowd[: len(chosen)]
    first = told.pop("alone, share reads")
    for name, answers in told.items():
        for index, (wanted, got) in enumerate(zip(first, answers, strict=True)):
            assert got.token_ids == wanted.token_ids, f"prompt {index} {name}"
            assert got.logprobs == wanted.logprobs, f"logprobs of prompt {index} {name}"
