# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""The products of packed.py on Hopper, for MXFP4 weights and experts with few rows.

Nothing is shared: a thread loads its part of both operands from memory into registers, in the order
of the matrix instruction, and no warp waits for another.

    weights   the left operand. A warp has two tiles of 16 outputs; a thread loads 16 bytes of two
              outputs of each, one block (nibbles.py) ahead. Unpacked, the bytes of a tile are its
              part of eight instructions
    x         the right operand. A thread loads 16 bytes of a row for each quarter of the block. The
              warps of a program have the same rows, and find them in the L1 cache, which weights
              pass by

A thread's bytes are neighbours in memory, so both operands have the columns of a quarter in another
order, the same for both. The two tiles are the same columns of gate and of up; for down, they are
COLUMNS apart. With one tile in a warp, x would be loaded twice as often, which takes longer than
the weights. A tile has up to 16 rows of an expert; with at most 8, half of the matrix instructions
are run.

A program computes a tile. If the last round of programs would leave half of the card idle or more,
its tiles are cut into turns of two blocks, and PROGRAMS programs get equally many of them:

    tile       0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 2 2 ..
    program    0 0 0 0 0 0 0 1 1 1 1 1 1 1 2 2 2 2 2 2 2 3 3 3 ..

If a tile has several programs, the last one to arrive adds their sums, in the order of programs,
and writes the tile.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainstem.kernels.dense.nibbles import (
    BLOCK,
    QUARTER,
    WIDTH,
    WORDS,
    Nibbles,
    mxfp4_quarters,
)
from mainstem.kernels.experts.activate import gated
from mainstem.kernels.experts.products import tile_of
from mainstem.kernels.experts.route import Routing, most_tiles
from mainstem.kernels.hopper import barrier
from mainstem.kernels.host import cdiv

WARPS = 4
COLUMNS = 16 * WARPS  # of each of a program's two tiles
OPTIONS = {"num_warps": WARPS, "maxnreg": 128}  # four programs on a multiprocessor
PROGRAMS = 4 * 132  # a round: those that a card has room for
GROUP_ROWS = 8  # tiles of rows that pass over the same weights together, for the L2 cache
ROWS = 16  # of a tile
_SLOTS = 2  # of a program's sums: it begins in one tile and ends in another

_COLUMNS = gl.constexpr(COLUMNS)
_ROWS = gl.constexpr(ROWS)
_FEW = gl.constexpr(8)  # rows of a matrix instruction
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 8))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUMS.value, 8))
_WARP_BASES = [[16 << i, 0] for i in range(WARPS.bit_length() - 1)]
# A thread's 8 neighbouring words of a row are 8 neighbouring numbers of each quarter, as in _LEFT.
_OF_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=_WARP_BASES,
        block_bases=[],
        shape=[COLUMNS, WORDS],
    )
)


@gluon.constexpr_function
def _of_x(rows):
    """The layout of a quarter of x, [32, rows], as in _RIGHT; all warps have the same."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0]] + [[0, 8]] * (rows // 16),
        lane_bases=[[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 0]] * len(_WARP_BASES),
        block_bases=[],
        shape=[WORDS, rows],
    )


@gluon.jit
def _fetch(words_ptrs, factors_ptrs, block, num_out):
    """Load a tile's words and factors of a block."""
    words_ptrs += block.to(gl.int64) * (num_out * QUARTER)
    return gl.load(words_ptrs, cache_modifier=".cg"), gl.load(factors_ptrs + block * num_out)


@gluon.jit
def _multiply(first_sums, second_sums, first, second, x_ptrs, QUARTERS: gl.constexpr):
    """Add the products of the first quarters of a block to the sums of both tiles."""
    first_parts = mxfp4_quarters(first[0], first[1], x_ptrs.dtype.element_ty, True)
    second_parts = mxfp4_quarters(second[0], second[1], x_ptrs.dtype.element_ty, True)
    for index in gl.static_range(QUARTERS):
        x = gl.convert_layout(gl.load(x_ptrs + index * QUARTER), _RIGHT)
        first_sums = mma_v2(gl.convert_layout(first_parts[index], _LEFT), x, first_sums)
        second_sums = mma_v2(gl.convert_layout(second_parts[index], _LEFT), x, second_sums)
    return first_sums, second_sums


