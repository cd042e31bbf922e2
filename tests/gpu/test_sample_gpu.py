"""A card draws the tokens that a CPU draws with the same noise keys."""

import numpy as np
import pytest
import torch

from mainstem.core.request import SamplingParams
from mainstem.core.step import StartedSequence
from mainstem.runner.sampler import Sampler, choice_of, choose, start_logprobs
from mainstem_bench.kernels.samples import a_sample_batch
from tests.runner.steps import Seq, Work, a_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB = 128_256
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=50),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.8, top_k=200, top_p=0.95, min_p=0.01),
    SamplingParams(top_p=0.999, temperature=1.5),
]


@pytest.mark.parametrize("has_limits", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_card_draws_what_a_cpu_draws(rows: int, has_limits: bool) -> None:
    """Scores differ in the last bits of fp32, about 1e-6, which changes one of 300 draws once in
    thousands of runs. With limits, one draw may differ: at the limit of top_p."""
    from mainstem.kernels.sampling import sample as kernel  # noqa: PLC0415  # brings Triton

    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, VOCAB, generator=generator) * 2.5
    plain = [setting for setting in SETTINGS if setting.top_p == 1.0 and setting.top_k == 0]
    kinds = SETTINGS if has_limits else plain
    settings = [kinds[row % len(kinds)] for row in range(rows)]
    keys = np.random.default_rng(rows).integers(-(2**63), 2**63, rows, np.int64)
    batch = a_sample_batch(settings, VOCAB, keys)
    on_card = logits.cuda()
    named = {"temperature": batch.temperature, "min_p": batch.min_p, "keys": batch.noise_keys}
    if has_limits:
        named |= {"top_k": batch.top_k, "top_p": batch.top_p}
    columns = {name: torch.from_numpy(column).cuda() for name, column in named.items()}
    found = kernel.sample(on_card, **columns) if has_limits else kernel.draw(on_card, **columns)
    expected = choose(logits, choice_of(batch))
    assert int((found.cpu() != expected).sum()) <= (1 if has_limits else 0)
    again = kernel.sample(on_card, **columns) if has_limits else kernel.draw(on_card, **columns)
    assert torch.equal(found, again)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_sampler_does_not_wait_for_the_card() -> None:
    """Penalties, bias, masks and draws give the tokens of the CPU's sampler without
    synchronising."""
    from mainstem_bench.kernels.fused import some  # noqa: PLC0415  # brings Triton

    vocab, rows = 5000, 40
    settings = [
        SamplingParams(
            max_tokens=100,
            temperature=0.0 if row % 3 else 0.7,
            repetition_penalty=1.2 if row % 2 else 1.0,
            frequency_penalty=0.3,
            min_tokens=5 if row % 4 == 0 else 0,
            logit_bias={row: 2.0},
        )
        for row in range(rows)
    ]
    samplers = Sampler(), Sampler(torch.device("cuda"))
    for row in range(rows):
        prompt, empty = np.arange(row, row + 30, dtype=np.int32), np.empty(0, np.int32)
        for sampler in samplers:
            sampler.start(StartedSequence(row, settings[row], prompt, empty, (2,)))
    step = a_step([Work(Seq(row, [1], [row], sampling=settings[row]), 1) for row in range(rows)],
                  4, vocab)  # fmt: skip
    for index in range(12):
        logits = some(rows, vocab, dtype=torch.float32, seed=index)
        torch.cuda.synchronize()
        right = samplers[0].sample(logits.cpu(), step)
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        ids = samplers[1].sample(logits, step)
        raw = logits[:4].clone()
        records = start_logprobs(raw, ids[:4], np.array([3, 0, 5, 1], np.int32))
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(ids.cpu(), right)
        plain = start_logprobs(raw.cpu(), right[:4], np.array([3, 0, 5, 1], np.int32))
        for mine, theirs in zip(records.resolve(), plain.resolve(), strict=True):
            assert (mine.token_id, mine.rank, mine.top_ids) == (
                theirs.token_id, theirs.rank, theirs.top_ids,
            )  # fmt: skip
            assert abs(mine.logprob - theirs.logprob) < 1e-4
