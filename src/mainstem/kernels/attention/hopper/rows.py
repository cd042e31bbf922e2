# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: code for rows that large and small units share, and helpers for Gluon.

A group of four warps has 64 rows. In a large unit they belong to one KV head. In a small unit they
belong to FOLD KV heads, and each row occurs SPLITS times: a head's keys are split into SPLITS
parts, which have separate sums until the unit ends (`small.py`). With N = 64 / (FOLD * SPLITS):

    row r of a group  ->  row row_begin + r % N of the span,  KV head kv_head + r // (64 / FOLD)

A head_dim is MAIN dims, in panels of 64, plus a TAIL of 16 or 32 if 64 does not divide it: 80 is 64
+ 16. The tail has separate memory, descriptors and sums, so that no padding is read or computed.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mainstem.kernels.attention.hopper.codes import packed_rows
from mainstem.kernels.attention.triton.layout import (
    ENTRY_FIRST_KEY,
    ENTRY_SLOT,
    HEADER_INTS,
    PIECE_ENTRY,
    PIECE_FIRST_LIMIT,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_ROW_BEGIN,
    PIECE_ROW_END,
    PIECE_STRETCH,
    SHARE_INTS,
)
from mainstem.kernels.attention.triton.rows import LN_2, LOG2_E
from mainstem.kernels.hopper import barrier, finished, load_rows, tiles_of

PANEL = gl.constexpr(64)  # dims of a row that lie together in shared memory: 128 bytes
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # for copying queries
LEAST_PEAK = gl.constexpr(1e-30)  # rows are divided by their peak, which must not be 0


def tail_of(head_dim: int) -> int:
    """The number of dims after the last whole panel."""
    return head_dim % int(PANEL.value)


