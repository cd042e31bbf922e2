"""Penalties, bias and barred tokens of many sequences at once equal those of each one alone."""

from collections import Counter

import numpy as np
import pytest
import torch

from mainstem.core.request import SamplingParams
from mainstem.core.step import StartedSequence
from mainstem.runner.edits import LogitEdits
from mainstem.runner.uploads import Uploads

VOCAB = 40
CPU = torch.device("cpu")


def edited(
    logits: torch.Tensor, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """Edits one row, token by token, with penalties as vLLM's documentation defines them."""
    row = logits.clone()
    for token, bias in (sampling.logit_bias or {}).items():
        row[token] += bias
    if len(output) < sampling.min_tokens:
        row[0] = float("-inf")
    times = Counter(output)
    for token in range(VOCAB):
        if token in times or token in prompt:
            factor = sampling.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if token in times:
            row[token] -= sampling.frequency_penalty * times[token] + sampling.presence_penalty
    return row


def some_sampling(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        max_tokens=1000,
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        frequency_penalty=float(rng.choice([0.0, 0.5, -0.25])),
        presence_penalty=float(rng.choice([0.0, 0.7])),
        min_tokens=int(rng.choice([0, 6])),
        logit_bias={int(t): 1.5 for t in rng.integers(0, VOCAB, 3)} if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_is_edited_as_if_it_were_alone(seed: int) -> None:
    """There are 50 sequences, more than are counted at once; some end, others return after
    preemption."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    edits = LogitEdits(Uploads(CPU))
    settings: dict[int, SamplingParams] = {}
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}

    def start(slot: int) -> None:
        settings[slot] = some_sampling(rng)
        prompts[slot] = rng.integers(0, VOCAB, rng.integers(1, 400)).tolist()
        outputs[slot] = rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()
        edits.start(
            StartedSequence(
                slot,
                settings[slot],
                np.array(prompts[slot], np.int32),
                np.array(outputs[slot], np.int32),
                (0,),
            )
        )

    for slot in range(50):
        start(slot)
    for _ in range(8):
        slots = rng.permutation(50)[: rng.integers(1, 50)].astype(np.int32)
        rows = rng.permutation(60)[: len(slots)].astype(np.int32)
        logits = torch.randn(60, VOCAB, generator=generator) * 3
        right = logits.clone()
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            right[row] = edited(right[row], settings[slot], prompts[slot], outputs[slot])
        edits.apply(logits, rows, slots)
        torch.testing.assert_close(logits, right, rtol=1e-6, atol=1e-6)
        sampled = torch.from_numpy(rng.integers(0, VOCAB, 60))
        edits.append(sampled, rows, slots)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            outputs[slot].append(int(sampled[row]))
        start(int(rng.integers(0, 50)))


def test_an_answer_may_grow_longer_than_its_row_of_the_buffer() -> None:
    sampling = SamplingParams(max_tokens=2000, frequency_penalty=0.001, temperature=0.0)
    edits = LogitEdits(Uploads(CPU))
    for slot in range(20):  # more rows than the buffer has at first
        empty = np.empty(0, np.int32)
        edits.start(StartedSequence(slot, sampling, np.zeros(1, np.int32), empty, ()))
    row, slots = np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int32)
    for step in range(300):
        edits.append(torch.full((20,), step % 3), row, slots)
    logits = torch.zeros(20, VOCAB)
    edits.apply(logits, row, slots)
    expected = torch.zeros(VOCAB)
    expected[:3] = -0.1
    torch.testing.assert_close(logits, expected.expand(20, -1))


def test_an_end_token_that_the_model_does_not_have_is_ignored() -> None:
    edits = LogitEdits(Uploads(CPU))
    sampling = SamplingParams(max_tokens=9, min_tokens=2)
    nothing = np.empty(0, np.int32)
    edits.start(StartedSequence(0, sampling, np.array([1], np.int32), nothing, (3, VOCAB + 2)))
    edits.start(StartedSequence(1, sampling, np.array([1], np.int32), nothing, (VOCAB,)))
    logits = torch.zeros(2, VOCAB)
    edits.apply(logits, np.array([0, 1], np.int32), np.array([0, 1], np.int32))
    assert logits.isinf().nonzero().tolist() == [[0, 3]]
