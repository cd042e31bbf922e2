# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Products of few tokens, which only read weights: how columns are split among programs.

A program computes a tile of outputs and tokens. If there are fewer tiles than a card has room for,
several programs share a tile; each sums a part of the columns, and the last one to arrive adds the
parts, always in the same order.

    columns    0 ........ 4096 ........ 8192 ....... 14336
    program    | first part | second part | third part |     one tile of outputs

An output is one sum over columns from first to last, or the sum of such sums over parts. The parts
depend only on the weight's shape and the tile, so with one tile a row's bits do not depend on other
rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES = 1 << 14  # maximum tiles of a product whose columns are split
_FULL_CARD = 132  # multiprocessors of the card that tiles were measured on
_LEAST_BLOCKS, _MOST_PARTS = 4, 16


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """What one program computes, and how."""

    outs: int
    tokens: int
    warps: int
    stages: int
    programs: int  # number that run on a multiprocessor at once; columns are split to reach it
    # blocks of columns per iteration, if that divides the weight's number of blocks
    blocks: int = 1


def make_counters(device: torch.device) -> Tensor:
    """Counters for one weight, by tile: how many programs have stored their part; zeros between
    products. Weights do not share them, because engines on one card may run at the same time.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def num_splits(num_out: int, blocks: int, tile: ColumnTile) -> int:
    """The number of parts into which columns are split. It depends only on the weight's shape and
    the tile, so that with one tile a row's bits do not depend on the step."""
    programs = -(-num_out // tile.outs)
    most = min(blocks // _LEAST_BLOCKS, _MOST_PARTS)
    return max(1, min(tile.programs * _FULL_CARD // programs, most))


def most_split_tokens(num_out: int, tile: ColumnTile) -> int:
    """Return the maximum number of tokens in one launch with split columns: each tile needs a
    counter, and the number of counters is limited."""
    return MOST_TILES // -(-num_out // tile.outs) * tile.tokens


@triton.jit
def tile_of(tokens, TILE_OUT: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """The outputs and tokens of this program's tile."""
    tile = tl.program_id(0)
    token_tiles = tl.cdiv(tokens, TILE_TOKENS)
    outs = (tile // token_tiles) * TILE_OUT + tl.arange(0, TILE_OUT)
    rows = (tile % token_tiles) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    return outs, rows


@triton.jit
def columns_of(steps, splits):
    """The first step of this program's columns, and the end."""
    split = tl.program_id(1)
    return steps * split // splits, steps * (split + 1) // splits


@triton.jit
def write_tile(
    acc, outs, rows, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    tokens, num_out, splits, stride_out,
    IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the sums of this program's columns, acc [outs, rows]. If columns are split, the last
    program to arrive writes the sum of all parts."""
    is_written = (outs < num_out)[:, None] & (rows < tokens)[None, :]
    is_last = True
    if IS_SPLIT:
        tile, split = tl.program_id(0), tl.program_id(1)
        size = tokens.to(tl.int64) * num_out
        partial_ptrs = partial_ptr + rows.to(tl.int64)[None, :] * num_out + outs[:, None]
        tl.store(partial_ptrs + split * size, acc, mask=is_written)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            acc = tl.zeros_like(acc)
            for index in range(splits):
                acc += tl.load(partial_ptrs + index * size, mask=is_written, other=0.0)
    if is_last:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * stride_out + outs[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_written)