@gluon.jit
def _sum_turns(
    x_ptrs, words_ptrs, factors_ptrs, first_column, second_column, first_turn, last_turn, num_out,
    ROWS: gl.constexpr, BLOCKS: gl.constexpr, TAIL: gl.constexpr, TURNS: gl.constexpr,
    IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """The sums of both tiles over some turns. The last turn of a tile has all blocks that are left,
    and its TAIL quarters."""
    WHOLE: gl.constexpr = BLOCKS // 2  # turns of two blocks
    first_words = words_ptrs + first_column * QUARTER
    first_factors = factors_ptrs + first_column
    second_words = words_ptrs + second_column * QUARTER
    second_factors = factors_ptrs + second_column
    first_sums = gl.zeros([_COLUMNS, ROWS], gl.float32, _SUMS)
    second_sums = gl.zeros([_COLUMNS, ROWS], gl.float32, _SUMS)
    # past the end the last block is read again: a mask would cost more instructions
    if IS_WHOLE:
        is_end: gl.constexpr = True
        last_block = BLOCKS + (TAIL > 0) - 1
        block = num_out * 0
        first_turn = 0
        last_turn = TURNS
    else:
        is_end = last_turn == TURNS
        last_block = gl.where(is_end, BLOCKS + (TAIL > 0), 2 * last_turn) - 1
        x_ptrs += first_turn * (2 * WIDTH)
        block = 2 * first_turn
    first = _fetch(first_words, first_factors, block, num_out)
    second = _fetch(second_words, second_factors, block, num_out)
    if WHOLE > 0:
        for turn in range(first_turn, last_turn):
            for index in gl.static_range(2):
                block = 2 * turn + (index + 1)
                if index == 1 and not (IS_WHOLE and BLOCKS % 2 + TAIL > 0):
                    block = gl.minimum(block, last_block)
                next_first = _fetch(first_words, first_factors, block, num_out)
                next_second = _fetch(second_words, second_factors, block, num_out)
                first_sums, second_sums = _multiply(
                    first_sums, second_sums, first, second, x_ptrs, 4
                )
                first = next_first
                second = next_second
                x_ptrs += WIDTH
    if is_end:
        if BLOCKS % 2 > 0:
            # the tail, if there is one
            next_first = _fetch(first_words, first_factors, last_block, num_out)
            next_second = _fetch(second_words, second_factors, last_block, num_out)
            first_sums, second_sums = _multiply(first_sums, second_sums, first, second, x_ptrs, 4)
            first = next_first
            second = next_second
            x_ptrs += WIDTH
        if TAIL > 0:
            first_sums, second_sums = _multiply(
                first_sums, second_sums, first, second, x_ptrs, TAIL
            )
    return first_sums, second_sums


@gluon.jit
def _slot_ptrs(partial_ptr, slot, ROWS: gl.constexpr):
    """Where a program leaves the sums of the first of its two tiles; those of the second follow."""
    columns = gl.arange(0, _COLUMNS, gl.SliceLayout(1, _SUMS))
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, _SUMS))
    return partial_ptr + slot * (2 * _COLUMNS * _ROWS) + columns[:, None] * ROWS + rows[None, :]


@gluon.jit
def _add_parts(
    first_sums, second_sums, partial_ptr, arrived_ptr, program, tile_turn, share,
    TURNS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Leave this program's sums of a tile; whether it is the last one to do so, and the sums of
    all. Programs and turns are counted from the first tile that is cut."""
    SIZE: gl.constexpr = _COLUMNS * _ROWS
    first_program = tile_turn // share
    last_program = (tile_turn + TURNS - 1) // share
    # the first slot is for the tile that a program begins with
    slot = 2 * program + (program * share < tile_turn).to(gl.int32)
    ptrs = _slot_ptrs(partial_ptr, slot, ROWS)
    gl.store(ptrs, first_sums)
    gl.store(ptrs + SIZE, second_sums)
    barrier()
    count = gl.atomic_add(arrived_ptr + first_program, 1, sem="acq_rel")
    is_last = count == last_program - first_program
    if is_last:
        gl.store(arrived_ptr + first_program, 0)
        slot = 2 * first_program + (first_program * share < tile_turn).to(gl.int32)
        ptrs = _slot_ptrs(partial_ptr, slot, ROWS)
        first_sums = gl.load(ptrs)
        second_sums = gl.load(ptrs + SIZE)
        for other in range(first_program + 1, last_program + 1):
            ptrs = _slot_ptrs(partial_ptr, 2 * other, ROWS)
            first_sums += gl.load(ptrs)
            second_sums += gl.load(ptrs + SIZE)
    return is_last, first_sums, second_sums


@gluon.jit
def _write_rows(
    first_sums, second_sums, bias_ptr, out_ptr, start, end, first_column, second_column, stride_out,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write both tiles of the rows start .. end - 1."""
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(0, _SUMS))
    columns = first_column + gl.arange(0, _COLUMNS, gl.SliceLayout(1, _SUMS))
    out_ptrs = out_ptr + (rows.to(gl.int64) * stride_out)[None, :] + columns[:, None]
    is_row = (rows < end)[None, :] & (columns >= 0)[:, None]
    apart = second_column - first_column
    if IS_GATED:
        if HAS_BIAS:
            first_sums += gl.load(bias_ptr + columns).to(gl.float32)[:, None]
            second_sums += gl.load(bias_ptr + apart + columns).to(gl.float32)[:, None]
        act = gated(first_sums, second_sums, ACTIVATION)
        gl.store(out_ptrs, act.to(out_ptr.dtype.element_ty), mask=is_row)
    else:
        gl.store(out_ptrs, first_sums.to(out_ptr.dtype.element_ty), mask=is_row)
        gl.store(out_ptrs + apart, second_sums.to(out_ptr.dtype.element_ty), mask=is_row)


