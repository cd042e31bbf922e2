# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Copies small arrays between pinned memory and the device with a kernel that reads or writes the
host's memory directly.

A step's inputs and outputs must not wait for the copy engines, which may have seconds of stored
pages in their queue.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 1024
MOST_BLOCKS = 32  # maximum programs per row


@triton.jit(do_not_specialize=["num_words", "target_stride", "source_stride"])  # one binary
def _move_kernel(
    target_ptr, source_ptr, target_stride, source_stride, num_words, BLOCK: tl.constexpr
):
    """The programs along axis 1 share a row."""
    target_ptr += tl.program_id(0) * target_stride
    source_ptr += tl.program_id(0) * source_stride
    for first in range(tl.program_id(1) * BLOCK, num_words, tl.num_programs(1) * BLOCK):
        words = first + tl.arange(0, BLOCK)
        mask = words < num_words
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=mask), mask=mask)


def move_words(target: Tensor, source: Tensor) -> None:
    """Copy [rows, columns] of int32, int64 or float32 on the current stream; a side that is not on
    the device is in pinned memory.

    The caller must keep pinned memory unchanged until the stream has run the copy: torch's
    allocator does not know that a kernel uses it.
    """
    if target.device.type == source.device.type:
        target.copy_(source)
        return
    if target.dtype != torch.int32:
        target, source = target.view(torch.int32), source.view(torch.int32)
    rows, words = target.shape
    if words == 0:
        return
    blocks = min(-(-words // BLOCK_WORDS), MOST_BLOCKS)
    _move_kernel[(rows, blocks)](
        target, source, target.stride(0), source.stride(0), words, BLOCK=BLOCK_WORDS, num_warps=4
    )
