# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The activation of an MLP between its two products, in one pass over memory (`rows.py` says what
these kernels have in common).

Computed in fp32. With gates, act(gate) is rounded to the model's dtype before it is multiplied by
`up`, as Hugging Face's models do; CLAMPED_SILU rounds only its result.
"""

from enum import StrEnum

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.fp8_rows import Fp8Per, Fp8Rows
from mainstem.kernels.dense.rows import (
    MAX_MLP,
    check_out,
    check_rows,
    group_of,
    quantized,
    row_options,
    store_row,
    stride_of,
)
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_BLOCK = 2048


class Act(StrEnum):
    """Activations by the names that recipes use."""

    SILU = "silu"
    GELU = "gelu"  # with the error function
    GELU_TANH = "gelu_tanh"  # approximated with tanh
    RELU = "relu"
    RELU_SQUARED = "relu2"
    CLAMPED_SILU = "clamped"  # gpt-oss, see `_clamped`; only with gates


@triton.jit
def _activated(x, ACT: tl.constexpr):
    """x fp32; NaN stays NaN."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    elif ACT == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z); 2 sqrt(2 / pi) is 1.5957...
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = tl.where(x < 0.0, 0.0, x)
        if ACT == "relu2":
            y = y * y
        else:
            tl.static_assert(ACT == "relu")
    return y


@triton.jit
def _clamped(gate, up):
    """(up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, up from -7 to 7; fp32."""
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return (up + 1.0) * (gate * tl.sigmoid(1.702 * gate))


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, stride_out, stride_scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
    IS_GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and block. With one scale per row a block is the whole row, because the
    scale depends on the row's peak."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lanes = part * BLOCK + tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    element = x_ptr.dtype.element_ty
    x_ptrs = x_ptr + token * stride_x + lanes
    row = tl.load(x_ptrs, mask=is_lane, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x_ptrs + SIZE, mask=is_lane, other=0.0).to(tl.float32)
        if ACT == "clamped":
            row = _clamped(row, up)
        else:
            row = _activated(row, ACT).to(element).to(tl.float32) * up
    else:
        row = _activated(row, ACT)
    store_row(
        row.to(element), lanes, part, out_ptr, scales_ptr, token, stride_out, stride_scales,
        SIZE, BLOCK, GROUP,
    )  # fmt: skip


def activate(x: Tensor, act: Act, out: Tensor | None = None) -> Tensor:
    """Return act(x), [tokens, size] like x. `out` may be x."""
    out = x.new_empty(x.shape) if out is None else out
    _launch(x, act, x.shape[1], out, None)
    return out


def activate_fp8(
    x: Tensor, act: Act, out: Fp8Rows | None = None, per: Fp8Per = Fp8Per.ROW
) -> Fp8Rows:
    """Like `activate`, but the result is quantized."""
    size = x.shape[1]
    return quantized(size, x, out, per, lambda v, s: _launch(x, act, size, v, s))


def activate_gated(gate_up: Tensor, act: Act, out: Tensor | None = None) -> Tensor:
    """act(gate) * up; [tokens, 2 * size], gates first -> [tokens, size]."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size) if out is None else out
    _launch(gate_up, act, size, out, None)
    return out


def activate_gated_fp8(
    gate_up: Tensor, act: Act, out: Fp8Rows | None = None, per: Fp8Per = Fp8Per.ROW
) -> Fp8Rows:
    """Like `activate_gated`, but the result is quantized."""
    size = gate_up.shape[1] // 2
    return quantized(size, gate_up, out, per, lambda v, s: _launch(gate_up, act, size, v, s))


def _launch(x: Tensor, act: Act, size: int, out: Tensor, scales: Tensor | None) -> None:
    """`size` is the output's size: the size of x, or half of it if x has gates."""
    is_gated = size != x.shape[1]
    # a row with one scale is one block, because its peak is needed; other rows are cut into blocks
    is_cut = scales is None or scales.shape[1] > 1
    most = x.shape[1] if is_cut else MAX_MLP * (2 if is_gated else 1)
    if is_gated:
        check_rows("gate_up", x, 2 * size, most)
    elif act is Act.CLAMPED_SILU:
        raise LayoutError(f"activation {act} needs gates")
    else:
        check_rows("x", x, size, most)
    check_out(out, len(x), size, x.dtype if scales is None else None)
    if len(x) == 0:
        return
    options = row_options(min(size, MAX_MLP))
    if is_cut and size > _BLOCK:
        options = {"SIZE": size, "BLOCK": _BLOCK, "num_warps": 4}
    _activation_kernel[(len(x), cdiv(size, options["BLOCK"]))](
        x, out, scales, x.stride(0), out.stride(0), stride_of(scales),
        GROUP=group_of(scales, options["BLOCK"]), ACT=act.value, IS_GATED=is_gated,
        **options, **overlap_options(x.device),
    )  # fmt: skip
