"""Log-probabilities of tokens in the distribution they were drawn from."""

import numpy as np
import pytest
import torch

from mainstem.core.step import SampleBatch
from mainstem.runner.sampler import drawn_logprobs

VOCAB = 50


def a_batch(rows: list[tuple[float, int, float, float]]) -> SampleBatch:
    """Rows of temperature, top_k (0: no limit), top_p and min_p."""
    columns = np.array(rows, np.float64).T
    top_k = columns[1].astype(np.int32)
    return SampleBatch(
        temperature=columns[0].astype(np.float32),
        top_p=columns[2].astype(np.float32),
        top_k=np.where(top_k == 0, VOCAB, top_k),
        min_p=columns[3].astype(np.float32),
        noise_keys=np.zeros(len(rows), np.int64),
        num_logprobs=np.zeros(len(rows), np.int32),
        wants_logprobs=np.ones(len(rows), np.bool_),
        special_rows=np.empty(0, np.int32),
        is_greedy=False,
    )


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):  # type: ignore[no-untyped-def]
    """The distribution, one filter after the other, in fp64."""
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0.0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= np.float32(top_p) * weights.sum()]] = 0.0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (0.9, 0, 1.0, 0.1),
        (1.1, 20, 0.7, 0.02),
    ],
)
def test_they_are_those_of_the_filtered_distribution(row: tuple[float, int, float, float]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(1, VOCAB)).astype(np.float32) * 2
    expected = reference(logits[0], *row)
    # in a batch with a row without filters, which must not change it
    batch = a_batch([(1.0, 0, 1.0, 0.0), row])
    rows = np.array([0, 1])
    both = torch.from_numpy(np.concatenate([logits, logits]))
    plain = reference(logits[0], 1.0, 0, 1.0, 0.0)
    for token in np.flatnonzero(expected):
        tokens = torch.tensor([token, token])
        found = drawn_logprobs(both.clone(), tokens, batch, rows).numpy()
        assert found[0] == pytest.approx(np.log(plain[token]), abs=1e-5)
        assert found[1] == pytest.approx(np.log(expected[token]), abs=1e-5)


def test_a_greedy_token_is_certain() -> None:
    batch = a_batch([(0.0, 0, 1.0, 0.0)])
    found = drawn_logprobs(torch.randn(1, VOCAB), torch.tensor([3]), batch, np.array([0]))
    assert found.tolist() == [0.0]


def test_tokens_that_a_mask_excludes_have_no_share() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2:] = float("-inf")
    batch = a_batch([(1.0, 0, 1.0, 0.0)])
    found = drawn_logprobs(logits, torch.tensor([1]), batch, np.array([0]))
    assert found.tolist() == pytest.approx([np.log(0.5)])


def test_rows_are_independent_of_how_many_there_are() -> None:
    """300 rows are computed in three parts; every fifth is greedy."""
    temperatures = [0.0 if number % 5 == 0 else 0.5 + number / 100 for number in range(300)]
    batch = a_batch([(temperature, 0, 1.0, 0.0) for temperature in temperatures])
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(300, VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (300,), generator=generator)
    found = drawn_logprobs(logits, tokens, batch, np.arange(300))
    alone = [
        drawn_logprobs(logits[row][None], tokens[row][None], batch, np.array([row]))
        for row in range(300)
    ]
    assert found.tolist() == pytest.approx(torch.cat(alone).tolist(), abs=1e-5)
