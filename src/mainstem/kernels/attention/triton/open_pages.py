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
BYTES_OF_WARP = 4096  # of K, V, queries or output; with more, registers spill
MOST_WARPS = 8
# From this many tokens on, most are of prompts: neighbours share a page. Then they also share a
# program, in rows that one token leaves free.
MANY_TOKENS = 512


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for all steps
def _open_pages_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, positions_ptr, slots_ptr, num_tokens,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has some neighbouring tokens and a KV head, LANES rows of each token. It reads the
    pages of its tokens one after the other. `scale` includes log2(e); a WINDOW of 0 means none.

    Attention over rounded pages may still run: it began after queries and open pages were written.
    So only its results must be waited for.
    """
    kv_head = tl.program_id(1)
    let_in(OVERLAPS)
    rows, keys, dims = tl.arange(0, ROWS), tl.arange(0, PAGE_SIZE), tl.arange(0, DIM)
    token = tl.program_id(0).to(tl.int64) * TOKENS + rows // LANES
    is_row = (rows % LANES < GROUP) & (rows // LANES < TOKENS) & (token < num_tokens)
    slot = tl.load(slots_ptr + token, mask=is_row, other=-1)
    is_row = is_row & (slot >= 0)
    position = tl.load(positions_ptr + token, mask=is_row, other=0)
    page, own = slot // PAGE_SIZE, slot % PAGE_SIZE
    head = kv_head * GROUP + rows % LANES
    is_dim = (dims < HEAD_DIM)[None, :]
    q_offset = token * stride_q_token + head * stride_q_head
    is_cell = is_row[:, None] & is_dim
    q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], mask=is_cell, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    is_left = is_row
    while tl.max(is_left.to(tl.int32), 0) > 0:
        this = tl.max(tl.where(is_left, page, -1), 0)
        is_here = is_left & (page == this)
        cells = (this * KV_HEADS + kv_head) * (PAGE_SIZE * HEAD_DIM)
        cells += keys[:, None] * HEAD_DIM + dims[None, :]
        # slots after the last token may hold anything
        is_there = (keys <= tl.max(tl.where(is_here, own, -1), 0))[:, None] & is_dim
        k = tl.load(k_ptr + cells, mask=is_there, other=0.0)
        v = tl.load(v_ptr + cells, mask=is_there, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = _capped(scores, scale, SOFTCAP) if SOFTCAP > 0 else scores * scale
        is_seen = is_here[:, None] & (keys[None, :] <= own[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > own[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        top = tl.where(is_here, tl.max(scores, 1), top)
        p = tl.where(is_seen, tl.exp2(scores - tl.where(is_here, top, 0.0)[:, None]), 0.0)
        total += tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        is_left = is_left & (page != this)
    page_start = position - own
    first_seen = page_start * 0
    if WINDOW > 0:
        first_seen = tl.maximum(position - (WINDOW - 1), 0)
    wait_alone(OVERLAPS)
    out_offset = token * stride_out_token + head * stride_out_head
    out_ptrs = out_ptr + out_offset[:, None] + dims[None, :]
    has_before = is_row & (page_start > first_seen)
    lse_ptrs = lse_ptr + token * (KV_HEADS * GROUP) + head
    lse = tl.load(lse_ptrs, mask=has_before, other=float("-inf")) * LOG2_E
    before = tl.load(out_ptrs, mask=has_before[:, None] & is_dim, other=0.0).to(tl.float32)
    base = tl.maximum(top, lse)
    sink = lse
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * LOG2_E
        base = tl.maximum(base, sink)
    base = tl.where(is_row, base, 0.0)
    share, own_share = tl.exp2(lse - base), tl.exp2(top - base)
    total = total * own_share + share
    if sinks_ptr is not None:
        total += tl.exp2(sink - base)
    acc = acc * own_share[:, None] + before * share[:, None]
    total = tl.where(is_row, total, 1.0)
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
    group = heads // kv_heads
    lanes = next_power_of_2(group)
    taken = max(LEAST_ROWS // lanes, 1) if tokens >= MANY_TOKENS else 1
    rows, padded = max(LEAST_ROWS, lanes), next_power_of_2(dim)
    most_bytes = max(rows, page_size) * padded * q.dtype.itemsize
    warps = max(min(most_bytes // BYTES_OF_WARP, MOST_WARPS), 1)
    _open_pages_kernel[(-(-tokens // taken), kv_heads)](
        q, k_pages, v_pages, out, lse, sinks, positions, slots, tokens,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP=group, LANES=lanes, TOKENS=taken,
        ROWS=rows, HEAD_DIM=dim, DIM=padded, PAGE_SIZE=page_size,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, UPCAST=q.device.type == "cpu",
        num_warps=warps, **overlap_options(q.device),
    )  # fmt: skip
