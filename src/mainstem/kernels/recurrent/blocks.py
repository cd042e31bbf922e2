# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""What the kernels of recurrent layers have in common: how gates are computed, how matrices are
multiplied, and checks of arguments.

In every kernel a program computes a part of one sequence, in tiles that depend only on the lengths
of the sequence's own segments. So a sequence's bits do not depend on other sequences. But they
depend on where its segments end, unless tokens are computed one after the other. If all sequences
have one token, all indices are read from tensors and nothing is allocated: safe in a CUDA graph.

A decay is the exponential of a difference of sums of logarithms that is never positive: it
underflows to 0, and is never NaN. The weights a_log, dt_bias, d, gains and those of convolutions
are a model's constants: they are read while the previous kernel may still run (`overlap.py`).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256
USUAL_DIMS = (64, 128)
MIN_LOG_DECAY = tl.constexpr(-120.0)  # exp gives 0; less would only cost digits of sums
# Kernels that compute tokens one after the other are compiled once for a model, for any step's rows
# and segments. Otherwise Triton compiles other code for rows whose address and stride it knows to
# be multiples of 16: a thread then loads two neighbours of 256 dims, instead of two that are 128
# apart, and their squares are summed in another order.
OF_SEGMENTS = ("starts_ptr", "writes_ptr", "seq_segments_ptr", "reads_ptr")


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits for small results too."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    is_lost = more == 1.0
    log = tl.log(more) * (small / tl.where(is_lost, 1.0, more - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_lost, small, log)


@triton.jit
def log_decay(step, a_log):
    """The logarithm of a token's decay, at most 0, for a step of this size."""
    return tl.maximum(-tl.exp(a_log) * step, MIN_LOG_DECAY)


@triton.jit
def product(a, b, element: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """The product of two matrices that are rounded to `element` first; sums are in fp32."""
    a, b = a.to(element), b.to(element)
    if UPCAST:  # the interpreter cannot multiply bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rows_of(ptr, rows, is_row, dims, stride, DIM: tl.constexpr):
    """Load [rows, dims] of a head; zeros past DIM and for rows that are none."""
    ptrs = ptr + rows[:, None] * stride + dims[None, :]
    return tl.load(ptrs, mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def read_state(ptr, slot, cells, is_cell, stride_slot):
    """Load cells of the state in a slot; zeros if the slot is negative."""
    is_kept = cells * 0 <= slot  # a block: the interpreter cannot join a block with one bool
    ptrs = ptr + slot.to(tl.int64) * stride_slot + cells
    return tl.load(ptrs, mask=is_cell & is_kept, other=0.0)


@triton.jit
def write_state(ptr, slot, cells, is_cell, stride_slot, state):
    """Store cells of a state in a slot."""
    tl.store(ptr + slot.to(tl.int64) * stride_slot + cells, state, mask=is_cell)


@triton.jit
def read_state_or_rows(
    ptr, slot, rows_ptr, row_slot, cells, is_cell, stride_slot, stride_row_slot
):  # fmt: skip
    """Load cells from a row slot if it is not negative, else from the slot of a state."""
    if rows_ptr is None:
        found = read_state(ptr, slot, cells, is_cell, stride_slot)
    else:
        has_rows = cells * 0 <= row_slot
        of_rows = read_state(rows_ptr, row_slot, cells, is_cell, stride_row_slot)
        found = read_state(ptr, slot, cells, is_cell & (cells * 0 > row_slot), stride_slot)
        found = tl.where(has_rows, of_rows, found)
    return found


@triton.jit
def write_state_or_rows(
    ptr, slot, rows_ptr, row_slot, cells, is_cell, stride_slot, stride_row_slot, state
):  # fmt: skip
    """Store cells in the slot of a state if it is not negative, else in a row slot."""
    if rows_ptr is None:
        write_state(ptr, slot, cells, is_cell, stride_slot, state)
    else:
        is_written = cells * 0 <= slot
        write_state(ptr, slot, cells, is_cell & is_written, stride_slot, state)
        is_row = is_cell & (cells * 0 <= row_slot) & (cells * 0 > slot)
        write_state(rows_ptr, row_slot, cells, is_row, stride_row_slot, state)


@triton.jit
def write_rows(
    values_ptr, sums_ptr, slot, head, places, is_row, columns, values, sums,
    stride_values, stride_sums, room, V: tl.constexpr,
):  # fmt: skip
    """Store columns of a head's rows, and sums of logarithms, if the slot is not negative."""
    is_kept = is_row & (places * 0 <= slot)
    slot = slot.to(tl.int64)
    cells = (head * room + places)[:, None] * V + columns[None, :]
    ptrs = values_ptr + slot * stride_values + cells
    is_cell = is_kept[:, None] & (columns < V)[None, :]
    tl.store(ptrs, values.to(values_ptr.dtype.element_ty), mask=is_cell)
    tl.store(sums_ptr + slot * stride_sums + head * room + places, sums, mask=is_kept)


def lanes_of(dim: int) -> int:
    """The size of a block that holds a head's dims."""
    return max(next_power_of_2(dim), 16)


def dot_options(x: Tensor, *dims: int) -> dict[str, object]:
    """Constants of kernels that call `product`, for heads of these dims. TF32 is more precise than
    all 16-bit dtypes. On an H200, products of 16-bit blocks with other than the usual dims were
    wrong (Triton 3.6), so these are widened."""
    is_wide = x.dtype == torch.float32
    is_usual = x.is_cuda and all(dim in USUAL_DIMS for dim in dims)
    return {"PRECISION": "ieee" if is_wide else "tf32", "UPCAST": not is_usual}


@cache
def has_large_memory(device: torch.device) -> bool:
    """Whether a program may use 227 KiB of shared memory: enough for two tiles at a time."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def tile_options(dim: int, element_size: int, is_large: bool) -> dict[str, int]:
    """Launch options of programs that go from tile to tile; dim: of the rows of a state."""
    is_small = element_size == 2 and dim <= 128
    return {
        "num_warps": 4 if is_small else 8,
        "num_stages": 2 if is_small and is_large else 1,
    }


def check_heads(name: str, x: Tensor, tokens: int, dtype: torch.dtype) -> None:
    """Raise LayoutError unless x is [tokens, heads, dim], or a part of the columns of such rows,
    with a dtype and dims that the kernels support."""
    if x.dim() != 3 or len(x) != tokens or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise LayoutError(
            f"{name} must be [{tokens}, heads, dim] with neighbouring heads, got {tuple(x.shape)}"
        )
    if x.shape[2] > MAX_DIM:
        raise LayoutError(f"{name} must have at most {MAX_DIM} dims a head, got {x.shape[2]}")
    if x.dtype not in DTYPES or x.dtype != dtype:
        raise LayoutError(f"{name} must be {dtype} (bfloat16, float16, float32), got {x.dtype}")


def check_gates(name: str, x: Tensor, tokens: int, heads: int) -> None:
    """Raise LayoutError unless x has one number per token and head."""
    if tuple(x.shape) != (tokens, heads) or x.stride(1) != 1:
        raise LayoutError(
            f"{name} must be [{tokens}, {heads}] with a contiguous last axis, got {tuple(x.shape)}"
        )


def check_matrix(matrix: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise LayoutError unless `matrix` holds states of this shape."""
    is_whole = matrix.dim() == 4 and matrix[:1].is_contiguous()
    if not is_whole or tuple(matrix.shape[1:]) != shape or matrix.dtype != torch.float32:
        raise LayoutError(
            f"matrix must be float32 [slots, {shape[0]}, {shape[1]}, {shape[2]}], contiguous in a "
            f"slot, got {matrix.dtype} {tuple(matrix.shape)}"
        )


def check_per_head(name: str, x: Tensor, heads: int) -> None:
    """Raise LayoutError unless x has one fp32 number per head."""
    if tuple(x.shape) != (heads,) or x.dtype != torch.float32 or not x.is_contiguous():
        raise LayoutError(
            f"{name} must be contiguous float32 [{heads}], got {x.dtype} {tuple(x.shape)}"
        )
