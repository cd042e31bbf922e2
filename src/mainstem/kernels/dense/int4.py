# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Products with 4-bit weights: x [tokens, in] in 16 bits, weights (value - zero) * scale.

There are two ways. `multiply` reads packed weights and unpacks them in registers, as the left
operand of the matrix instruction; for few tokens columns are split among programs
(`split_columns.py`). `dequantize` writes the weights to memory that all products share, for a
product by the vendor's library. Both use the same numbers, rounded once to the dtype of x.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from mainstem.kernels.dense.nibbles import (
    BLOCK,
    QUARTER,
    WIDTH,
    WORDS,
    Nibbles,
    load_block,
    load_columns,
)
from mainstem.kernels.dense.split_columns import (
    ColumnTile,
    columns_of,
    most_split_tokens,
    num_splits,
    tile_of,
    write_tile,
)
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import let_in, overlap_options, wait_alone, wait_for_ahead

_DEQUANTIZED_ROWS = 64

# By number of tokens in a step, ascending; as measured on an H200 (docs/log/gpu.md). With 8 tokens
# each warp multiplies alone, which is faster for few tokens; from 16 tokens on, four warps multiply
# together.
TILES = (
    ColumnTile(outs=64, tokens=8, warps=4, stages=3, programs=6, blocks=2),
    ColumnTile(outs=128, tokens=16, warps=4, stages=5, programs=4),
    ColumnTile(outs=128, tokens=32, warps=8, stages=3, programs=2, blocks=2),
    ColumnTile(outs=128, tokens=64, warps=8, stages=3, programs=2),
    ColumnTile(outs=256, tokens=128, warps=8, stages=3, programs=1),
    ColumnTile(outs=128, tokens=256, warps=8, stages=3, programs=1),
)
_DETERMINISTIC_TOKENS = 64
MOST_TOKENS = 512  # the largest step that reads packed weights; above, dequantizing is faster


def multiply(
    x: Tensor, weight: Nibbles, bias: Tensor | None, out: Tensor, tile: ColumnTile | None = None
) -> Tensor:
    """out [tokens, out] = x @ weight.T + bias."""
    tokens, num_out = len(x), weight.num_out
    _check(x, weight, bias, out)
    if tokens == 0:
        return out
    tile = tile or tile_for(tokens, x.dtype, x.device)
    splits = num_splits(num_out, weight.num_blocks, tile)
    most = most_split_tokens(num_out, tile)
    if splits > 1 and tokens > most:  # in several launches: rows do not depend on each other
        for first in range(0, tokens, most):
            rows = slice(first, first + most)
            multiply(x[rows], weight, bias, out[rows], tile)
        return out
    tiles = cdiv(num_out, tile.outs) * cdiv(tokens, tile.tokens)
    partial = x
    if splits > 1:
        partial = x.new_empty(splits, tokens, num_out, dtype=torch.float32)
    _product_kernel[(tiles, splits)](
        x, weight.words, weight.factors, x if bias is None else bias, out, partial, weight.arrived,
        tokens, num_out, weight.num_in, weight.num_blocks, splits, x.stride(0), out.stride(0),
        IS_SPLIT=splits > 1, TILE_OUT=tile.outs, TILE_TOKENS=tile.tokens,
        STEP=1 if weight.num_blocks % tile.blocks else tile.blocks, HAS_BIAS=bias is not None,
        UPCAST=x.device.type != "cuda", num_warps=tile.warps, num_stages=tile.stages,
        **weight.options(), **overlap_options(x.device),
    )  # fmt: skip
    return out


