# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Expands rounded pages to the compute dtype, for kernels that do not read fp8; on a CPU
`records.py` does it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # 16 bytes of fp8 a thread
NUM_PROGRAMS = 1056  # eight for each of an H200's multiprocessors


@triton.jit(do_not_specialize=["num_pages"])  # one binary for all steps
def _expand_pages_kernel(
    out_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, pages_ptr, num_pages,
    stride_page, stride_scales, stride_half,
    KV_HEADS: tl.constexpr, COUNT: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An item is K or V of one head of a page, COUNT numbers; each of n programs takes every n-th
    item. What is not finite becomes 0: no row sees a page that was never rounded, but attention
    multiplies it by weights of 0."""
    for item in range(tl.program_id(0), num_pages * (2 * KV_HEADS), tl.num_programs(0)):
        place = item // (2 * KV_HEADS)
        half = (item // KV_HEADS) % 2
        head = item % KV_HEADS
        page = tl.load(pages_ptr + place).to(tl.int64)
        codes_ptr = k_ptr
        scale_ptr = k_scales_ptr
        if half == 1:
            codes_ptr = v_ptr
            scale_ptr = v_scales_ptr
        scale = tl.load(scale_ptr + page * stride_scales + head)
        source_ptr = codes_ptr + page * stride_page + head * COUNT
        target = half.to(tl.int64) * stride_half
        target += (place.to(tl.int64) * KV_HEADS + head) * COUNT
        for first in range(0, COUNT, BLOCK):
            lanes = first + tl.arange(0, BLOCK)
            codes = tl.load(source_ptr + lanes, mask=lanes < COUNT, other=0.0)
            numbers = codes.to(tl.float32) * scale
            numbers = tl.where(tl.abs(numbers) <= LARGEST, numbers, 0.0)
            out_ptrs = out_ptr + target + lanes
            tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=lanes < COUNT)


def expand_rounded_pages(
    numbers: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    pages: Tensor,
    num_pages: int,
    out: Tensor,
) -> None:
    """Write the first `num_pages` of `pages` (int32 ids) to out[:, :num_pages].

    `numbers` of K and V [pages, kv_heads, page_size, dim] are in e4m3, `scales` [pages, kv_heads]
    in fp32; both may have a distance between pages. `out` [2, pages, kv_heads, page_size, dim] is
    contiguous.
    """
    _, _, kv_heads, page_size, dim = out.shape
    programs = max(min(NUM_PROGRAMS, num_pages * 2 * kv_heads), 1)
    _expand_pages_kernel[(programs,)](
        out, *numbers, *scales, pages, num_pages,
        numbers[0].stride(0), scales[0].stride(0), out.stride(0),
        KV_HEADS=kv_heads, COUNT=page_size * dim, LARGEST=torch.finfo(out.dtype).max, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
