# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Code that the kernels between matrix products have in common: it checks rows, and writes them in
the model's dtype or in fp8.

In every kernel a program computes one token, or a part of it, in blocks that depend only on the
row's length. So a row's bits do not depend on other rows. Code for a pointer that is None is not
compiled.

The `_fp8` variants of all kernels return (values, scales) with values * scales = the row: the
largest magnitude that shares a scale becomes 448, the largest float8_e4m3fn. A row has one scale,
or one for each group of 128 columns. The values are the result of the plain variant, quantized.

If outputs are given, nothing is allocated and the host never waits for the device: safe in a CUDA
graph.

Gains and biases are a model's constants: from Hopper on they are read while the previous kernel may
still run (`overlap.py`), so no kernel may write them.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense import fp8_rows
from mainstem.kernels.dense.fp8_rows import FP8, GROUP, Fp8Per, Fp8Rows, empty_rows
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HIDDEN = 16384
MAX_MLP = 32768
FP8_MAX = tl.constexpr(fp8_rows.MAX)
MIN_PEAK = tl.constexpr(fp8_rows.MIN_PEAK)


@triton.jit
def store_row(
    row, lanes, part, out_ptr, scales_ptr, token, stride_out, stride_scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store part number `part` of a row: BLOCK lanes, already rounded to the model's dtype. With
    scales it is stored in fp8, with one scale per GROUP lanes."""
    if scales_ptr is not None:
        wide = tl.reshape(row.to(tl.float32), [BLOCK // GROUP, GROUP])
        peaks = tl.maximum(tl.max(tl.abs(wide), 1), MIN_PEAK)
        groups = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        scales_ptrs = scales_ptr + groups * stride_scales + token
        tl.store(scales_ptrs, tl.div_rn(peaks, FP8_MAX), mask=groups * GROUP < SIZE)
        wide = wide * tl.div_rn(FP8_MAX, peaks)[:, None]
        wide = tl.minimum(tl.maximum(wide, -FP8_MAX), FP8_MAX)
        row = tl.reshape(wide, [BLOCK])
    out_ptrs = out_ptr + token * stride_out + lanes
    tl.store(out_ptrs, row.to(out_ptr.dtype.element_ty), mask=lanes < SIZE)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, stride_out, stride_scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    row = tl.load(x_ptr + token * stride_x + lanes, mask=lanes < SIZE, other=0.0)
    store_row(
        row, lanes, 0, out_ptr, scales_ptr, token, stride_out, stride_scales, SIZE, BLOCK, GROUP
    )


def quantize_rows(x: Tensor, out: Fp8Rows | None = None, per: Fp8Per = Fp8Per.ROW) -> Fp8Rows:
    """Quantize x [tokens, size]."""

    def launch(values: Tensor, scales: Tensor) -> None:
        check_rows("x", x, x.shape[1], MAX_MLP)
        check_out(values, len(x), x.shape[1])
        options = row_options(x.shape[1])
        if len(x):
            _quantize_kernel[(len(x),)](
                x, values, scales, x.stride(0), values.stride(0), stride_of(scales),
                GROUP=group_of(scales, options["BLOCK"]), **options, **overlap_options(x.device),
            )  # fmt: skip

    return quantized(x.shape[1], x, out, per, launch)


def quantized(
    size: int,
    x: Tensor,
    out: Fp8Rows | None,
    per: Fp8Per,
    launch: Callable[[Tensor, Tensor], None],
) -> Fp8Rows:
    """Run a kernel. Its outputs are `out`, or are allocated here."""
    if per is Fp8Per.GROUP and size % GROUP:
        raise LayoutError(f"rows in groups must have a multiple of {GROUP} columns, got {size}")
    out = empty_rows(len(x), size, per, x.device) if out is None else out
    values, scales = out
    count = 1 if per is Fp8Per.ROW else size // GROUP
    if values.dtype != FP8 or scales.dtype != torch.float32 or scales.shape != (len(x), count):
        raise LayoutError(f"out must be (float8_e4m3fn [tokens, size], float32 [tokens, {count}])")
    if scales.stride(0) != 1:
        raise LayoutError("scales must be contiguous along tokens")
    if x.is_cuda:
        launch(values, scales)
    else:  # the interpreter rounds to fp8 wrongly, torch does not
        wide = torch.empty(values.shape)
        launch(wide, scales)
        values.copy_(wide)
    return out


def row_options(size: int) -> dict[str, int]:
    """Block and number of warps, which depend only on the row's length: 16 columns per thread,
    fewer in short rows and more in long ones."""
    block = next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def group_of(scales: Tensor | None, block: int) -> int:
    """Lanes of a block that share a scale."""
    return GROUP if scales is not None and scales.shape[1] > 1 else block


def stride_of(scales: Tensor | None) -> int:
    """The distance in memory from a group's scales to those of the next group."""
    return 0 if scales is None or scales.shape[1] == 1 else scales.stride(1)


def check_rows(name: str, x: Tensor, size: int, largest: int) -> None:
    """Raise LayoutError unless x is [tokens, size] with a dtype and length that the kernels
    support."""
    if x.dim() != 2 or x.shape[1] != size or x.stride(1) != 1:
        raise LayoutError(f"{name} must be [tokens, {size}] with a contiguous last axis, "
                          f"got {tuple(x.shape)}")  # fmt: skip
    if size % 8 or size > largest:
        raise LayoutError(f"{name} must have a multiple of 8 and at most {largest} columns, "
                          f"got {size}")  # fmt: skip
    if x.dtype not in DTYPES:
        raise LayoutError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def check_out(out: Tensor, tokens: int, size: int, dtype: torch.dtype | None = None) -> None:
    """Raise LayoutError unless out is [tokens, size] and, if a dtype is given, has that dtype."""
    if tuple(out.shape) != (tokens, size) or out.stride(1) != 1:
        raise LayoutError(f"out must be [{tokens}, {size}] with a contiguous last axis, "
                          f"got {tuple(out.shape)}")  # fmt: skip
    if dtype is not None and out.dtype != dtype:
        raise LayoutError(f"out must be {dtype}, got {out.dtype}")
