# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Argmax and draws on the device, compared with the sampler that sorts."""

import numpy as np
import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.core.request import SamplingParams  # noqa: E402
from mainstem.core.step import Int64s  # noqa: E402
from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.sampling import noise as kernel_noise  # noqa: E402
from mainstem.kernels.sampling import sample as kernel  # noqa: E402
from mainstem.kernels.sampling.sample import argmax  # noqa: E402
from mainstem.runner import noise  # noqa: E402
from mainstem.runner.sampler import choice_of, choose  # noqa: E402
from mainstem_bench.kernels.samples import a_sample_batch, some_keys  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.2),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.8),
    "small top_p": SamplingParams(top_p=0.01),
    "nearly all of top_p": SamplingParams(top_p=0.999, temperature=1.7),
    "min_p": SamplingParams(min_p=0.1),
    "min_p 1": SamplingParams(min_p=1.0),
    "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    "min_p before top_k": SamplingParams(top_k=40, min_p=0.3),
}


def some_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


def sample(logits: Tensor, settings: list[SamplingParams], keys: Int64s) -> Tensor:
    batch = a_sample_batch(settings, logits.shape[1], keys)
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.noise_keys)
    return kernel.sample(logits, *(torch.from_numpy(column) for column in columns))


def draw(logits: Tensor, settings: list[SamplingParams], keys: Int64s) -> Tensor:
    """Like `sample`, without top_k and top_p."""
    batch = a_sample_batch(settings, logits.shape[1], keys)
    columns = (batch.temperature, batch.min_p, batch.noise_keys)
    return kernel.draw(logits, *(torch.from_numpy(column) for column in columns))


def sorted_draw(logits: Tensor, settings: list[SamplingParams], keys: Int64s) -> Tensor:
    return choose(logits, choice_of(a_sample_batch(settings, logits.shape[1], keys)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (2, 9000), (5, 4096)])
def test_argmax_takes_the_first_id_on_a_tie(rows: int, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (rows, vocab), generator=generator).to(dtype)
    for _ in range(2):  # the buffers that parts share are reset
        assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_argmax_reads_bf16() -> None:
    logits = some_logits(2, 300).bfloat16()
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_argmax_of_parts_orders_signs_and_infinities() -> None:
    logits = torch.full((4, 10_000), float("-inf"))
    logits[0, 9_999] = -5.0
    logits[1, 9_000] = -0.0
    logits[1, 9_500] = 0.0
    logits[2, 0] = -1e30
    logits[2, 8_200] = -1e-30
    out = torch.full((6,), -7)
    argmax(logits, out[1:5])
    assert out.tolist() == [-7, 9_999, 9_000, 8_200, 0, -7]


@triton.jit
def _noise_kernel(keys_ptr, ids_ptr, bits_ptr, gumbel_ptr, COUNT: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, COUNT)
    low, high = kernel_noise.halves_of(keys_ptr, row)
    bits = kernel_noise.bits_of(low, high, tl.load(ids_ptr + lanes))
    tl.store(bits_ptr + row * COUNT + lanes, bits.to(tl.int64))
    given = tl.load(ids_ptr + lanes).to(tl.uint32)
    tl.store(gumbel_ptr + row * COUNT + lanes, kernel_noise.gumbel_of(given))


def test_the_noise_of_a_token_has_the_bits_of_the_cpu() -> None:
    keys, ids = some_keys(4), np.arange(1000, 1064)
    bits, gumbel = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64)
    _noise_kernel[(4,)](torch.from_numpy(keys), torch.from_numpy(ids), bits, gumbel, COUNT=64)
    right = noise.bits_of(keys, np.broadcast_to(ids, (4, 64)), 2000)
    assert np.array_equal(bits.numpy(), right)


def test_noise_is_precise_at_both_ends() -> None:
    """The bound, 4e-6, is two rounding errors of a value near 33, the largest that occurs."""
    edge = 2**29  # above it the series is not used
    given = [0, 1, 2, 1000, 2**20 + 1, edge - 1, edge, edge + 1, 2**31, 2**32 - 2, 2**32 - 1]
    given += np.random.default_rng(0).integers(0, 2**32, 64 - len(given)).tolist()
    bits, gumbel = torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64)
    keys, ids = torch.zeros(1, dtype=torch.int64), torch.tensor(given)
    _noise_kernel[(1,)](keys, ids, bits, gumbel, COUNT=64)
    right = noise.gumbel(np.array(given, np.uint32)) / np.log(2)
    assert np.abs(gumbel[0].numpy() - right).max() < 4e-6


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_draw_equals_that_of_the_sampler_that_sorts(name: str) -> None:
    """Scores of both samplers differ in the seventh digit. With these seeds no two tokens are so
    close that this changes a draw."""
    rows, vocab = 3, 500
    logits = some_logits(rows, vocab, seed=len(name))
    settings, keys = [SETTINGS[name]] * rows, some_keys(rows)
    kept = logits.clone()
    right = sorted_draw(logits, settings, keys).tolist()
    assert sample(logits, settings, keys).tolist() == right
    if SETTINGS[name].top_k <= 0 and SETTINGS[name].top_p == 1.0:
        assert draw(logits, settings, keys).tolist() == right
    assert torch.equal(logits, kept)


