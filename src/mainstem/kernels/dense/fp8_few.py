# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""fp8 products of few tokens: x and weights in fp8, the scales of either kind of fp8 linear.

    channels   x_scale [tokens, 1], w_scale [out]: the sum is scaled at the end
    blocks     x_scale [tokens, in / 128], w_scale [out / 128, in / 128]: the sum of each block is

For few tokens the vendor's library reads weights at about half of the memory's bandwidth. Weights
are the left operand of the matrix instruction here, so a tile may have as few as 8 tokens, and
columns are split among programs (`split_columns.py`). Products of many tokens stay with the
library.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.fp8_rows import GROUP, Fp8Rows
from mainstem.kernels.dense.split_columns import (
    ColumnTile,
    columns_of,
    make_counters,
    num_splits,
    tile_of,
    write_tile,
)
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import let_in, overlap_options, wait_alone

# By number of tokens in a step, ascending; as measured on an H200 (docs/log/gpu.md).
TILES = (
    ColumnTile(outs=64, tokens=8, warps=4, stages=3, programs=2, blocks=2),
    ColumnTile(outs=128, tokens=16, warps=8, stages=3, programs=2, blocks=2),
    ColumnTile(outs=64, tokens=32, warps=4, stages=3, programs=2, blocks=2),
    ColumnTile(outs=64, tokens=64, warps=4, stages=3, programs=2, blocks=2),
)
MOST_TOKENS = TILES[-1].tokens
_WIDTH = tl.constexpr(GROUP)
_HOPPER = 9


class FewRows:
    """A weight: values [out, in], and scales of channels or blocks. It is used on Hopper, the only
    cards on which it was measured, and needs multiples of 128 columns."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._values, self._scales, self._bias = values, scales, bias
        self._arrived = make_counters(values.device)
        is_hopper = values.is_cuda and torch.version.hip is None
        is_hopper = is_hopper and torch.cuda.get_device_capability(values.device)[0] == _HOPPER
        self._most = MOST_TOKENS if is_hopper and values.shape[1] % GROUP == 0 else 0

    def can_take(self, tokens: int) -> bool:
        return 0 < tokens <= self._most

    def __call__(self, rows: Fp8Rows, out_dtype: torch.dtype) -> Tensor:
        """[tokens, in] -> [tokens, out], a new tensor."""
        out = torch.empty(len(rows[0]), len(self._values), dtype=out_dtype, device=rows[0].device)
        return multiply(rows, self._values, self._scales, self._bias, self._arrived, out)


def multiply(
    rows: Fp8Rows, values: Tensor, scales: Tensor, bias: Tensor | None, arrived: Tensor, out: Tensor
) -> Tensor:
    """out [tokens, out] = rows @ weight.T + bias, with 1 to MOST_TOKENS tokens. `arrived` are the
    weight's counters (`make_counters`)."""
    (x, x_scales), (tokens, num_out) = rows, out.shape
    num_blocks = x.shape[1] // GROUP
    tile = next(tile for tile in TILES if tokens <= tile.tokens)
    splits = num_splits(num_out, num_blocks, tile)
    partial = out
    if splits > 1:
        partial = torch.empty(splits, tokens, num_out, dtype=torch.float32, device=out.device)
    _few_rows_kernel[(cdiv(num_out, tile.outs), splits)](
        x, x_scales, values, scales, out if bias is None else bias, out, partial, arrived,
        tokens, num_out, num_blocks, splits,
        x.stride(0), x_scales.stride(0), x_scales.stride(1), values.stride(0), out.stride(0),
        IS_BLOCKS=scales.dim() == 2, IS_SPLIT=splits > 1, TILE_OUT=tile.outs,
        TILE_TOKENS=tile.tokens, STEP=1 if num_blocks % tile.blocks else tile.blocks,
        HAS_BIAS=bias is not None, UPCAST=out.device.type != "cuda",
        num_warps=tile.warps, num_stages=tile.stages, **overlap_options(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("tokens", "splits"))
def _few_rows_kernel(
    x_ptr, x_scales_ptr, values_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    tokens, num_out, num_blocks, splits,
    stride_x, stride_x_scale, stride_x_group, stride_values, stride_out,
    IS_BLOCKS: tl.constexpr, IS_SPLIT: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_TOKENS: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output and part of the columns."""
    outs, rows = tile_of(tokens, TILE_OUT, TILE_TOKENS)
    first, end = columns_of(num_blocks // STEP, splits)
    # rows past the last output read the last one again and are not written
    read = tl.minimum(outs, num_out - 1)
    is_token = rows < tokens
    columns = first * (STEP * _WIDTH) + tl.arange(0, _WIDTH)
    values_ptrs = values_ptr + read.to(tl.int64)[:, None] * stride_values + columns[None, :]
    x_ptrs = x_ptr + rows[None, :] * stride_x + columns[:, None]
    row_of_blocks = tl.program_id(0) * TILE_OUT // _WIDTH  # a tile is within one
    wait_alone(OVERLAPS)
    acc = tl.zeros([TILE_OUT, TILE_TOKENS], tl.float32)
    for start in range(first, end):
        for index in tl.static_range(STEP):
            weight = tl.load(values_ptrs)
            x = tl.load(x_ptrs, mask=is_token[None, :], other=0.0)
            if UPCAST:
                weight, x = weight.to(tl.float32), x.to(tl.float32)
            if IS_BLOCKS:
                block = start * STEP + index
                x_scale_ptrs = x_scales_ptr + rows * stride_x_scale + block * stride_x_group
                x_scales = tl.load(x_scale_ptrs, mask=is_token, other=0.0)
                scale = tl.load(scales_ptr + row_of_blocks * num_blocks + block)
                acc += tl.dot(weight, x, input_precision="ieee") * (x_scales * scale)[None, :]
            else:
                acc = tl.dot(weight, x, acc, input_precision="ieee")
            values_ptrs += _WIDTH
            x_ptrs += _WIDTH
    let_in(OVERLAPS)
    if not IS_BLOCKS:
        x_scales = tl.load(x_scales_ptr + rows * stride_x_scale, mask=is_token, other=0.0)
        acc = acc * tl.load(scales_ptr + read)[:, None] * x_scales[None, :]
    write_tile(
        acc, outs, rows, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
        tokens, num_out, splits, stride_out, IS_SPLIT, HAS_BIAS,
    )  # fmt: skip
