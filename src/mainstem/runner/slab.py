"""A slab of host memory: equal slots of one page each, aligned for files and devices.

    slot  for each part of a page (page_parts.py):
          [layers][K or V][kv_heads, page_size, head_dim]  + padding to the next 4 KiB

The order does not depend on how a device stores its pages, so a page saved by one device can be
loaded by another that computes the same. Under tensor parallelism a slot holds the parts of all
ranks, one after the other, in memory that they share.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.errors import ConfigError
from mainstem.models.shard import Shard

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class SlabPart:
    """Which part of every slot a rank has, and the memory that all ranks share."""

    shard: Shard
    fd: int


WHOLE = SlabPart(Shard(), -1)  # the whole slot, in memory of this process


class HostSlab:
    """Owns the memory; each of `parts` is [slots, layers, 2, kv_heads, page_size, head_dim], and
    begins `part_starts` bytes after the start of a page.

    Pinned memory lets a GPU copy without the CPU.
    """

    def __init__(
        self,
        host_bytes: int,
        part_shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        is_pinned: bool,
        part: SlabPart = WHOLE,
    ) -> None:
        """`part_shapes` are [layers, 2, kv_heads, page_size, head_dim] of each part of a page, as
        this rank has it."""
        sizes = [math.prod(shape) for shape in part_shapes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]  # in numbers
        self.page_bytes = sum(sizes) * dtype.itemsize
        self.part_starts = [start * dtype.itemsize for start in starts]
        whole_bytes = part.shard.of * self.page_bytes
        self.num_slots = num_slots = count_slots(host_bytes, whole_bytes)
        self.slot_bytes = slot_bytes(whole_bytes)  # distance between slots
        # memory is used only after it is written
        memory = mmap.mmap(part.fd, num_slots * self.slot_bytes)
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(memory)
        words = torch.frombuffer(memory, dtype=torch.uint8)
        self._start = words.data_ptr()
        self._first = part.shard.rank * self.page_bytes  # this rank's first byte in each slot
        self.address = self._start + self._first
        self._is_pinned = is_pinned
        if is_pinned:  # not by torch, which rounds pinned memory up to powers of two
            _check(torch.cuda.cudart().cudaHostRegister(self._start, len(words), 0), "pinned")  # type: ignore[no-untyped-call]
        used = words.view(num_slots, -1).narrow(1, self._first, self.page_bytes).view(dtype)
        self.parts: list[Tensor] = [
            used.narrow(1, start, size).view(num_slots, *shape)
            for start, size, shape in zip(starts, sizes, part_shapes, strict=True)
        ]

    def slot(self, slot: int) -> memoryview:
        """The bytes of a page in a slot."""
        first = slot * self.slot_bytes + self._first
        return self._bytes[first : first + self.page_bytes]

    def close(self) -> None:
        """Unpin the memory; no copy may use it any more."""
        if self._is_pinned:
            _check(torch.cuda.cudart().cudaHostUnregister(self._start), "unpinned")  # type: ignore[no-untyped-call]
            self._is_pinned = False


def _check(result: object, wanted: str) -> None:
    if int(result) != 0:  # type: ignore[call-overload]
        hint = "; lower host_gb" if wanted == "pinned" else ""
        raise ConfigError(f"host memory for pages cannot be {wanted}: {result}{hint}")


def slot_bytes(page_bytes: int) -> int:
    """The size of a page's slot in a slab."""
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


def count_slots(host_bytes: int, page_bytes: int) -> int:
    """Return the number of slots in a slab of `host_bytes`, at least two."""
    return max(2, host_bytes // slot_bytes(page_bytes))
