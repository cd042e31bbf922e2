"""The kernels of Llama's block by the names that models/device.py uses; the kernels themselves are
in norms.py, head_norms.py, activations.py and rows.py."""

from torch import Tensor

from mainstem.kernels.dense import head_norms, norms
from mainstem.kernels.dense.activations import Act, activate_gated, activate_gated_fp8
from mainstem.kernels.dense.fp8_rows import Fp8Rows
from mainstem.kernels.dense.norms import Delta, Norm


def rms_norm(x: Tensor, gain: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [tokens, hidden] / sqrt(mean(x^2) + eps) * gain."""
    return norms.norm_rows(x, Norm(gain, eps), out=out)


def add_rms_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x, in place; returns rms_norm(residual)."""
    return norms.norm_rows(residual, Norm(gain, eps), Delta(x), out)


def rms_norm_fp8(x: Tensor, gain: Tensor, eps: float, out: Fp8Rows | None = None) -> Fp8Rows:
    """rms_norm, quantized per token."""
    return norms.norm_rows_fp8(x, Norm(gain, eps), out=out)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, out: Fp8Rows | None = None
) -> Fp8Rows:
    """add_rms_norm, quantized per token."""
    return norms.norm_rows_fp8(residual, Norm(gain, eps), Delta(x), out)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up; [tokens, 2 * size] -> [tokens, size]."""
    return activate_gated(gate_up, Act.SILU, out)


def silu_mul_fp8(gate_up: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """silu_mul, quantized per token."""
    return activate_gated_fp8(gate_up, Act.SILU, out)


def head_norm_(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    """RMS norm of each query and each key head, in place (Qwen3)."""
    q_norm, k_norm = Norm(q_gain, eps), Norm(k_gain, eps)
    head_norms.head_norm_(qkv, q_norm, k_norm, heads, kv_heads, dim)
