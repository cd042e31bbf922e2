"""Each sampling feature, on logits made by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.request import SamplingParams
from mainstem.core.step import Int64s, StartedSequence, Step
from mainstem.runner.sampler import Sampler, likeliest, start_logprobs
from mainstem_bench.kernels.samples import a_sample_batch, some_keys
from tests.runner.steps import Seq, Work, a_step

VOCAB = 50
DRAWS = 4000


def step_for(rows: Sequence[SamplingParams], keys: Int64s) -> Step:
    works = [Work(Seq(slot, [1], [slot], sampling=s), 1) for slot, s in enumerate(rows)]
    batch = a_sample_batch(rows, VOCAB, keys)
    return replace(a_step(works, 4, VOCAB), sampling=batch)


def start(
    sampler: Sampler,
    sampling: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: tuple[int, ...] = (),
    slot: int = 0,
) -> None:
    record = StartedSequence(
        slot, sampling, np.array(prompt, np.int32), np.array(output, np.int32), stop_ids
    )
    sampler.start(record)


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=100, **settings)  # type: ignore[arg-type]


def sample_one(sampler: Sampler, logits: torch.Tensor, sampling: SamplingParams) -> int:
    return int(sampler.sample(logits.clone()[None], step_for([sampling], some_keys(1)))[0])


def counts(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """How often each token is drawn, over the noise of the first DRAWS tokens of an answer."""
    step = step_for([sampling] * DRAWS, some_keys(DRAWS))
    ids = Sampler().sample(logits.expand(DRAWS, -1).clone(), step)
    return torch.bincount(ids, minlength=VOCAB)


def assert_shares(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """A right sampler fails this in fewer than two cases of 10^9: the statistic's mean is the
    degrees of freedom f, its variance 2 f, and its tail beyond f + 2 sqrt(21 f) + 42 is e^-21
    (Laurent and Massart 2000, lemma 1). Tokens expected less than 5 times are taken together."""
    assert int(counts[expected == 0].sum()) == 0
    mean = expected.double() * DRAWS
    is_rare = mean < 5
    found = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    mean = torch.cat((mean[~is_rare], mean[is_rare].sum()[None]))
    found, mean = found[mean > 0], mean[mean > 0]
    statistic = float(((found - mean) ** 2 / mean).sum())
    freedom = max(len(mean) - 1, 1)
    assert statistic < freedom + 2 * (21 * freedom) ** 0.5 + 42


def some_logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_likeliest_token() -> None:
    logits = some_logits()
    assert sample_one(Sampler(), logits, greedy()) == int(logits.argmax())


@pytest.mark.parametrize("vocab", [1, 50, 64, 768])
def test_a_tie_is_broken_by_the_lowest_id(vocab: int) -> None:
    logits = torch.randint(-3, 3, (40, vocab), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_gives_the_models_distribution(temperature: float) -> None:
    logits = some_logits()
    found = counts(logits, SamplingParams(temperature=temperature))
    assert_shares(found, torch.softmax(logits / temperature, dim=-1))


def test_top_k_keeps_k_tokens() -> None:
    logits = some_logits()
    best = logits.topk(3)
    expected = torch.zeros(VOCAB).index_put((best.indices,), torch.softmax(best.values, -1))
    assert_shares(counts(logits, SamplingParams(top_k=3)), expected)


def four_tokens() -> torch.Tensor:
    logits = torch.full((VOCAB,), float("-inf"))
    logits[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    return logits


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    expected = torch.zeros(VOCAB)
    expected[:2] = torch.tensor([4, 3]) / 7
    assert_shares(counts(four_tokens(), SamplingParams(top_p=0.65)), expected)


def test_top_p_applies_to_the_tokens_that_top_k_keeps() -> None:
    # 0.4 and 0.3 are left; the first is 0.57 of them
    found = counts(four_tokens(), SamplingParams(top_p=0.55, top_k=2))
    assert found.nonzero()[:, 0].tolist() == [0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    expected = torch.zeros(VOCAB)
    expected[:3] = torch.tensor([4, 3, 2]) / 9
    assert_shares(counts(four_tokens(), SamplingParams(min_p=0.45)), expected)


def test_ties_at_a_limit_are_broken_by_the_lowest_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[20] = 1.0
    for sampling in (SamplingParams(top_k=6), SamplingParams(top_p=0.14)):
        found = counts(logits, sampling).nonzero()[:, 0].tolist()
        assert found == [0, 1, 2, 3, 4, 20]  # (e + 4) / (e + 49) is 0.13


def test_top_p_beyond_the_candidates_sorts_everything() -> None:
    """Nearly flat logits over a large vocabulary: 1,024 candidates do not reach 0.9. The chance
    that none of 300 draws is in the last tenth of the kept tokens is below 10^-13."""
    vocab, rows = 5000, 300
    logits = torch.linspace(0.001, 0.0, vocab).expand(rows, -1)
    step = step_for([SamplingParams(top_p=0.9)] * rows, some_keys(rows))
    batch = replace(step.sampling, top_k=np.full(rows, vocab, np.int32))
    ids = Sampler().sample(logits.clone(), replace(step, sampling=batch))
    assert 0.81 * vocab < int(ids.max()) < 0.905 * vocab


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    settings = [
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.8),
        greedy(),
        SamplingParams(top_k=5, min_p=0.1),
        SamplingParams(temperature=1.3, top_p=0.5, top_k=9),
    ]
    keys = some_keys(5)
    logits = torch.stack([some_logits(seed) for seed in range(5)])
    together = Sampler().sample(logits.clone(), step_for(settings, keys)).tolist()
    alone = [
        int(
            Sampler().sample(logits[i : i + 1].clone(), step_for([settings[i]], keys[i : i + 1]))[0]
        )
        for i in range(5)
    ]
    backwards = Sampler().sample(
        logits.flip(0).clone(), step_for(settings[::-1], keys[::-1].copy())
    )
    assert together == alone == backwards.tolist()[::-1]


def test_only_possible_tokens_are_drawn() -> None:
    logits = torch.full((VOCAB,), float("-inf"))
    logits[[7, 30]] = 0.0
    expected = torch.zeros(VOCAB)
    expected[[7, 30]] = 0.5
    assert_shares(counts(logits, SamplingParams()), expected)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.5, top_k=9)])
def test_draws_from_nan_and_infinity_stay_within_the_vocabulary(sampling: SamplingParams) -> None:
    logits = torch.full((4, VOCAB), float("nan"))
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    logits[3, 1:] = 0.0
    ids = Sampler().sample(logits, step_for([sampling] * 4, some_keys(4)))
    assert bool(((ids >= 0) & (ids < VOCAB)).all())


def test_repetition_penalty_counts_prompt_and_output() -> None:
    sampler, sampling = Sampler(), greedy(repetition_penalty=2.0)
    start(sampler, sampling, prompt=[3], output=[4])
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 5]] = torch.tensor([3.9, 3.8, 2.0])
    assert sample_one(sampler, logits, sampling) == 5
    assert sample_one(sampler, logits, sampling) == 3  # 5 was sampled: 2.0 / 2 < 3.9 / 2


def test_presence_penalty_is_flat_and_frequency_penalty_counts() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4]] = torch.tensor([5.0, 3.5])
    flat, counting = greedy(presence_penalty=1.0), greedy(frequency_penalty=1.0)
    sampler = Sampler()
    start(sampler, flat, prompt=[3, 3, 3])
    assert [sample_one(sampler, logits, flat) for _ in range(4)] == [3, 3, 3, 3]
    start(sampler, counting, prompt=[3, 3, 3])
    assert [sample_one(sampler, logits, counting) for _ in range(4)] == [3, 3, 4, 3]


def test_counts_are_rebuilt_when_a_preempted_sequence_returns() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4]] = torch.tensor([5.0, 3.5])
    sampling = greedy(frequency_penalty=1.0)
    sampler = Sampler()
    start(sampler, sampling, output=[3, 3])
    assert sample_one(sampler, logits, sampling) == 4
    start(sampler, sampling)  # another sequence in the same slot
    assert sample_one(sampler, logits, sampling) == 3


def test_logit_bias_is_added_to_logits() -> None:
    sampling = greedy(logit_bias={7: 50.0, 8: -100.0})
    sampler = Sampler()
    start(sampler, sampling)
    assert sample_one(sampler, some_logits(), sampling) == 7


def test_min_tokens_bars_the_stop_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[2, 9]] = torch.tensor([5.0, 1.0])
    sampling = greedy(min_tokens=2)
    sampler = Sampler()
    start(sampler, sampling, stop_ids=(2,))
    assert [sample_one(sampler, logits, sampling) for _ in range(3)] == [9, 9, 2]


@pytest.mark.parametrize("sampling", [greedy(), SamplingParams(temperature=5.0)])
def test_a_mask_limits_the_tokens_of_its_row(sampling: SamplingParams) -> None:
    allowed = np.zeros((1, VOCAB), np.bool_)
    allowed[0, [10, VOCAB - 1]] = True
    step = step_for([sampling] * 3, some_keys(3))
    masks = np.packbits(allowed, axis=1, bitorder="little")
    masked = replace(step.sampling, mask_rows=np.array([1], np.int32), masks=masks)
    step = replace(step, sampling=replace(masked, is_greedy=False))
    logits = some_logits().expand(3, -1)
    free, bound, last = Sampler().sample(logits.clone(), step).tolist()
    assert bound in (10, VOCAB - 1)
    if sampling.is_greedy:
        assert bound == (10 if logits[1, 10] >= logits[1, VOCAB - 1] else VOCAB - 1)
        assert free == last == int(logits[0].argmax())


def test_logprobs_have_rank_and_top_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [4, 6]] = torch.tensor([3.0, 2.0])
    records = start_logprobs(logits, torch.tensor([6, 0]), np.array([2, 0], np.int32)).resolve()
    expected = torch.log_softmax(logits, -1)
    assert records[0].rank == 2
    assert records[0].top_ids == (4, 6)
    assert records[0].logprob == pytest.approx(float(expected[0, 6]))
    assert records[0].top_logprobs == pytest.approx(expected[0, [4, 6]].tolist())
    assert records[1].rank == 1
    assert records[1].top_ids == ()


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_logprobs_of_many_rows_equal_those_of_single_rows(rows: int) -> None:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))
    ids, counts = torch.arange(rows) % VOCAB, np.arange(rows, dtype=np.int32) % 4
    records = start_logprobs(logits, ids, counts).resolve()
    assert len(records) == rows
    for row in range(0, rows, 37):
        alone = start_logprobs(logits[row : row + 1], ids[row : row + 1], counts[row : row + 1])
        assert alone.resolve() == [records[row]]
