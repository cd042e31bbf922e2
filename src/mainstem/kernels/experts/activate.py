# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Gated activations, in fp32: inside other kernels, or as a pass over rows.

Their names are the values of models.spec.Activation.
"""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped")
_MOST_BLOCK = 1024


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up; gate and up in fp32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 = sigmoid(2 y)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    elif ACTIVATION == "relu":
        return tl.maximum(gate, 0.0) * up
    elif ACTIVATION == "relu2":
        gate = tl.maximum(gate, 0.0)
        return gate * gate * up
    else:
        tl.static_assert(ACTIVATION == "clamped", "an activation without code")
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def _gated_rows_kernel(
    both_ptr, bias_ptr, experts_ptr, out_ptr, size, stride_both, stride_out,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCK columns."""
    wait_for_ahead(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    ptrs = both_ptr + row * stride_both + columns
    gate = tl.load(ptrs, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(ptrs + size, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + tl.load(experts_ptr + row) * 2 * size + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + size, mask=is_column, other=0.0).to(tl.float32)
    act = gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + columns, act, mask=is_column)


def gated_rows(
    both: Tensor,
    activation: str,
    out: Tensor,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """out [rows, size] = act(gate) * up; `both` [rows, 2 * size] holds gate, then up. A bias
    [experts, 2 * size] is added first; `experts` [rows] int32 is the expert of each row."""
    rows, size = out.shape
    if both.shape != (rows, 2 * size) or both.stride(1) != 1 or out.stride(1) != 1:
        raise LayoutError(
            f"both must be [{rows}, {2 * size}] with contiguous rows, got {tuple(both.shape)}"
        )
    check_activation(activation)
    if bias is not None and (experts is None or bias.shape[1] != 2 * size):
        raise LayoutError(f"a bias must be [experts, {2 * size}] and needs the experts of rows")
    if rows == 0:
        return out
    block = min(next_power_of_2(size), _MOST_BLOCK)
    _gated_rows_kernel[(rows, cdiv(size, block))](
        both, both if bias is None else bias, both if experts is None else experts, out, size,
        both.stride(0), out.stride(0),
        ACTIVATION=activation, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4,
        **overlap_options(out.device),
    )  # fmt: skip
    return out


def check_activation(activation: str) -> None:
    """Raise LayoutError for an activation that has no code here."""
    if activation not in ACTIVATIONS:
        raise LayoutError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation}")
