# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Decodes with rows (`rows.py`) as Triton kernels, for the delta rule and for Mamba-2, whose query,
key and value are c, b and x. With S the base, G_i the product of the decays from the base up to
token i, and t the token of this step:

    delta rule   u_t = beta (v_t - G_t k_t^T S - sum_{i<t} (G_t/G_i) (k_t . k_i) u_i)
    Mamba-2      u_t = dt v_t
    both         o_t = G_t q_t^T S + sum_{i<=t} (G_t/G_i) (q_t . k_i) u_i
                 S_t = G_t S + sum_{i<=t} (G_t/G_i) k_i u_i^T

Two kernels. The first reads each base once for a group of siblings, and multiplies it with all
their queries and keys; some of its programs compute gates and norms. The second adds a sequence's
own rows, and appends one. It begins while the first still runs, and waits for it after its rows.
The programs of the first take what there is to do in turn: in a CUDA graph only the device knows
how much that is. Sequences that write a state are computed as those without rows are, from the sum
of base and rows (`sum_of_rows`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import let_in, overlap_options, wait_alone
from mainstem.kernels.recurrent.blocks import (
    lanes_of,
    log_decay,
    product,
    read_state,
    rows_of,
    softplus,
)
from mainstem.kernels.recurrent.rows import ROOM_STEP, SIBLINGS, LayerRows, RowUse
from mainstem.kernels.recurrent.segments import Segments, TileList

EPS = tl.constexpr(1e-6)
FOLDED = tl.constexpr(32)  # rows that are added to a state at a time
ROWS = 4  # that a program reads at a time
# the best of ten to twenty settings each on an H200, heads of 128; see docs/log/gpu.md
BASE_PROGRAMS = 528
GATE_PROGRAMS = 132
WRITER_PROGRAMS = 2112
BASE_OPTIONS = {"num_warps": 4, "num_stages": 2}
ROW_OPTIONS = {"num_warps": 1, "num_stages": 1}


@triton.jit
def _write_gates(
    q_ptr, k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, norms_ptr, keys_ptr, sums_ptr,
    row_slots_ptr, counts_ptr, seq,
    stride_q, stride_k, stride_a, stride_b, stride_keys, stride_sums, room, scale, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_LANES: tl.constexpr,
    HEAD_LANES: tl.constexpr, KEY_HEAD_LANES: tl.constexpr,
):  # fmt: skip
    """Store for each head of a token: its decay, the sum of logarithms of decays since the base,
    and beta (of Mamba-2: dt); for each key head: what the query is to be multiplied with, what the
    key, and their product. Append the key and the sums to the rows."""
    key_heads: tl.constexpr = HEADS // GROUP
    token = seq.to(tl.int64)
    slot, count = tl.load(row_slots_ptr + seq).to(tl.int64), tl.load(counts_ptr + seq)
    heads = tl.arange(0, HEAD_LANES)
    is_head = heads < HEADS
    a = tl.load(a_ptr + token * stride_a + heads, mask=is_head, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + heads, mask=is_head, other=0.0)
    step = softplus(a + tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0))
    step = tl.minimum(tl.maximum(step, least), most)
    log = log_decay(step, a_log)
    sum_ptrs = sums_ptr + slot * stride_sums + heads * room + count
    total = log + tl.load(sum_ptrs - 1, mask=is_head & (heads * 0 < count), other=0.0)
    factor = step
    if b_ptr is not None:
        b = tl.load(b_ptr + token * stride_b + heads, mask=is_head, other=0.0)
        factor = tl.sigmoid(b.to(tl.float32))
    gate_ptrs = gates_ptr + (token * HEADS + heads) * 4
    tl.store(gate_ptrs, tl.exp(log), mask=is_head)
    tl.store(gate_ptrs + 1, tl.exp(total), mask=is_head)
    tl.store(gate_ptrs + 2, factor, mask=is_head)
    tl.store(sum_ptrs, total, mask=is_head)

    key_ids, dims = tl.arange(0, KEY_HEAD_LANES), tl.arange(0, K_LANES)
    is_key_head = key_ids < key_heads
    cells = key_ids[:, None] * K + dims[None, :]
    is_cell = is_key_head[:, None] & (dims < K)[None, :]
    q = tl.load(q_ptr + token * stride_q + cells, mask=is_cell, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * stride_k + cells, mask=is_cell, other=0.0).to(tl.float32)
    q_scale = tl.zeros([KEY_HEAD_LANES], tl.float32) + 1.0
    k_scale = q_scale
    if b_ptr is not None:
        q_scale = tl.rsqrt(tl.sum(q * q, 1) + EPS) * scale
        k_scale = tl.rsqrt(tl.sum(k * k, 1) + EPS)
    norm_ptrs = norms_ptr + (token * key_heads + key_ids) * 4
    tl.store(norm_ptrs, q_scale, mask=is_key_head)
    tl.store(norm_ptrs + 1, k_scale, mask=is_key_head)
    tl.store(norm_ptrs + 2, tl.sum(q * k, 1) * q_scale * k_scale, mask=is_key_head)
    key_ptrs = keys_ptr + slot * stride_keys + (key_ids * room + count)[:, None] * K
    tl.store(
        key_ptrs + dims[None, :], (k * k_scale[:, None]).to(keys_ptr.dtype.element_ty), mask=is_cell
    )


