# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Decodes with rows (`rows.py`) as Triton kernels, for the delta rule and for Mamba-2, whose query,
key and value are c, b and x. With S the base, G_i the product of the decays from the base up to
token i, and t the token of this step:

    delta rule   u_t = beta (v_t - G_t k_t^T S - sum_{i<t} (G_t/G_i) (k_t . k_i) u_i)
    Mamba-2      u_t = dt v_t
    both         o_t = G_t q_t^T S + sum_{i<=t} (G_t/G_i) (q_t . k_i) u_i
                 S_t = G_t S + sum_{i<=t} (G_t/G_i) k_i u_i^T

Three kernels, one after the other. The first reads each base once for a group of siblings, and
multiplies it with all their queries and keys. The second adds a sequence's own rows, and appends
one. The third writes S_t for the few sequences that fold. The programs of the first and of the
third take what there is to do in turn: in a CUDA graph only the device knows how much that is.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead
from mainstem.kernels.recurrent.blocks import (
    dot_options,
    lanes_of,
    log_decay,
    product,
    read_state,
    rows_of,
    softplus,
    write_state,
)
from mainstem.kernels.recurrent.rows import ROOM_STEP, SIBLINGS, LayerRows, RowUse
from mainstem.kernels.recurrent.segments import Segments, TileList

EPS = tl.constexpr(1e-6)
VECTORS = tl.constexpr(16)  # rows of a product: the query, the key if needed, and padding
ROWS = 64  # that are multiplied at a time
PART = 1
COLUMNS = 64  # of a state in one program
BASE_PROGRAMS = 1024
FOLD_PROGRAMS = 512
PLAIN_PROGRAMS = 8  # for each block of a head's state, beside sequences with rows
BASE_OPTIONS = {"num_warps": 4, "num_stages": 1}
ROW_OPTIONS = {"num_warps": 4, "num_stages": 1}
FOLD_OPTIONS = {"num_warps": 4, "num_stages": 1}


