# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Join two Partials by log-sum-exp (RelayAttention Eq. 11, 12), for users of other attention
kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2

ROWS = 16


@triton.jit
def _merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head) pairs."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM)
    is_row = rows < num_rows
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    cells = rows[:, None] * HEAD_DIM + dims[None, :]
    lse_a = tl.load(lse_a_ptr + rows, mask=is_row, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + rows, mask=is_row, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    share_a, share_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = share_a + share_b
    divisor = tl.where(total > 0, total, 1.0)
    out_a = tl.load(out_a_ptr + cells, mask=is_cell, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + cells, mask=is_cell, other=0.0).to(tl.float32)
    # A side without keys has no weight, whatever is in its rows.
    out_a = tl.where((share_a > 0)[:, None], out_a * (share_a / divisor)[:, None], 0.0)
    out_b = tl.where((share_b > 0)[:, None], out_b * (share_b / divisor)[:, None], 0.0)
    tl.store(out_ptr + cells, (out_a + out_b).to(out_ptr.dtype.element_ty), mask=is_cell)
    lse = tl.where(total > 0, base + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + rows, lse, mask=is_row)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys A and B, from attention over A and over B.

    out: [tokens, heads, dim]; lse: [tokens, heads] fp32, natural log, -inf where a side had no
    keys. Where both sides had none, the result is 0.
    """
    tokens, heads, head_dim = out_a.shape
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        if tensor.shape != out_a.shape or tensor.dtype != out_a.dtype or not tensor.is_contiguous():
            raise LayoutError(f"{name} must be contiguous, with the shape and dtype of out_a")
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(tensor.shape) != (tokens, heads) or tensor.dtype != torch.float32:
            raise LayoutError(f"{name} must be fp32 [{tokens}, {heads}], got {tensor.dtype} "
                              f"{tuple(tensor.shape)}")  # fmt: skip
        if not tensor.is_contiguous():
            raise LayoutError(f"{name} must be contiguous")
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    num_rows = tokens * heads
    if num_rows:
        _merge_kernel[(cdiv(num_rows, ROWS),)](
            out_a, lse_a, out_b, lse_b, out, lse, num_rows,
            HEAD_DIM=head_dim, DIM=next_power_of_2(head_dim), TILE_ROWS=ROWS,
        )  # fmt: skip
    return out, lse