@triton.jit
def _sibling_bases_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, matrix_ptr, found_ptr, gates_ptr,
    norms_ptr, keys_ptr, sums_ptr, reads_ptr, row_slots_ptr, counts_ptr, members_ptr,
    group_starts_ptr, sizes_ptr,
    stride_q, stride_k, stride_a, stride_b, stride_slot, stride_keys, stride_sums, room, plane,
    scale, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, HEAD_LANES: tl.constexpr, KEY_HEAD_LANES: tl.constexpr,
    BLOCK_V: tl.constexpr, MEMBERS: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The first GATES programs: see _write_gates. The others store the products of a base with its
    group's queries and, `plane` numbers after that, keys; one takes some columns of a head's base
    for one group, then others."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    wait_alone(OVERLAPS)
    let_in(OVERLAPS)
    num_groups = tl.load(sizes_ptr)
    if program < GATES:
        for index in range(program, tl.load(group_starts_ptr + num_groups), GATES):
            _write_gates(
                q_ptr, k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, norms_ptr,
                keys_ptr, sums_ptr, row_slots_ptr, counts_ptr, tl.load(members_ptr + index),
                stride_q, stride_k, stride_a, stride_b, stride_keys, stride_sums, room,
                scale, least, most, HEADS, GROUP, K, K_LANES, HEAD_LANES, KEY_HEAD_LANES,
            )  # fmt: skip
    else:
        ids, dims = tl.arange(0, MEMBERS), tl.arange(0, K_LANES)
        step = tl.num_programs(0) - GATES
        for item in range(program - GATES, num_groups * (HEADS * blocks), step):
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
            if b_ptr is not None:
                k = rows_of(k_ptr + (head // GROUP) * K, seqs, is_member, dims, stride_k, K)
                of_keys = product(k, state, tl.float32, PRECISION, False)
                tl.store(found_ptrs + plane, of_keys, mask=is_found)


@triton.jit
def _of_rows(
    q, k, keys_ptr, values_ptr, sums_ptr, count, dims, columns,
    K: tl.constexpr, V: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_KEY: tl.constexpr,
):  # fmt: skip
    """The products of a query and a key with the sum of a head's rows after the last one. They are
    no matrix products: of their 16 rows two would be used, and moved between threads."""
    last = tl.load(sums_ptr + tl.maximum(count - 1, 0), mask=count > 0, other=0.0)
    of_query = tl.zeros([columns.shape[0]], tl.float32)
    of_key = of_query
    for first in range(0, count, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        is_row = rows < count
        keys = rows_of(keys_ptr, rows, is_row, dims, K, K).to(tl.float32)
        values = rows_of(values_ptr, rows, is_row, columns, V, V).to(tl.float32)
        sums = tl.load(sums_ptr + rows, mask=is_row, other=0.0)
        weights = tl.where(is_row, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)
        scores = tl.sum(keys * q[None, :], 1) * weights
        of_query += tl.sum(values * scores[:, None], 0)
        if HAS_KEY:
            scores = tl.sum(keys * k[None, :], 1) * weights
            of_key += tl.sum(values * scores[:, None], 0)
    return of_query, of_key


@triton.jit
def _sibling_rows_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, skip_ptr, of_base_ptr, gates_ptr, norms_ptr, out_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr, writes_ptr,
    stride_q, stride_k, stride_v, stride_out, stride_keys, stride_values, stride_sums, room, plane,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, V_LANES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence and head. Without b_ptr: Mamba-2. When it begins, the kernel before
    the previous one has ended: rows, queries and keys are there."""
    head, seq = tl.program_id(0), tl.program_id(1)
    let_in(OVERLAPS)
    slot = tl.load(row_slots_ptr + seq).to(tl.int64)
    if (slot >= 0) & (tl.load(writes_ptr + seq) < 0):
        count = tl.load(counts_ptr + seq)
        token = seq.to(tl.int64)
        key_head = head // GROUP
        dims, columns = tl.arange(0, K_LANES), tl.arange(0, V_LANES)
        is_dim, is_column = dims < K, columns < V
        key_cells = key_head * K + dims
        q = tl.load(q_ptr + token * stride_q + key_cells, mask=is_dim, other=0.0).to(tl.float32)
        k = q
        if b_ptr is not None:
            k = tl.load(k_ptr + token * stride_k + key_cells, mask=is_dim, other=0.0)
            k = k.to(tl.float32)
        keys_ptr += slot * stride_keys + key_head * room * K
        norm_ptrs = norms_ptr + (token * (HEADS // GROUP) + key_head) * 4
        head_values_ptr = values_ptr + slot * stride_values + head * room * V
        of_query, of_key = _of_rows(
            q, k, keys_ptr, head_values_ptr, sums_ptr + slot * stride_sums + head * room,
            count, dims, columns, K, V, BLOCK_ROWS, b_ptr is not None,
        )  # fmt: skip
        wait_alone(OVERLAPS)
        gate_ptrs = gates_ptr + (token * HEADS + head) * 4
        decay, decay_of_base = tl.load(gate_ptrs), tl.load(gate_ptrs + 1)
        of_base_ptrs = of_base_ptr + (token * HEADS + head) * V + columns
        of_base = tl.load(of_base_ptrs, mask=is_column, other=0.0)
        of_query = of_query * decay + of_base * decay_of_base
        v_ptrs = v_ptr + token * stride_v + head * V + columns
        v = tl.load(v_ptrs, mask=is_column, other=0.0).to(tl.float32)
        out = of_query * tl.load(norm_ptrs)
        u = v
        if b_ptr is None:
            out += tl.load(skip_ptr + head) * v
        else:
            of_base = tl.load(of_base_ptrs + plane, mask=is_column, other=0.0)
            u -= (of_key * decay + of_base * decay_of_base) * tl.load(norm_ptrs + 1)
        u *= tl.load(gate_ptrs + 2)
        out += tl.load(norm_ptrs + 2) * u
        out_ptrs = out_ptr + token * stride_out + head * V + columns
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_column)
        new = u.to(values_ptr.dtype.element_ty)
        tl.store(head_values_ptr + count * V + columns, new, mask=is_column)
    else:
        wait_alone(OVERLAPS)


@triton.jit
def sum_of_rows(
    keys_ptr, values_ptr, sums_ptr, slot, count, head, dims, columns,
    stride_keys, stride_values, stride_sums, room,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The decay of a head's base after `count` rows of a slot, and columns of what the rows add to
    it [dims, columns]."""
    slot = slot.to(tl.int64)
    keys_ptr += slot * stride_keys + (head // GROUP) * room * K
    values_ptr += slot * stride_values + head * room * V
    sums_ptr += slot * stride_sums + head * room
    last = tl.load(sums_ptr + count - 1)
    added = tl.zeros([dims.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, count, FOLDED):
        rows = first + tl.arange(0, FOLDED)
        is_row = rows < count
        keys = rows_of(keys_ptr, rows, is_row, dims, K, K)
        values = rows_of(values_ptr, rows, is_row, columns, V, V).to(tl.float32)
        sums = tl.load(sums_ptr + rows, mask=is_row, other=0.0)
        values = values * tl.where(is_row, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)[:, None]
        added += product(tl.trans(keys), values, keys_ptr.dtype.element_ty, PRECISION, UPCAST)
    return tl.exp(last), added


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
    """Compute the decodes of a step that append a row."""
    q, k, v, a, b, use = inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, segments.rows
    assert use is not None
    (key_heads, key_dim), (heads, value_dim) = q.shape[1:], v.shape[1:]
    rows = check_rows(rows, v, (key_heads, key_dim))
    if use.num_groups == 0:
        return
    num_decodes, is_delta = segments.num_decodes, b is not None
    of_base = _fp32(out, 1 + is_delta, num_decodes, heads, value_dim)
    gates, norms = _fp32(out, num_decodes, heads, 4), _fp32(out, num_decodes, key_heads, 4)
    sizes = {
        "HEADS": heads, "GROUP": heads // key_heads, "K": key_dim, "V": value_dim,
        "K_LANES": lanes_of(key_dim), **overlap_options(out.device),
    }  # fmt: skip
    columns = base_columns(key_dim, value_dim)
    items = use.num_groups * heads * cdiv(value_dim, columns)
    precision = "ieee" if v.dtype == torch.float32 else "tf32"
    gate_programs = min(GATE_PROGRAMS, num_decodes)
    stride_b = 0 if b is None else b.stride(0)
    _sibling_bases_kernel[(gate_programs + min(items, BASE_PROGRAMS),)](
        q, k, a, b, inputs.a_log, inputs.dt_bias, matrix, of_base, gates, norms,
        rows.keys, rows.sums, segments.reads, use.slots, use.counts, use.members,
        use.group_starts, use.sizes,
        q.stride(0), k.stride(0), a.stride(0), stride_b, matrix.stride(0), rows.keys.stride(0),
        rows.sums.stride(0), rows.sums.shape[2], of_base.stride(0), key_dim**-0.5, *inputs.limits,
        BLOCK_V=columns, MEMBERS=SIBLINGS, GATES=gate_programs, HEAD_LANES=next_power_of_2(heads),
        KEY_HEAD_LANES=next_power_of_2(key_heads), PRECISION=precision, **sizes,
        **BASE_OPTIONS,
    )  # fmt: skip
    _sibling_rows_kernel[(heads, num_decodes)](
        q, k, v, b, inputs.skip, of_base, gates, norms, out,
        *rows[1:], use.slots, use.counts, segments.writes,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        *_strides(rows), rows.sums.shape[2], of_base.stride(0),
        V_LANES=lanes_of(value_dim), BLOCK_ROWS=ROWS, **sizes, **ROW_OPTIONS,
    )  # fmt: skip


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(rows: LayerRows) -> tuple[int, int, int]:
    """Of keys, values and sums, from slot to slot."""
    return rows.keys.stride(0), rows.values.stride(0), rows.sums.stride(0)


class KernelRows(NamedTuple):
    """Arguments of kernels that may read or store rows; all nothing in a step without rows."""

    keys: Tensor | None = None
    values: Tensor | None = None
    sums: Tensor | None = None
    slots: Tensor | None = None  # of sequences, or of tiles
    firsts: Tensor | None = None  # of sequences: counts; of tiles: where their rows begin
    stride_keys: int = 0
    stride_values: int = 0
    stride_sums: int = 0
    room: int = 0

    @classmethod
    def of_tiles(cls, tiles: TileList, rows: LayerRows | None) -> "KernelRows":
        return cls._of(tiles.row_slots, tiles.first_rows, rows)

    @classmethod
    def of_writers(cls, use: RowUse | None, rows: LayerRows | None) -> "KernelRows":
        return cls() if use is None else cls._of(use.slots, use.counts, rows)

    @classmethod
    def _of(
        cls, slots: Tensor | None, firsts: Tensor | None, rows: LayerRows | None
    ) -> "KernelRows":
        if slots is None:
            return cls()
        assert rows is not None, "rows: without a place for them"
        return cls(*rows[1:], slots, firsts, *_strides(rows), rows.sums.shape[2])


def base_columns(key_dim: int, value_dim: int) -> int:
    """The columns of a base in one program: two fit into the shared memory of small cards."""
    return min(lanes_of(value_dim), 64, 8192 // lanes_of(key_dim))


def writer_options(use: RowUse | None, key_dim: int) -> dict[str, int]:
    """Launch options of decodes that write a state; if they may fold, they need more registers."""
    return {} if use is None else {"num_warps": 2 if key_dim <= 128 else 4, "num_stages": 1}


def writer_grid(use: RowUse | None, blocks: int, num_writers: int) -> tuple[int, ...]:
    """The programs of decodes that write a state, of `blocks` blocks each."""
    if use is None:
        return blocks, num_writers
    return (min(blocks * num_writers, WRITER_PROGRAMS),)


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
