# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Sinks: learned scores, one per head, that take part in the softmax and have a value of 0.

A sink counts as one more Partial of every row, with values of 0 and the sink as its lse. This
kernel is a pass over finished rows, so it can follow any attention kernel.
"""

import triton
import triton.language as tl

from mainstem.kernels.overlap import wait_for_ahead


@triton.jit
def _sinks_kernel(
    out_ptr, lse_ptr, sinks_ptr, num_rows, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head) pairs."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    token, head = rows // HEADS, rows % HEADS
    dims = tl.arange(0, DIM)
    sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
    wait_for_ahead(OVERLAPS)
    lse = tl.load(lse_ptr + rows, mask=is_row, other=0.0)
    top = tl.maximum(lse, sink)  # a sink is finite, an lse may be -inf
    share, rest = tl.exp(lse - top), tl.exp(sink - top)
    total = share + rest
    offset = token.to(tl.int64) * stride_out_token + head * stride_out_head
    cells = out_ptr + offset[:, None] + dims[None, :]
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    out = tl.load(cells, mask=is_cell, other=0.0).to(tl.float32)
    out *= (share / total)[:, None]
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=is_cell)
    tl.debug_barrier()  # every warp has read the old lse of all rows
    tl.store(lse_ptr + rows, top + tl.log(total), mask=is_row)
