# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Rope and append in one pass: normalises (if the model does) and rotates new queries and keys, and
writes new K and V into their pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.head_norms import HeadNorms, head_warps, norm_heads
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead


@triton.jit
def _rotated(x_ptr, offset, is_head, cos, sin, HALF: tl.constexpr, LANES: tl.constexpr):
    """Return both halves of the rotated part of some heads, in fp32; dims i and i + HALF are a
    pair."""
    lanes = tl.arange(0, LANES)
    mask = is_head[:, None] & (lanes < HALF)[None, :]
    ptrs = x_ptr + offset[:, None] + lanes[None, :]
    first = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_halves(ptr, offset, is_head, first, second, HALF: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    mask = is_head[:, None] & (lanes < HALF)[None, :]
    ptrs = ptr + offset[:, None] + lanes[None, :]
    tl.store(ptrs, first.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, second.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_append_kernel(
    q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, positions_ptr, slots_ptr, inv_freq_ptr,
    q_gain_ptr, k_gain_ptr, k_shift_ptr,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_page, stride_kv_head, eps,
    HEADS: tl.constexpr, HEAD_LANES: tl.constexpr, KV_HEADS: tl.constexpr, KV_LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    kv_heads = tl.arange(0, KV_LANES)
    is_kv = kv_heads < KV_HEADS
    if HALF > 0:
        halves = tl.arange(0, HALF_LANES)
        inv_freq = tl.load(inv_freq_ptr + halves, mask=halves < HALF, other=0.0)
        if k_shift_ptr is not None:
            shift_ptrs = k_shift_ptr + kv_heads[:, None] * HEAD_DIM + halves[None, :]
            is_pair = is_kv[:, None] & (halves < HALF)[None, :]
            shift_first = tl.load(shift_ptrs, mask=is_pair, other=0.0)
            shift_second = tl.load(shift_ptrs + HALF, mask=is_pair, other=0.0)
    wait_for_ahead(OVERLAPS)
    slot = tl.load(slots_ptr + token)
    if q_gain_ptr is not None:
        norm_heads(
            q_ptr + token * stride_q_token, q_gain_ptr, stride_q_head, eps,
            HEADS, HEAD_LANES, HEAD_DIM, DIM,
        )  # fmt: skip
        norm_heads(
            k_ptr + token * stride_k_token, k_gain_ptr, stride_k_head, eps,
            KV_HEADS, KV_LANES, HEAD_DIM, DIM,
        )  # fmt: skip
        tl.debug_barrier()  # the code below reads values that other threads have written
    if HALF > 0:
        angle = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]

        heads = tl.arange(0, HEAD_LANES)
        is_head = heads < HEADS
        q_offset = token * stride_q_token + heads * stride_q_head
        first, second = _rotated(q_ptr, q_offset, is_head, cos, sin, HALF, HALF_LANES)
        _store_halves(q_ptr, q_offset, is_head, first, second, HALF, HALF_LANES)

    if slot >= 0:
        page_offset = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * HEAD_DIM
        target = page_offset + kv_heads * stride_kv_head
        k_offset = token * stride_k_token + kv_heads * stride_k_head
        if HALF > 0:
            k_first, k_second = _rotated(k_ptr, k_offset, is_kv, cos, sin, HALF, HALF_LANES)
            if k_shift_ptr is not None:
                k_first -= shift_first
                k_second -= shift_second
            _store_halves(k_pages_ptr, target, is_kv, k_first, k_second, HALF, HALF_LANES)
        dims = tl.arange(0, DIM)
        is_cell = is_kv[:, None] & (dims < HEAD_DIM)[None, :]
        if 2 * HALF < HEAD_DIM:  # partial rotary: the other dims of K are copied
            rest = is_kv[:, None] & ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
            k = tl.load(k_ptr + k_offset[:, None] + dims[None, :], mask=rest)
            if k_shift_ptr is not None:
                rest_ptrs = k_shift_ptr + kv_heads[:, None] * HEAD_DIM + dims[None, :]
                k = k.to(tl.float32) - tl.load(rest_ptrs, mask=rest, other=0.0)
                k = k.to(k_ptr.dtype.element_ty)
            tl.store(k_pages_ptr + target[:, None] + dims[None, :], k, mask=rest)
        v_offset = token * stride_v_token + kv_heads * stride_v_head
        v = tl.load(v_ptr + v_offset[:, None] + dims[None, :], mask=is_cell)
        tl.store(v_pages_ptr + target[:, None] + dims[None, :], v, mask=is_cell)


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor | None,
    norms: HeadNorms | None = None,
    shift: Tensor | None = None,
) -> None:
    """Normalise and rotate q [tokens, heads, dim] in place; write k [tokens, kv_heads, dim],
    normalised and rotated, and v into pages.

    Slots are page_id * page_size + offset, int64; a token with a negative slot (padding of a CUDA
    graph) is not written. Rotates the first 2 * len(inv_freq) dims, dim i with dim i +
    len(inv_freq); None: nothing is rotated. `shift` [kv_heads, dim] fp32 is subtracted from keys
    after their rotation. q, k, v may be views of one projection; v is not changed, and k only by
    its norm, in place. inv_freq and shift are a model's constants: they are read while the
    previous kernel may still run, so that kernel must not write them.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    half = 0 if inv_freq is None else len(inv_freq)
    for name, tensor, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        if tuple(tensor.shape) != (tokens, count, head_dim) or tensor.stride(-1) != 1:
            raise LayoutError(
                f"{name} must be [{tokens}, {count}, {head_dim}] with a contiguous last axis, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.dtype != k_pages.dtype:
            raise LayoutError(f"{name} is {tensor.dtype}, the pages are {k_pages.dtype}")
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != head_dim:
        raise LayoutError(
            f"pages must be [*, kv_heads, page_size, {head_dim}], the same for K and V"
        )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise LayoutError("k_pages and v_pages must be contiguous")
    if len(positions) != tokens or len(slots) != tokens or slots.dtype != torch.int64:
        raise LayoutError(f"positions and slots (int64) must have {tokens} entries")
    if inv_freq is not None and (2 * half > head_dim or inv_freq.dtype != torch.float32):
        raise LayoutError(f"inv_freq must be fp32 and have at most {head_dim // 2} entries")
    if shift is not None and (
        tuple(shift.shape) != (kv_heads, head_dim)
        or shift.dtype != torch.float32
        or not shift.is_contiguous()
    ):
        raise LayoutError(f"shift must be contiguous fp32 [{kv_heads}, {head_dim}]")
    eps = 0.0 if norms is None else norms.check(head_dim)
    if tokens == 0:
        return
    _rope_append_kernel[(tokens,)](
        q, k, v, k_pages, v_pages, positions, slots, inv_freq,
        None if norms is None else norms.q.gain, None if norms is None else norms.k.gain, shift,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pages.stride(0), k_pages.stride(1), eps,
        HEADS=heads, HEAD_LANES=next_power_of_2(heads),
        KV_HEADS=kv_heads, KV_LANES=next_power_of_2(kv_heads),
        HEAD_DIM=head_dim, DIM=next_power_of_2(head_dim),
        HALF=half, HALF_LANES=max(next_power_of_2(half), 1), PAGE_SIZE=page_size,
        num_warps=head_warps(next_power_of_2(heads), next_power_of_2(head_dim)),
        **overlap_options(q.device),
    )  # fmt: skip
