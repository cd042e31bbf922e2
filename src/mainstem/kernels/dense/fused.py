# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Norm, residual, activation and fp8 quantization between the products, one pass over memory each.

Every kernel gives a program one token, or a part of it, in blocks that depend on the row's length
alone, so a row's bits do not depend on the rows beside it. Rounding is that of Hugging
Face's models: sums in fp32, the normed row rounded to its dtype, then multiplied by the gain.

The `_fp8` variants answer (values, scales) with values * scales = the row, scales [tokens, 1]: a
row's largest magnitude becomes 448, the largest float8_e4m3fn. Their values are those of the plain
variant, quantized.

With outputs given nothing is allocated and nothing waits for the device: safe in a CUDA graph.

Gains are a model's constants: from Hopper on they are read while the kernels ahead may still run
(`overlap.py`), so none of these may be writing them.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense import fp8_rows
from mainstem.kernels.dense.fp8_rows import FP8, Fp8Rows
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HIDDEN = 16384
MAX_MLP = 32768
_SILU_BLOCK = 2048
FP8_MAX = tl.constexpr(fp8_rows.MAX)
MIN_PEAK = tl.constexpr(fp8_rows.MIN_PEAK)


@triton.jit
def _store_row(
    row, lanes, out_ptr, scales_ptr, token, stride_out, SIZE: tl.constexpr, IS_FP8: tl.constexpr
):
    """A row that is rounded to the model's dtype already; as it is, or with its scale."""
    if IS_FP8:
        wide = row.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(wide), 0), MIN_PEAK)
        tl.store(scales_ptr + token, tl.div_rn(peak, FP8_MAX))
        wide = wide * tl.div_rn(FP8_MAX, peak)
        row = tl.minimum(tl.maximum(wide, -FP8_MAX), FP8_MAX)
    out_ptrs = out_ptr + token * stride_out + lanes
    tl.store(out_ptrs, row.to(out_ptr.dtype.element_ty), mask=lanes < SIZE)


@triton.jit
def _normed(row, gain, eps, SIZE: tl.constexpr, element: tl.constexpr):
    """row [BLOCK] fp32, zero past SIZE."""
    mean = tl.sum(row * row, 0) / SIZE
    return (row * tl.rsqrt(mean + eps)).to(element).to(tl.float32) * gain


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, gain_ptr, out_ptr, scales_ptr, stride_x, stride_residual, stride_out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    element = x_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)
    wait_for_ahead(OVERLAPS)
    row = tl.load(x_ptr + token * stride_x + lanes, mask=is_lane, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_residual + lanes
        row += tl.load(residual_ptrs, mask=is_lane, other=0.0).to(tl.float32)
        rounded = row.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask=is_lane)
        row = rounded.to(tl.float32)
    row = _normed(row, gain, eps, SIZE, element).to(element)
    _store_row(row, lanes, out_ptr, scales_ptr, token, stride_out, SIZE, IS_FP8)


