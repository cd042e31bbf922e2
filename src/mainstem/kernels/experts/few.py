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
the weights. A program has up to 16 rows of an expert; with at most 8 it runs half of the matrix
instructions.
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
from mainstem.kernels.host import cdiv

WARPS = 4
COLUMNS = 16 * WARPS  # of each of a program's two tiles
OPTIONS = {"num_warps": WARPS, "maxnreg": 128}  # four programs on a multiprocessor
GROUP_ROWS = 8  # tiles of rows that pass over the same weights together, for the L2 cache
ROWS = 16  # of a tile

_COLUMNS = gl.constexpr(COLUMNS)
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
    words = gl.load(words_ptrs + block.to(gl.int64) * (num_out * QUARTER), cache_modifier=".cg")
    return words, gl.load(factors_ptrs + block * num_out)


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
def _write_rows(
    x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, start, end, first_column,
    second_column, num_out, stride_x, stride_out,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr,
    BLOCKS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Sum and write both tiles of the rows start .. end - 1, at most ROWS. BLOCKS: the number of
    whole blocks; TAIL: quarters of one more."""
    OF_X: gl.constexpr = _of_x(ROWS)
    # turns of two blocks each, after which at least one block is left, whole or not
    TURNS: gl.constexpr = BLOCKS // 2 if TAIL > 0 else (BLOCKS - 1) // 2
    REST: gl.constexpr = BLOCKS - 2 * TURNS
    rows = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, OF_X)), end - 1)
    if IS_GATED:
        rows = gl.load(sorted_ptr + rows)
    ks = gl.arange(0, QUARTER, gl.SliceLayout(1, OF_X))
    x_ptrs = x_ptr + (rows.to(gl.int64) * stride_x)[None, :] + ks[:, None]
    first_words = words_ptrs + first_column * QUARTER
    first_factors = factors_ptrs + first_column
    second_words = words_ptrs + second_column * QUARTER
    second_factors = factors_ptrs + second_column
    first_sums = gl.zeros([_COLUMNS, ROWS], gl.float32, _SUMS)
    second_sums = gl.zeros([_COLUMNS, ROWS], gl.float32, _SUMS)
    zero = start * 0
    first = _fetch(first_words, first_factors, zero, num_out)
    second = _fetch(second_words, second_factors, zero, num_out)
    for turn in range(0, TURNS):
        for index in gl.static_range(2):
            next_first = _fetch(first_words, first_factors, 2 * turn + (index + 1), num_out)
            next_second = _fetch(second_words, second_factors, 2 * turn + (index + 1), num_out)
            first_sums, second_sums = _multiply(first_sums, second_sums, first, second, x_ptrs, 4)
            first = next_first
            second = next_second
            x_ptrs += WIDTH
    for index in gl.static_range(REST):
        next_first = first
        next_second = second
        if index + 1 < REST or TAIL > 0:
            block = zero + (2 * TURNS + index + 1)
            next_first = _fetch(first_words, first_factors, block, num_out)
            next_second = _fetch(second_words, second_factors, block, num_out)
        first_sums, second_sums = _multiply(first_sums, second_sums, first, second, x_ptrs, 4)
        first = next_first
        second = next_second
        x_ptrs += WIDTH
    if TAIL > 0:
        first_sums, second_sums = _multiply(first_sums, second_sums, first, second, x_ptrs, TAIL)
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


@gluon.jit(do_not_specialize=("row_tiles",))
def _few_kernel(
    x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, tile_experts_ptr, tile_starts_ptr,
    tile_ends_ptr, row_tiles, num_out, stride_x, stride_out, stride_words, stride_factors,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCKS: gl.constexpr,
    TAIL: gl.constexpr, GROUP_ROWS: gl.constexpr,
):  # fmt: skip
    """words: [experts, blocks, num_out, 32]. If down has an odd number of tiles, some programs
    compute the last one twice."""
    gdc_launch_dependents()
    gdc_wait()
    column_tiles = (num_out // _COLUMNS + 1) // 2
    row_tile, column_tile = tile_of(gl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    expert = gl.load(tile_experts_ptr + row_tile)
    start = gl.load(tile_starts_ptr + row_tile)
    end = gl.load(tile_ends_ptr + row_tile)
    if expert < 0:
        return
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
        _write_rows(
            x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, start, end,
            first_column, second_column, num_out, stride_x, stride_out,
            IS_GATED, ACTIVATION, HAS_BIAS, _FEW, BLOCKS, TAIL,
        )  # fmt: skip
    else:
        _write_rows(
            x_ptr, sorted_ptr, words_ptrs, factors_ptrs, bias_ptr, out_ptr, start, end,
            first_column, second_column, num_out, stride_x, stride_out,
            IS_GATED, ACTIVATION, HAS_BIAS, 2 * _FEW, BLOCKS, TAIL,
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
    words, row_tiles = weights.words, most_tiles(len(out), len(weights.words), ROWS)
    _few_kernel[(row_tiles * cdiv(weights.num_out, 2 * COLUMNS),)](
        x, routing.sorted_tokens, words, weights.factors, x if bias is None else bias, out,
        routing.tile_experts, routing.tile_starts, routing.tile_ends, row_tiles, weights.num_out,
        x.stride(0), out.stride(0), words.stride(0), weights.factors.stride(0),
        IS_GATED=is_gated, ACTIVATION=activation, HAS_BIAS=bias is not None,
        BLOCKS=weights.num_in // BLOCK, TAIL=weights.num_in % BLOCK // WORDS,
        GROUP_ROWS=GROUP_ROWS, launch_pdl=True, **OPTIONS,
    )  # fmt: skip
