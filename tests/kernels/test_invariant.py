"""The product of the deterministic setting is right, and each row is independent of other rows."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense.invariant import matmul  # noqa: E402

pytestmark = pytest.mark.torch

# Relative to the largest output. Inputs are equal on both sides; only the sum's order and the
# output's rounding differ (the interpreter truncates bf16 instead of rounding it).
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("tokens", "num_out", "num_in"), [(1, 64, 64), (70, 150, 100), (3, 201, 180)]
)
def test_matmul_agrees_with_torch_in_double(
    tokens: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    x, weight = some(tokens, num_in).to(dtype), some(num_out, num_in, seed=1).to(dtype)
    bias = some(num_out, seed=2).to(dtype)
    wide = torch.full((tokens + 1, num_out + 8), float("nan"), dtype=dtype)
    matmul(x, weight, bias, out=wide[:tokens, :num_out])
    right = x.double() @ weight.double().t() + bias.double()
    off = (wide[:tokens, :num_out].double() - right).abs().max() / right.abs().max()
    assert float(off) < TOLERANCE[dtype]
    assert int(wide.isnan().sum()) == wide.numel() - tokens * num_out
    assert torch.equal(matmul(x, weight, bias), wide[:tokens, :num_out])


def test_a_row_does_not_depend_on_other_rows() -> None:
    x, weight = some(140, 96), some(80, 96, seed=1)
    together = matmul(x, weight)
    for first, last in ((0, 1), (139, 140), (17, 90)):
        assert torch.equal(matmul(x[first:last], weight), together[first:last])
    assert torch.equal(matmul(x.flip(0), weight).flip(0), together)


def test_refused_arguments_are_named() -> None:
    x, weight = some(2, 32), some(16, 32)
    with pytest.raises(LayoutError, match="must agree"):
        matmul(x, some(16, 24))
    with pytest.raises(LayoutError, match="float64"):
        matmul(x.double(), weight.double())
    with pytest.raises(LayoutError, match="bias"):
        matmul(x, weight, torch.ones(8))
    with pytest.raises(LayoutError, match="out must be"):
        matmul(x, weight, out=torch.empty(2, 8))
    assert matmul(torch.empty(0, 32), weight).shape == (0, 16)
