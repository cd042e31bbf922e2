# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The weighted sum of the outputs of a token's experts, in fp32, added from the best expert on."""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.experts.route import Routing
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_MOST_BLOCK = 1024


@triton.jit
def _combine_kernel(
    rows_ptr, positions_ptr, ids_ptr, weights_ptr, bias_ptr, shared_ptr, shared_weights_ptr,
    out_ptr, hidden, stride_rows, stride_shared, stride_out,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK columns."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lanes < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = token * TOP_K + slot
        position = tl.load(positions_ptr + place).to(tl.int64)
        weight = tl.load(weights_ptr + place)
        row = tl.load(rows_ptr + position * stride_rows + lanes, mask=is_lane, other=0.0)
        row = row.to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(ids_ptr + place).to(tl.int64)
            bias = tl.load(bias_ptr + expert * hidden + lanes, mask=is_lane, other=0.0)
            row += bias.to(tl.float32)
        total += weight * row
    if HAS_SHARED:
        row = tl.load(shared_ptr + token * stride_shared + lanes, mask=is_lane, other=0.0)
        row = row.to(tl.float32)
        if HAS_GATE:
            row *= tl.load(shared_weights_ptr + token)
        total += row
    out_ptrs = out_ptr + token * stride_out + lanes
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_lane)


def combine(
    rows: Tensor,
    routing: Routing,
    bias: Tensor | None,
    shared: Tensor | None,
    has_shared_gate: bool,
    out: Tensor,
) -> Tensor:
    """out [tokens, hidden]: for each token the sum of weight * (row + the expert's bias) over its
    top_k experts, plus the shared expert's output, times its weight if it has a gate. Rows
    [tokens * top_k, hidden] are sorted by expert."""
    tokens, hidden = out.shape
    top_k = routing.ids.shape[1]
    if rows.shape != (tokens * top_k, hidden) or rows.stride(1) != 1 or out.stride(1) != 1:
        raise LayoutError(
            f"rows must be [{tokens * top_k}, {hidden}] with contiguous rows, "
            f"got {tuple(rows.shape)}"
        )
    if shared is not None and (shared.shape != out.shape or shared.stride(1) != 1):
        raise LayoutError(f"shared must be [{tokens}, {hidden}], got {tuple(shared.shape)}")
    if bias is not None and (bias.shape[1] != hidden or not bias.is_contiguous()):
        raise LayoutError(f"bias must be contiguous [experts, {hidden}], got {tuple(bias.shape)}")
    if tokens == 0:
        return out
    block = min(next_power_of_2(hidden), _MOST_BLOCK)
    _combine_kernel[(tokens, cdiv(hidden, block))](
        rows, routing.positions, routing.ids, routing.weights, rows if bias is None else bias,
        rows if shared is None else shared, routing.shared_weights, out, hidden,
        rows.stride(0), 0 if shared is None else shared.stride(0), out.stride(0),
        TOP_K=top_k, BLOCK=block, HAS_BIAS=bias is not None, HAS_SHARED=shared is not None,
        HAS_GATE=has_shared_gate, num_warps=4, **overlap_options(out.device),
    )  # fmt: skip
    return out
