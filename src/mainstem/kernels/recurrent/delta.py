# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The gated delta rule as Triton kernels. A decode reads its state once and writes it once, and so
does a segment whose tokens are computed one after the other (`Segments.is_serial`). Other sequences
are computed in tiles of 64 tokens. With G_i the product of a tile's decays up to token i,
and S the state before the tile:

    u_i = beta_i (v_i - G_i k_i^T S - sum_{j<i} (G_i/G_j) (k_i . k_j) u_j)
    o_i = G_i q_i^T S + sum_{j<=i} (G_i/G_j) (q_i . k_j) u_j
    S'  = G_n S + sum_j (G_n/G_j) k_j u_j^T

The first line is a triangular system (1 + A) u = beta (v - G k^T S). With T = (1 + A)^-1, B the
diagonal matrix of beta, and P the weights of the second line's sum:

    u = T B v - (T B G k^T) S
    o = P T B v + (G q^T - P T B G k^T) S

One kernel computes what is here without S, for all tiles in parallel: the *parts* of a tile.
Another kernel then goes from tile to tile with some columns of S in registers: two products a tile,
one for u and o, one for S'. The tokens of a prompt may become rows (`rows.py`): the first kernel
writes the keys, the other one u and the sums of logarithms. Decodes with rows are in `siblings.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead
from mainstem.kernels.recurrent.blocks import (
    OF_SEGMENTS,
    check_gates,
    check_heads,
    check_matrix,
    check_per_head,
    dot_options,
    has_large_memory,
    lanes_of,
    log_decay,
    product,
    read_state,
    rows_of,
    softplus,
    write_rows,
    write_state,
)
from mainstem.kernels.recurrent.rows import LayerRows
from mainstem.kernels.recurrent.segments import TILE, Segments, TileList
from mainstem.kernels.recurrent.siblings import (
    DecodeInputs,
    KernelRows,
    decode_with_rows,
    sum_of_rows,
    writer_grid,
    writer_options,
)

DECODE_COLUMNS = 32
LONG_TILES = 4  # of a sequence, on average
SMALL = tl.constexpr(16)  # rows of blocks that are inverted row by row
EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
# what may differ between launches for the same model; see `OF_SEGMENTS`
OF_STEP = (
    *OF_SEGMENTS, "q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr",
    "stride_q", "stride_k", "stride_v", "stride_a", "stride_b", "stride_out",
)  # fmt: skip


@triton.jit
def _delta_token(
    state, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, out_ptr, token, head, dims, columns,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_out, scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Store a token's output in columns of a head; returns these columns of the state after it."""
    is_dim, is_column = dims < K, columns < V
    key_cells = (head // GROUP) * K + dims
    q = tl.load(q_ptr + token * stride_q + key_cells, mask=is_dim, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * stride_k + key_cells, mask=is_dim, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * stride_v + head * V + columns, mask=is_column, other=0.0)
    a = tl.load(a_ptr + token * stride_a + head).to(tl.float32)
    beta = tl.sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
    state = state * tl.exp(log_decay(softplus(a + dt_bias), a_log))
    u = beta * (v.to(tl.float32) - tl.sum(k[:, None] * state, 0))
    state += k[:, None] * u[None, :]
    out = tl.sum(q[:, None] * state, 0)
    out_ptrs = out_ptr + token * stride_out + head * V + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_column)
    return state


@triton.jit
def _delta_decode(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, matrix_ptr, out_ptr, writes_ptr, reads_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr, seq, head, dims, columns,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_out,
    stride_keys, stride_values, stride_sums, room, scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute columns of a head for one decode that writes a state."""
    slot, write = tl.load(reads_ptr + seq), tl.load(writes_ptr + seq)
    cells = head * K * V + dims[:, None] * V + columns[None, :]
    is_cell = (dims < K)[:, None] & (columns < V)[None, :]
    if row_slots_ptr is None:
        state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)
    else:
        row_slot, count = tl.load(row_slots_ptr + seq), tl.load(counts_ptr + seq)
        decay, added = 1.0, tl.zeros([dims.shape[0], columns.shape[0]], tl.float32)
        if (row_slot >= 0) & (count > 0):
            decay, added = sum_of_rows(
                keys_ptr, values_ptr, sums_ptr, row_slot, count, head, dims, columns,
                stride_keys, stride_values, stride_sums, room, GROUP, K, V, PRECISION, UPCAST,
            )  # fmt: skip
        state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot) * decay + added
    state = _delta_token(
        state, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, out_ptr, seq.to(tl.int64),
        head, dims, columns,
        stride_q, stride_k, stride_v, stride_a, stride_b, stride_out, scale, GROUP, K, V,
    )  # fmt: skip
    write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)


@triton.jit
def _delta_decode_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, matrix_ptr, out_ptr,
    writes_ptr, reads_ptr, writers_ptr, sizes_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_out,
    stride_keys, stride_values, stride_sums, room, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_LANES: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and BLOCK_V columns of its state; or with a list of sequences
    (RowUse.writers), of which a program takes some columns of one, then of another."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    dims = tl.arange(0, K_LANES)
    if writers_ptr is None:
        head, seq = tl.program_id(0) // blocks, tl.program_id(1)
        columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
        wait_for_ahead(OVERLAPS)
        _delta_decode(
            q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, matrix_ptr, out_ptr,
            writes_ptr, reads_ptr, None, None, None, None, None, seq, head, dims, columns,
            stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_out, 0, 0, 0, 0,
            scale, GROUP, K, V, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        wait_for_ahead(OVERLAPS)
        items = tl.load(sizes_ptr + 1) * (HEADS * blocks)
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            seq, head = tl.load(writers_ptr + item // (HEADS * blocks)), (item // blocks) % HEADS
            columns = (item % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
            a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
            _delta_decode(
                q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, matrix_ptr, out_ptr,
                writes_ptr, reads_ptr, keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr,
                seq, head, dims, columns,
                stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_out,
                stride_keys, stride_values, stride_sums, room, scale, GROUP, K, V,
                PRECISION, UPCAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=OF_STEP)
def _delta_serial_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, matrix_ptr, out_ptr,
    starts_ptr, writes_ptr, seq_segments_ptr, reads_ptr,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_out, scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_LANES: tl.constexpr,
    BLOCK_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Likewise for sequences of any number of segments and tokens."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, seq = tl.program_id(0) // blocks, tl.program_id(1)
    dims = tl.arange(0, K_LANES)
    columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_ahead(OVERLAPS)
    cells = head * K * V + dims[:, None] * V + columns[None, :]
    is_cell = (dims < K)[:, None] & (columns < V)[None, :]
    state = read_state(matrix_ptr, tl.load(reads_ptr + seq), cells, is_cell, stride_slot)
    first, end = tl.load(seq_segments_ptr + seq), tl.load(seq_segments_ptr + seq + 1)
    for segment in range(first, end):
        start = tl.load(starts_ptr + segment)
        for index in range(0, tl.load(starts_ptr + segment + 1) - start):
            state = _delta_token(
                state, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log, dt_bias, out_ptr,
                (start + index).to(tl.int64), head, dims, columns,
                stride_q, stride_k, stride_v, stride_a, stride_b, stride_out, scale, GROUP, K, V,
            )  # fmt: skip
        write = tl.load(writes_ptr + segment)
        write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of 1 + lower, a strictly lower triangular matrix [TILE, TILE] in fp32.

    Blocks on the diagonal are inverted first, all at the same time, those of 2 rows, then of 4, 8
    and 16: with X the inverses of blocks of one size and N what is between two of them, those of
    twice the size are X - X N X. With X the inverses of SMALL rows and N the rest of `lower`,
    1 + lower = X^-1 (1 + X N). There are 4 blocks, so (X N)^4 = 0 and the inverse is
    (1 - X N) (1 + (X N)^2) X.
    """
    BLOCKS: tl.constexpr = TILE // SMALL
    ids = tl.arange(0, TILE)
    is_near = (ids // SMALL)[:, None] == (ids // SMALL)[None, :]
    near = tl.reshape(tl.where(is_near, lower, 0.0), [BLOCKS, SMALL, BLOCKS, SMALL])
    near = tl.sum(near, 2)  # [blocks, rows, columns]
    small = tl.arange(0, SMALL)
    one = (small[:, None] == small[None, :]).to(tl.float32)
    is_pair = (small // 2)[:, None] == (small // 2)[None, :]
    found = one[None, :, :] - tl.where(is_pair[None, :, :], near, 0.0)
    for level in tl.static_range(1, 4):  # blocks of 2, 4 and 8 rows
        is_same = (small >> level)[:, None] == (small >> level)[None, :]
        is_next = (small >> (level + 1))[:, None] == (small >> (level + 1))[None, :]
        between = tl.where((is_next & (is_same == 0))[None, :, :], near, 0.0)
        right = tl.dot(between, found, input_precision=PRECISION)
        found -= tl.dot(found, right, input_precision=PRECISION)
    wide = tl.broadcast_to(found[:, :, None, :], [BLOCKS, SMALL, BLOCKS, SMALL])
    blocks = tl.where(is_near, tl.reshape(wide, [TILE, TILE]), 0.0)
    # all factors are below 2^14; fp16 keeps as many digits as TF32, and moves half the bytes
    element: tl.constexpr = tl.float16 if PRECISION == "tf32" else tl.float32
    blocks, far = blocks.to(element), tl.where(is_near, 0.0, lower).to(element)
    step = tl.dot(blocks, far, input_precision=PRECISION)
    whole = (ids[:, None] == ids[None, :]).to(tl.float32)
    half = step.to(element)
    square = tl.dot(half, half, input_precision=PRECISION)
    powers = whole - step + square
    powers -= tl.dot(half, square.to(element), input_precision=PRECISION)
    return tl.dot(powers.to(element), blocks, input_precision=PRECISION)


@triton.jit(do_not_specialize=("first_tile",))
def _delta_solve_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, tile_starts_ptr, tile_ends_ptr,
    parts_ptr, factors_ptr, keys_ptr, row_slots_ptr, first_rows_ptr,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_keys, room, first_tile, scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_LANES: tl.constexpr,
    V_LANES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile and value head. It stores the parts of the tile: what S is multiplied by
    for u, then for o, [2 * TILE, K_LANES]; after that the rest of u and o, transposed,
    [V_LANES, 2 * TILE]; in fp32 what keys are to be multiplied by, and the logarithms of decays
    from the tile's start, [2, TILE]. If there are row slots, keys are stored there."""
    tile = first_tile + tl.program_id(0)
    head, heads = tl.program_id(1), tl.num_programs(1)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_ahead(OVERLAPS)
    start, end = tl.load(tile_starts_ptr + tile), tl.load(tile_ends_ptr + tile)
    ids = tl.arange(0, TILE)
    is_row = ids < end - start
    tokens = (start + ids).to(tl.int64)
    a = tl.load(a_ptr + tokens * stride_a + head, mask=is_row, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + tokens * stride_b + head, mask=is_row, other=0.0).to(tl.float32)
    beta = tl.where(is_row, tl.sigmoid(b), 0.0)
    logs = tl.where(is_row, log_decay(softplus(a + dt_bias), a_log), 0.0)
    total = tl.cumsum(logs, 0)
    last = tl.min(total, 0)

    element = q_ptr.dtype.element_ty
    q_ptr += (head // GROUP) * K
    k_ptr += (head // GROUP) * K
    q_square, k_square = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    scores, lower = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, K, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        q = rows_of(q_ptr, tokens, is_row, dims, stride_q, K)
        k = rows_of(k_ptr, tokens, is_row, dims, stride_k, K)
        scores += product(q, tl.trans(k), element, PRECISION, UPCAST)
        lower += product(k, tl.trans(k), element, PRECISION, UPCAST)
        q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
        q_square += tl.sum(q_wide * q_wide, 1)
        k_square += tl.sum(k_wide * k_wide, 1)
    q_scale, k_scale = tl.rsqrt(q_square + EPS) * scale, tl.rsqrt(k_square + EPS)
    twos = total * LOG2_E
    between = tl.exp2(tl.minimum(twos[:, None] - twos[None, :], 0.0)) * k_scale[None, :]
    scores = tl.where(ids[:, None] >= ids[None, :], scores * q_scale[:, None] * between, 0.0)
    lower = tl.where(ids[:, None] > ids[None, :], lower * (beta * k_scale)[:, None] * between, 0.0)
    columns = tl.arange(0, BLOCK_V)
    # values are read here, long before they are needed
    v = rows_of(v_ptr + head * V, tokens, is_row, columns, stride_v, V)
    inverse = _inverse(lower, TILE, PRECISION)
    seen = product(scores, inverse, element, PRECISION, UPCAST)

    number = (tl.program_id(0) * heads + head).to(tl.int64)
    factor_ptrs = factors_ptr + number * (2 * TILE) + ids
    tl.store(factor_ptrs, k_scale * tl.exp(tl.minimum(last - total, 0.0)))
    tl.store(factor_ptrs + TILE, total)
    if row_slots_ptr is not None:
        row_slot = tl.where(head % GROUP == 0, tl.load(row_slots_ptr + tile), -1)
        first_row = (head // GROUP) * room + tl.load(first_rows_ptr + tile)
        keys_ptr += row_slot.to(tl.int64) * stride_keys + first_row * K
    parts_ptr += number * (2 * TILE * (K_LANES + V_LANES))
    inverse, seen = inverse.to(element), seen.to(element)
    to = tl.exp(total)
    for first in range(0, K_LANES, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        q = rows_of(q_ptr, tokens, is_row, dims, stride_q, K)
        k = rows_of(k_ptr, tokens, is_row, dims, stride_k, K)
        normed = k.to(tl.float32) * k_scale[:, None]
        scaled = normed * (beta * to)[:, None]
        of_state = -product(inverse, scaled, element, PRECISION, UPCAST)
        reader = q.to(tl.float32) * (q_scale * to)[:, None]
        reader -= product(seen, scaled, element, PRECISION, UPCAST)
        part_ptrs = parts_ptr + ids[:, None] * K_LANES + dims[None, :]
        tl.store(part_ptrs, of_state.to(element))
        tl.store(part_ptrs + TILE * K_LANES, reader.to(element))
        if row_slots_ptr is not None:
            is_kept = is_row[:, None] & (dims < K)[None, :] & (ids[:, None] * 0 <= row_slot)
            key_ptrs = keys_ptr + ids[:, None] * K + dims[None, :]
            tl.store(key_ptrs, normed.to(element), mask=is_kept)
    parts_ptr += 2 * TILE * K_LANES
    for _ in range(0, V_LANES, BLOCK_V):
        scaled = v.to(tl.float32) * beta[:, None]
        v = rows_of(v_ptr + head * V, tokens, is_row, columns + BLOCK_V, stride_v, V)
        own = product(inverse, scaled, element, PRECISION, UPCAST)
        out = product(seen, scaled, element, PRECISION, UPCAST)
        part_ptrs = parts_ptr + columns[:, None] * (2 * TILE) + ids[None, :]
        tl.store(part_ptrs, tl.trans(own.to(element)))
        tl.store(part_ptrs + TILE, tl.trans(out.to(element)))
        columns += BLOCK_V


@triton.jit(do_not_specialize=("first_seq", "num_decodes", "first_tile"))
def _delta_pass_kernel(
    k_ptr, parts_ptr, factors_ptr, matrix_ptr, out_ptr,
    tile_starts_ptr, tile_ends_ptr, tile_writes_ptr, seq_tiles_ptr, reads_ptr,
    values_ptr, sums_ptr, row_slots_ptr, first_rows_ptr,
    stride_k, stride_slot, stride_out, stride_values, stride_sums, room,
    first_seq, num_decodes, first_tile,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_LANES: tl.constexpr,
    V_LANES: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and BLOCK_V columns of its state, tile by tile. States,
    u and o are transposed: then one product is the first factor of the next without leaving its
    registers."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, heads = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    seq = first_seq + tl.program_id(1)
    wait_for_ahead(OVERLAPS)
    ids, dims = tl.arange(0, TILE), tl.arange(0, K_LANES)
    columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = head * K * V + dims[None, :] * V + columns[:, None]
    is_cell = (dims < K)[None, :] & (columns < V)[:, None]
    slot = tl.load(reads_ptr + num_decodes + seq)
    state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)

    element = k_ptr.dtype.element_ty
    k_ptr += (head // GROUP) * K
    twice = tl.arange(0, 2 * TILE)
    of_weights = twice[:, None] * K_LANES + dims[None, :]
    of_rest = 2 * TILE * K_LANES + columns[:, None] * (2 * TILE) + twice[None, :]
    size: tl.constexpr = 2 * TILE * (K_LANES + V_LANES)
    before = 0.0  # sum of logarithms, of rows
    tile, end_tile = tl.load(seq_tiles_ptr + seq), tl.load(seq_tiles_ptr + seq + 1)
    start, end = tl.load(tile_starts_ptr + tile), tl.load(tile_ends_ptr + tile)
    write = tl.load(tile_writes_ptr + tile)
    number = ((tile - first_tile) * heads + head).to(tl.int64)
    factors_ptr += number * (2 * TILE)
    last = tl.load(factors_ptr + 2 * TILE - 1)
    parts_ptr += number * size
    # stages that are named here are those of all loads, not only of factors
    for index in tl.range(tile, end_tile, num_stages=STAGES):
        # numbers of the next tile are read while this one is computed
        following = tl.minimum(index + 1, end_tile - 1)
        next_start = tl.load(tile_starts_ptr + following)
        next_end = tl.load(tile_ends_ptr + following)
        next_write = tl.load(tile_writes_ptr + following)
        step = ((index - tile) * heads).to(tl.int64)
        next_step = ((following - tile) * heads).to(tl.int64)
        next_last = tl.load(factors_ptr + next_step * (2 * TILE) + 2 * TILE - 1)
        part_ptr = parts_ptr + step * size
        factor_ptr = factors_ptr + step * (2 * TILE)
        weights = tl.load(part_ptr + of_weights)
        both = tl.load(part_ptr + of_rest).to(tl.float32)
        both += product(state, tl.trans(weights), element, PRECISION, UPCAST)
        u, out = tl.split(tl.permute(tl.reshape(both, [BLOCK_V, 2, TILE]), [0, 2, 1]))
        tokens = (start + ids).to(tl.int64)
        is_row = ids < end - start
        k = rows_of(k_ptr, tokens, is_row, dims, stride_k, K)
        k_factor = tl.load(factor_ptr + ids)
        state = state * tl.exp(last)
        state += product(u * k_factor[None, :], k, element, PRECISION, UPCAST)
        out_ptrs = out_ptr + tokens[None, :] * stride_out + head * V + columns[:, None]
        is_out = is_row[None, :] & (columns < V)[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)
        if write >= 0:
            write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)
        if row_slots_ptr is not None:
            total = tl.load(factor_ptr + TILE + ids)
            write_rows(
                values_ptr, sums_ptr, tl.load(row_slots_ptr + index), head,
                tl.load(first_rows_ptr + index) + ids, is_row, columns, tl.trans(u),
                before + total, stride_values, stride_sums, room, V,
            )  # fmt: skip
            before += last
        start, end, write, last = next_start, next_end, next_write, next_last


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    segments: Segments,
    matrix: Tensor,
    out: Tensor,
    rows: LayerRows | None = None,
) -> None:
    """Write the output of the gated delta rule to `out` [tokens, value_heads, value_dim].

    q, k: [tokens, key_heads, key_dim], not normalised; v: like out; a, b: [tokens, value_heads],
    not activated; a_log, dt_bias: [value_heads] fp32; matrix: [slots, value_heads, key_dim,
    value_dim] fp32; rows: needed if sequences of the step keep rows.
    """
    tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[1:]
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_heads(name, x, tokens, q.dtype)
    if k.shape != q.shape or out.shape != v.shape or heads % key_heads:
        raise LayoutError(
            f"q and k must agree, v and out too, and have a multiple of q's {key_heads} heads, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {tuple(out.shape)}"
        )
    for name, x in (("a", a), ("b", b)):
        check_gates(name, x, tokens, heads)
    for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        check_per_head(name, x, heads)
    check_matrix(matrix, (heads, key_dim, value_dim))
    block = min(lanes_of(value_dim), DECODE_COLUMNS)
    strides = (
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), matrix.stride(0),
        out.stride(0),
    )  # fmt: skip
    options = {
        "GROUP": heads // key_heads, "K": key_dim, "V": value_dim, "K_LANES": lanes_of(key_dim),
        "BLOCK_V": block, **overlap_options(q.device),
    }  # fmt: skip
    if segments.is_serial:
        _delta_serial_kernel[(heads * cdiv(value_dim, block), segments.num_seqs)](
            q, k, v, a, b, a_log, dt_bias, matrix, out,
            segments.starts, segments.writes, segments.seq_segments, segments.reads,
            *strides, key_dim**-0.5, **options,
        )  # fmt: skip
    use = segments.rows
    if use is not None:
        inputs = DecodeInputs(q, k, v, a, b, a_log, dt_bias, None)
        decode_with_rows(inputs, segments, matrix, rows, out)
    num_writers = segments.num_decodes if use is None else use.num_writers
    if num_writers:
        blocks, kept = heads * cdiv(value_dim, block), KernelRows.of_writers(use, rows)
        grid = writer_grid(use, blocks, num_writers)
        _delta_decode_kernel[grid](
            q, k, v, a, b, a_log, dt_bias, matrix, out, segments.writes, segments.reads,
            None if use is None else use.writers, None if use is None else use.sizes,
            *kept[:5], *strides, *kept[5:], key_dim**-0.5, HEADS=heads,
            **dot_options(v, key_dim, value_dim), **options,
            **writer_options(use, key_dim),
        )  # fmt: skip
    if segments.tiles is not None:
        _run_tiles((q, k, v, a, b), (a_log, dt_bias), segments, segments.tiles, matrix, out, rows)


def pass_columns(value_dim: int, element_size: int) -> int:
    """The columns of a state in one program: states stay in registers."""
    return min(lanes_of(value_dim), 64 if element_size == 2 else 16)


def solve_options_of(
    key_lanes: int, value_lanes: int, element_size: int, is_hopper: bool
) -> dict[str, int]:
    """Constants and launch options of the solves."""
    options = {"BLOCK_K": min(key_lanes, 64), "BLOCK_V": min(value_lanes, 64), "num_stages": 1}
    options["num_warps"] = 4 if element_size == 2 else 8
    if element_size == 2 and is_hopper:
        options["maxnreg"] = 168  # three programs on a multiprocessor
    return options


def pass_options_of(
    key_dim: int, element_size: int, is_large: bool, is_long: bool
) -> dict[str, int]:
    """Constants and launch options of the passes. Loads ahead take the shared memory of a second
    program, which is worth it if sequences are long (`is_long`)."""
    is_small = element_size == 2 and key_dim <= 128
    stages = 3 if is_small and is_large and is_long else 1
    return {"num_warps": 4 if is_small else 8, "num_stages": stages, "STAGES": stages}


def _run_tiles(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    constants: tuple[Tensor, Tensor],
    segments: Segments,
    tiles: TileList,
    matrix: Tensor,
    out: Tensor,
    rows: LayerRows | None,
) -> None:
    """Compute all sequences but the decodes."""
    q, k, v, a, b = inputs
    heads, (key_dim, value_dim) = v.shape[1], (k.shape[2], v.shape[2])
    key_lanes, value_lanes = lanes_of(key_dim), lanes_of(value_dim)
    num_tiles = max(found.num_tiles for found in tiles.rounds)
    parts = q.new_empty(num_tiles * heads * 2 * TILE * (key_lanes + value_lanes))
    factors = torch.empty(num_tiles * heads * 2 * TILE, dtype=torch.float32, device=q.device)
    kept = KernelRows.of_tiles(tiles, rows)
    common = {
        "GROUP": heads // q.shape[1], "K": key_dim, "V": value_dim, "K_LANES": key_lanes,
        "V_LANES": value_lanes, "TILE": TILE,
        **dot_options(q, key_dim, value_dim), **overlap_options(q.device),
    }  # fmt: skip
    block = pass_columns(value_dim, q.element_size())
    is_large, blocks = has_large_memory(q.device), heads * cdiv(value_dim, block)
    solve_options = solve_options_of(key_lanes, value_lanes, q.element_size(), is_large)
    for found in tiles.rounds:
        is_long = found.num_tiles >= LONG_TILES * found.num_seqs
        pass_options = pass_options_of(key_dim, q.element_size(), is_large, is_long)
        _delta_solve_kernel[(found.num_tiles, heads)](
            q, k, v, a, b, *constants, tiles.starts, tiles.ends, parts, factors,
            kept.keys, kept.slots, kept.firsts,
            q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), kept.stride_keys,
            kept.room, found.first_tile, key_dim**-0.5, **common, **solve_options,
        )  # fmt: skip
        _delta_pass_kernel[(blocks, found.num_seqs)](
            k, parts, factors, matrix, out,
            tiles.starts, tiles.ends, tiles.writes, tiles.seq_tiles, segments.reads,
            kept.values, kept.sums, kept.slots, kept.firsts,
            k.stride(0), matrix.stride(0), out.stride(0), kept.stride_values, kept.stride_sums,
            kept.room, found.first_seq, segments.num_decodes, found.first_tile,
            BLOCK_V=block, **common, **pass_options,
        )  # fmt: skip