def dequantize(weight: Nibbles, out: Tensor) -> Tensor:
    """Write the weight to out [out, in], contiguous, in the dtype of x."""
    if out.shape != (weight.num_out, weight.num_in) or not out.is_contiguous():
        raise LayoutError(f"out must be contiguous [{weight.num_out}, {weight.num_in}], "
                          f"got {tuple(out.shape)}")  # fmt: skip
    if out.dtype != weight.dtype:
        raise LayoutError(f"out must be {weight.dtype}, got {out.dtype}")
    grid = (cdiv(weight.num_out, _DEQUANTIZED_ROWS), weight.num_blocks)
    _dequantize_kernel[grid](
        weight.words, weight.factors, out, weight.num_out, weight.num_in,
        TILE_OUT=_DEQUANTIZED_ROWS, num_warps=4, **weight.options(), **overlap_options(out.device),
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Nibbles, bias: Tensor | None, out: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != weight.num_in or x.stride(1) != 1:
        raise LayoutError(f"x must be [tokens, {weight.num_in}] with contiguous rows, "
                          f"got {tuple(x.shape)}")  # fmt: skip
    if x.dtype != weight.dtype or out.dtype != x.dtype:
        raise LayoutError(f"x and out must be {weight.dtype}, got {x.dtype} and {out.dtype}")
    if out.shape != (len(x), weight.num_out) or out.stride(1) != 1:
        raise LayoutError(f"out must be [{len(x)}, {weight.num_out}], got {tuple(out.shape)}")
    if bias is not None and (bias.shape != (weight.num_out,) or not bias.is_contiguous()):
        raise LayoutError(f"bias must be contiguous [{weight.num_out}], got {tuple(bias.shape)}")


def tile_for(tokens: int, dtype: torch.dtype, device: torch.device) -> ColumnTile:
    """The smallest tile that holds all tokens, or else the largest."""
    tiles = _tiles_that_fit(dtype, device)
    return next((tile for tile in tiles if tokens <= tile.tokens), tiles[-1])


def deterministic_tile(dtype: torch.dtype, device: torch.device) -> ColumnTile:
    """The same tile for every step. It splits columns into few parts, since large steps must hold
    all parts in memory."""
    return replace(tile_for(_DETERMINISTIC_TOKENS, dtype, device), programs=1)


@cache
def _tiles_that_fit(dtype: torch.dtype, device: torch.device) -> tuple[ColumnTile, ...]:
    """Tiles that fit into a multiprocessor's shared memory, with fewer stages if it is small."""
    if device.type != "cuda":
        return TILES
    most: int = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    found = []
    for tile in TILES:
        per_stage = tile.outs * (2 * WORDS + 16) + tile.tokens * BLOCK * dtype.itemsize
        per_stage *= tile.blocks
        if (stages := min(tile.stages, most // per_stage)) > 1:
            found.append(replace(tile, stages=stages))
    return tuple(found)


@triton.jit(do_not_specialize=("tokens", "splits"))
def _product_kernel(
    x_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    tokens, num_out, num_in, num_blocks, splits, stride_x, stride_out,
    IS_SPLIT: tl.constexpr, TILE_OUT: tl.constexpr, TILE_TOKENS: tl.constexpr, STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, IS_MXFP4: tl.constexpr, IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr, IS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output and part of the columns."""
    wait_alone(OVERLAPS)
    outs, rows = tile_of(tokens, TILE_OUT, TILE_TOKENS)
    first, end = columns_of(num_blocks // STEP, splits)
    # rows past the last output read the last one again and are not written
    read = tl.minimum(outs, num_out - 1)
    is_token = (rows < tokens)[None, :]
    columns = tl.arange(0, WIDTH)
    words_ptrs = words_ptr + (first * STEP * num_out + read).to(tl.int64)[:, None] * QUARTER
    words_ptrs += tl.arange(0, QUARTER)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * stride_x
    x_ptrs += (first * (STEP * WIDTH) + columns)[:, None]
    acc = tl.zeros([TILE_OUT, TILE_TOKENS], tl.float32)
    for start in range(first, end):
        for index in tl.static_range(STEP):
            block = start * STEP + index
            part = load_block(
                words_ptrs, factors_ptr, block, read, num_out,
                GROUP, IS_MXFP4, x_ptr.dtype.element_ty, IS_PTX,
            )  # fmt: skip
            x = load_columns(x_ptrs, columns + block * WIDTH, num_in, is_token, IS_EVEN)
            if UPCAST:
                part, x = part.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(part, x, acc, input_precision="ieee")
            words_ptrs += num_out * QUARTER
            x_ptrs += WIDTH
    let_in(OVERLAPS)
    write_tile(
        acc, outs, rows, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
        tokens, num_out, splits, stride_out, IS_SPLIT, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    words_ptr, factors_ptr, out_ptr, num_out, num_in,
    TILE_OUT: tl.constexpr, GROUP: tl.constexpr, IS_MXFP4: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per block and TILE_OUT rows."""
    wait_for_ahead(OVERLAPS)
    block = tl.program_id(1)
    outs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    read = tl.minimum(outs, num_out - 1)
    words_ptrs = words_ptr + (block * num_out + read).to(tl.int64)[:, None] * QUARTER
    part = load_block(
        words_ptrs + tl.arange(0, QUARTER)[None, :], factors_ptr, block, read, num_out,
        GROUP, IS_MXFP4, out_ptr.dtype.element_ty, IS_PTX,
    )  # fmt: skip
    columns = block * WIDTH + tl.arange(0, WIDTH)
    mask = (outs < num_out)[:, None]
    if not IS_EVEN:
        mask = mask & (columns < num_in)[None, :]
    tl.store(out_ptr + outs.to(tl.int64)[:, None] * num_in + columns[None, :], part, mask=mask)
