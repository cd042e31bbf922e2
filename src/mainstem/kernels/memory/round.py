# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Rounds pages that a step has filled to fp8; on a CPU `records.py` does it."""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead


@triton.jit
def _round_pages_kernel(
    k_open_ptr, v_open_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, slots_ptr, targets_ptr,
    stride_page, stride_scales,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token, for K or V of one head."""
    token = tl.program_id(0)
    head = tl.program_id(1) % KV_HEADS
    wait_for_ahead(OVERLAPS)
    target = tl.load(targets_ptr + token).to(tl.int64)
    if target >= 0:
        place = tl.load(slots_ptr + token) // PAGE_SIZE
        tokens, dims = tl.arange(0, PAGE_SIZE), tl.arange(0, DIM)
        is_dim = (dims < HEAD_DIM)[None, :]
        cells = tokens[:, None] * HEAD_DIM + dims[None, :]
        source = (place * KV_HEADS + head) * (PAGE_SIZE * HEAD_DIM) + cells
        result = target * stride_page + head * (PAGE_SIZE * HEAD_DIM) + cells
        if tl.program_id(1) < KV_HEADS:
            _round(
                k_open_ptr + source,
                k_ptr + result,
                k_scales_ptr + target * stride_scales + head,
                is_dim,
            )
        else:
            _round(
                v_open_ptr + source,
                v_ptr + result,
                v_scales_ptr + target * stride_scales + head,
                is_dim,
            )


@triton.jit
def _nearest(x):
    """The nearest numbers of e4m3, ties to even: three bits after the leading one, and multiples of
    2^-9 below 2^-6. (Triton's interpreter would cut bits off.)"""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    step: tl.constexpr = 1.5 * 2.0**14  # sums with it are multiples of 2^-9
    return tl.where(tl.abs(x) < 0.015625, (x + step) - step, bits.to(tl.float32, bitcast=True))


@triton.jit
def _round(source_ptrs, target_ptrs, scale_ptr, is_dim):
    values = tl.load(source_ptrs, mask=is_dim, other=0.0).to(tl.float32)
    scale = tl.max(tl.max(tl.abs(values), 1), 0) / 448.0
    inverse = 1.0 / tl.where(scale > 0, scale, 1.0)
    codes = _nearest(tl.minimum(tl.maximum(values * inverse, -448.0), 448.0))
    tl.store(target_ptrs, codes.to(target_ptrs.dtype.element_ty), mask=is_dim)
    tl.store(scale_ptr, scale)


def round_open_pages(
    k_open: Tensor,
    v_open: Tensor,
    numbers: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    slots: Tensor,
    targets: Tensor,
) -> None:
    """Round the open pages [pages, kv_heads, page_size, dim] of some tokens to rounded pages.

    `slots` [tokens] are the places of tokens in open pages. `targets` [tokens] are the pages to
    round to, of tokens that fill their page; -1 for all others. `numbers` of K and V
    [pages, kv_heads, page_size, dim] are in e4m3, `scales` [pages, kv_heads] in fp32; both may have
    a distance between pages.
    """
    tokens = len(slots)
    _, kv_heads, page_size, dim = k_open.shape
    if tokens == 0:
        return
    _round_pages_kernel[(tokens, 2 * kv_heads)](
        k_open, v_open, *numbers, *scales, slots, targets,
        numbers[0].stride(0), scales[0].stride(0),
        KV_HEADS=kv_heads, HEAD_DIM=dim, DIM=next_power_of_2(dim), PAGE_SIZE=page_size,
        num_warps=4, **overlap_options(k_open.device),
    )  # fmt: skip
