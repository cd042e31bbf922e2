# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The norms around attention and MLP, and the addition to the residual that precedes them, in one
pass over memory (`rows.py` says what these kernels have in common):

    x += scale * after(rows + more)        each part is optional; x is the residual
    out = norm(x)                          optional too

Sums are in fp32; rounding is that of Hugging Face's models. Each step of the first line is rounded
to the model's dtype. An RMS norm rounds the normed row to that dtype and then multiplies by the
gain (Llama), or rounds only the product if the gain is fp32 (Gemma, OLMo 2, gpt-oss). LayerNorm
rounds once, at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.fp8_rows import Fp8Per, Fp8Rows
from mainstem.kernels.dense.rows import (
    MAX_HIDDEN,
    check_out,
    check_rows,
    group_of,
    quantized,
    row_options,
    store_row,
    stride_of,
)
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.overlap import overlap_options, wait_for_ahead


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / sqrt(mean(x^2) + eps) * gain. LayerNorm does this with x - mean(x), and adds a bias."""

    gain: Tensor  # in the rows' dtype or fp32, which decides how RMS rounds
    eps: float
    is_layer: bool = False
    bias: Tensor | None = None  # only for LayerNorm

    def __post_init__(self) -> None:
        if self.bias is not None and not self.is_layer:
            raise ValueError("an RMS norm has no bias")


class Delta(NamedTuple):
    """What is added to the residual: scale * after(rows + more)."""

    rows: Tensor
    more: Tensor | None = None  # the MLP's output, if `rows` is attention's (parallel residual)
    after: Norm | None = None
    scale: float = 1.0


class _Output(NamedTuple):
    norm: Norm
    rows: Tensor
    scales: Tensor | None = None  # the output's scales, if it is in fp8


@triton.jit
def normed(
    rows, is_cell, gain, bias, eps, SIZE: tl.constexpr, IS_LAYER: tl.constexpr, AXIS: tl.constexpr,
    element: tl.constexpr, known_square=None,
):  # fmt: skip
    """Normalise fp32 rows, [BLOCK] with AXIS 0 or [TILE, BLOCK] with AXIS 1, zero past SIZE. The
    result is rounded to `element`. `known_square` replaces the mean of squares of these rows."""
    is_rounded_twice: tl.constexpr = not IS_LAYER and gain.dtype != tl.float32
    gain = gain.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(rows, AXIS, keep_dims=AXIS == 1) / SIZE
        rows = tl.where(is_cell, rows - mean, 0.0)
    if known_square is None:
        square = tl.sum(rows * rows, AXIS, keep_dims=AXIS == 1) / SIZE
    else:
        square = known_square
    rows = rows * tl.rsqrt(square + eps)
    if is_rounded_twice:
        rows = rows.to(element).to(tl.float32)
    rows = rows * gain
    if bias is not None:
        rows += bias.to(tl.float32)
    return rows.to(element)


@triton.jit
def _constant(ptr, lanes, is_lane):
    """Load a gain or a bias; None if there is none."""
    if ptr is None:  # noqa: SIM108 - Triton 3.6 knows None in a statement only
        found = None
    else:
        found = tl.load(ptr + lanes, mask=is_lane, other=0.0)
    return found


@triton.jit
def _norm_kernel(
    x_ptr, rows_ptr, more_ptr, after_gain_ptr, after_bias_ptr,
    gain_ptr, bias_ptr, out_ptr, scales_ptr,
    stride_x, stride_rows, stride_more, stride_out, stride_scales, eps, scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IS_LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    element = x_ptr.dtype.element_ty
    after_gain = _constant(after_gain_ptr, lanes, is_lane)
    after_bias = _constant(after_bias_ptr, lanes, is_lane)
    gain = _constant(gain_ptr, lanes, is_lane)
    bias = _constant(bias_ptr, lanes, is_lane)
    wait_for_ahead(OVERLAPS)
    x_ptrs = x_ptr + token * stride_x + lanes
    if rows_ptr is None:
        row = tl.load(x_ptrs, mask=is_lane, other=0.0).to(tl.float32)
    else:
        rows_ptrs = rows_ptr + token * stride_rows + lanes
        row = tl.load(rows_ptrs, mask=is_lane, other=0.0).to(tl.float32)
        if more_ptr is not None:
            more_ptrs = more_ptr + token * stride_more + lanes
            row += tl.load(more_ptrs, mask=is_lane, other=0.0).to(tl.float32)
            row = row.to(element).to(tl.float32)
        if after_gain_ptr is not None:
            row = normed(row, is_lane, after_gain, after_bias, eps, SIZE, IS_LAYER, 0, element)
            row = row.to(tl.float32)
        if HAS_SCALE:
            row = (row * scale).to(element).to(tl.float32)
        row += tl.load(x_ptrs, mask=is_lane, other=0.0).to(tl.float32)
        rounded = row.to(element)
        tl.store(x_ptrs, rounded, mask=is_lane)
        row = rounded.to(tl.float32)
    if gain_ptr is not None:
        out = normed(row, is_lane, gain, bias, eps, SIZE, IS_LAYER, 0, element)
        store_row(
            out, lanes, 0, out_ptr, scales_ptr, token, stride_out, stride_scales, SIZE, BLOCK, GROUP
        )


def add_(x: Tensor, delta: Delta) -> None:
    """x [tokens, hidden] += delta, in place."""
    _launch(x, delta, None)


def norm_rows(
    x: Tensor, norm: Norm, delta: Delta | None = None, out: Tensor | None = None
) -> Tensor:
    """Add `delta` to x [tokens, hidden] in place, and return the norm of x. Without a delta `out`
    may be x."""
    target = torch.empty_like(x) if out is None else out
    _launch(x, delta, _Output(norm, target))
    return target


def norm_rows_fp8(
    x: Tensor,
    norm: Norm,
    delta: Delta | None = None,
    out: Fp8Rows | None = None,
    per: Fp8Per = Fp8Per.ROW,
) -> Fp8Rows:
    """Like `norm_rows`, but the result is quantized; x keeps its dtype."""
    return quantized(x.shape[1], x, out, per, lambda v, s: _launch(x, delta, _Output(norm, v, s)))


def _launch(x: Tensor, delta: Delta | None, output: _Output | None) -> None:
    size = x.shape[1]
    check_rows("x", x, size, MAX_HIDDEN)
    norm, out, scales = output or (None, None, None)
    if out is not None:
        check_out(out, len(x), size, x.dtype if scales is None else None)
    rows, more, after, scale = delta or (None, None, None, 1.0)
    norms = [each for each in (norm, after) if each is not None]
    for added in (rows, more):
        if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
            raise LayoutError(f"delta must be {x.dtype} {tuple(x.shape)} like the residual, "
                              f"got {added.dtype} {tuple(added.shape)}")  # fmt: skip
        if added is not None and added.stride(1) != 1:
            raise LayoutError("delta must have a contiguous last axis")
    eps, is_layer = kind_of(norms)
    for each in norms:
        check_constant("gain", each.gain, (size,))
        if each.bias is not None:
            check_constant("bias", each.bias, (size,))
    if len(x) == 0:
        return
    options = row_options(size)
    _norm_kernel[(len(x),)](
        x, rows, more, after and after.gain, after and after.bias,
        norm and norm.gain, norm and norm.bias, out, scales,
        x.stride(0), _stride(rows), _stride(more), _stride(out), stride_of(scales), eps, scale,
        GROUP=group_of(scales, options["BLOCK"]), IS_LAYER=is_layer, HAS_SCALE=scale != 1.0,
        **options, **overlap_options(x.device),
    )  # fmt: skip


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def kind_of(norms: Sequence[Norm]) -> tuple[float, bool]:
    """Return eps and is_layer of the norms of one call; raises LayoutError if they differ."""
    if not norms:
        return 0.0, False
    eps, is_layer = norms[0].eps, norms[0].is_layer
    for norm in norms[1:]:
        if norm.eps != eps or norm.is_layer != is_layer:
            raise LayoutError("norms of one call must have one eps and be of one kind")
    return eps, is_layer


def check_constant(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise LayoutError unless a gain or bias is contiguous and has this shape."""
    if tuple(x.shape) != shape or not x.is_contiguous():
        raise LayoutError(f"{name} must be contiguous {list(shape)}, got {tuple(x.shape)}")
