"""Linears and norms of the decoder on CPUs.

At batch 1 the overhead of a torch call, several microseconds, counts, so each class makes as few
calls as possible.
"""

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.models.collectives import Collectives

Linear = Callable[[Tensor], Tensor]  # [tokens, in] -> [tokens, out]
Norm = Callable[[Tensor], Tensor]  # [tokens, size] -> the same


WIDENED_AT_ONCE = 1 << 22  # numbers of a weight


def has_onednn() -> bool:
    """Whether this torch has oneDNN and the CPU can use it."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix products of this dtype for this CPU; if not, torch's own loops take
    100 to 300 times as long as fp32."""
    if dtype == torch.float32:
        return True
    if not has_onednn():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # on Arm without SVE, oneDNN accepts fp16 and computes it with its reference loop
    if platform.machine() == "aarch64" and "SVE" not in torch.backends.cpu.get_cpu_capability():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Numbers of 16 bits are widened, a part of the weight at a time, if there are no products of
    their dtype. Besides being slow, bf16 would make torch on Arm warn with a trace of C++ calls and
    turn oneDNN off for the whole process."""
    if has_products(x.dtype):
        return F.linear(x, weight, bias)
    wide, y = x.float(), x.new_empty(len(x), len(weight))
    step = max(1, WIDENED_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        y[:, part] = F.linear(
            wide, weight[part].float(), None if bias is None else bias[part].float()
        )
    return y


class DenseLinear:
    """x @ weight.T + bias.

    `weight` is [out, in], which the product of a single token reads at memory speed. Products of
    several tokens are faster with a second copy in oneDNN's layout (`pack`), which doubles the
    memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._columns = weight.t()  # made once: with one token even a view costs noticeable time
        self._packed: Tensor | None = None
        self._is_widened = not has_products(weight.dtype)

    def pack(self) -> None:
        """Keep the second copy."""
        if has_onednn() and self.weight.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None and x.shape[0] > 1:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self.bias, "none", [], ""
            )
            return packed
        if self._is_widened:
            return multiply(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._columns)
        return torch.addmm(self.bias, x, self._columns)


class RmsNorm:
    """x / sqrt(sum(x^2) + size * eps) * scale over the last axis, computed in fp32.

    The usual definition divides by the root of the mean square and multiplies by a gain. Both are
    the same if the scale is `norm_scale(gain)`. If the scale is None, it was folded into the
    weights of the next product.
    """

    def __init__(self, scale: Tensor | None, size: int, eps: float) -> None:
        self._scale = scale
        # sqrt(sum + size * eps) = hypot(sqrt(sum), sqrt(size * eps))
        self._floor = torch.tensor(math.sqrt(size * eps))

    @property
    def has_scale(self) -> bool:
        """Whether the norm applies a gain; otherwise the gain is part of the next product."""
        return self._scale is not None

    def scaled(self, scale: Tensor) -> "RmsNorm":
        """The same norm with another scale."""
        norm = RmsNorm(scale, 1, 1.0)
        norm._floor = self._floor
        return norm

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed = wide / length.hypot_(self._floor)
        if self._scale is not None:
            normed *= self._scale
        return normed.to(x.dtype)


def norm_scale(gain: Tensor) -> Tensor:
    """The scale of an RmsNorm with this gain, or of the columns that the gain is folded into."""
    return gain.float() * math.sqrt(len(gain))


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * gain + bias over the last axis."""

    def __init__(self, gain: Tensor, bias: Tensor | None, eps: float) -> None:
        self._gain, self._eps = gain, eps
        # torch wants both in the dtype of x or both in fp32, which only some gains are (Nemotron)
        self._bias = None if bias is None else bias.to(gain.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._gain.shape, self._gain, self._bias, self._eps)


class Identity:
    """Stands for a norm that a family does not have."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class HeadNorm:
    """Norm of each query and key head of qkv [tokens, heads + 2 kv_heads, dim] (flattened), in
    place."""

    def __init__(self, q: RmsNorm, k: RmsNorm, heads: int, kv_heads: int, dim: int) -> None:
        self._q, self._k = q, k
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim

    def __call__(self, qkv: Tensor) -> None:
        heads = qkv.view(len(qkv), -1, self._dim)
        q = heads[:, : self._heads]
        k = heads[:, self._heads : self._heads + self._kv_heads]
        q.copy_(self._q(q))
        k.copy_(self._k(k))


@dataclass(frozen=True, slots=True)
class QueryNorm:
    """Norm of each head of a product that has only queries, in place."""

    q: RmsNorm
    dim: int

    def __call__(self, qkv: Tensor) -> None:
        heads = qkv.view(len(qkv), -1, self.dim)
        heads.copy_(self.q(heads))


class ValueNorm(HeadNorm):
    """Like HeadNorm, and each value head is normed without a gain."""

    def __call__(self, qkv: Tensor) -> None:
        super().__call__(qkv)
        first = self._heads + self._kv_heads
        v = qkv.view(len(qkv), -1, self._dim)[:, first : first + self._kv_heads]
        v.copy_(self._q.scaled(v.new_tensor(math.sqrt(self._dim), dtype=torch.float32))(v))


class RowNorm(HeadNorm):
    """Like HeadNorm, but over all query heads of a token together, and over all its key heads."""

    def __call__(self, qkv: Tensor) -> None:
        end = self._heads * self._dim
        q, k = qkv[:, :end], qkv[:, end : end + self._kv_heads * self._dim]
        q.copy_(self._q(q))
        k.copy_(self._k(k))


class SplitRowNorm:
    """A RowNorm over heads that are split over ranks: squares are summed over all ranks.

    `widths` are the dims of all query heads and of all key heads; if several ranks have the same
    head, it counts several times. Gains are those of this rank.
    """

    def __init__(
        self,
        q_gain: Tensor,
        k_gain: Tensor,
        widths: tuple[int, int],
        eps: float,
        ranks: Collectives,
    ) -> None:
        self._gain = torch.cat((q_gain, k_gain)).float()
        self._sizes = [len(q_gain), len(k_gain)]
        self._widths = torch.tensor(widths, dtype=torch.float32)
        self._eps = eps
        self._ranks = ranks

    def __call__(self, qkv: Tensor) -> None:
        turned = qkv[:, : len(self._gain)]
        wide = turned.float()
        parts = torch.split(wide, self._sizes, dim=1)
        squares = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        factors = (self._ranks.sum_(squares) / self._widths + self._eps).rsqrt_()
        for part, factor in zip(parts, torch.split(factors, 1, dim=1), strict=True):
            part.mul_(factor)
        turned.copy_(wide.mul_(self._gain))


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums an output over ranks, then applies `then`."""

    ranks: Collectives
    then: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.then(self.ranks.sum_(x))


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activate(first(x)))."""

    first: Linear
    activate: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.first(x)))
