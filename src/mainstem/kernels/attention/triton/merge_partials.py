# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: PLR0917
"""Merges the Partials of span attention.

This is a separate launch, but a cheap one: on Hopper and later it begins while attention still
runs. Its programs start as programs of attention end, fetch their code and the list of merges, and
wait for the last Partial.

Partials have two forms. Plain: rows of fp32, each with an lse. Packed (`hopper/rows.py`): rows of
fp16, each with an lse and a factor. Packed rows have another order within every 32 dims:

    place 8 b + 2 a + c  |  dim 8 a + 2 b + c, where a and b are 0 to 3, c is 0 or 1

Places past a head's dims are not written, and may hold anything.
"""

import triton
import triton.language as tl

from mainstem.kernels.attention.triton.layout import (
    HEADER_MERGES,
    HEADER_MOST_PARTIALS,
    HEADER_NUM_MERGES,
    MERGE_PARTIALS,
    MERGE_SLOT,
)
from mainstem.kernels.attention.triton.rows import normalised, write_rows
from mainstem.kernels.overlap import let_in

FEW_PARTS = tl.constexpr(8)


@triton.jit
def _find_rows(merges_ptr, num_merges, first, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return token, head, first slot and number of Partials of ROWS rows, and which of them exist.
    Each entry of the merge list has one row per head."""
    rows = first + tl.arange(0, ROWS)
    is_row = rows < num_merges * HEADS
    merge_ptr = merges_ptr + rows // HEADS
    token = tl.load(merge_ptr, mask=is_row, other=0)
    slot = tl.load(merge_ptr + MERGE_SLOT * num_merges, mask=is_row, other=0)
    parts = tl.load(merge_ptr + MERGE_PARTIALS * num_merges, mask=is_row, other=0)
    return token, rows % HEADS, slot, parts, is_row


@triton.jit
def _load_lse(partial_lse_ptr, place, is_there, IS_PACKED: tl.constexpr):
    """Load the lse of Partials, and the factors of their rows."""
    STEP: tl.constexpr = 2 if IS_PACKED else 1
    ptrs = partial_lse_ptr + place * STEP
    lse = tl.load(ptrs, mask=is_there, other=float("-inf"), cache_modifier=".cg")
    if IS_PACKED:
        return lse, tl.load(ptrs + 1, mask=is_there, other=0.0, cache_modifier=".cg")
    else:
        return lse, 1.0


@triton.jit
def _are_there(is_there, dims, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Restrict a mask of places to the groups of 32 places that hold dims of a head."""
    if HEAD_DIM == DIM:
        return is_there
    else:
        return is_there & (dims // 32 * 32 < HEAD_DIM)


@triton.jit
def _base_of(top):
    """Return what to subtract from exponents: their maximum, or 0 if the maximum is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _write(
    merged, top, total, token, head, is_row, dims,
    out_ptr, lse_ptr, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_LSE: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Write finished rows, with dims in order."""
    if IS_PACKED:
        ROWS: tl.constexpr = merged.shape[0]
        WIDTH: tl.constexpr = merged.shape[1]
        merged = tl.permute(tl.reshape(merged, [ROWS, WIDTH // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
        merged = tl.reshape(merged, [ROWS, WIDTH])
    merged, lse = normalised(merged, top, total)
    write_rows(
        out_ptr, lse_ptr, token, head, dims, merged, lse, is_row,
        stride_out_token, stride_out_head, HEADS, HEAD_DIM, HAS_LSE,
    )  # fmt: skip


@triton.jit
def _merge_rows(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
    stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr, IS_PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows, PARTS Partials of each at a time: these are all loaded before the first is
    used. A thread has the same dims of all Partials, so threads exchange no data.
    """
    token, head, slot, parts, is_row = _find_rows(merges_ptr, num_merges, tile * ROWS, HEADS, ROWS)
    most = tl.max(parts, 0)
    dims = tl.arange(0, DIM)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, most, PARTS):
        found = ()
        new_top = top
        for i in tl.static_range(PARTS):
            is_there = first + i < parts
            place = (slot + first + i) * HEADS + head
            lse, factor = _load_lse(partial_lse_ptr, place, is_there, IS_PACKED)
            rows = tl.load(
                partial_ptr + place.to(tl.int64)[:, None] * DIM + dims[None, :],
                mask=_are_there(is_there[:, None], dims[None, :], HEAD_DIM, DIM), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            found += ((lse, factor, rows),)
            new_top = tl.maximum(new_top, lse)
        base = _base_of(new_top)
        shrink = tl.exp2(top - base)
        total *= shrink
        merged *= shrink[:, None]
        for i in tl.static_range(PARTS):
            lse, factor, rows = found[i]
            share = tl.exp2(lse - base)
            total += share
            merged += rows.to(tl.float32) * (share * factor)[:, None]
        top = new_top
    _write(
        merged, top, total, token, head, is_row, dims,
        out_ptr, lse_ptr, stride_out_token, stride_out_head, HEADS, HEAD_DIM, HAS_LSE, IS_PACKED,
    )  # fmt: skip


@triton.jit
def _merge_dims(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
    stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr, IS_PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge WIDTH dims of one row. Its Partials are spread over all threads."""
    ACROSS: tl.constexpr = DIM // WIDTH
    token, head, slot, parts, is_row = _find_rows(merges_ptr, num_merges, tile // ACROSS, HEADS, 1)
    most = tl.max(parts, 0)
    dims = tile % ACROSS * WIDTH + tl.arange(0, WIDTH)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, most, PARTS):
        part = first + tl.arange(0, PARTS)
        is_there = part[None, :] < parts[:, None]
        place = (slot[:, None] + part[None, :]) * HEADS + head[:, None]
        lse, factor = _load_lse(partial_lse_ptr, place, is_there, IS_PACKED)
        rows = tl.load(
            partial_ptr + place.to(tl.int64)[:, :, None] * DIM + dims[None, None, :],
            mask=_are_there(is_there[:, :, None], dims[None, None, :], HEAD_DIM, DIM), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 1))
        base = _base_of(new_top)
        shrink = tl.exp2(top - base)
        share = tl.exp2(lse - base[:, None])
        total = total * shrink + tl.sum(share, 1)
        rows = rows.to(tl.float32) * (share * factor)[:, :, None]
        merged = merged * shrink[:, None] + tl.sum(rows, 1)
        top = new_top
    _write(
        merged, top, total, token, head, is_row, dims,
        out_ptr, lse_ptr, stride_out_token, stride_out_head, HEADS, HEAD_DIM, HAS_LSE, IS_PACKED,
    )  # fmt: skip


@triton.jit
def _merge_partials_kernel(
    out_ptr, lse_ptr, plan_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    IS_ORDERED: tl.constexpr, HAS_LSE: tl.constexpr, IS_PACKED: tl.constexpr,
    LETS_IN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge this program's tiles. A tile is 16 rows; or 4 rows, if there are few rows or many
    Partials; or 32 dims of one row, if there are very few rows. If IS_ORDERED (for
    deterministic attention), it is always 16 rows. LETS_IN: the next kernel is that of open pages.
    """
    if LETS_IN:
        let_in(OVERLAPS)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    merges_ptr = plan_ptr + tl.load(plan_ptr + HEADER_MERGES)
    num_merges = tl.load(plan_ptr + HEADER_NUM_MERGES)
    most_parts = tl.load(plan_ptr + HEADER_MOST_PARTIALS)
    num_rows = num_merges * HEADS
    if IS_ORDERED:
        for tile in range(program, tl.cdiv(num_rows, 16), num_programs):
            _merge_rows(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, 16, 1, HAS_LSE, IS_PACKED, OVERLAPS,
            )  # fmt: skip
    elif most_parts <= FEW_PARTS and num_rows >= 8 * num_programs:
        for tile in range(program, tl.cdiv(num_rows, 16), num_programs):
            _merge_rows(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, 16, 4, HAS_LSE, IS_PACKED, OVERLAPS,
            )  # fmt: skip
    elif num_rows * (DIM // 32) > num_programs:
        for tile in range(program, tl.cdiv(num_rows, 4), num_programs):
            _merge_rows(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, 4, 12, HAS_LSE, IS_PACKED, OVERLAPS,
            )  # fmt: skip
    else:
        for tile in range(program, num_rows * (DIM // 32), num_programs):
            _merge_dims(
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, tile,
                stride_out_token, stride_out_head,
                HEADS, HEAD_DIM, DIM, 32, 128, HAS_LSE, IS_PACKED, OVERLAPS,
            )  # fmt: skip
    if OVERLAPS:  # a program with nothing to merge, too, must not end before attention
        tl.extra.cuda.gdc_wait()
