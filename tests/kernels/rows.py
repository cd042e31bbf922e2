"""Rows for tests of the kernels between matrix products, and how close answers must be."""

from collections.abc import Callable

import torch
from torch import Tensor

# Relative errors. fp16 is rounded the same way on both sides; the interpreter truncates bf16
# instead of rounding it, twice in succession.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def some(tokens: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, size, generator=generator) * 2).to(dtype)


def a_quantization(x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    return (x.float() * (448.0 / peak)).to(torch.float8_e4m3fn), peak / 448.0


def assert_close(found: Tensor, right: Tensor) -> None:
    assert found.dtype == right.dtype
    tolerance = TOLERANCE[right.dtype]
    torch.testing.assert_close(found.float(), right.float(), rtol=tolerance, atol=tolerance)


def assert_fp8_close(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    """Values differ by at most one step of fp8 (1/8) and are nearly always equal: the inputs may
    differ by a few ulp of fp32."""
    torch.testing.assert_close(found[1], right[1], rtol=2e-6, atol=0)
    apart = (found[0].float() - right[0].float()).abs()
    assert bool((apart <= right[0].float().abs() / 7 + 2**-8).all())
    assert float((apart > 0).float().mean()) < 0.01


def assert_rows_are_independent(run: Callable[[Tensor], Tensor]) -> None:
    """A row has the same bits alone, in a batch, and at another place of it."""
    x = some(9, 128)
    together = run(x)
    for row in (0, 4, 8):
        assert torch.equal(run(x[row : row + 1])[0], together[row])
    assert torch.equal(run(x.flip(0)).flip(0), together)
