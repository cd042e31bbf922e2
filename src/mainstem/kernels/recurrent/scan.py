# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The recurrence of Mamba-2 as Triton kernels. A decode reads its state once and writes it once. So
does a segment whose tokens are computed one after the other (`Segments.is_serial`). Other sequences
are computed in tiles of 64 tokens. With G_i the product of a tile's decays up to token i, and S the
state before the tile:

    y_i = G_i c_i^T S + sum_{j<=i} (G_i/G_j) (c_i . b_j) dt_j x_j + d x_i
    S'  = G_n S + sum_j (G_n/G_j) b_j dt_j x_j^T

A program goes from tile to tile with some columns of S in registers. The tokens of a prompt may
become rows (`rows.py`). Decodes with rows are in `siblings.py`.
"""

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
from mainstem.kernels.recurrent.segments import TILE, Segments
from mainstem.kernels.recurrent.siblings import (
    DecodeInputs,
    KernelRows,
    decode_with_rows,
    sum_of_rows,
    writer_grid,
    writer_options,
)

DECODE_COLUMNS = 32
# what may differ between launches for the same model; see `OF_SEGMENTS`
OF_STEP = (
    *OF_SEGMENTS, "x_ptr", "b_ptr", "c_ptr", "dt_ptr", "out_ptr",
    "stride_x", "stride_b", "stride_c", "stride_dt", "stride_out",
)  # fmt: skip


@triton.jit
def _scan_token(
    state, x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, out_ptr, token, head, dims, columns,
    stride_x, stride_b, stride_c, stride_dt, stride_out, least, most,
    GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store a token's output in columns of a head; returns these columns of the state after it."""
    is_dim, is_column = dims < N, columns < P
    group_cells = (head // GROUP) * N + dims
    b = tl.load(b_ptr + token * stride_b + group_cells, mask=is_dim, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * stride_c + group_cells, mask=is_dim, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * stride_x + head * P + columns, mask=is_column, other=0.0)
    x = x.to(tl.float32)
    dt = softplus(tl.load(dt_ptr + token * stride_dt + head).to(tl.float32) + dt_bias)
    dt = tl.minimum(tl.maximum(dt, least), most)
    state = state * tl.exp(log_decay(dt, a_log)) + (dt * b)[:, None] * x[None, :]
    out = tl.sum(c[:, None] * state, 0) + skip * x
    out_ptrs = out_ptr + token * stride_out + head * P + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_column)
    return state