@gluon.jit
def _run_tile(
    x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    start, end, first_column, second_column, program, tile_turn, first_turn, last_turn, share,
    num_out, stride_x, stride_out,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr,
    BLOCKS: gl.constexpr, TAIL: gl.constexpr, TURNS: gl.constexpr, IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """Some turns of the rows start .. end - 1, at most ROWS, of both tiles."""
    OF_X: gl.constexpr = _of_x(ROWS)
    rows = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, OF_X)), end - 1)
    if IS_GATED:
        rows = gl.load(sorted_ptr + rows)
    ks = gl.arange(0, QUARTER, gl.SliceLayout(1, OF_X))
    x_ptrs = x_ptr + (rows.to(gl.int64) * stride_x)[None, :] + ks[:, None]
    first_sums, second_sums = _sum_turns(
        x_ptrs, words_ptrs, factors_ptrs, first_column, second_column, first_turn, last_turn,
        num_out, ROWS, BLOCKS, TAIL, TURNS, IS_WHOLE,
    )  # fmt: skip
    is_last = True
    if not IS_WHOLE:
        is_last, first_sums, second_sums = _add_parts(
            first_sums, second_sums, partial_ptr, arrived_ptr, program, tile_turn, share, TURNS,
            ROWS,
        )  # fmt: skip
    if is_last:
        _write_rows(
            first_sums, second_sums, bias_ptr, out_ptr, start, end, first_column, second_column,
            stride_out, IS_GATED, ACTIVATION, HAS_BIAS, ROWS,
        )  # fmt: skip


