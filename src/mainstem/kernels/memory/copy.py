# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Copy K and V of single token slots, if a sequence's page begins like another page."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2


@triton.jit
def _copy_slots_kernel(
    pages_ptr, from_ptr, to_ptr, half_elements,
    KV_HEADS: tl.constexpr, HEAD_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program per slot and layer for K, one for V."""
    slot = tl.program_id(0)
    base = pages_ptr + tl.program_id(1).to(tl.int64) * half_elements
    source = tl.load(from_ptr + slot)
    target = tl.load(to_ptr + slot)
    heads, dims = tl.arange(0, HEAD_LANES), tl.arange(0, DIM)
    cells = (heads * (PAGE_SIZE * HEAD_DIM))[:, None] + dims[None, :]
    mask = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    page = KV_HEADS * PAGE_SIZE * HEAD_DIM
    read = base + (source // PAGE_SIZE) * page + (source % PAGE_SIZE) * HEAD_DIM
    write = base + (target // PAGE_SIZE) * page + (target % PAGE_SIZE) * HEAD_DIM
    tl.store(write + cells, tl.load(read + cells, mask=mask), mask=mask)


def copy_slots(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy slots within pages: [2, pages, kv_heads, page_size, head_dim] of one layer, or [2 *
    layers, ...] of many. Slots are page_id * page_size + offset, int64. No slot may be both a
    source and a target."""
    if pages.ndim != 5 or pages.shape[0] % 2 or not pages.is_contiguous():
        raise LayoutError(
            f"pages must be contiguous [2 * layers, pages, kv_heads, page_size, head_dim], "
            f"got {tuple(pages.shape)}"
        )
    for name, slots in (("source_slots", source_slots), ("target_slots", target_slots)):
        if slots.dtype != torch.int64 or slots.shape != source_slots.shape:
            raise LayoutError(f"{name} must be int64, and as long as source_slots")
    if len(source_slots) == 0:
        return
    num_halves, _, kv_heads, page_size, head_dim = pages.shape
    _copy_slots_kernel[(len(source_slots), num_halves)](
        pages, source_slots, target_slots, pages[0].numel(),
        KV_HEADS=kv_heads, HEAD_LANES=next_power_of_2(kv_heads), PAGE_SIZE=page_size,
        HEAD_DIM=head_dim, DIM=next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
