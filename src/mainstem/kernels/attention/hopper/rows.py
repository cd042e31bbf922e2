# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: what units of both kinds do with their rows, and words of Gluon's.

A group of four warps has 64 rows. In a large unit they are rows of one KV head; in a small unit
they are FOLD times N = 64 / FOLD, of as many KV heads side by side:

    row r of a group  ->  row row_begin + r % N of the span,  KV head kv_head + r // N
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mainstem.kernels.attention.triton.layout import (
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
from mainstem.kernels.attention.triton.rows import LN_2

PANEL = gl.constexpr(64)  # dims of a row that lie together in shared memory: 128 bytes
PANELS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILES = gl.constexpr(PANELS)
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # as they are copied
LEAST_PEAK = gl.constexpr(1e-30)  # of a row, so that one of zeros can be divided by it


def _packed(head_dim: int) -> gl.DistributedLinearLayout:
    """64 packed rows: who has what does not change by packing, but 8 that a thread has are
    neighbours, 16 bytes to write at once, and so are the 32 of the four threads of a row.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *[[0, 32], [0, 64]][: head_dim // 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, head_dim],
    )


PACKED_64, PACKED_128 = gl.constexpr(_packed(64)), gl.constexpr(_packed(128))
# Names that differ between Triton 3.6 and 3.9.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def boxes_of(rows: Tensor, num_rows: int) -> TensorDescriptor:
    """K or V of a layer, [keys, head_dim], as what is copied at once: 64 dims of some rows."""
    return TensorDescriptor.from_tensor(rows, [num_rows, PANEL.value], PANELS)


@gluon.jit
def reshaped(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as something else."""
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def as_tiles(memory, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory as [COUNT, ROWS, COLUMNS]."""
    return reshaped(memory, [COUNT, ROWS, COLUMNS], TILES)


@gluon.jit
def share_of(plan_ptr):
    """Where it stands what this program has to do."""
    return plan_ptr + HEADER_INTS + gl.program_id(0) * SHARE_INTS


@gluon.jit
def num_tiles_of(key_begin, key_end, KEYS: gl.constexpr):
    """A unit without keys has a tile as well, all masked: its rows are written like others."""
    return gl.maximum((key_end - key_begin + KEYS - 1) // KEYS, 1)


@gluon.jit
def read_piece(piece_ptr):
    """Entry, rows, keys, limit and stretch."""
    return (
        gl.load(piece_ptr + PIECE_ENTRY),
        gl.load(piece_ptr + PIECE_ROW_BEGIN), gl.load(piece_ptr + PIECE_ROW_END),
        gl.load(piece_ptr + PIECE_KEY_BEGIN), gl.load(piece_ptr + PIECE_KEY_END),
        gl.load(piece_ptr + PIECE_FIRST_LIMIT), gl.load(piece_ptr + PIECE_STRETCH),
    )  # fmt: skip


@gluon.jit
def rows_of(row_begin, kv_head, GROUP: gl.constexpr, FOLD: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of the span that a group has, and their heads."""
    lanes = gl.arange(0, 64, LAYOUT)
    rows = row_begin + lanes % (64 // FOLD)
    return rows, (kv_head + lanes // (64 // FOLD)) * GROUP + rows % GROUP


@gluon.jit
def find_tokens(
    first_token, entries_ptr, row_begin, row_end, GROUP: gl.constexpr, FOLD: gl.constexpr
):
    """Tokens of a group's rows. Where those of the span are neighbours, the piece tells the first,
    and they need not be looked up; else it tells -1.
    """
    rows, _ = rows_of(row_begin, 0, GROUP, FOLD, gl.SliceLayout(1, QUERIES))
    tokens = first_token + rows // GROUP
    if first_token < 0:
        tokens = gl.load(entries_ptr + rows // GROUP, mask=rows < row_end, other=0)
    return tokens


@gluon.jit
def start_queries(
    q_ptr, q_rows, tokens, row_begin, row_end, kv_head, stride_q_token, stride_q_head,
    GROUP: gl.constexpr, FOLD: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Begin to copy a group's rows into shared memory; those past the last are nobody's."""
    rows, head = rows_of(row_begin, kv_head, GROUP, FOLD, gl.SliceLayout(1, QUERIES))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, QUERIES))
    offset = tokens.to(gl.int64) * stride_q_token + head * stride_q_head
    is_row = rows < row_end
    _load_rows(q_rows, q_ptr + offset[:, None] + dims[None, :], mask=is_row[:, None])
    async_copy.commit_group()


@gluon.jit
def await_queries():
    """No fence, since they are read as any memory: that would wait for everything else that this
    group has asked for.
    """
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def release(empty, stage, is_read=True):
    """All warps of the group have read the tile: it may be overwritten."""
    barrier()
    mbarrier.arrive(empty.index(stage), count=1, pred=is_read)


@gluon.jit
def shares_of(top, total, LAYOUT: gl.constexpr):
    """What to multiply rows by, and their base-2 lse; no keys give zeros and -inf."""
    has_keys = total > 0
    total = gl.where(has_keys, total, 1.0)
    lse = gl.where(has_keys, top + gl.log2(total), float("-inf"))
    return gl.convert_layout(1.0 / total, LAYOUT), gl.convert_layout(lse, LAYOUT)


@gluon.jit
def find_rows(
    entries_ptr, num_entries, row_begin, row_end, kv_head,
    GROUP: gl.constexpr, FOLD: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Token, slot and head of a group's rows, which of them there are, and whether they are whole;
    a unit's rows are all of one kind.
    """
    rows, head = rows_of(row_begin, kv_head, GROUP, FOLD, LAYOUT)
    is_row = rows < row_end
    token = gl.load(entries_ptr + rows // GROUP, mask=is_row, other=0)
    slots_ptr = entries_ptr + ENTRY_SLOT * num_entries
    slot = gl.load(slots_ptr + rows // GROUP, mask=is_row, other=0)
    is_whole = gl.load(slots_ptr + row_begin // GROUP) < 0
    return token, slot, head, is_row, is_whole


@gluon.jit
def write_rows(
    acc, share, lse, token, slot, head, is_row, is_whole, stretch,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows, times their share, to `out` where they are whole; packed to their slots where they are
    Partials.

    A packed row is in fp16, over its largest magnitude: half of the bytes to write and to read, and
    nothing overflows; if that is infinite, no dim of the row is a number. Beside its lse stands
    what to multiply it by. Its dims stand in the order in which threads have them
    (`merge_partials.py`).
    """
    if is_whole:
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
        offset = token.to(gl.int64) * stride_out_token + head * stride_out_head
        gl.store(
            out_ptr + offset[:, None] + dims[None, :],
            (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None],
        )  # fmt: skip
        if HAS_LSE:
            gl.store(lse_ptr + token * HEADS + head, lse * LN_2, mask=is_row)
    else:
        PACKED: gl.constexpr = PACKED_128 if HEAD_DIM == 128 else PACKED_64
        ROWS: gl.constexpr = gl.SliceLayout(1, PACKED)
        place = (slot + stretch) * HEADS + head
        peak = gl.maximum(gl.max(gl.abs(acc), 1), LEAST_PEAK)
        gl.store(partial_lse_ptr + 2 * place, lse, mask=is_row)
        gl.store(partial_lse_ptr + 2 * place + 1, peak * share, mask=is_row)
        rows = (acc * (1.0 / peak)[:, None]).to(gl.float16)
        rows = rows.reshape([64, HEAD_DIM // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4))
        rows = gl.convert_layout(rows.reshape([64, HEAD_DIM]), PACKED)
        columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, PACKED))
        first = gl.convert_layout(place, ROWS).to(gl.int64) * HEAD_DIM
        mask = gl.convert_layout(is_row, ROWS)[:, None]
        gl.store(partial_ptr + first[:, None] + columns[None, :], rows, mask=mask)