@triton.jit
def _base_kernel(
    q_ptr, k_ptr, matrix_ptr, found_ptr, reads_ptr, members_ptr, group_starts_ptr, sizes_ptr,
    stride_q, stride_k, stride_slot, plane,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, BLOCK_V: tl.constexpr, MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Store the products of a base with its group's queries and, `plane` numbers after that, keys.
    One program takes some columns of a head's base for one group, then others."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    wait_for_ahead(OVERLAPS)
    ids, dims = tl.arange(0, MEMBERS), tl.arange(0, K_LANES)
    for item in range(tl.program_id(0), tl.load(sizes_ptr) * (HEADS * blocks), tl.num_programs(0)):
        group, head = item // (HEADS * blocks), (item // blocks) % HEADS
        columns = (item % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        first = tl.load(group_starts_ptr + group)
        is_member = ids < tl.load(group_starts_ptr + group + 1) - first
        slot = tl.load(reads_ptr + tl.load(members_ptr + first))
        seqs = tl.load(members_ptr + first + ids, mask=is_member, other=0).to(tl.int64)
        cells = head * K * V + dims[:, None] * V + columns[None, :]
        is_cell = (dims < K)[:, None] & (columns < V)[None, :]
        state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)
        found_ptrs = found_ptr + (seqs * HEADS + head)[:, None] * V + columns[None, :]
        is_found = is_member[:, None] & (columns < V)[None, :]
        q = rows_of(q_ptr + (head // GROUP) * K, seqs, is_member, dims, stride_q, K)
        of_queries = product(q, state, tl.float32, PRECISION, False)
        tl.store(found_ptrs, of_queries, mask=is_found)
        if k_ptr is not None:
            k = rows_of(k_ptr + (head // GROUP) * K, seqs, is_member, dims, stride_k, K)
            of_keys = product(k, state, tl.float32, PRECISION, False)
            tl.store(found_ptrs + plane, of_keys, mask=is_found)


@triton.jit
def _sum_of(x, which):
    """Row `which` of x [VECTORS, columns]."""
    ids = tl.arange(0, VECTORS)
    return tl.sum(tl.where((ids == which)[:, None], x, 0.0), 0)


@triton.jit
def _row_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, skip_ptr, of_base_ptr, out_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_out,
    stride_keys, stride_values, stride_sums, room, plane, scale, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, V_LANES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence and PART heads that have one key head. Without b_ptr: Mamba-2."""
    first_head, seq = tl.program_id(0) * PART, tl.program_id(1)
    wait_for_ahead(OVERLAPS)
    slot = tl.load(row_slots_ptr + seq).to(tl.int64)
    if slot >= 0:
        count = tl.load(counts_ptr + seq)
        token = seq.to(tl.int64)
        key_head = first_head // GROUP
        ids, dims, columns = tl.arange(0, VECTORS), tl.arange(0, K_LANES), tl.arange(0, V_LANES)
        is_dim, is_column = dims < K, columns < V
        q = tl.load(q_ptr + token * stride_q + key_head * K + dims, mask=is_dim, other=0.0)
        k = tl.load(k_ptr + token * stride_k + key_head * K + dims, mask=is_dim, other=0.0)
        q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
        vectors = tl.where((ids == 0)[:, None], q_wide[None, :], 0.0)
        q_scale, k_scale = 1.0, 1.0
        if b_ptr is not None:
            vectors = tl.where((ids == 1)[:, None], k_wide[None, :], vectors)
            q_scale = tl.rsqrt(tl.sum(q_wide * q_wide, 0) + EPS) * scale
            k_scale = tl.rsqrt(tl.sum(k_wide * k_wide, 0) + EPS)
        of_key = tl.sum(q_wide * k_wide, 0) * q_scale * k_scale
        element = keys_ptr.dtype.element_ty
        keys_ptr += slot * stride_keys + key_head * room * K
        for part in tl.static_range(PART):
            head = first_head + part
            head_values_ptr = values_ptr + slot * stride_values + head * room * V
            head_sums_ptr = sums_ptr + slot * stride_sums + head * room
            a = tl.load(a_ptr + token * stride_a + head).to(tl.float32)
            step = softplus(a + tl.load(dt_bias_ptr + head))
            step = tl.minimum(tl.maximum(step, least), most)
            before = tl.load(head_sums_ptr + tl.maximum(count - 1, 0), mask=count > 0, other=0.0)
            total = before + log_decay(step, tl.load(a_log_ptr + head))
            of_base_ptrs = of_base_ptr + ids[:, None] * plane + columns[None, :]
            num_vectors: tl.constexpr = 1 if b_ptr is None else 2
            is_found = (ids < num_vectors)[:, None] & is_column[None, :]
            found = tl.load(
                of_base_ptrs + (token * HEADS + head) * V, mask=is_found, other=0.0
            ) * tl.exp(total)
            for first in range(0, count, BLOCK_ROWS):
                rows = first + tl.arange(0, BLOCK_ROWS)
                is_row = rows < count
                keys = rows_of(keys_ptr, rows, is_row, dims, K, K)
                values = rows_of(head_values_ptr, rows, is_row, columns, V, V)
                sums = tl.load(head_sums_ptr + rows, mask=is_row, other=0.0)
                weights = tl.where(is_row, tl.exp(tl.minimum(total - sums, 0.0)), 0.0)
                scores = product(vectors, tl.trans(keys), element, PRECISION, UPCAST)
                scores = scores * weights[None, :]
                found += product(scores, values, element, PRECISION, UPCAST)
            v_ptrs = v_ptr + token * stride_v + head * V + columns
            v = tl.load(v_ptrs, mask=is_column, other=0.0).to(tl.float32)
            out = _sum_of(found, 0) * q_scale
            if b_ptr is None:
                u = step * v
                out += tl.load(skip_ptr + head) * v
            else:
                beta = tl.sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
                u = beta * (v - _sum_of(found, 1) * k_scale)
            out += of_key * u
            out_ptrs = out_ptr + token * stride_out + head * V + columns
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_column)
            tl.store(head_values_ptr + count * V + columns, u.to(element), mask=is_column)
            tl.store(head_sums_ptr + count, total)
        if first_head % GROUP == 0:
            tl.store(keys_ptr + count * K + dims, (k_wide * k_scale).to(element), mask=is_dim)


@triton.jit
def _fold_kernel(
    matrix_ptr, keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr, reads_ptr, writes_ptr,
    folds_ptr, sizes_ptr, stride_slot, stride_keys, stride_values, stride_sums, room,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the states of sequences that fold. One program takes some columns of a head's state of
    one sequence, then others."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    wait_for_ahead(OVERLAPS)
    dims = tl.arange(0, K_LANES)
    for item in range(
        tl.program_id(0), tl.load(sizes_ptr + 1) * (HEADS * blocks), tl.num_programs(0)
    ):
        seq, head = tl.load(folds_ptr + item // (HEADS * blocks)), (item // blocks) % HEADS
        columns = (item % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        cells = head * K * V + dims[:, None] * V + columns[None, :]
        is_cell = (dims < K)[:, None] & (columns < V)[None, :]
        state = read_state(matrix_ptr, tl.load(reads_ptr + seq), cells, is_cell, stride_slot)
        slot, end = tl.load(row_slots_ptr + seq).to(tl.int64), tl.load(counts_ptr + seq) + 1
        head_keys_ptr = keys_ptr + slot * stride_keys + (head // GROUP) * room * K
        head_values_ptr = values_ptr + slot * stride_values + head * room * V
        head_sums_ptr = sums_ptr + slot * stride_sums + head * room
        total = tl.load(head_sums_ptr + end - 1)
        state = state * tl.exp(total)
        for first in range(0, end, BLOCK_ROWS):
            rows = first + tl.arange(0, BLOCK_ROWS)
            is_row = rows < end
            keys = rows_of(head_keys_ptr, rows, is_row, dims, K, K)
            values = rows_of(head_values_ptr, rows, is_row, columns, V, V).to(tl.float32)
            sums = tl.load(head_sums_ptr + rows, mask=is_row, other=0.0)
            weights = tl.where(is_row, tl.exp(tl.minimum(total - sums, 0.0)), 0.0)
            values = values * weights[:, None]
            state += product(tl.trans(keys), values, tl.float32, PRECISION, False)
        write = tl.load(writes_ptr + seq)
        write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """A token's query, key, value and gates, under the names of the delta rule."""

    q: Tensor  # [tokens, key_heads, key_dim]
    k: Tensor
    v: Tensor  # [tokens, heads, value_dim]
    a: Tensor  # [tokens, heads]
    b: Tensor | None  # [tokens, heads]; None: Mamba-2
    a_log: Tensor  # [heads]
    dt_bias: Tensor
    skip: Tensor | None  # of Mamba-2
    limits: tuple[float, float] = (0.0, float("inf"))  # of the step


def decode_with_rows(
    inputs: DecodeInputs, segments: Segments, matrix: Tensor, rows: LayerRows | None, out: Tensor
) -> None:
    """Compute the decodes of a step that have rows: outputs, rows, and the states of folds."""
    use = segments.rows
    assert use is not None
    key_heads, key_dim = inputs.q.shape[1:]
    heads, value_dim = inputs.v.shape[1:]
    rows = check_rows(rows, inputs.v, (key_heads, key_dim))
    if use.num_groups == 0:
        return
    is_delta, is_wide = inputs.b is not None, rows.keys.dtype == torch.float32
    of_base = torch.empty(
        1 + is_delta, segments.num_decodes, heads, value_dim,
        dtype=torch.float32, device=out.device,
    )  # fmt: skip
    sizes = {
        "HEADS": heads, "GROUP": heads // key_heads, "K": key_dim, "V": value_dim,
        "K_LANES": lanes_of(key_dim), **overlap_options(out.device),
    }  # fmt: skip
    columns = min(lanes_of(value_dim), COLUMNS)
    blocks = heads * cdiv(value_dim, columns)
    precision = {"PRECISION": "ieee" if is_wide else "tf32"}
    _base_kernel[(min(use.num_groups * blocks, BASE_PROGRAMS),)](
        inputs.q, inputs.k if is_delta else None, matrix, of_base,
        segments.reads, use.members, use.group_starts, use.sizes,
        inputs.q.stride(0), inputs.k.stride(0), matrix.stride(0), of_base.stride(0),
        BLOCK_V=columns, MEMBERS=SIBLINGS, **precision, **sizes, **BASE_OPTIONS,
    )  # fmt: skip
    _add_rows(inputs, segments.num_decodes, use, rows, of_base, out, sizes)
    if use.num_folds:
        _fold_kernel[(min(use.num_folds * blocks, FOLD_PROGRAMS),)](
            matrix, *rows[1:], use.slots, use.counts, segments.reads, segments.writes,
            use.folds, use.sizes, matrix.stride(0), *_strides(rows), rows.sums.shape[2],
            BLOCK_V=columns, BLOCK_ROWS=ROWS, **precision, **sizes, **FOLD_OPTIONS,
        )  # fmt: skip


def _add_rows(
    inputs: DecodeInputs,
    num_decodes: int,
    use: RowUse,
    rows: LayerRows,
    of_base: Tensor,
    out: Tensor,
    sizes: dict[str, object],
) -> None:
    q, k, v, a, b = inputs.q, inputs.k, inputs.v, inputs.a, inputs.b
    heads, value_dim = v.shape[1:]
    part = PART if heads // q.shape[1] % PART == 0 else 1
    _row_kernel[(heads // part, num_decodes)](
        q, k, v, a, b, inputs.a_log, inputs.dt_bias, inputs.skip, of_base, out,
        *rows[1:], use.slots, use.counts,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), 0 if b is None else b.stride(0),
        out.stride(0), *_strides(rows), rows.sums.shape[2], of_base.stride(0), q.shape[2] ** -0.5,
        *inputs.limits, V_LANES=lanes_of(value_dim), BLOCK_ROWS=ROWS, PART=part,
        **dot_options(rows.keys, q.shape[2], value_dim), **sizes, **ROW_OPTIONS,
    )  # fmt: skip


def _strides(rows: LayerRows) -> tuple[int, int, int]:
    """Of keys, values and sums, from slot to slot."""
    return rows.keys.stride(0), rows.values.stride(0), rows.sums.stride(0)


class TileRows(NamedTuple):
    """Where the kernels of tiles store rows; all nothing in a step without rows."""

    keys: Tensor | None = None
    values: Tensor | None = None
    sums: Tensor | None = None
    slots: Tensor | None = None  # of tiles
    firsts: Tensor | None = None
    stride_keys: int = 0
    stride_values: int = 0
    stride_sums: int = 0
    room: int = 0

    @classmethod
    def of(cls, tiles: TileList, rows: LayerRows | None) -> "TileRows":
        if tiles.row_slots is None or rows is None:
            assert tiles.row_slots is None, "rows: without a place for them"
            return cls()
        return cls(
            *rows[1:], tiles.row_slots, tiles.first_rows, *_strides(rows), rows.sums.shape[2]
        )


def check_rows(rows: LayerRows | None, values: Tensor, key_shape: tuple[int, int]) -> LayerRows:
    """Raise LayoutError unless `rows` holds rows of such keys and values [tokens, heads, dim]."""
    assert rows is not None, "rows: without a place for them"
    room, (heads, value_dim) = rows.sums.shape[2], values.shape[1:]
    shapes = {
        "keys": (key_shape[0], room, key_shape[1]),
        "values": (heads, room, value_dim),
        "sums": (heads, room),
    }
    for name, shape in shapes.items():
        part: Tensor = getattr(rows, name)
        dtype = torch.float32 if name == "sums" else values.dtype
        is_whole = part.dim() == len(shape) + 1 and part[:1].is_contiguous()
        if not is_whole or tuple(part.shape[1:]) != shape or part.dtype != dtype:
            raise LayoutError(
                f"{name} of rows must be {dtype} {list(shape)} in a slot, contiguous, "
                f"got {part.dtype} {tuple(part.shape)}"
            )
    if room % ROOM_STEP:
        raise LayoutError(f"a slot must have room for a multiple of {ROOM_STEP} rows, got {room}")
    return rows
