"""Norms, activation and fp8 quantization between the products."""

from collections.abc import Callable

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense import fused  # noqa: E402

pytestmark = pytest.mark.torch

EPS = 1e-5
SIZES = [8, 576, 1000, 4096]
# Relative. fp16 rounds alike; the interpreter cuts bf16 instead of rounding, twice in a row.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def some(tokens: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, size, generator=generator) * 2).to(dtype)


def a_norm(x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """As Hugging Face's LlamaRMSNorm rounds."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * normed.to(x.dtype)


def a_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).to(gate.dtype) * up


def a_quantization(x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    return (x.float() * (448.0 / peak)).to(torch.float8_e4m3fn), peak / 448.0


def assert_close(found: Tensor, right: Tensor) -> None:
    assert found.dtype == right.dtype
    tolerance = TOLERANCE[right.dtype]
    torch.testing.assert_close(found.float(), right.float(), rtol=tolerance, atol=tolerance)


def assert_fp8_close(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    """At most one step of fp8 apart (1/8), and nearly always equal: the inputs may differ by one
    ulp of fp32."""
    torch.testing.assert_close(found[1], right[1], rtol=1e-6, atol=0)
    apart = (found[0].float() - right[0].float()).abs()
    assert bool((apart <= right[0].float().abs() / 7 + 2**-8).all())
    assert float((apart > 0).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_agrees_with_torch(size: int, dtype: torch.dtype) -> None:
    x, gain = some(3, size, dtype), some(1, size, dtype, seed=1)[0]
    kept = x.clone()
    assert_close(fused.rms_norm(x, gain, EPS), a_norm(x, gain))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, gain = (some(3, 576, dtype, seed) for seed in range(3))
    total = x + residual
    found = fused.add_rms_norm(x, residual, gain[0], EPS)
    assert_close(residual, total)
    assert_close(found, a_norm(residual, gain[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 1536, 5000])
def test_silu_mul_agrees_with_torch(size: int, dtype: torch.dtype) -> None:
    gate_up = some(3, 2 * size, dtype)
    assert_close(fused.silu_mul(gate_up), a_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 1, 80), (16, 8, 128)])
def test_head_norm_leaves_the_values(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    qkv = some(3, (heads + 2 * kv_heads) * dim, dtype)
    q_gain, k_gain = some(1, dim, dtype, 1)[0], some(1, dim, dtype, 2)[0]
    right = qkv.view(3, -1, dim).clone()
    right[:, :heads] = a_norm(right[:, :heads], q_gain)
    right[:, heads : heads + kv_heads] = a_norm(right[:, heads : heads + kv_heads], k_gain)
    values = qkv[:, (heads + kv_heads) * dim :].clone()
    fused.head_norm_(qkv, q_gain, k_gain, EPS, heads, kv_heads, dim)
    assert_close(qkv, right.view(3, -1))
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], values)


def test_outputs_that_are_given_are_filled_and_nothing_else() -> None:
    x, gain, gate_up = some(2, 64), some(1, 64, seed=1)[0], some(2, 128)
    runs: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda out: fused.rms_norm(x, gain, EPS, out), a_norm(x, gain)),
        (lambda out: fused.silu_mul(gate_up, out), a_silu_mul(gate_up)),
    ]
    for run, right in runs:
        wide = torch.full((4, 96), float("nan"))
        out = wide[1:3, 16:80]  # a view with a stride of its own
        assert run(out) is out
        assert_close(out, right)
        assert int(wide.isnan().sum()) == 4 * 96 - 2 * 64


def test_rows_may_lie_apart() -> None:
    whole, gain = some(3, 200), some(1, 64, seed=1)[0]
    x = whole[:, 8:72]
    assert_close(fused.rms_norm(x, gain, EPS), a_norm(x, gain))


def test_fp8_variants_quantize_what_the_plain_ones_answer() -> None:
    x, residual, gain = some(3, 576), some(3, 576, seed=1), some(1, 576, seed=2)[0]
    x[1] = 0.0
    gate_up = some(3, 2 * 768)
    other = residual.clone()
    assert_fp8_close(fused.quantize_rows(x), a_quantization(x))
    assert_fp8_close(fused.rms_norm_fp8(x, gain, EPS), a_quantization(a_norm(x, gain)))
    found = fused.add_rms_norm_fp8(x, residual, gain, EPS)
    assert_fp8_close(found, a_quantization(fused.add_rms_norm(x, other, gain, EPS)))
    assert torch.equal(residual, other)
    assert_fp8_close(fused.silu_mul_fp8(gate_up), a_quantization(a_silu_mul(gate_up)))


def test_fp8_rows_reach_the_end_of_the_range() -> None:
    values, scales = fused.quantize_rows(torch.tensor([[3.0, -6.0] * 4, [0.0] * 8]))
    assert values.float()[0, :2].tolist() == [224.0, -448.0]
    assert scales[0, 0] == pytest.approx(6.0 / 448.0)
    assert values.float()[1].abs().max() == 0


ROW_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: fused.rms_norm(x, torch.linspace(-2, 2, 128), EPS),
    "add_rms_norm": lambda x: fused.add_rms_norm(x, x * 0.3, torch.linspace(-2, 2, 128), EPS),
    "silu_mul": fused.silu_mul,
    "quantize_rows": lambda x: fused.quantize_rows(x)[0].float(),
}


@pytest.mark.parametrize("name", list(ROW_KERNELS))
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    run, x = ROW_KERNELS[name], some(9, 128)
    together = run(x)
    for row in (0, 4, 8):
        assert torch.equal(run(x[row : row + 1])[0], together[row])
    assert torch.equal(run(x.flip(0)).flip(0), together)


def test_no_tokens_is_no_work() -> None:
    gain = torch.ones(64)
    assert fused.rms_norm(torch.empty(0, 64), gain, EPS).shape == (0, 64)
    assert fused.silu_mul(torch.empty(0, 64)).shape == (0, 32)
    assert fused.quantize_rows(torch.empty(0, 64))[1].shape == (0, 1)


def test_what_is_not_taken_is_named() -> None:
    x, gain = some(2, 64), torch.ones(64)
    with pytest.raises(LayoutError, match="multiple of 8"):
        fused.rms_norm(some(2, 60), torch.ones(60), EPS)
    with pytest.raises(LayoutError, match="at most 16384"):
        fused.rms_norm(some(1, 16392), torch.ones(16392), EPS)
    with pytest.raises(LayoutError, match="gain"):
        fused.rms_norm(x, torch.ones(32), EPS)
    with pytest.raises(LayoutError, match="residual"):
        fused.add_rms_norm(x, some(3, 64), gain, EPS)
    with pytest.raises(LayoutError, match="out must be"):
        fused.rms_norm(x, gain, EPS, out=torch.empty(2, 32))
    with pytest.raises(LayoutError, match="float64"):
        fused.rms_norm(x.double(), gain, EPS)
    with pytest.raises(LayoutError, match="k_gain"):
        fused.head_norm_(some(2, 256), gain, torch.ones(32), EPS, 2, 1, 64)
    with pytest.raises(LayoutError, match="float8_e4m3fn"):
        fused.quantize_rows(x, (torch.empty(2, 64), torch.empty(2, 1)))
