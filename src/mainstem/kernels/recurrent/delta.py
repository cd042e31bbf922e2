# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The gated delta rule as Triton kernels. A decode reads its state once and writes it once, and so
does a segment whose tokens are computed one after the other (`Segments.is_serial`). Other sequences
are computed in tiles of 64 tokens. With G_i the product of a tile's decays up to token i,
and S the state before the tile:

    u_i = beta_i (v_i - G_i k_i^T S - sum_{j<i} (G_i/G_j) (k_i . k_j) u_j)
    o_i = G_i q_i^T S + sum_{j<=i} (G_i/G_j) (q_i . k_j) u_j
    S'  = G_n S + sum_j (G_n/G_j) k_j u_j^T

The first line is a triangular system (1 + A) u = beta (v - G k^T S). One kernel inverts 1 + A, for
all tiles in parallel, and writes u's part without S (`own`), what is to be multiplied by S
(`of_state`), and the weights of the second line's sum (`scores`). Another kernel then goes from
tile to tile with some columns of S in registers. The tokens of a prompt may become rows
(`rows.py`): the first kernel writes the keys, the other one u and the sums of logarithms. Decodes
with rows are in `siblings.py`.
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
    tile_options,
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
SMALL = tl.constexpr(16)  # rows of blocks that are inverted row by row
EPS = tl.constexpr(1e-6)
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

    Blocks on the diagonal are inverted row by row, all at the same time. With X their inverses and
    N the rest of `lower`, 1 + lower = X^-1 (1 + X N). There are 4 blocks, so (X N)^4 = 0 and the
    inverse is (1 - X N) (1 + (X N)^2) X.
    """
    BLOCKS: tl.constexpr = TILE // SMALL
    ids = tl.arange(0, TILE)
    is_near = (ids // SMALL)[:, None] == (ids // SMALL)[None, :]
    near = tl.reshape(tl.where(is_near, lower, 0.0), [BLOCKS, SMALL, BLOCKS, SMALL])
    near = tl.sum(near, 2)  # [blocks, rows, columns]
    small = tl.arange(0, SMALL)
    one = (small[:, None] == small[None, :]).to(tl.float32)
    found = tl.zeros([BLOCKS, SMALL, SMALL], tl.float32) + one[None, :, :]
    for row in range(1, SMALL):
        is_row = (small == row)[None, :, None]
        weights = tl.sum(tl.where(is_row, near, 0.0), 1)  # [blocks, columns]
        new = tl.sum(weights[:, :, None] * found, 1)
        found = tl.where(is_row, found - new[:, None, :], found)
    wide = tl.broadcast_to(found[:, :, None, :], [BLOCKS, SMALL, BLOCKS, SMALL])
    blocks = tl.where(is_near, tl.reshape(wide, [TILE, TILE]), 0.0)
    far = tl.where(is_near, 0.0, lower)
    step = tl.dot(blocks, far, input_precision=PRECISION)
    whole = (ids[:, None] == ids[None, :]).to(tl.float32)
    square = tl.dot(step, step, input_precision=PRECISION)
    powers = whole - step + square - tl.dot(step, square, input_precision=PRECISION)
    return tl.dot(powers, blocks, input_precision=PRECISION)


@triton.jit(do_not_specialize=("first_token", "num_rows"))
def _delta_solve_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, tile_starts_ptr, tile_ends_ptr,
    own_ptr, of_state_ptr, scores_ptr, factors_ptr, keys_ptr, row_slots_ptr, first_rows_ptr,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_keys, room, first_token, num_rows,
    scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile and value head.

    Rows of the outputs are tokens from `first_token` on: own [rows, heads, V], of_state [rows,
    heads, K], scores [rows, heads, TILE]; factors [3, rows, heads] in fp32 are to be multiplied by
    the queries, by the keys, and by the state before the tile. If there are row slots, keys are
    stored there, and factors has the logarithms of decays from the tile's start, too."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_ahead(OVERLAPS)
    start, end = (
        tl.load(tile_starts_ptr + tl.program_id(0)),
        tl.load(tile_ends_ptr + tl.program_id(0)),
    )
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
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * k_scale[None, :]
    scores = tl.where(ids[:, None] >= ids[None, :], scores * q_scale[:, None] * between, 0.0)
    lower = tl.where(ids[:, None] > ids[None, :], lower * (beta * k_scale)[:, None] * between, 0.0)
    inverse = _inverse(lower, TILE, PRECISION)

    rows = (tokens - first_token) * heads + head
    to = tl.exp(total)
    factor_ptrs = factors_ptr + rows
    plane = num_rows.to(tl.int64) * heads
    tl.store(factor_ptrs, q_scale * to, mask=is_row)
    after = tl.exp(tl.minimum(last - total, 0.0))
    tl.store(factor_ptrs + plane, k_scale * after, mask=is_row)
    tl.store(factor_ptrs + 2 * plane, tl.zeros_like(to) + tl.exp(last), mask=is_row)
    if row_slots_ptr is not None:
        tl.store(factor_ptrs + 3 * plane, total, mask=is_row)
        row_slot = tl.where(head % GROUP == 0, tl.load(row_slots_ptr + tl.program_id(0)), -1)
        first_row = (head // GROUP) * room + tl.load(first_rows_ptr + tl.program_id(0))
        keys_ptr += row_slot.to(tl.int64) * stride_keys + first_row * K
    scores_ptrs = scores_ptr + rows[:, None] * TILE + ids[None, :]
    tl.store(scores_ptrs, scores.to(element), mask=is_row[:, None])
    weights = inverse * beta[None, :]
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        v = rows_of(v_ptr + head * V, tokens, is_row, columns, stride_v, V)
        own = product(weights, v, element, PRECISION, UPCAST)
        own_ptrs = own_ptr + rows[:, None] * V + columns[None, :]
        tl.store(own_ptrs, own.to(element), mask=is_row[:, None] & (columns < V)[None, :])
    weights = inverse * (beta * k_scale * to)[None, :]
    for first in range(0, K, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        k = rows_of(k_ptr, tokens, is_row, dims, stride_k, K)
        of_state = product(weights, k, element, PRECISION, UPCAST)
        state_ptrs = of_state_ptr + rows[:, None] * K + dims[None, :]
        is_key = is_row[:, None] & (dims < K)[None, :]
        tl.store(state_ptrs, of_state.to(element), mask=is_key)
        if row_slots_ptr is not None:
            normed = (k.to(tl.float32) * k_scale[:, None]).to(element)
            is_kept = is_key & (ids[:, None] * 0 <= row_slot)
            tl.store(keys_ptr + ids[:, None] * K + dims[None, :], normed, mask=is_kept)


@triton.jit(do_not_specialize=("first_token", "first_seq", "num_rows"))
def _delta_pass_kernel(
    q_ptr, k_ptr, own_ptr, of_state_ptr, scores_ptr, factors_ptr, matrix_ptr, out_ptr,
    tile_starts_ptr, tile_ends_ptr, tile_writes_ptr, seq_tiles_ptr, reads_ptr,
    values_ptr, sums_ptr, row_slots_ptr, first_rows_ptr,
    stride_q, stride_k, stride_slot, stride_out, stride_values, stride_sums, room,
    first_token, first_seq, num_rows,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_LANES: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and BLOCK_V columns of its state, tile by tile."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, heads = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    seq = tl.program_id(1)
    wait_for_ahead(OVERLAPS)
    ids, dims = tl.arange(0, TILE), tl.arange(0, K_LANES)
    columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = head * K * V + dims[:, None] * V + columns[None, :]
    is_cell = (dims < K)[:, None] & (columns < V)[None, :]
    slot = tl.load(reads_ptr + first_seq + seq)
    state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)

    element = q_ptr.dtype.element_ty
    plane = num_rows.to(tl.int64) * heads
    q_ptr += (head // GROUP) * K
    k_ptr += (head // GROUP) * K
    before = 0.0  # sum of logarithms, of rows
    for tile in range(tl.load(seq_tiles_ptr + seq), tl.load(seq_tiles_ptr + seq + 1)):
        start = tl.load(tile_starts_ptr + tile)
        is_row = ids < tl.load(tile_ends_ptr + tile) - start
        write = tl.load(tile_writes_ptr + tile)
        tokens = (start + ids).to(tl.int64)
        rows = (tokens - first_token) * heads + head
        old = state.to(element)
        of_state = rows_of(of_state_ptr, rows, is_row, dims, K, K)
        u = rows_of(own_ptr, rows, is_row, columns, V, V).to(tl.float32)
        u -= product(of_state, old, element, PRECISION, UPCAST)
        q = rows_of(q_ptr, tokens, is_row, dims, stride_q, K)
        q_factor = tl.load(factors_ptr + rows, mask=is_row, other=0.0)
        out = product(q, old, element, PRECISION, UPCAST) * q_factor[:, None]
        scores = rows_of(scores_ptr, rows, is_row, ids, TILE, TILE)
        out += product(scores, u, element, PRECISION, UPCAST)
        out_ptrs = out_ptr + tokens[:, None] * stride_out + head * V + columns[None, :]
        is_out = is_row[:, None] & (columns < V)[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)
        k = rows_of(k_ptr, tokens, is_row, dims, stride_k, K)
        k_factor = tl.load(factors_ptr + plane + rows, mask=is_row, other=0.0)
        first_row = (start - first_token).to(tl.int64) * heads + head
        state = state * tl.load(factors_ptr + 2 * plane + first_row)
        state += product(tl.trans(k), u * k_factor[:, None], element, PRECISION, UPCAST)
        if write >= 0:
            write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)
        if row_slots_ptr is not None:
            total = tl.load(factors_ptr + 3 * plane + rows, mask=is_row, other=0.0)
            write_rows(
                values_ptr, sums_ptr, tl.load(row_slots_ptr + tile), head,
                tl.load(first_rows_ptr + tile) + ids, is_row, columns, u, before + total,
                stride_values, stride_sums, room, V,
            )  # fmt: skip
            before += tl.min(total, 0)


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
    return min(lanes_of(value_dim), 32 if element_size == 2 else 16)


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
    first, num_rows = segments.num_decodes, len(q) - segments.num_decodes
    own, of_state = (q.new_empty(num_rows, heads, dim) for dim in (value_dim, key_dim))
    scores = q.new_empty(num_rows, heads, TILE)
    kept = KernelRows.of_tiles(tiles, rows)
    num_factors = 3 if kept.slots is None else 4
    factors = torch.empty(num_factors, num_rows, heads, dtype=torch.float32, device=q.device)
    common = {
        "GROUP": heads // q.shape[1], "K": key_dim, "V": value_dim, "TILE": TILE,
        **dot_options(q, key_dim, value_dim), **overlap_options(q.device),
    }  # fmt: skip
    _delta_solve_kernel[(tiles.num_tiles, heads)](
        q, k, v, a, b, *constants, tiles.starts, tiles.ends, own, of_state, scores, factors,
        kept.keys, kept.slots, kept.firsts,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), kept.stride_keys,
        kept.room, first, num_rows, key_dim**-0.5,
        BLOCK_K=min(lanes_of(key_dim), 64), BLOCK_V=min(lanes_of(value_dim), 64),
        num_warps=4 if q.element_size() == 2 else 8, num_stages=1, **common,
    )  # fmt: skip
    block, is_large = pass_columns(value_dim, q.element_size()), has_large_memory(q.device)
    grid = (heads * cdiv(value_dim, block), segments.num_seqs - first)
    _delta_pass_kernel[grid](
        q, k, own, of_state, scores, factors, matrix, out,
        tiles.starts, tiles.ends, tiles.writes, tiles.seq_tiles, segments.reads,
        kept.values, kept.sums, kept.slots, kept.firsts,
        q.stride(0), k.stride(0), matrix.stride(0), out.stride(0), kept.stride_values,
        kept.stride_sums, kept.room, first, first, num_rows,
        K_LANES=lanes_of(key_dim), BLOCK_V=block, **common,
        **tile_options(key_dim, q.element_size(), is_large),
    )  # fmt: skip
