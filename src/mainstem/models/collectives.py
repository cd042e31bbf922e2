"""Collectives between the ranks of a tensor-parallel model during a forward pass.

Every rank runs the same Steps, so every rank makes the same calls in the same order. Results have
the same bits on all ranks, so that ranks sample the same tokens from gathered logits.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mainstem.models.shard import Shard

# torch 2.13 has a new name for this function, and warns about the old one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(Protocol):
    """The collectives of one rank."""

    @property
    def shard(self) -> Shard: ...

    @property
    def is_capturable(self) -> bool:
        """Whether the calls may be captured in CUDA graphs."""

    def sum_(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place; x is contiguous."""

    def gather(self, x: Tensor) -> Tensor:
        """[rows, part] of each rank -> [rows, ranks * part], in the order of ranks."""


class Alone:
    """One rank that has the whole model."""

    shard = Shard()
    is_capturable = True

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


def smallest(count: int, ranks: Collectives, device: torch.device) -> int:
    """The smallest of the ranks' counts."""
    if ranks.shard.of == 1:
        return count
    return int(ranks.gather(torch.tensor([[count]], device=device)).min())


class ProcessGroup:
    """Ranks that are processes, over torch.distributed.

    NCCL runs on the current stream and can be captured. gloo runs on the host: tensors on a card
    are copied to the host and back. This is for checks; it is slow.

    With is_deterministic, sums are always in the order of ranks, so that a row does not depend on
    other rows. This moves ranks / 2 times as many bytes. With two ranks the order has no effect.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, is_deterministic: bool = False
    ) -> None:
        """`group` None: the default group, which the process has joined already."""
        self._group = group
        self.shard = Shard(dist.get_rank(group), dist.get_world_size(group))
        self.is_capturable = dist.get_backend(group) == "nccl"
        self._is_ordered = is_deterministic and self.shard.of > 2

    def sum_(self, x: Tensor) -> Tensor:
        if self._is_ordered:
            first, *others = self._gather_parts(x)
            x.copy_(first)
            for part in others:
                x += part
            return x
        if self.is_capturable or not x.is_cuda:
            dist.all_reduce(x, group=self._group)
            return x
        there = x.cpu()
        dist.all_reduce(there, group=self._group)
        return x.copy_(there)

    def gather(self, x: Tensor) -> Tensor:
        return self._gather_parts(x.contiguous()).transpose(0, 1).flatten(1)

    def _gather_parts(self, x: Tensor) -> Tensor:
        """[ranks, *shape of x]"""
        there = x if self.is_capturable or not x.is_cuda else x.cpu()
        parts = there.new_empty(self.shard.of * len(x), *x.shape[1:])
        _all_gather(parts, there, group=self._group)
        return parts.view(self.shard.of, *x.shape).to(x.device)
