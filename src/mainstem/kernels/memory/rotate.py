# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Moves cached keys to other positions: rotates them by the difference of the positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2


@triton.jit
def _rerotate_kernel(
    k_pages_ptr, v_pages_ptr, source_ptr, target_ptr, shift_ptr, inv_freq_ptr,
    stride_page, stride_kv_head,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program per page and KV head."""
    index = tl.program_id(0)
    source = tl.load(source_ptr + index).to(tl.int64)
    target = tl.load(target_ptr + index).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * stride_kv_head
    tokens, dims = tl.arange(0, PAGE_SIZE), tl.arange(0, DIM)
    from_ptr = k_pages_ptr + source * stride_page + head
    to_ptr = k_pages_ptr + target * stride_page + head
    if HALF > 0:
        halves = tl.arange(0, HALF_LANES)
        inv_freq = tl.load(inv_freq_ptr + halves, mask=halves < HALF, other=0.0)
        angle = tl.load(shift_ptr + index).to(tl.float32) * inv_freq
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
        cells = tokens[:, None] * HEAD_DIM + halves[None, :]
        is_half = (halves < HALF)[None, :]
        first = tl.load(from_ptr + cells, mask=is_half, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + cells + HALF, mask=is_half, other=0.0).to(tl.float32)
        element = k_pages_ptr.dtype.element_ty
        tl.store(to_ptr + cells, (first * cos - second * sin).to(element), mask=is_half)
        tl.store(to_ptr + cells + HALF, (second * cos + first * sin).to(element), mask=is_half)
    if source != target:
        whole = tokens[:, None] * HEAD_DIM + dims[None, :]
        is_rest = ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
        tl.store(to_ptr + whole, tl.load(from_ptr + whole, mask=is_rest), mask=is_rest)
        is_dim = (dims < HEAD_DIM)[None, :]
        v = tl.load(v_pages_ptr + source * stride_page + head + whole, mask=is_dim)
        tl.store(v_pages_ptr + target * stride_page + head + whole, v, mask=is_dim)


def rerotate(
    k_pages: Tensor,
    v_pages: Tensor,
    source_ids: Tensor,
    target_ids: Tensor,
    shifts: Tensor,
    inv_freq: Tensor | None,
) -> None:
    """Write page `source_ids[i]`, with its keys rotated by `shifts[i]` positions and its V
    unchanged, to page `target_ids[i]`. Without frequencies nothing is rotated.

    Ids and shifts are int32 or int64. A page may be its own target; no page may be the target of
    one entry and the source of another. Move the original page if possible: a page that is moved
    twice is rounded twice.
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise LayoutError("k_pages and v_pages must have the same shape and dtype")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise LayoutError("k_pages and v_pages must be contiguous")
    if not len(source_ids) == len(target_ids) == len(shifts):
        raise LayoutError("source_ids, target_ids and shifts must have one length")
    half = 0 if inv_freq is None else len(inv_freq)
    if inv_freq is not None and (2 * half > head_dim or inv_freq.dtype != torch.float32):
        raise LayoutError(f"inv_freq must be fp32 and have at most {head_dim // 2} entries")
    if len(source_ids) == 0:
        return
    _rerotate_kernel[(len(source_ids), kv_heads)](
        k_pages, v_pages, source_ids, target_ids, shifts, inv_freq,
        k_pages.stride(0), k_pages.stride(1),
        HEAD_DIM=head_dim, DIM=next_power_of_2(head_dim),
        HALF=half, HALF_LANES=max(next_power_of_2(half), 1), PAGE_SIZE=page_size,
        num_warps=4,
    )  # fmt: skip
