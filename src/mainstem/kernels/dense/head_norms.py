# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Norms of queries and keys before rotation, in place in the QKV product's output: of all heads of
a token together (`joint_norm_`), or of each head (`HeadNorms`, which `rope_append` computes). They
round like the norms of `norms.py`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.norms import Norm, check_constant, kind_of, normed
from mainstem.kernels.dense.rows import MAX_HIDDEN, MAX_MLP, check_rows, row_options
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_MOST_OF_FOUR_WARPS = 8192  # numbers: 64 registers a thread in fp32


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and of each key head; gains are [dim] (Qwen3, Gemma 3)."""

    q: Norm
    k: Norm

    def check(self, dim: int) -> float:
        """Return the eps of both norms; raises LayoutError if they are not supported."""
        check_constant("q_gain", self.q.gain, (dim,))
        check_constant("k_gain", self.k.gain, (dim,))
        eps, is_layer = _kind_of(self.q, self.k)
        if is_layer:
            raise LayoutError("norms of heads must be RMS norms")
        return eps


@triton.jit
def norm_heads(
    x_ptr, gain_ptr, stride_head, eps,
    HEADS: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Normalise each head of a token, in place."""
    heads, dims = tl.arange(0, LANES), tl.arange(0, DIM)
    is_cell = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    gain = tl.load(gain_ptr + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    ptrs = x_ptr + heads[:, None] * stride_head + dims[None, :]
    rows = tl.load(ptrs, mask=is_cell, other=0.0).to(tl.float32)
    out = normed(rows, is_cell, gain, None, eps, HEAD_DIM, False, 1, x_ptr.dtype.element_ty)
    tl.store(ptrs, out, mask=is_cell)


@triton.jit
def _norm_heads_kernel(
    x_ptr, gain_ptr, stride_token, stride_head, eps,
    HEADS: tl.constexpr, HEAD_LANES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    norm_heads(
        x_ptr + token * stride_token, gain_ptr, stride_head, eps, HEADS, HEAD_LANES, HEAD_DIM, DIM
    )


def norm_heads_(x: Tensor, norm: Norm) -> None:
    """Normalise each head of x [tokens, heads, dim] in place; the gain is [dim]."""
    tokens, heads, dim = x.shape
    check_constant("gain", norm.gain, (dim,))
    eps, is_layer = kind_of((norm,))
    if is_layer or norm.bias is not None:
        raise LayoutError("norms of heads must be RMS norms")
    if x.stride(2) != 1:
        raise LayoutError("x must have a contiguous last axis")
    if tokens == 0:
        return
    lanes, width = next_power_of_2(heads), next_power_of_2(dim)
    _norm_heads_kernel[(tokens,)](
        x, norm.gain, x.stride(0), x.stride(1), eps,
        HEADS=heads, HEAD_LANES=lanes, HEAD_DIM=dim, DIM=width,
        num_warps=head_warps(lanes, width), **overlap_options(x.device),
    )  # fmt: skip


def head_warps(lanes: int, width: int) -> int:
    """Warps of a program that holds this many lanes of heads."""
    return 4 if lanes * width <= _MOST_OF_FOUR_WARPS else 8


@triton.jit
def _norm_in_place(
    ptr, gain_ptr, square_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_LAYER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    gain = tl.load(gain_ptr + lanes, mask=is_lane, other=0.0)
    wait_for_ahead(OVERLAPS)
    row = tl.load(ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)
    element = ptr.dtype.element_ty
    if square_ptr is None:
        out = normed(row, is_lane, gain, None, eps, SIZE, IS_LAYER, 0, element)
    else:
        square = tl.load(square_ptr)
        out = normed(row, is_lane, gain, None, eps, SIZE, IS_LAYER, 0, element, square)
    tl.store(ptr + lanes, out, mask=is_lane)


@triton.jit
def _joint_norm_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, squares_ptr, stride_token, eps,
    Q_SIZE: tl.constexpr, Q_BLOCK: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    IS_LAYER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Two programs per token: one for all its queries, one for all its keys. squares: [tokens,
    2]."""
    token = tl.program_id(0).to(tl.int64)
    ptr = qkv_ptr + token * stride_token
    if squares_ptr is None:
        q_square_ptr = None
        k_square_ptr = None
    else:
        q_square_ptr = squares_ptr + 2 * token
        k_square_ptr = q_square_ptr + 1
    if tl.program_id(1) == 0:
        _norm_in_place(ptr, q_gain_ptr, q_square_ptr, eps, Q_SIZE, Q_BLOCK, IS_LAYER, OVERLAPS)
    else:
        ptr += Q_SIZE
        _norm_in_place(ptr, k_gain_ptr, k_square_ptr, eps, K_SIZE, K_BLOCK, IS_LAYER, OVERLAPS)


@triton.jit
def _square_in(ptr, share, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return share * the mean of squares."""
    lanes = tl.arange(0, BLOCK)
    row = tl.load(ptr + lanes, mask=lanes < SIZE, other=0.0).to(tl.float32)
    return tl.sum(row * row, 0) / SIZE * share


@triton.jit
def _joint_squares_kernel(
    qkv_ptr, squares_ptr, stride_token, share,
    Q_SIZE: tl.constexpr, Q_BLOCK: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Two programs per token, like _joint_norm_kernel."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    ptr = qkv_ptr + token * stride_token
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + 2 * token, _square_in(ptr, share, Q_SIZE, Q_BLOCK))
    else:
        tl.store(squares_ptr + 2 * token + 1, _square_in(ptr + Q_SIZE, share, K_SIZE, K_BLOCK))


def joint_norm_(
    qkv: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    heads: int,
    kv_heads: int,
    dim: int,
    squares: Tensor | None = None,
) -> None:
    """Normalise, in place, all query heads of a token of qkv [tokens, (heads + 2 kv_heads) * dim]
    together, and all its key heads together (OLMo 2). Value heads are not changed.

    Gains are [heads * dim] and [kv_heads * dim]. If qkv has only some of the heads, `squares` must
    hold the mean squares over all heads (joint_squares).
    """
    check_rows("qkv", qkv, (heads + 2 * kv_heads) * dim, 2 * MAX_MLP)
    eps, is_layer = _kind_of(q_norm, k_norm)
    q_size, k_size = heads * dim, kv_heads * dim
    check_constant("q_gain", q_norm.gain, (q_size,))
    check_constant("k_gain", k_norm.gain, (k_size,))
    if squares is not None:
        _check_squares(squares, len(qkv))
        if is_layer:
            raise LayoutError("squares are for RMS norms: a LayerNorm needs means, too")
    if len(qkv) == 0:
        return
    _joint_norm_kernel[(len(qkv), 2)](
        qkv, q_norm.gain, k_norm.gain, squares, qkv.stride(0), eps, IS_LAYER=is_layer,
        **_joint_options(q_size, k_size), **overlap_options(qkv.device),
    )  # fmt: skip


def joint_squares(
    qkv: Tensor, heads: int, kv_heads: int, dim: int, num_parts: int, out: Tensor
) -> Tensor:
    """Write the mean squares of a token's queries and of its keys, divided by `num_parts`, to
    `out`, fp32 [tokens, 2], and return it. The sum over `num_parts` equal parts of the heads is
    then the mean over all heads."""
    check_rows("qkv", qkv, (heads + 2 * kv_heads) * dim, 2 * MAX_MLP)
    _check_squares(out, len(qkv))
    if len(qkv):
        _joint_squares_kernel[(len(qkv), 2)](
            qkv, out, qkv.stride(0), 1.0 / num_parts,
            **_joint_options(heads * dim, kv_heads * dim), **overlap_options(qkv.device),
        )  # fmt: skip
    return out


def _joint_options(q_size: int, k_size: int) -> dict[str, int]:
    if q_size > MAX_HIDDEN:
        raise LayoutError(f"queries of a token must have at most {MAX_HIDDEN} dims, got {q_size}")
    return {
        "Q_SIZE": q_size,
        "Q_BLOCK": next_power_of_2(q_size),
        "K_SIZE": k_size,
        "K_BLOCK": next_power_of_2(k_size),
        "num_warps": row_options(q_size)["num_warps"],
    }


def _check_squares(squares: Tensor, tokens: int) -> None:
    is_right = squares.shape == (tokens, 2) and squares.dtype == torch.float32
    if not is_right or not squares.is_contiguous():
        raise LayoutError(
            f"squares must be contiguous [{tokens}, 2] of float32, got {tuple(squares.shape)} of "
            f"{squares.dtype}"
        )


def _kind_of(q_norm: Norm, k_norm: Norm) -> tuple[float, bool]:
    """Return eps and is_layer of both norms; raises LayoutError if they differ or have a bias."""
    if q_norm.bias is not None or k_norm.bias is not None:
        raise LayoutError("norms of queries and keys take no bias")
    if q_norm.gain.dtype != k_norm.gain.dtype:
        raise LayoutError("q_gain and k_gain must have one dtype")
    return kind_of((q_norm, k_norm))
