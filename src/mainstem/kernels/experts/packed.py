# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The products of all experts at once, with 4-bit weights, over rows sorted by expert.

Like products.py, but the weights are the left operand of the matrix instruction and are unpacked in
registers (dense/nibbles.py). So a program holds its tile of outputs as [columns, rows]. On Hopper,
few.py computes MXFP4 experts with few rows.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.invariant import Tile
from mainstem.kernels.dense.nibbles import (
    BLOCK,
    QUARTER,
    WIDTH,
    Nibbles,
    load_block,
    load_columns,
)
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.experts.activate import check_activation, gated
from mainstem.kernels.experts.choose import few_kernels
from mainstem.kernels.experts.products import ExpertTiles, check_bias, rows_of, tile_of
from mainstem.kernels.experts.route import Routing, most_tiles
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_GROUP_ROWS = 8  # tiles of rows that pass over the same weights together, for the L2 cache

# tiles by the mean number of rows per expert
FEW = ExpertTiles(Tile(16, 64, BLOCK, warps=4, stages=4), Tile(16, 64, BLOCK, warps=4, stages=5))
SOME = ExpertTiles(Tile(64, 64, BLOCK, warps=4, stages=3), Tile(64, 128, BLOCK, warps=8, stages=4))
MANY = ExpertTiles(
    Tile(128, 128, BLOCK, warps=8, stages=3), Tile(128, 128, BLOCK, warps=8, stages=3)
)
_MOST_OF_FEW = 8
_MOST_OF_SOME = 96


def choose_packed(num_rows: int, num_experts: int, is_deterministic: bool) -> ExpertTiles:
    """How a step of `num_rows` = tokens * top_k rows is computed."""
    rows = num_rows / num_experts
    if is_deterministic or _MOST_OF_FEW < rows <= _MOST_OF_SOME:
        return SOME
    return FEW if rows <= _MOST_OF_FEW else MANY


