# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The products of all experts at once, over rows that are sorted by expert (route.py).

    gate_up   act[row] = gated(x[token of the row] @ gate_up[expert].T + bias)     gathers rows
    down      out[row] = act[row] @ down[expert].T                                 reads sorted rows

Here a program takes one tile of rows of one expert, and the same columns of gate and of up, so that
only the activated rows are written. hopper.py does the same, for experts with many rows.
`choose.py` chooses one of the two by the number of rows, which the host knows. LIBRARY, for
comparison, is torch's grouped product over gathered rows, with the activation as a separate pass.

Every output is one sum over K, tile.k columns at a time from first to last. So with one tile for
all batches, a row's bits do not depend on other rows. The deterministic setting uses one tile.

From Hopper on, weights and sorted rows are read as boxes by TMA; on other cards by plain loads.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mainstem.kernels.dense.invariant import Tile
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.experts.activate import check_activation, gated
from mainstem.kernels.experts.route import Routing, most_tiles
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_GROUP_ROWS = 8  # tiles of rows that pass over the same weights together, for the L2 cache


class Method(Enum):
    OURS = "ours"
    HOPPER = "hopper"  # hopper.py
    LIBRARY = "library"  # torch._grouped_mm, for measuring


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How a step's products are computed. Tiles of both products have equally many rows."""

    gate_up: Tile  # its columns are those of gate; as many of up are computed with them
    down: Tile
    method: Method = Method.OURS

    @property
    def rows(self) -> int:
        return self.gate_up.rows


# tiles by the mean number of rows per expert
FEW = ExpertTiles(Tile(16, 32, 256, warps=4, stages=3), Tile(16, 64, 256, warps=4, stages=3))
SOME = ExpertTiles(Tile(64, 64, 64, warps=4, stages=4), Tile(64, 128, 64, warps=4, stages=4))
MANY = ExpertTiles(Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4))
HOPPER = ExpertTiles(
    Tile(128, 128, 64, warps=4, stages=4), Tile(128, 256, 64, warps=4, stages=4), Method.HOPPER
)
GROUPED = ExpertTiles(MANY.gate_up, MANY.down, Method.LIBRARY)
FULL_PRECISION = ExpertTiles(
    Tile(64, 32, 32, warps=4, stages=3), Tile(64, 64, 32, warps=4, stages=3)
)


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The tile of a program, ordered so that neighbouring programs share rows and columns."""
    first_row = (program // (GROUP * column_tiles)) * GROUP
    height = tl.minimum(row_tiles - first_row, GROUP)
    within = program % (GROUP * column_tiles)
    return first_row + within % height, within // height


@triton.jit
def rows_of(row_tile, expert, tile_starts_ptr, ends_ptr, TILE_ROWS: tl.constexpr):
    """The sorted rows of a tile, and which of them are the expert's."""
    rows = tl.load(tile_starts_ptr + row_tile) + tl.arange(0, TILE_ROWS)
    return rows, rows < tl.load(ends_ptr + expert)