def boxes_of(rows: Tensor, num_rows: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Describe K or V of a layer, [keys, head_dim], as the boxes that one copy moves: 64 dims of
    some rows, and their tail.
    """
    panel, tail = int(PANEL.value), tail_of(rows.shape[1])
    return (
        TensorDescriptor.from_tensor(rows, [num_rows, panel], tiles_of(panel)),
        TensorDescriptor.from_tensor(rows, [num_rows, tail], tiles_of(tail)) if tail else None,
    )


@gluon.jit
def share_of(plan_ptr):
    """This program's share in the plan."""
    return plan_ptr + HEADER_INTS + gl.program_id(0) * SHARE_INTS


@gluon.jit
def num_tiles_of(key_begin, key_end, KEYS: gl.constexpr):
    """The number of tiles of a unit. A unit without keys has one masked tile, so that its rows are
    written like others."""
    return gl.maximum((key_end - key_begin + KEYS - 1) // KEYS, 1)


@gluon.jit
def read_piece(piece_ptr):
    """Return a piece's entry, rows, keys, limit and stretch."""
    return (
        gl.load(piece_ptr + PIECE_ENTRY),
        gl.load(piece_ptr + PIECE_ROW_BEGIN), gl.load(piece_ptr + PIECE_ROW_END),
        gl.load(piece_ptr + PIECE_KEY_BEGIN), gl.load(piece_ptr + PIECE_KEY_END),
        gl.load(piece_ptr + PIECE_FIRST_LIMIT), gl.load(piece_ptr + PIECE_STRETCH),
    )  # fmt: skip


@gluon.jit
def rows_of(
    row_begin, kv_head, COUNT: gl.constexpr,
    GROUP: gl.constexpr, FOLD: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the rows of the span that a group has, and their heads."""
    lanes = gl.arange(0, COUNT, LAYOUT)
    rows = row_begin + lanes % (COUNT // (FOLD * SPLITS))
    return rows, (kv_head + lanes // (COUNT // FOLD)) * GROUP + rows % GROUP


@gluon.jit
def find_tokens(
    first_token, entries_ptr, row_begin, row_end,
    GROUP: gl.constexpr, FOLD: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Return the tokens of a group's rows. If the span's tokens are neighbours, the piece holds the
    first of them, and no lookup is needed; otherwise it holds -1.
    """
    rows, _ = rows_of(row_begin, 0, 64, GROUP, FOLD, SPLITS, gl.SliceLayout(1, QUERIES))
    tokens = first_token + rows // GROUP
    if first_token < 0:
        tokens = gl.load(entries_ptr + rows // GROUP, mask=rows < row_end, other=0)
    return tokens


@gluon.jit
def start_queries(
    q_ptr, q_rows, q_tail, tokens, row_begin, row_end, kv_head, stride_q_token, stride_q_head,
    GROUP: gl.constexpr, FOLD: gl.constexpr, SPLITS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Begin to copy a group's rows into shared memory. Results past the last row are never
    written."""
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    rows, head = rows_of(row_begin, kv_head, 64, GROUP, FOLD, SPLITS, gl.SliceLayout(1, QUERIES))
    dims = gl.arange(0, MAIN, gl.SliceLayout(0, QUERIES))
    offset = tokens.to(gl.int64) * stride_q_token + head * stride_q_head
    is_row = rows < row_end
    load_rows(q_rows, q_ptr + offset[:, None] + dims[None, :], mask=is_row[:, None])
    if MAIN < HEAD_DIM:
        dims = MAIN + gl.arange(0, HEAD_DIM - MAIN, gl.SliceLayout(0, QUERIES))
        load_rows(q_tail, q_ptr + offset[:, None] + dims[None, :], mask=is_row[:, None])
    async_copy.commit_group()


@gluon.jit
def await_queries():
    """Wait for the queries. There is no fence, which would wait for everything else that this group
    has requested: plain loads of the queries need none.
    """
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def shares_of(top, total, LAYOUT: gl.constexpr):
    """Return 1 / (sum of weights) of each row, and its base-2 lse; without keys, 1 and -inf."""
    has_keys = total > 0
    total = gl.where(has_keys, total, 1.0)
    lse = gl.where(has_keys, top + gl.log2(total), float("-inf"))
    return gl.convert_layout(1.0 / total, LAYOUT), gl.convert_layout(lse, LAYOUT)


@gluon.jit
def find_rows(
    entries_ptr, num_entries, row_begin, row_end, kv_head, COUNT: gl.constexpr,
    GROUP: gl.constexpr, FOLD: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return token, slot and head of a group's rows, which of them exist, and whether they are
    whole (all rows of a unit are whole, or none). COUNT is 64, or less after splits are merged.
    """
    rows, head = rows_of(row_begin, kv_head, COUNT, GROUP, FOLD, 1, LAYOUT)
    is_row = rows < row_end
    token = gl.load(entries_ptr + rows // GROUP, mask=is_row, other=0)
    slots_ptr = entries_ptr + ENTRY_SLOT * num_entries
    slot = gl.load(slots_ptr + rows // GROUP, mask=is_row, other=0)
    is_whole = gl.load(slots_ptr + row_begin // GROUP) < 0
    return token, slot, head, is_row, is_whole


@gluon.jit
def last_seen(own, PAGE_SIZE: gl.constexpr, BEFORE_OWN_PAGE: gl.constexpr):
    """The last key that a row sees, if the span is long enough; see `_limit` in `span.py`."""
    if BEFORE_OWN_PAGE:
        own = own // PAGE_SIZE * PAGE_SIZE - 1
    return own


@gluon.jit
def find_first_keys(entries_ptr, num_entries, rows, row_end, GROUP: gl.constexpr):
    """The first key that each row sees."""
    ptrs = entries_ptr + ENTRY_FIRST_KEY * num_entries + rows // GROUP
    return gl.load(ptrs, mask=rows < row_end, other=0)


@gluon.jit
def capped(scores, scale, SOFTCAP: gl.constexpr):
    """Return SOFTCAP * tanh(score / SOFTCAP) in base-2 units, or the scores if there is no SOFTCAP,
    and the scale that must still be applied."""
    if SOFTCAP > 0:
        doubled = gl.exp2(scores * (scale * (2.0 / SOFTCAP)))
        return (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0)), 1.0
    else:
        return scores, scale


@gluon.jit
def _store_whole(
    rows, share, first_dim: gl.constexpr, offset, is_row, out_ptr, LAYOUT: gl.constexpr
):
    """Store some dims of finished rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dims = first_dim + gl.arange(0, rows.shape[1], gl.SliceLayout(0, LAYOUT))
    rows = (rows * gl.convert_layout(share, ROWS)[:, None]).to(out_ptr.dtype.element_ty)
    offset = gl.convert_layout(offset, ROWS)[:, None]
    is_row = gl.convert_layout(is_row, ROWS)[:, None]
    gl.store(out_ptr + offset + dims[None, :], rows, mask=is_row)


@gluon.jit
def _store_packed(
    rows, peak, first_dim: gl.constexpr, offset, is_row, partial_ptr, LAYOUT: gl.constexpr,
    FROM_CODES: gl.constexpr,
):  # fmt: skip
    """Store some dims of Partials in fp16, in the order in which threads have them."""
    COUNT: gl.constexpr = rows.shape[0]
    DIMS: gl.constexpr = rows.shape[1]
    PACKED: gl.constexpr = packed_rows(DIMS) if FROM_CODES else finished(COUNT, DIMS, True)
    RUN: gl.constexpr = min(DIMS, 32) // 4  # neighbouring dims of a thread
    ROWS: gl.constexpr = gl.SliceLayout(1, PACKED)
    factor = gl.convert_layout(1.0 / peak, gl.SliceLayout(1, LAYOUT))
    rows = (rows * factor[:, None]).to(gl.float16)
    rows = rows.reshape([COUNT, DIMS // (4 * RUN), RUN // 2, 4, 2]).permute((0, 1, 3, 2, 4))
    rows = gl.convert_layout(rows.reshape([COUNT, DIMS]), PACKED)
    columns = gl.arange(0, DIMS, gl.SliceLayout(0, PACKED))
    if RUN < 8:
        columns = columns // RUN * 8 + columns % RUN
    first = gl.convert_layout(offset, ROWS)[:, None] + first_dim
    mask = gl.convert_layout(is_row, ROWS)[:, None]
    gl.store(partial_ptr + first + columns[None, :], rows, mask=mask)


@gluon.jit
def write_rows(
    acc, tail, share, lse, token, slot, head, is_row, is_whole, stretch,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr,
    LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr, FROM_CODES: gl.constexpr = False,
):  # fmt: skip
    """Write rows: to `out`, multiplied by their share, if they are whole; packed, to their slots,
    if they are Partials.

    A packed row is in fp16, divided by its largest magnitude: half of the bytes to write and read,
    and nothing overflows. If that magnitude is infinite, all dims of the row are NaN. The factor to
    multiply the row by (magnitude x share) is next to its lse. Dims are in the order in which
    threads have them (`merge_partials.py`). FROM_CODES: LAYOUT is `natural_rows` (`codes.py`).
    """
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    if is_whole:
        offset = token.to(gl.int64) * stride_out_token + head * stride_out_head
        _store_whole(acc, share, 0, offset, is_row, out_ptr, LAYOUT)
        if TAIL > 0:
            _store_whole(tail, share, MAIN, offset, is_row, out_ptr, TAIL_LAYOUT)
        if HAS_LSE:
            gl.store(lse_ptr + token * HEADS + head, lse * LN_2, mask=is_row)
    else:
        PITCH: gl.constexpr = 128 if TAIL > 0 else MAIN
        place = (slot + stretch) * HEADS + head
        peak = gl.maximum(gl.max(gl.abs(acc), 1), LEAST_PEAK)
        if TAIL > 0:
            peak_of_tail = gl.convert_layout(gl.max(gl.abs(tail), 1), gl.SliceLayout(1, LAYOUT))
            peak = gl.maximum(peak, peak_of_tail)
        gl.store(partial_lse_ptr + 2 * place, lse, mask=is_row)
        gl.store(partial_lse_ptr + 2 * place + 1, peak * share, mask=is_row)
        offset = place.to(gl.int64) * PITCH
        _store_packed(acc, peak, 0, offset, is_row, partial_ptr, LAYOUT, FROM_CODES)
        if TAIL > 0:
            _store_packed(tail, peak, MAIN, offset, is_row, partial_ptr, TAIL_LAYOUT, False)