@triton.jit(do_not_specialize=("row_tiles",))
def _packed_gate_up_kernel(
    x_ptr, sorted_ptr, words_ptr, factors_ptr, bias_ptr, out_ptr, tile_experts_ptr, tile_starts_ptr,
    ends_ptr, row_tiles, num_blocks, size, hidden, stride_x, stride_out, stride_words,
    stride_factors,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr, UPCAST: tl.constexpr, GROUP: tl.constexpr,
    IS_MXFP4: tl.constexpr, IS_EVEN: tl.constexpr, IS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output. words: [experts, num_blocks, 2 * size, 32]."""
    wait_for_ahead(OVERLAPS)
    column_tiles = tl.cdiv(size, TILE_COLUMNS)
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    expert = tl.load(tile_experts_ptr + row_tile)
    if expert < 0:
        return
    rows, is_row = rows_of(row_tile, expert, tile_starts_ptr, ends_ptr, TILE_ROWS)
    tokens = tl.load(sorted_ptr + rows, mask=is_row, other=0)
    ks = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * stride_x + ks[:, None]
    columns = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    # columns past the last one read it again and are not written
    read = tl.minimum(columns, size - 1)
    words_ptrs = words_ptr + expert.to(tl.int64) * stride_words
    words_ptrs += read[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    factors_ptr += expert.to(tl.int64) * stride_factors
    gate = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    up = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for block in range(num_blocks):
        x = load_columns(x_ptrs, ks + block * WIDTH, hidden, is_row[None, :], IS_EVEN)
        gate_part = load_block(
            words_ptrs, factors_ptr, block, read, 2 * size,
            GROUP, IS_MXFP4, x_ptr.dtype.element_ty, IS_PTX,
        )  # fmt: skip
        up_part = load_block(
            words_ptrs + size * QUARTER, factors_ptr, block, read + size, 2 * size,
            GROUP, IS_MXFP4, x_ptr.dtype.element_ty, IS_PTX,
        )  # fmt: skip
        if UPCAST:
            x = x.to(tl.float32)
            gate_part, up_part = gate_part.to(tl.float32), up_part.to(tl.float32)
        gate = tl.dot(gate_part, x, gate, input_precision="ieee")
        up = tl.dot(up_part, x, up, input_precision="ieee")
        words_ptrs += 2 * size * QUARTER
        x_ptrs += WIDTH
    is_column = columns < size
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * size + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptrs + size, mask=is_column, other=0.0).to(tl.float32)[:, None]
    act = gated(gate, up, ACTIVATION)
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
    mask = is_row[None, :] & is_column[:, None]
    tl.store(out_ptrs, act.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("row_tiles",))
def _packed_down_kernel(
    act_ptr, words_ptr, factors_ptr, out_ptr, tile_experts_ptr, tile_starts_ptr, ends_ptr,
    row_tiles, num_blocks, size, hidden, stride_act, stride_out, stride_words, stride_factors,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    UPCAST: tl.constexpr, GROUP: tl.constexpr, IS_MXFP4: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output. words: [experts, num_blocks, hidden, 32]."""
    wait_for_ahead(OVERLAPS)
    column_tiles = tl.cdiv(hidden, TILE_COLUMNS)
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    expert = tl.load(tile_experts_ptr + row_tile)
    if expert < 0:
        return
    rows, is_row = rows_of(row_tile, expert, tile_starts_ptr, ends_ptr, TILE_ROWS)
    ks = tl.arange(0, WIDTH)
    act_ptrs = act_ptr + rows.to(tl.int64)[None, :] * stride_act + ks[:, None]
    columns = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    read = tl.minimum(columns, hidden - 1)
    words_ptrs = words_ptr + expert.to(tl.int64) * stride_words
    words_ptrs += read[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    factors_ptr += expert.to(tl.int64) * stride_factors
    out = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for block in range(num_blocks):
        part = load_block(
            words_ptrs, factors_ptr, block, read, hidden,
            GROUP, IS_MXFP4, act_ptr.dtype.element_ty, IS_PTX,
        )  # fmt: skip
        x = load_columns(act_ptrs, ks + block * WIDTH, size, is_row[None, :], IS_EVEN)
        if UPCAST:
            part, x = part.to(tl.float32), x.to(tl.float32)
        out = tl.dot(part, x, out, input_precision="ieee")
        words_ptrs += hidden * QUARTER
        act_ptrs += WIDTH
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
    mask = is_row[None, :] & (columns < hidden)[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def packed_gate_up(
    x: Tensor,
    routing: Routing,
    weights: Nibbles,
    bias: Tensor | None,
    activation: str,
    tile: Tile,
    out: Tensor,
) -> Tensor:
    """out [rows, size], sorted; x [tokens, hidden] is gathered. weights: [experts, 2 * size,
    hidden]. `routing` was made from the same x, with tiles of tile.rows."""
    experts, size = len(weights.words), weights.num_out // 2
    _check_rows("x", x, weights.num_in, weights.dtype)
    _check_rows("out", out, size, weights.dtype)
    check_bias("gate_up", bias, experts, 2 * size)
    check_activation(activation)
    row_tiles = most_tiles(len(out), experts, tile.rows)
    if row_tiles and (kernels := _kernels_of_few(tile, weights, is_gated=True)) is not None:
        kernels.few_gate_up(x, routing, weights, bias, activation, out)
    elif row_tiles:
        _packed_gate_up_kernel[(row_tiles * cdiv(size, tile.columns),)](
            x, routing.sorted_tokens, weights.words, weights.factors, x if bias is None else bias,
            out, routing.tile_experts, routing.tile_starts, routing.ends, row_tiles,
            weights.num_blocks, size, weights.num_in, x.stride(0), out.stride(0),
            weights.words.stride(0), weights.factors.stride(0),
            ACTIVATION=activation, HAS_BIAS=bias is not None, **_options(tile, weights, x.device),
        )  # fmt: skip
    return out


def packed_down(act: Tensor, routing: Routing, weights: Nibbles, tile: Tile, out: Tensor) -> Tensor:
    """out [rows, hidden] of act [rows, size], both sorted. weights: [experts, hidden, size]."""
    experts, hidden = len(weights.words), weights.num_out
    _check_rows("act", act, weights.num_in, weights.dtype)
    _check_rows("out", out, hidden, weights.dtype)
    if len(act) != len(out):
        raise LayoutError(f"act must have the {len(out)} rows of out, got {len(act)}")
    row_tiles = most_tiles(len(out), experts, tile.rows)
    if row_tiles and (kernels := _kernels_of_few(tile, weights, is_gated=False)) is not None:
        kernels.few_down(act, routing, weights, out)
    elif row_tiles:
        _packed_down_kernel[(row_tiles * cdiv(hidden, tile.columns),)](
            act, weights.words, weights.factors, out, routing.tile_experts, routing.tile_starts,
            routing.ends, row_tiles, weights.num_blocks, weights.num_in, hidden, act.stride(0),
            out.stride(0), weights.words.stride(0), weights.factors.stride(0),
            **_options(tile, weights, act.device),
        )  # fmt: skip
    return out


def _kernels_of_few(tile: Tile, weights: Nibbles, *, is_gated: bool) -> ModuleType | None:
    """few.py, if it computes this product; its bits may differ from those of the kernels here."""
    if tile not in (FEW.gate_up, FEW.down):
        return None
    kernels = few_kernels(weights.words.device)
    return None if kernels is None or not kernels.can_take(weights, is_gated) else kernels


def _options(tile: Tile, weights: Nibbles, device: torch.device) -> dict[str, int | bool]:
    return {
        "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "GROUP_ROWS": _GROUP_ROWS,
        "UPCAST": device.type != "cuda", "num_warps": tile.warps, "num_stages": tile.stages,
        **weights.options(), **overlap_options(device),
    }  # fmt: skip


def _check_rows(name: str, x: Tensor, width: int, dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1 or x.dtype != dtype:
        raise LayoutError(f"{name} must be [rows, {width}] of {dtype} with contiguous rows, "
                          f"got {tuple(x.shape)} of {x.dtype}")  # fmt: skip
