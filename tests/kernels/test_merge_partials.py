"""The kernel that merges packed Partials of a step; test_span.py checks plain ones."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.kernels.attention.layout import (  # noqa: E402
    HEADER_INTS,
    HEADER_MERGES,
    HEADER_MOST_PARTIALS,
    HEADER_NUM_MERGES,
    MERGE_PARTIALS,
    MERGE_ROWS,
    MERGE_SLOT,
    MERGE_TOKEN,
)
from mainstem.kernels.attention.triton.merge_partials import _merge_partials_kernel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

HEADS, NUM_PROGRAMS = 4, 3


def _pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of Partials in the layout of Hopper's kernels (which need a card), and factors."""
    slots, heads, dim = rows.shape
    factors = rows.abs().amax(2).clamp_min(1e-30)
    halves = (rows / factors[:, :, None]).half().view(slots, heads, dim // 32, 4, 4, 2)
    return halves.transpose(3, 4).reshape(slots, heads, dim), factors


def _plan(counts: list[int]) -> Tensor:
    """A plan of merges only, of `counts` Partials for each token, with tokens in reverse order."""
    parts = torch.tensor(counts, dtype=torch.int32)
    plan = torch.zeros(HEADER_INTS + MERGE_ROWS * len(counts), dtype=torch.int32)
    plan[HEADER_MERGES] = HEADER_INTS
    plan[HEADER_NUM_MERGES], plan[HEADER_MOST_PARTIALS] = len(counts), max(counts)
    merges = plan[HEADER_INTS:].view(MERGE_ROWS, -1)
    merges[MERGE_TOKEN] = torch.arange(len(counts)).flip(0)
    merges[MERGE_SLOT] = parts.cumsum(0) - parts
    merges[MERGE_PARTIALS] = parts
    return plan


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([2, 5, 8, 1, 3, 2, 2], id="many rows"),
        pytest.param([2, 13, 30], id="few rows"),
        pytest.param([140], id="one row"),
    ],
)
def test_packed_partials_are_merged(counts: list[int], dim: int) -> None:
    """Also with values far outside the range of fp16, with dims that are far smaller than others,
    and without keys.
    """
    torch.manual_seed(0)
    magnitudes = 10.0 ** torch.randint(-9, 9, (sum(counts), HEADS, 1))
    rows = torch.randn(sum(counts), HEADS, dim) * magnitudes
    rows[:, :, ::3] *= 2.0**-20
    lses = torch.randn(sum(counts), HEADS) * 4
    lses[: counts[0] if len(counts) > 1 else 1] = float("-inf")  # all Partials of a token, or one
    rows[0] = 0.0
    halves, factors = _pack(rows)
    out = torch.full((len(counts), HEADS, dim), float("nan"))
    lse = torch.full((len(counts), HEADS), float("nan"))
    programs = 1 if len(counts) > 4 else NUM_PROGRAMS if len(counts) > 1 else 16
    _merge_partials_kernel[(programs,)](
        out, lse, _plan(counts), halves, torch.stack((lses, factors), dim=2),
        out.stride(0), out.stride(1), HEADS=HEADS, HEAD_DIM=dim, DIM=dim,
        IS_ORDERED=False, HAS_LSE=True, IS_PACKED=True, LETS_IN=False, OVERLAPS=False,
    )  # fmt: skip
    pairs = zip(torch.split(rows, counts), torch.split(lses, counts), strict=True)
    for token, (parts, part_lses) in enumerate(list(pairs)[::-1]):
        top = part_lses.amax(0).nan_to_num(neginf=0.0)
        weights = torch.exp2(part_lses - top).double()
        weights = (weights / weights.sum(0).clamp_min(1e-30))[:, :, None]
        right = (weights * parts.double()).sum(0)
        sizes = parts.double().abs()
        # Rounding to fp16 is relative to the value, or to the row's largest if the value is far
        # smaller.
        rounding = torch.maximum(sizes * 2**-11, sizes.amax(2, keepdim=True) * 2**-25)
        allowed = (weights * (rounding + sizes * 2**-20)).sum(0)  # 2**-20: sums in fp32
        assert ((out[token] - right).abs() <= allowed).all()
        right_lse = torch.logsumexp(part_lses.double() * 0.6931471805599453, 0)
        assert torch.allclose(lse[token].double(), right_lse, atol=1e-5)