def test_rows_with_different_settings_do_not_mix() -> None:
    names = ["plain", "top_k", "top_p", "min_p", "all", "plain"]
    settings = [*(SETTINGS[name] for name in names), SamplingParams(temperature=0.0)]
    logits = some_logits(len(settings), 2500, seed=3)  # two parts
    keys = some_keys(len(settings))
    together = sample(logits, settings, keys)
    right = sorted_draw(logits, [*settings[:-1], SamplingParams(top_k=1)], keys)
    assert together.tolist() == right.tolist()
    for row in (0, 2):
        alone = sample(logits[row : row + 1], settings[row : row + 1], keys[row : row + 1])
        assert int(alone[0]) == int(together[row])


def test_a_draw_does_not_depend_on_the_number_of_parts() -> None:
    settings = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(min_p=0.1)]
    logits = some_logits(3, 9000, seed=5)
    logits[1, [4000, 8000]] = 50.0
    found = draw(logits, settings, some_keys(3))
    right = sorted_draw(logits, settings[:1] * 3, some_keys(3))
    right[1] = 4000
    right[2] = sorted_draw(logits[2:], settings[2:], some_keys(3)[2:])[0]
    assert found.tolist() == right.tolist()


def test_ties_are_broken_by_the_lowest_id() -> None:
    logits, settings, keys = torch.zeros(4, 5000), [SamplingParams(top_k=2003)] * 4, some_keys(4)
    logits[:, 3000:3003] = 1e-3 * torch.arange(3)  # sort keys resolve 3e-8
    kept = np.r_[0:2001, 3001, 3002]  # 3000 ties with all others and has a higher id
    bits = noise.bits_of(keys, np.broadcast_to(kept, (4, 2003)), 5000)
    right = kept[noise.pick(logits[:, kept].numpy(), bits)].tolist()
    assert sample(logits, settings, keys).tolist() == right
    assert sorted_draw(logits, settings, keys).tolist() == right


@pytest.mark.parametrize("name", ["top_k 4500", "top_p 0.95", "both"])
def test_a_limit_may_lie_beyond_the_4096_likeliest_tokens(name: str) -> None:
    """The distribution is nearly flat: the 4,096 likeliest tokens have less than 0.95 of it."""
    sampling = {
        "top_k 4500": SamplingParams(top_k=4500),
        "top_p 0.95": SamplingParams(top_p=0.95),
        "both": SamplingParams(top_k=4500, top_p=0.99),
    }[name]
    logits = torch.linspace(1.0, 0.0, 5000).expand(200, -1).contiguous()
    right = sorted_draw(logits, [sampling] * 200, some_keys(200))
    rows = (right > 4096).nonzero()[:2, 0]
    assert len(rows) == 2
    found = sample(logits[rows], [sampling] * 2, some_keys(200)[rows.numpy()])
    assert found.tolist() == right[rows].tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.5), SamplingParams()])
def test_nan_rows_stay_within_the_vocabulary(sampling: SamplingParams) -> None:
    logits = torch.full((3, 600), float("nan"))
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    found = sample(logits, [sampling] * 3, some_keys(3))
    assert bool(((found >= 0) & (found < 600)).all())
    if sampling.top_p == 1.0:
        found = draw(logits, [sampling] * 3, some_keys(3))
        assert bool(((found >= 0) & (found < 600)).all())


def test_draws_stay_within_top_p() -> None:
    """Draws equal those of the sampler that sorts; `test_sampler.py` counts how often that sampler
    draws each token."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(7, -1).contiguous()
    settings, keys = [SamplingParams(top_p=0.65)] * 7, some_keys(7)
    ids = sample(logits, settings, keys).tolist()
    assert set(ids) == {0, 1}
    assert ids == sorted_draw(logits, settings, keys).tolist()


def test_only_possible_tokens_are_drawn() -> None:
    logits = torch.full((8, 70), float("-inf"))
    logits[:, [7, 30]] = 0.0
    ids = sample(logits, [SamplingParams()] * 4 + [SamplingParams(top_k=5)] * 4, some_keys(8))
    assert set(ids[:4].tolist()) == set(ids[4:].tolist()) == {7, 30}


def test_bf16_logits_draw_as_the_same_numbers_in_fp32() -> None:
    logits = some_logits(4, 300).bfloat16()
    settings, keys = [SamplingParams(top_p=0.9), SamplingParams()] * 2, some_keys(4)
    assert (
        sample(logits, settings, keys).tolist() == sample(logits.float(), settings, keys).tolist()
    )


def test_the_error_names_a_refused_argument() -> None:
    logits = some_logits(2, 50)
    ones, k = torch.ones(2), torch.ones(2, dtype=torch.int32)
    with pytest.raises(LayoutError, match="top_k"):
        kernel.sample(logits, ones, ones, ones, ones, ones)
    with pytest.raises(LayoutError, match="keys"):
        kernel.sample(logits, ones, k, ones, ones, torch.ones(2, dtype=torch.int32))
    with pytest.raises(LayoutError, match="min_p"):
        kernel.draw(logits, ones, torch.ones(3), k.long())
    with pytest.raises(LayoutError, match="out must be"):
        argmax(logits, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(LayoutError, match="float64"):
        argmax(logits.double())
    with pytest.raises(LayoutError, match="columns"):
        argmax(torch.zeros(1, 0))
    assert argmax(torch.zeros(0, 5)).shape == (0,)