@gluon.jit
def _run(
    x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, row_tile, column_tile, program, tile_turn,
    first_turn, last_turn, share, num_out, stride_x, stride_out, stride_words, stride_factors,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCKS: gl.constexpr,
    TAIL: gl.constexpr, TURNS: gl.constexpr, IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """Some turns of a tile."""
    expert = gl.load(tile_experts_ptr + row_tile)
    start = gl.load(tile_starts_ptr + row_tile)
    end = gl.load(tile_ends_ptr + row_tile)
    if IS_GATED:
        first_column = column_tile * _COLUMNS
        second_column = first_column + num_out // 2
    else:
        first_column = column_tile * (2 * _COLUMNS)
        second_column = gl.minimum(first_column + _COLUMNS, num_out - _COLUMNS)
    columns = gl.arange(0, _COLUMNS, gl.SliceLayout(1, _OF_WORDS))
    words = gl.arange(0, QUARTER, gl.SliceLayout(0, _OF_WORDS))
    words_ptrs = words_ptr + expert.to(gl.int64) * stride_words
    words_ptrs += columns[:, None] * QUARTER + words[None, :]
    factors_ptrs = factors_ptr + expert.to(gl.int64) * stride_factors + columns
    bias_ptr += expert * num_out
    if end - start <= _FEW:
        _run_tile(
            x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, partial_ptr,
            arrived_ptr, start, end, first_column, second_column, program, tile_turn,
            first_turn, last_turn, share, num_out, stride_x, stride_out,
            IS_GATED, ACTIVATION, HAS_BIAS, _FEW, BLOCKS, TAIL, TURNS, IS_WHOLE,
        )  # fmt: skip
    else:
        _run_tile(
            x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, partial_ptr,
            arrived_ptr, start, end, first_column, second_column, program, tile_turn,
            first_turn, last_turn, share, num_out, stride_x, stride_out,
            IS_GATED, ACTIVATION, HAS_BIAS, 2 * _FEW, BLOCKS, TAIL, TURNS, IS_WHOLE,
        )  # fmt: skip


@gluon.jit
def _few_kernel(
    x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr, num_out, stride_x, stride_out,
    stride_words, stride_factors,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCKS: gl.constexpr,
    TAIL: gl.constexpr, GROUP_ROWS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """words: [experts, blocks, num_out, 32]. If down has an odd number of tiles, its last one is
    computed twice. The counters are zeros between launches."""
    gdc_launch_dependents()
    gdc_wait()
    TURNS: gl.constexpr = max(BLOCKS // 2, 1)
    row_tiles = gl.load(tile_count_ptr)
    column_tiles = (num_out // _COLUMNS + 1) // 2
    tiles = row_tiles * column_tiles
    num_cut = tiles % PROGRAMS
    num_cut = gl.where(num_cut * 2 <= PROGRAMS, num_cut, 0)
    num_whole = tiles - num_cut
    program = gl.program_id(0) - num_whole
    if program < 0:
        row_tile, column_tile = tile_of(gl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
        _run(
            x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
            tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, row_tile, column_tile, 0, 0, 0, 0, 1,
            num_out, stride_x, stride_out, stride_words, stride_factors,
            IS_GATED, ACTIVATION, HAS_BIAS, BLOCKS, TAIL, TURNS, True,
        )  # fmt: skip
    else:
        # programs and turns are counted from the first tile that is cut
        all_turns = num_cut * TURNS
        share = (all_turns + PROGRAMS - 1) // PROGRAMS
        turn = program * share
        end_turn = gl.minimum(turn + share, all_turns)
        while turn < end_turn:
            tile = turn // TURNS
            tile_turn = tile * TURNS
            first_turn = turn - tile_turn
            last_turn = gl.minimum(end_turn - tile_turn, TURNS)
            turn = tile_turn + last_turn
            row_tile, column_tile = tile_of(tile + num_whole, row_tiles, column_tiles, GROUP_ROWS)
            _run(
                x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr,
                arrived_ptr, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, row_tile,
                column_tile, program, tile_turn, first_turn, last_turn, share,
                num_out, stride_x, stride_out, stride_words, stride_factors,
                IS_GATED, ACTIVATION, HAS_BIAS, BLOCKS, TAIL, TURNS, False,
            )  # fmt: skip


def can_take(weights: Nibbles, is_gated: bool) -> bool:
    """Whether the kernel reads this weight: MXFP4 in bf16, with outputs for whole tiles."""
    widths = 2 * COLUMNS if is_gated else COLUMNS
    return weights.is_mxfp4 and weights.dtype == torch.bfloat16 and weights.num_out % widths == 0


def few_gate_up(
    x: Tensor, routing: Routing, weights: Nibbles, bias: Tensor | None, activation: str, out: Tensor
) -> None:
    """As `packed_gate_up`, with a routing for tiles of ROWS."""
    _launch(x, routing, weights, bias, out, is_gated=True, activation=activation)


def few_down(act: Tensor, routing: Routing, weights: Nibbles, out: Tensor) -> None:
    """As `packed_down`, with a routing for tiles of ROWS."""
    _launch(act, routing, weights, None, out, is_gated=False, activation="")


def _launch(
    x: Tensor,
    routing: Routing,
    weights: Nibbles,
    bias: Tensor | None,
    out: Tensor,
    *,
    is_gated: bool,
    activation: str,
) -> None:
    words = weights.words
    partial = x.new_empty(PROGRAMS * _SLOTS * 2 * COLUMNS * ROWS, dtype=torch.float32)
    tiles = most_tiles(len(out), len(words), ROWS) * cdiv(weights.num_out, 2 * COLUMNS)
    _few_kernel[((tiles // PROGRAMS + 1) * PROGRAMS,)](
        x, routing.sorted_tokens, words, weights.factors, x if bias is None else bias, out,
        partial, weights.arrived, routing.tile_experts, routing.tile_starts, routing.tile_ends,
        routing.tile_count, weights.num_out, x.stride(0), out.stride(0), words.stride(0),
        weights.factors.stride(0),
        IS_GATED=is_gated, ACTIVATION=activation, HAS_BIAS=bias is not None,
        BLOCKS=weights.num_in // BLOCK, TAIL=weights.num_in % BLOCK // WORDS,
        GROUP_ROWS=GROUP_ROWS, PROGRAMS=PROGRAMS, launch_pdl=True, **OPTIONS,
    )  # fmt: skip
