"""Token ids on the device: argmax and draws, against the sampler that sorts."""

import numpy as np
import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.core.request import SamplingParams  # noqa: E402
from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.sampling.sample import argmax, sample  # noqa: E402
from mainstem.runner.sampler import choice_of, choose  # noqa: E402
from tests.runner.steps import a_sample_batch  # noqa: E402

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


def draw(logits: Tensor, settings: list[SamplingParams], uniform: np.ndarray) -> Tensor:
    batch = a_sample_batch(settings, logits.shape[1], uniform.astype(np.float32))
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
    return sample(logits, *(torch.from_numpy(column) for column in columns))


def sorted_draw(logits: Tensor, settings: list[SamplingParams], uniform: np.ndarray) -> Tensor:
    batch = a_sample_batch(settings, logits.shape[1], uniform.astype(np.float32))
    return choose(logits, choice_of(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (2, 9000), (5, 4096)])
def test_argmax_takes_the_first_of_equals(rows: int, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (rows, vocab), generator=generator).to(dtype)
    for _ in range(2):  # the meeting places are left as they were found
        assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_argmax_reads_bf16() -> None:
    logits = some_logits(2, 300).bfloat16()
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_argmax_of_parts_knows_signs_and_infinities() -> None:
    logits = torch.full((4, 10_000), float("-inf"))
    logits[0, 9_999] = -5.0
    logits[1, 9_000] = -0.0
    logits[1, 9_500] = 0.0
    logits[2, 0] = -1e30
    logits[2, 8_200] = -1e-30
    out = torch.full((6,), -7)
    argmax(logits, out[1:5])
    assert out.tolist() == [-7, 9_999, 9_000, 8_200, 0, -7]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_draw_is_the_sorted_draw(name: str) -> None:
    """Masses differ from the sorted path's in the seventh digit, so a random number would have to
    lie that close to a token's edge; these seeds do not."""
    rows, vocab = 2, 500
    logits = some_logits(rows, vocab, seed=len(name))
    uniform = (np.arange(rows) + 0.37) / rows
    settings = [SETTINGS[name]] * rows
    kept = logits.clone()
    assert (
        draw(logits, settings, uniform).tolist() == sorted_draw(logits, settings, uniform).tolist()
    )
    assert torch.equal(logits, kept)


def test_rows_with_different_settings_do_not_mix() -> None:
    names = ["plain", "top_k", "top_p", "min_p", "all"]
    settings = [*(SETTINGS[name] for name in names), SamplingParams(temperature=0.0)]
    logits = some_logits(len(settings), 2500, seed=3)  # two parts
    uniform = np.linspace(0.02, 0.95, len(settings))
    together = draw(logits, settings, uniform)
    right = sorted_draw(logits, [*settings[:-1], SamplingParams(top_k=1)], uniform)
    assert together.tolist() == right.tolist()
    alone = draw(logits[2:3], settings[2:3], uniform[2:3])
    assert int(alone[0]) == int(together[2])


def test_equals_are_taken_in_the_order_of_ids() -> None:
    logits = torch.zeros(3, 5000)
    logits[:, :3] = 1e-3 * torch.arange(3)
    uniform = (np.arange(3) + 0.5) / 3
    ids = draw(logits, [SamplingParams(top_k=2003)] * 3, uniform)
    # 2, 1, 0 and then 3, 4, ... 2002
    assert ids.tolist() == [int(u * 2003) for u in uniform]


@pytest.mark.parametrize("name", ["top_k 4500", "top_p 0.95", "both"])
def test_an_answer_may_lie_beyond_the_likeliest(name: str) -> None:
    """Nearly flat: 4,096 tokens are neither enough for 0.95 nor for rank 4,500."""
    sampling = {
        "top_k 4500": SamplingParams(top_k=4500),
        "top_p 0.95": SamplingParams(top_p=0.95),
        "both": SamplingParams(top_k=4500, top_p=0.99),
    }[name]
    logits = torch.linspace(1.0, 0.0, 5000).expand(2, -1).contiguous()
    uniform = np.array([0.3, 0.995])
    found = draw(logits, [sampling] * 2, uniform)
    assert found.tolist() == sorted_draw(logits, [sampling] * 2, uniform).tolist()
    assert int(found[1]) > 4096


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_that_are_not_numbers_stay_within_the_vocabulary() -> None:
    logits = torch.full((3, 600), float("nan"))
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    found = draw(logits, [SamplingParams(top_p=0.5)] * 3, np.array([0.1, 0.5, 0.9]))
    assert bool(((found >= 0) & (found < 600)).all())


def test_a_draw_gives_the_distribution() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(7, -1).contiguous()
    uniform = (np.arange(7) + 0.5) / 7
    ids = draw(logits, [SamplingParams(top_p=0.65)] * 7, uniform)
    assert torch.bincount(ids, minlength=4).tolist() == [4, 3, 0, 0]


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.full((4, 70), float("-inf"))
    logits[:, [7, 30]] = 0.0
    almost = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
    settings = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_k=5),
    ]
    assert draw(logits, settings, np.array([0.0, almost, 0.0, almost])).tolist() == [7, 30, 7, 30]


def test_bf16_logits_are_those_numbers() -> None:
    logits = some_logits(2, 300).bfloat16()
    settings, uniform = [SamplingParams(top_p=0.9)] * 2, np.array([0.4, 0.9])
    assert (
        draw(logits, settings, uniform).tolist() == draw(logits.float(), settings, uniform).tolist()
    )


def test_what_is_not_taken_is_named() -> None:
    logits = some_logits(2, 50)
    ones, k = torch.ones(2), torch.ones(2, dtype=torch.int32)
    with pytest.raises(LayoutError, match="top_k"):
        sample(logits, ones, ones, ones, ones, ones)
    with pytest.raises(LayoutError, match="uniform"):
        sample(logits, ones, k, ones, ones, torch.ones(3))
    with pytest.raises(LayoutError, match="out must be"):
        argmax(logits, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(LayoutError, match="float64"):
        argmax(logits.double())
    with pytest.raises(LayoutError, match="columns"):
        argmax(torch.zeros(1, 0))
    assert argmax(torch.zeros(0, 5)).shape == (0,)
