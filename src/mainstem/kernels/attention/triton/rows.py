# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""How attention kernels in Triton finish their rows."""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def normalised(acc, top, total):
    """Return rows divided by their sum of weights, and their base-2 lse; without keys, zeros and
    -inf."""
    has_keys = total > 0
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, top + tl.log2(total), float("-inf"))
    return acc * (1.0 / total)[:, None], lse


@triton.jit
def write_rows(
    out_ptr, lse_ptr, token, head, dims, rows, lse, is_row, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Store some dims of finished rows, and their lse in natural units."""
    out_offset = token.to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(
        out_ptr + out_offset[:, None] + dims[None, :],
        rows.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )
    if HAS_LSE:
        tl.store(lse_ptr + token * HEADS + head, lse * LN_2, mask=is_row)