@triton.jit
def _head_norm_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, stride_token, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and TILE query or key heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    is_cell = (heads < HEADS + KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    ptrs = qkv_ptr + token * stride_token + heads[:, None] * HEAD_DIM + dims[None, :]
    q_gain = tl.load(q_gain_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
    k_gain = tl.load(k_gain_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
    wait_for_ahead(OVERLAPS)
    rows = tl.load(ptrs, mask=is_cell, other=0.0).to(tl.float32)
    gain = tl.where((heads < HEADS)[:, None], q_gain[None, :], k_gain[None, :]).to(tl.float32)
    mean = tl.sum(rows * rows, 1) / HEAD_DIM
    element = qkv_ptr.dtype.element_ty
    normed = (rows * tl.rsqrt(mean + eps)[:, None]).to(element).to(tl.float32) * gain
    tl.store(ptrs, normed.to(element), mask=is_cell)


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, stride_out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_FP8: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and block; fp8 needs the row's peak, so there one block is the row."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    element = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + token * stride_x + lanes, mask=is_lane, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + lanes, mask=is_lane, other=0.0).to(tl.float32)
    row = ((gate * tl.sigmoid(gate)).to(element).to(tl.float32) * up).to(element)
    _store_row(row, lanes, out_ptr, scales_ptr, token, stride_out, SIZE, IS_FP8)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, stride_out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    row = tl.load(x_ptr + token * stride_x + lanes, mask=lanes < SIZE, other=0.0)
    _store_row(row, lanes, out_ptr, scales_ptr, token, stride_out, SIZE, True)


def rms_norm(x: Tensor, gain: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [tokens, hidden] / sqrt(mean(x^2) + eps) * gain; `out` may be x."""
    target = torch.empty_like(x) if out is None else out
    _norm(x, None, gain, eps, target, None)
    return target


def add_rms_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x, in place and rounded to its dtype; returns rms_norm(residual)."""
    target = torch.empty_like(x) if out is None else out
    _norm(x, residual, gain, eps, target, None)
    return target


def rms_norm_fp8(x: Tensor, gain: Tensor, eps: float, out: Fp8Rows | None = None) -> Fp8Rows:
    """rms_norm, quantized per token."""
    return _quantized(x.shape[1], x, out, lambda v, s: _norm(x, None, gain, eps, v, s))


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, out: Fp8Rows | None = None
) -> Fp8Rows:
    """add_rms_norm, quantized per token; the residual keeps its dtype."""
    return _quantized(x.shape[1], x, out, lambda v, s: _norm(x, residual, gain, eps, v, s))


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up; [tokens, 2 * size] -> [tokens, size]."""
    if out is None:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _silu_mul(gate_up, out, None)
    return out


def silu_mul_fp8(gate_up: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """silu_mul, quantized per token."""
    size = gate_up.shape[1] // 2
    return _quantized(size, gate_up, out, lambda v, s: _silu_mul(gate_up, v, s))


def quantize_rows(x: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """x [tokens, size] per token."""

    def launch(values: Tensor, scales: Tensor) -> None:
        _check("x", x, x.shape[1], MAX_MLP)
        if len(x):
            _quantize_kernel[(len(x),)](
                x, values, scales, x.stride(0), values.stride(0),
                **_row_options(x.shape[1]), **overlap_options(x.device),
            )  # fmt: skip

    return _quantized(x.shape[1], x, out, launch)


def head_norm_(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    """RMS norm of each query and each key head of qkv [tokens, (heads + 2 kv_heads) * dim], in
    place (Qwen3); values stay."""
    _check("qkv", qkv, (heads + 2 * kv_heads) * dim, 2 * MAX_MLP)
    for name, gain in (("q_gain", q_gain), ("k_gain", k_gain)):
        if tuple(gain.shape) != (dim,) or not gain.is_contiguous():
            raise LayoutError(f"{name} must be contiguous [{dim}], got {tuple(gain.shape)}")
    if len(qkv) == 0:
        return
    tile = 8
    _head_norm_kernel[(len(qkv), triton.cdiv(heads + kv_heads, tile))](
        qkv, q_gain, k_gain, qkv.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, DIM=triton.next_power_of_2(dim), TILE=tile,
        num_warps=4, **overlap_options(qkv.device),
    )  # fmt: skip


def _norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
) -> None:
    size = x.shape[1]
    _check("x", x, size, MAX_HIDDEN)
    if tuple(gain.shape) != (size,) or not gain.is_contiguous():
        raise LayoutError(f"gain must be contiguous [{size}], got {tuple(gain.shape)}")
    if residual is not None:
        _check("residual", residual, size, MAX_HIDDEN)
        if len(residual) != len(x):
            raise LayoutError(f"residual has {len(residual)} tokens, x {len(x)}")
    _check_out(out, len(x), size, x.dtype if scales is None else None)
    if len(x) == 0:
        return
    _norm_kernel[(len(x),)](
        x, x if residual is None else residual, gain, out, x if scales is None else scales,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
        HAS_RESIDUAL=residual is not None, IS_FP8=scales is not None,
        **_row_options(size), **overlap_options(x.device),
    )  # fmt: skip


def _silu_mul(gate_up: Tensor, out: Tensor, scales: Tensor | None) -> None:
    size = gate_up.shape[1] // 2
    _check("gate_up", gate_up, 2 * size, 2 * MAX_MLP)
    _check_out(out, len(gate_up), size, gate_up.dtype if scales is None else None)
    if len(gate_up) == 0:
        return
    options = _row_options(size)
    if scales is None and options["BLOCK"] > _SILU_BLOCK:
        options = {"SIZE": size, "BLOCK": _SILU_BLOCK, "num_warps": 4}
    _silu_mul_kernel[(len(gate_up), triton.cdiv(size, options["BLOCK"]))](
        gate_up, out, gate_up if scales is None else scales, gate_up.stride(0), out.stride(0),
        IS_FP8=scales is not None, **options, **overlap_options(gate_up.device),
    )  # fmt: skip


def _quantized(
    size: int, x: Tensor, out: Fp8Rows | None, launch: Callable[[Tensor, Tensor], None]
) -> Fp8Rows:
    """Run a kernel over outputs that are given or made here."""
    if out is None:
        values = torch.empty(len(x), size, dtype=FP8, device=x.device)
        out = values, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    values, scales = out
    if values.dtype != FP8 or scales.dtype != torch.float32 or scales.shape != (len(x), 1):
        raise LayoutError("out must be (float8_e4m3fn [tokens, size], float32 [tokens, 1])")
    if not scales.is_contiguous():
        raise LayoutError("scales must be contiguous")
    if x.is_cuda:
        launch(values, scales)
    else:  # the interpreter rounds to fp8 wrongly, torch does not
        wide = torch.empty(values.shape)
        launch(wide, scales)
        values.copy_(wide)
    return out


def _row_options(size: int) -> dict[str, int]:
    """Block and warps by the row's length alone: 16 bytes or more a thread."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _check(name: str, x: Tensor, size: int, largest: int) -> None:
    if x.dim() != 2 or x.shape[1] != size or x.stride(1) != 1:
        raise LayoutError(f"{name} must be [tokens, {size}] with a contiguous last axis, "
                          f"got {tuple(x.shape)}")  # fmt: skip
    if size % 8 or size > largest:
        raise LayoutError(f"{name} must have a multiple of 8 and at most {largest} columns, "
                          f"got {size}")  # fmt: skip
    if x.dtype not in DTYPES:
        raise LayoutError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def _check_out(out: Tensor, tokens: int, size: int, dtype: torch.dtype | None) -> None:
    if tuple(out.shape) != (tokens, size) or out.stride(1) != 1:
        raise LayoutError(f"out must be [{tokens}, {size}] with a contiguous last axis, "
                          f"got {tuple(out.shape)}")  # fmt: skip
    if dtype is not None and out.dtype != dtype:
        raise LayoutError(f"out must be {dtype}, got {out.dtype}")
