# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""A product in which a row's bits do not depend on other rows, for the deterministic setting.

cuBLAS picks a kernel by the number of rows and may split the sum over K, so a token's bits depend
on its batch. Here every output is one sum over K, in steps of TILE_K from first to last, by the
same matrix instruction, in fp32. The tile's size decides which program computes an output, but not
how it is computed: small products take smaller tiles so that more programs share the reading
(`src/mainstem_bench/kernels/fused.py` compares the bits of many tiles on a card).
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv

_GROUP_ROWS = 8  # tiles of rows that pass over the same weights together, for the L2 cache


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the output that one program computes, and how."""

    rows: int
    columns: int
    k: int
    warps: int
    stages: int
    wave_cost: int = 1  # relative time of one tile on each multiprocessor


_TILES = (  # costs as measured on an H200 (docs/log/gpu.md)
    Tile(rows=128, columns=128, k=64, warps=4, stages=4, wave_cost=30),
    Tile(rows=64, columns=128, k=64, warps=4, stages=5, wave_cost=20),
    Tile(rows=64, columns=64, k=128, warps=4, stages=4, wave_cost=14),
)
_FULL_PRECISION = Tile(rows=64, columns=64, k=32, warps=4, stages=3)


@triton.jit
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, num_out, num_in,
    stride_x, stride_weight, stride_out,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(tokens, TILE_ROWS), tl.cdiv(num_out, TILE_COLUMNS)
    first_row = (program // (GROUP * column_tiles)) * GROUP
    height = tl.minimum(row_tiles - first_row, GROUP)
    within = program % (GROUP * column_tiles)
    rows = (first_row + within % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = (within // height) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    ks = tl.arange(0, TILE_K)
    # rows and columns past the end read the first ones again and are not written
    x_ptrs = x_ptr + (rows % tokens).to(tl.int64)[:, None] * stride_x + ks[None, :]
    weight_ptrs = weight_ptr + (columns % num_out).to(tl.int64)[None, :] * stride_weight
    weight_ptrs += ks[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, num_in, TILE_K):
        if IS_EVEN:
            x, weight = tl.load(x_ptrs), tl.load(weight_ptrs)
        else:
            is_k = start + ks < num_in
            x = tl.load(x_ptrs, mask=is_k[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=is_k[:, None], other=0.0)
        if UPCAST:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_ptrs += TILE_K
        weight_ptrs += TILE_K
    is_column = columns < num_out
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    mask = (rows < tokens)[:, None] & is_column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x [tokens, in] @ weight [out, in].T + bias, summed in fp32. A row's bits depend only
    on the row and the weights."""
    tokens, num_in = x.shape
    num_out = len(weight)
    if weight.shape != (num_out, num_in) or x.stride(1) != 1 or weight.stride(1) != 1:
        raise LayoutError(
            f"x [tokens, in] and weight [out, in] must agree and have contiguous rows, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or weight.dtype != x.dtype:
        raise LayoutError(
            f"x and weight must both be bfloat16, float16 or float32, "
            f"got {x.dtype} and {weight.dtype}"
        )
    if bias is not None and (bias.shape != (num_out,) or not bias.is_contiguous()):
        raise LayoutError(f"bias must be contiguous [{num_out}], got {tuple(bias.shape)}")
    if out is None:
        out = x.new_empty(tokens, num_out)
    if out.shape != (tokens, num_out) or out.stride(1) != 1:
        raise LayoutError(f"out must be [{tokens}, {num_out}], got {tuple(out.shape)}")
    if tokens == 0:
        return out
    return _launch(x, weight, bias, out, _tile(x, num_out))


def multiply(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """Like `matmul`, with a given tile, to compare speed and bits."""
    return _launch(x, weight, None, x.new_empty(len(x), len(weight)), tile)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> Tensor:
    tokens, num_in = x.shape
    num_out = len(weight)
    grid = (cdiv(tokens, tile.rows) * cdiv(num_out, tile.columns),)
    _matmul_kernel[grid](
        x, weight, x if bias is None else bias, out, tokens, num_out, num_in,
        x.stride(0), weight.stride(0), out.stride(0),
        TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, TILE_K=tile.k,
        GROUP=_GROUP_ROWS, IS_EVEN=num_in % tile.k == 0,
        HAS_BIAS=bias is not None, UPCAST=not x.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile(x: Tensor, num_out: int) -> Tile:
    """The tile whose waves on the card take the least time."""
    if x.dtype == torch.float32:
        return _FULL_PRECISION
    num_units = _num_units(x.device)

    def cost(tile: Tile) -> int:
        tiles = cdiv(len(x), tile.rows) * cdiv(num_out, tile.columns)
        waves: int = cdiv(tiles, num_units)
        return waves * tile.wave_cost

    return min(_TILES, key=cost)


@cache
def _num_units(device: torch.device) -> int:
    """The number of multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
