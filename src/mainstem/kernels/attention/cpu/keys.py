"""Where the keys of a kernel call are: in place, or to be copied together (see attention.py)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageShape:
    """The sizes of q and of the pages that a plan depends on."""

    num_heads: int
    num_kv_heads: int
    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Some query rows x some keys, which begin `first` slots after the start of `pages`."""

    rows: Longs
    pages: Longs
    first: int
    num_keys: int
    is_triangle: bool
    seen: Longs | None = None  # [rows, 2]: the keys [from, to) that each row sees; None: all


class Keys(Protocol):
    """Where a bucket's K and V are."""

    @property
    def room(self) -> int:
        """The rows of scratch memory that `read` needs: (slots to copy) x (KV heads) x 2."""

    def read(self, kv: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, [parts, kv_heads, keys, dim]."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Evenly spaced runs of slots, read in place."""

    num_parts: int
    num_keys: int
    first: int  # slot
    step: int  # slots from one part to the next

    room = 0

    def read(self, kv: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        both, head, slot, _ = kv.stride()
        shape = (2, self.num_parts, kv.shape[1], self.num_keys, kv.shape[3])
        stride = (both, self.step * slot, head, slot, 1)
        k, v = kv.as_strided(shape, stride, kv.storage_offset() + self.first * slot).unbind()
        return k, v


@dataclass(frozen=True, slots=True)
class Gather:
    """Pages or slots anywhere, copied together."""

    num_parts: int
    num_keys: int
    rows: Tensor  # [2 * parts * kv_heads * units] rows of kv viewed as [-1, unit * dim]
    unit: int  # slots in one row: a whole page, or 1
    unused: Tensor | None  # copied slots after a part's last key, which may hold anything

    @property
    def room(self) -> int:
        return len(self.rows) * self.unit

    def read(self, kv: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads, dim = kv.shape[1], kv.shape[3]
        width = self.unit * dim
        keys = scratch[: len(self.rows) * width].view(-1, width)
        torch.index_select(kv.view(-1, width), 0, self.rows, out=keys)
        if self.unused is not None:
            keys.view(-1, dim).index_fill_(0, self.unused, 0.0)
        keys = keys.view(2, self.num_parts, kv_heads, -1, dim)
        if keys.shape[3] != self.num_keys:
            keys = keys[:, :, :, : self.num_keys]
        return keys[0], keys[1]


def find_windows(parts: list[KeyPart], shape: PageShape) -> Windows | None:
    """Return how to read the parts in place; None if they are not evenly spaced runs of
    neighbouring pages with equal numbers of keys.

    Runs of unequal length are not read in place, since slots after a run's last key may belong to
    another sequence.
    """
    size = shape.page_size
    num_keys = parts[0].num_keys
    if any(part.num_keys != num_keys for part in parts):
        return None
    for part in parts:
        pages = part.pages[part.first // size : -(-(part.first + num_keys) // size)]
        if len(pages) > 1 and (pages[1:] - pages[:-1] != 1).any():
            return None
    firsts = [int(part.pages[part.first // size]) * size + part.first % size for part in parts]
    steps = np.diff(firsts)
    if len(steps) and (steps[0] < 0 or (steps != steps[0]).any()):
        return None
    return Windows(len(parts), num_keys, firsts[0], int(steps[0]) if len(steps) else 0)


def gather(parts: list[KeyPart], lengths: Longs, shape: PageShape) -> Gather:
    """Return how to copy the parts together: triangles by slot, others by whole pages."""
    page_size, num_keys = shape.page_size, int(lengths.max())
    if parts[0].is_triangle:
        unit, per_head = 1, shape.num_pages * page_size
        places = np.arange(num_keys)
        slots = [part.first + np.minimum(places, part.num_keys - 1) for part in parts]
        units = np.stack(
            [
                part.pages[slot // page_size] * page_size + slot % page_size
                for part, slot in zip(parts, slots, strict=True)
            ]
        )
    else:
        unit, per_head = page_size, shape.num_pages
        count = -(-num_keys // page_size)
        units = np.stack([np.resize(part.pages[:count], count) for part in parts])
    heads = np.arange(2 * shape.num_kv_heads).reshape(2, 1, -1, 1)  # heads of K, then of V
    unused = None
    if lengths.min() < num_keys and not parts[0].is_triangle:
        behind = np.arange(units.shape[1] * unit) >= lengths[:, None, None]
        shape_of_keys = (2, len(parts), shape.num_kv_heads, behind.shape[2])
        unused = torch.from_numpy(np.flatnonzero(np.broadcast_to(behind, shape_of_keys)))
    return Gather(
        num_parts=len(parts),
        num_keys=num_keys,
        rows=torch.from_numpy((heads * per_head + units[:, None]).reshape(-1)),
        unit=unit,
        unused=unused,
    )
