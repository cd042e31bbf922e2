# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Attention to a token's own page, merged with that to the rounded pages before it.

Where full pages are rounded (runner/gpu_rounded.py), a token reads its own page as it was computed.
`span.py` has left the output over the rounded pages and its log-sum-exp; a token whose page is the
first that it sees has neither.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.attention.triton.rows import LOG2_E
from mainstem.kernels.attention.triton.span import _capped
from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import let_in, overlap_options, wait_alone

LEAST_ROWS = 16  # of a matrix product


@triton.jit
def _open_pages_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, positions_ptr, slots_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and KV head. `scale` includes log2(e); a WINDOW of 0 means none.

    Attention over rounded pages may still run: it began after queries and open pages were written.
    So only its results must be waited for.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    let_in(OVERLAPS)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        wait_alone(OVERLAPS)
    else:
        position = tl.load(positions_ptr + token)
        own = slot % PAGE_SIZE
        rows, keys, dims = tl.arange(0, ROWS), tl.arange(0, PAGE_SIZE), tl.arange(0, DIM)
        head = kv_head * GROUP + rows
        is_row = rows < GROUP
        is_dim = (dims < HEAD_DIM)[None, :]
        q_offset = token * stride_q_token + head * stride_q_head
        is_cell = is_row[:, None] & is_dim
        q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], mask=is_cell, other=0.0)
        cells = ((slot // PAGE_SIZE) * KV_HEADS + kv_head) * (PAGE_SIZE * HEAD_DIM)
        cells += keys[:, None] * HEAD_DIM + dims[None, :]
        is_key = keys <= own
        if WINDOW > 0:
            is_key = is_key & (keys > own - WINDOW)
        # slots after the token may hold anything
        k = tl.load(k_ptr + cells, mask=is_key[:, None] & is_dim, other=0.0)
        v = tl.load(v_ptr + cells, mask=is_key[:, None] & is_dim, other=0.0)
        if UPCAST:
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = _capped(scores, scale, SOFTCAP) if SOFTCAP > 0 else scores * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        page_start = position - own
        first_seen = page_start * 0
        if WINDOW > 0:
            first_seen = tl.maximum(position - (WINDOW - 1), 0)
        top = tl.max(scores, 1)
        wait_alone(OVERLAPS)
        out_offset = token * stride_out_token + head * stride_out_head
        out_ptrs = out_ptr + out_offset[:, None] + dims[None, :]
        has_before = is_row & (rows * 0 + page_start > first_seen)
        lse_ptrs = lse_ptr + token * (KV_HEADS * GROUP) + head
        lse = tl.load(lse_ptrs, mask=has_before, other=float("-inf"))
        before = tl.load(out_ptrs, mask=has_before[:, None] & is_dim, other=0.0).to(tl.float32)
        lse = lse * LOG2_E
        top = tl.maximum(top, lse)
        sink = lse
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * LOG2_E
            top = tl.maximum(top, sink)
        p = tl.exp2(scores - top[:, None])
        share = tl.exp2(lse - top)
        total = tl.sum(p, 1) + share
        if sinks_ptr is not None:
            total += tl.exp2(sink - top)
        acc = tl.dot(p.to(v.dtype), v, input_precision="ieee") + before * share[:, None]
        tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_cell)


def attend_open_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Merge attention to each token's own page into `out` [tokens, heads, dim].

    k_pages, v_pages [pages, kv_heads, page_size, dim] are the open pages; `slots` [tokens] are the
    places of the tokens in them, page * page_size + offset (negative: padding, which is left out).
    `lse` [tokens, heads] is the natural log-sum-exp that belongs to `out`; neither is read for a
    token that sees no page before its own.
    """
    tokens, heads, dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    if tokens == 0:
        return
    _open_pages_kernel[(tokens, kv_heads)](
        q, k_pages, v_pages, out, lse, sinks, positions, slots,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        ROWS=max(LEAST_ROWS, next_power_of_2(heads // kv_heads)),
        HEAD_DIM=dim, DIM=next_power_of_2(dim), PAGE_SIZE=page_size,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, UPCAST=q.device.type == "cpu",
        num_warps=4, **overlap_options(q.device),
    )  # fmt: skip
