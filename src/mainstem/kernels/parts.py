# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Merges the Partials that span attention left, in slot order, which is the order of the spans.

A launch of its own, but not a costly one: on cards that can (Hopper and later) it begins while
attention is still running. Its programs come in as those of attention end, fetch their code and
what to merge, and wait for the last Partial there.
"""

import triton
import triton.language as tl

from mainstem.kernels.rows import normalised, write_rows

FEW_PARTS = tl.constexpr(8)


@triton.jit
def _merge_tile(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
    stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_LSE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the merge list x heads, WIDTH of their dims, PARTS Partials at a time."""
    ACROSS: tl.constexpr = DIM // WIDTH
    dims = tile % ACROSS * WIDTH + tl.arange(0, WIDTH)
    rows = tile // ACROSS * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_merges * HEADS
    merge_ptr = merges_ptr + rows // HEADS
    head = rows % HEADS
    token = tl.load(merge_ptr, mask=is_row, other=0)
    slot = tl.load(merge_ptr + num_merges, mask=is_row, other=0)
    parts = tl.load(merge_ptr + 2 * num_merges, mask=is_row, other=0)
    most = tl.max(parts, 0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, most, PARTS):
        part = first + tl.arange(0, PARTS)
        is_there = part[None, :] < parts[:, None]
        place = (slot[:, None] + part[None, :]) * HEADS + head[:, None]
        lse = tl.load(
            partial_lse_ptr + place, mask=is_there, other=float("-inf"), cache_modifier=".cg"
        )
        out = tl.load(
            partial_ptr + place.to(tl.int64)[:, :, None] * DIM + dims[None, None, :],
            mask=is_there[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old_share = tl.exp2(top - base)
        share = tl.exp2(lse - base[:, None])
        total = total * old_share + tl.sum(share, 1)
        merged = merged * old_share[:, None] + tl.sum(out * share[:, :, None], 1)
        top = new_top
    merged, lse = normalised(merged, top, total)
    write_rows(
        out_ptr, lse_ptr, token, head, dims, merged, lse, is_row,
        stride_out_token, stride_out_head, HEADS, HEAD_DIM, HAS_LSE,
    )  # fmt: skip


@triton.jit
def _merge_parts_kernel(
    out_ptr, lse_ptr, plan_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    IS_ORDERED: tl.constexpr, HAS_LSE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """This program's tiles: of many rows with few Partials each, of few where there are not enough
    for all programs, or of one row with many Partials.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    merges_ptr = plan_ptr + tl.load(plan_ptr + 5)
    num_merges = tl.load(plan_ptr + 6)
    most_parts = tl.load(plan_ptr + 7)
    num_rows = num_merges * HEADS
    if IS_ORDERED:
        for tile in range(program, tl.cdiv(num_rows, 16), num_programs):
            _merge_tile(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, DIM, 16, 1, HAS_LSE, OVERLAPS,
            )  # fmt: skip
    elif most_parts <= FEW_PARTS and num_rows >= 8 * num_programs:
        for tile in range(program, tl.cdiv(num_rows, 16), num_programs):
            _merge_tile(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, DIM, 16, 2, HAS_LSE, OVERLAPS,
            )  # fmt: skip
    elif num_rows * (DIM // 32) > num_programs:
        for tile in range(program, tl.cdiv(num_rows, 4), num_programs):
            _merge_tile(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, DIM, 4, 8, HAS_LSE, OVERLAPS,
            )  # fmt: skip
    else:
        for tile in range(program, num_rows * (DIM // 32), num_programs):
            _merge_tile(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, 32, 1, 128, HAS_LSE, OVERLAPS,
            )  # fmt: skip
    if OVERLAPS:  # who has nothing to merge must not end before attention does, either
        tl.extra.cuda.gdc_wait()