@triton.jit
def _scan_decode(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, matrix_ptr, out_ptr, writes_ptr, reads_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr, seq, head, dims, columns,
    stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out,
    stride_keys, stride_values, stride_sums, room, least, most,
    GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute columns of a head for one decode that writes a state."""
    slot, write = tl.load(reads_ptr + seq), tl.load(writes_ptr + seq)
    cells = head * N * P + dims[:, None] * P + columns[None, :]
    is_cell = (dims < N)[:, None] & (columns < P)[None, :]
    if row_slots_ptr is None:
        state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)
    else:
        row_slot, count = tl.load(row_slots_ptr + seq), tl.load(counts_ptr + seq)
        decay, added = 1.0, tl.zeros([dims.shape[0], columns.shape[0]], tl.float32)
        if (row_slot >= 0) & (count > 0):
            decay, added = sum_of_rows(
                keys_ptr, values_ptr, sums_ptr, row_slot, count, head, dims, columns,
                stride_keys, stride_values, stride_sums, room, GROUP, N, P, PRECISION, UPCAST,
            )  # fmt: skip
        state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot) * decay + added
    state = _scan_token(
        state, x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, out_ptr, seq.to(tl.int64),
        head, dims, columns,
        stride_x, stride_b, stride_c, stride_dt, stride_out, least, most, GROUP, N, P,
    )  # fmt: skip
    write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)


@triton.jit
def _scan_decode_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, matrix_ptr, out_ptr,
    writes_ptr, reads_ptr, writers_ptr, sizes_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr,
    stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out,
    stride_keys, stride_values, stride_sums, room, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    N_LANES: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and BLOCK_P columns of its state; or with a list of sequences
    (RowUse.writers), of which a program takes some columns of one, then of another."""
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    dims = tl.arange(0, N_LANES)
    if writers_ptr is None:
        head, seq = tl.program_id(0) // blocks, tl.program_id(1)
        columns = (tl.program_id(0) % blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
        a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
        skip = tl.load(d_ptr + head)
        wait_for_ahead(OVERLAPS)
        _scan_decode(
            x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, matrix_ptr, out_ptr,
            writes_ptr, reads_ptr, None, None, None, None, None, seq, head, dims, columns,
            stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out, 0, 0, 0, 0,
            least, most, GROUP, N, P, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        wait_for_ahead(OVERLAPS)
        items = tl.load(sizes_ptr + 1) * (HEADS * blocks)
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            seq, head = tl.load(writers_ptr + item // (HEADS * blocks)), (item // blocks) % HEADS
            columns = (item % blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
            a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
            skip = tl.load(d_ptr + head)
            _scan_decode(
                x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, matrix_ptr, out_ptr,
                writes_ptr, reads_ptr, keys_ptr, values_ptr, sums_ptr, row_slots_ptr, counts_ptr,
                seq, head, dims, columns,
                stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out,
                stride_keys, stride_values, stride_sums, room, least, most, GROUP, N, P,
                PRECISION, UPCAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=OF_STEP)
def _scan_serial_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, matrix_ptr, out_ptr,
    starts_ptr, writes_ptr, seq_segments_ptr, reads_ptr,
    stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out, least, most,
    GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, N_LANES: tl.constexpr,
    BLOCK_P: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Likewise for sequences of any number of segments and tokens."""
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head, seq = tl.program_id(0) // blocks, tl.program_id(1)
    dims = tl.arange(0, N_LANES)
    columns = (tl.program_id(0) % blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    skip = tl.load(d_ptr + head)
    wait_for_ahead(OVERLAPS)
    cells = head * N * P + dims[:, None] * P + columns[None, :]
    is_cell = (dims < N)[:, None] & (columns < P)[None, :]
    state = read_state(matrix_ptr, tl.load(reads_ptr + seq), cells, is_cell, stride_slot)
    first, end = tl.load(seq_segments_ptr + seq), tl.load(seq_segments_ptr + seq + 1)
    for segment in range(first, end):
        start = tl.load(starts_ptr + segment)
        for index in range(0, tl.load(starts_ptr + segment + 1) - start):
            state = _scan_token(
                state, x_ptr, b_ptr, c_ptr, dt_ptr, a_log, dt_bias, skip, out_ptr,
                (start + index).to(tl.int64), head, dims, columns,
                stride_x, stride_b, stride_c, stride_dt, stride_out, least, most, GROUP, N, P,
            )  # fmt: skip
        write = tl.load(writes_ptr + segment)
        write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)


@triton.jit(do_not_specialize=("first_seq",))
def _scan_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, matrix_ptr, out_ptr,
    tile_starts_ptr, tile_ends_ptr, tile_writes_ptr, seq_tiles_ptr, reads_ptr,
    keys_ptr, values_ptr, sums_ptr, row_slots_ptr, first_rows_ptr,
    stride_x, stride_b, stride_c, stride_dt, stride_slot, stride_out,
    stride_keys, stride_values, stride_sums, room, first_seq, least, most,
    GROUP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, N_LANES: tl.constexpr,
    BLOCK_P: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and BLOCK_P columns of its state, tile by tile."""
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head, seq = tl.program_id(0) // blocks, tl.program_id(1)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    skip = tl.load(d_ptr + head)
    wait_for_ahead(OVERLAPS)
    ids, dims = tl.arange(0, TILE), tl.arange(0, N_LANES)
    columns = (tl.program_id(0) % blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
    cells = head * N * P + dims[:, None] * P + columns[None, :]
    is_cell = (dims < N)[:, None] & (columns < P)[None, :]
    slot = tl.load(reads_ptr + first_seq + seq)
    state = read_state(matrix_ptr, slot, cells, is_cell, stride_slot)

    element = x_ptr.dtype.element_ty
    x_ptr += head * P
    b_ptr += (head // GROUP) * N
    c_ptr += (head // GROUP) * N
    before = 0.0  # sum of logarithms, of rows
    for tile in range(tl.load(seq_tiles_ptr + seq), tl.load(seq_tiles_ptr + seq + 1)):
        start = tl.load(tile_starts_ptr + tile)
        is_row = ids < tl.load(tile_ends_ptr + tile) - start
        write = tl.load(tile_writes_ptr + tile)
        tokens = (start + ids).to(tl.int64)
        dt = tl.load(dt_ptr + tokens * stride_dt + head, mask=is_row, other=0.0).to(tl.float32)
        dt = tl.minimum(tl.maximum(softplus(dt + dt_bias), least), most)
        dt = tl.where(is_row, dt, 0.0)
        total = tl.cumsum(log_decay(dt, a_log), 0)
        last = tl.min(total, 0)
        b = rows_of(b_ptr, tokens, is_row, dims, stride_b, N)
        c = rows_of(c_ptr, tokens, is_row, dims, stride_c, N)
        x = rows_of(x_ptr, tokens, is_row, columns, stride_x, P)
        between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * dt[None, :]
        scores = product(c, tl.trans(b), element, PRECISION, UPCAST) * between
        scores = tl.where(ids[:, None] >= ids[None, :], scores, 0.0)
        out = product(c, state, element, PRECISION, UPCAST) * tl.exp(total)[:, None]
        out += product(scores, x, element, PRECISION, UPCAST)
        wide = x.to(tl.float32)
        out += skip * wide
        out_ptrs = out_ptr + tokens[:, None] * stride_out + head * P + columns[None, :]
        is_out = is_row[:, None] & (columns < P)[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)
        wide = wide * (dt * tl.exp(tl.minimum(last - total, 0.0)))[:, None]
        state = state * tl.exp(last)
        state += product(tl.trans(b), wide, element, PRECISION, UPCAST)
        if write >= 0:
            write_state(matrix_ptr, write, cells, is_cell, stride_slot, state)
        if row_slots_ptr is not None:
            row_slot = tl.load(row_slots_ptr + tile)
            places = tl.load(first_rows_ptr + tile) + ids
            write_rows(
                values_ptr, sums_ptr, row_slot, head, places, is_row, columns,
                x.to(tl.float32) * dt[:, None], before + total,
                stride_values, stride_sums, room, P,
            )  # fmt: skip
            if (row_slot >= 0) & (tl.program_id(0) % (GROUP * blocks) == 0):
                key_ptrs = keys_ptr + row_slot.to(tl.int64) * stride_keys
                key_ptrs += ((head // GROUP) * room + places)[:, None] * N + dims[None, :]
                tl.store(key_ptrs, b, mask=is_row[:, None] & (dims < N)[None, :])
            before += last


def mamba_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    limits: tuple[float, float],
    segments: Segments,
    matrix: Tensor,
    out: Tensor,
    rows: LayerRows | None = None,
) -> None:
    """Write the output of Mamba-2's recurrence to `out` [tokens, heads, head_dim].

    x: like out; b, c: [tokens, groups, state_dim]; dt: [tokens, heads], not activated; a_log,
    dt_bias, d: [heads] fp32; limits: of dt; matrix: [slots, heads, state_dim, head_dim] fp32;
    rows: needed if sequences of the step keep rows.
    """
    tokens, heads, head_dim = x.shape
    groups, state_dim = b.shape[1:]
    for name, of_heads in (("x", x), ("b", b), ("c", c), ("out", out)):
        check_heads(name, of_heads, tokens, x.dtype)
    if b.shape != c.shape or x.shape != out.shape or heads % groups:
        raise LayoutError(
            f"x and out must agree, b and c too, and have a divisor of x's {heads} heads, "
            f"got {tuple(x.shape)}, {tuple(out.shape)}, {tuple(b.shape)} and {tuple(c.shape)}"
        )
    check_gates("dt", dt, tokens, heads)
    for name, each in (("a_log", a_log), ("dt_bias", dt_bias), ("d", d)):
        check_per_head(name, each, heads)
    check_matrix(matrix, (heads, state_dim, head_dim))
    decodes, lanes = segments.num_decodes, lanes_of(state_dim)
    strides = (
        x.stride(0), b.stride(0), c.stride(0), dt.stride(0), matrix.stride(0), out.stride(0),
    )  # fmt: skip
    common = {
        "GROUP": heads // groups, "N": state_dim, "P": head_dim, "N_LANES": lanes,
        **overlap_options(x.device),
    }  # fmt: skip
    block = min(lanes_of(head_dim), DECODE_COLUMNS)
    if segments.is_serial:
        _scan_serial_kernel[(heads * cdiv(head_dim, block), segments.num_seqs)](
            x, b, c, dt, a_log, dt_bias, d, matrix, out,
            segments.starts, segments.writes, segments.seq_segments, segments.reads,
            *strides, *limits, BLOCK_P=block, **common,
        )  # fmt: skip
    use = segments.rows
    if use is not None:
        inputs = DecodeInputs(c, b, x, dt, None, a_log, dt_bias, d, limits)
        decode_with_rows(inputs, segments, matrix, rows, out)
    num_writers = decodes if use is None else use.num_writers
    if num_writers:
        blocks, kept = heads * cdiv(head_dim, block), KernelRows.of_writers(use, rows)
        grid = writer_grid(use, blocks, num_writers)
        _scan_decode_kernel[grid](
            x, b, c, dt, a_log, dt_bias, d, matrix, out, segments.writes, segments.reads,
            None if use is None else use.writers, None if use is None else use.sizes,
            *kept[:5], *strides, *kept[5:], *limits, HEADS=heads, BLOCK_P=block,
            **dot_options(x, state_dim, head_dim), **common,
            **writer_options(use, state_dim),
        )  # fmt: skip
    tiles = segments.tiles
    if tiles is not None:
        block = scan_columns(state_dim, head_dim, x.element_size())
        grid = (heads * cdiv(head_dim, block), segments.num_seqs - decodes)
        kept = KernelRows.of_tiles(tiles, rows)
        _scan_kernel[grid](
            x, b, c, dt, a_log, dt_bias, d, matrix, out,
            tiles.starts, tiles.ends, tiles.writes, tiles.seq_tiles, segments.reads,
            *kept[:5], *strides, *kept[5:], decodes, *limits, BLOCK_P=block, TILE=TILE,
            **common, **dot_options(x, state_dim, head_dim),
            **tile_options(state_dim, x.element_size(), has_large_memory(x.device)),
        )  # fmt: skip


def scan_columns(state_dim: int, head_dim: int, element_size: int) -> int:
    """The columns of a state in one program: states stay in registers."""
    most = 8192 // lanes_of(state_dim) if element_size == 2 else 16
    return min(lanes_of(head_dim), max(most, 16), 64)