@triton.jit
def _load_box(
    source, row, start, num_rows, width, ROWS: tl.constexpr, TILE_K: tl.constexpr,
    HAS_BOXES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """[ROWS, TILE_K] of source [num_rows, width]; zeros past the width, arbitrary numbers past the
    rows."""
    if HAS_BOXES:
        box = source.load([row, start])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        ks = start + tl.arange(0, TILE_K)
        ptrs = source + rows[:, None] * width + ks[None, :]
        box = tl.load(ptrs) if IS_EVEN else tl.load(ptrs, mask=(ks < width)[None, :], other=0.0)
    return box


@triton.jit(do_not_specialize=("row_tiles",))
def _gate_up_kernel(
    x_ptr, sorted_ptr, weights_ptr, bias_ptr, out_ptr, tile_experts_ptr, tile_starts_ptr, ends_ptr,
    row_tiles, num_weights, size, hidden, stride_x, stride_out,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BOXES: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output. weights: [num_weights = experts * 2 * size, hidden]."""
    wait_for_ahead(OVERLAPS)
    column_tiles = tl.cdiv(size, TILE_COLUMNS)
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert = tl.load(tile_experts_ptr + row_tile)
    if expert < 0:
        return
    rows, is_row = rows_of(row_tile, expert, tile_starts_ptr, ends_ptr, TILE_ROWS)
    tokens = tl.load(sorted_ptr + rows, mask=is_row, other=0)
    ks = tl.arange(0, TILE_K)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride_x + ks[None, :]
    first = expert * 2 * size + column_tile * TILE_COLUMNS
    gate = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, hidden, TILE_K):
        if IS_EVEN:
            x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=is_row[:, None] & (start + ks < hidden)[None, :], other=0.0)
        gate_weight = _load_box(
            weights_ptr, first, start, num_weights, hidden, TILE_COLUMNS, TILE_K, HAS_BOXES, IS_EVEN
        )
        up_weight = _load_box(
            weights_ptr, first + size, start, num_weights, hidden, TILE_COLUMNS, TILE_K, HAS_BOXES,
            IS_EVEN,
        )  # fmt: skip
        if UPCAST:
            x = x.to(tl.float32)
            gate_weight, up_weight = gate_weight.to(tl.float32), up_weight.to(tl.float32)
        gate = tl.dot(x, gate_weight.T, gate, input_precision="ieee")
        up = tl.dot(x, up_weight.T, up, input_precision="ieee")
        x_ptrs += TILE_K
    # past the last column a box holds rows of another expert; these are not written
    columns = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < size
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * size + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + size, mask=is_column, other=0.0).to(tl.float32)[None, :]
    act = gated(gate, up, ACTIVATION)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, act.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("row_tiles", "num_rows"))
def _down_kernel(
    act_ptr, weights_ptr, out_ptr, tile_experts_ptr, tile_starts_ptr, ends_ptr,
    row_tiles, num_rows, num_weights, size, hidden, stride_out,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, HAS_BOXES: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output. act: [num_rows, size]; weights: [num_weights = experts *
    hidden, size]."""
    wait_for_ahead(OVERLAPS)
    column_tiles = tl.cdiv(hidden, TILE_COLUMNS)
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert = tl.load(tile_experts_ptr + row_tile)
    if expert < 0:
        return
    first_row = tl.load(tile_starts_ptr + row_tile)
    first_column = column_tile * TILE_COLUMNS
    out = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, size, TILE_K):
        x = _load_box(
            act_ptr, first_row, start, num_rows, size, TILE_ROWS, TILE_K, HAS_BOXES, IS_EVEN
        )
        weight = _load_box(
            weights_ptr, expert * hidden + first_column, start, num_weights, size, TILE_COLUMNS,
            TILE_K, HAS_BOXES, IS_EVEN,
        )  # fmt: skip
        if UPCAST:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        out = tl.dot(x, weight.T, out, input_precision="ieee")
    # past the last row or column a box holds other rows; these are not written
    rows = first_row + tl.arange(0, TILE_ROWS)
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    mask = (rows < tl.load(ends_ptr + expert))[:, None] & (columns < hidden)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gate_up(
    x: Tensor,
    routing: Routing,
    weights: Tensor,
    bias: Tensor | None,
    activation: str,
    tile: Tile,
    out: Tensor,
) -> Tensor:
    """out [rows, size], sorted; x [tokens, hidden] is gathered. `routing` was made from the
    same x, with tiles of tile.rows."""
    experts, both, hidden = weights.shape
    size = both // 2
    check_rows("x", x, hidden)
    check_rows("out", out, size)
    check_weights("gate_up", weights, x.dtype)
    check_bias("gate_up", bias, experts, both)
    check_activation(activation)
    row_tiles = _row_tiles(out, experts, tile)
    if row_tiles:
        rows = weights.view(-1, hidden)
        _gate_up_kernel[(row_tiles * cdiv(size, tile.columns),)](
            x, routing.sorted_tokens, _boxes(rows, tile.columns, tile), x if bias is None else bias,
            out, routing.tile_experts, routing.tile_starts, routing.ends, row_tiles, len(rows),
            size, hidden, x.stride(0), out.stride(0),
            ACTIVATION=activation, HAS_BIAS=bias is not None, IS_EVEN=hidden % tile.k == 0,
            **_tile_options(tile, x.device),
        )  # fmt: skip
    return out


def down(act: Tensor, routing: Routing, weights: Tensor, tile: Tile, out: Tensor) -> Tensor:
    """out [rows, hidden] of act [rows, size], both sorted."""
    experts, hidden, size = weights.shape
    check_rows("act", act, size)
    check_rows("out", out, hidden)
    if len(act) != len(out) or not act.is_contiguous():
        raise LayoutError(f"act must be contiguous [{len(out)}, {size}], got {tuple(act.shape)}")
    check_weights("down", weights, act.dtype)
    row_tiles = _row_tiles(out, experts, tile)
    if row_tiles:
        rows = weights.view(-1, size)
        _down_kernel[(row_tiles * cdiv(hidden, tile.columns),)](
            _boxes(act, tile.rows, tile), _boxes(rows, tile.columns, tile), out,
            routing.tile_experts, routing.tile_starts, routing.ends,
            row_tiles, len(act), len(rows), size, hidden, out.stride(0),
            IS_EVEN=size % tile.k == 0, **_tile_options(tile, act.device),
        )  # fmt: skip
    return out


def grouped_product(rows: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """torch's product of sorted rows [rows, in] and weights [experts, out, in], as a new tensor."""
    product: Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=routing.ends)
    return product


def _row_tiles(out: Tensor, experts: int, tile: Tile) -> int:
    return most_tiles(len(out), experts, tile.rows)


@cache
def has_boxes(device: torch.device) -> bool:
    """Whether the device, or the interpreter, can copy boxes of a tensor (TMA)."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _boxes(source: Tensor, rows: int, tile: Tile) -> Tensor | TensorDescriptor:
    if not has_boxes(source.device):
        return source
    return TensorDescriptor.from_tensor(source, [rows, tile.k])


def _tile_options(tile: Tile, device: torch.device) -> dict[str, int | bool]:
    return {
        "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_K": tile.k,
        "GROUP": _GROUP_ROWS, "HAS_BOXES": has_boxes(device), "UPCAST": device.type != "cuda",
        "num_warps": tile.warps, "num_stages": tile.stages, **overlap_options(device),
    }  # fmt: skip


def check_rows(name: str, x: Tensor, width: int) -> None:
    if x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
        raise LayoutError(f"{name} must be [rows, {width}] with contiguous rows, "
                          f"got {tuple(x.shape)}")  # fmt: skip


def check_weights(name: str, weights: Tensor, dtype: torch.dtype) -> None:
    if weights.dtype != dtype or not weights.is_contiguous():
        raise LayoutError(f"{name} must be contiguous {dtype}, got {weights.dtype} with strides "
                          f"{weights.stride()}")  # fmt: skip
    if weights.shape[2] % 8 or weights.shape[1] % 8:
        raise LayoutError(f"sizes of {name} must be multiples of 8, got {tuple(weights.shape)}")


def check_bias(name: str, bias: Tensor | None, experts: int, width: int) -> None:
    if bias is not None and (bias.shape != (experts, width) or not bias.is_contiguous()):
        raise LayoutError(f"bias of {name} must be contiguous [{experts}, {width}], "
                          f"got {tuple(bias.shape)}")  # fmt: skip
