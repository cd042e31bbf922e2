"""Where the queries of a kernel call are: in place, or to be copied together (see attention.py)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mainstem.kernels.attention.cpu.keys import Longs


class Queries(Protocol):
    """Where a bucket's queries are."""

    def read(self, q: Tensor) -> Tensor:
        """Return [parts, queries, heads, dim], taken from q [tokens, heads, dim]."""


@dataclass(frozen=True, slots=True)
class _Even:
    """Evenly spaced rows, read in place. If all parts have the same tokens, `part_step` is 0."""

    num_parts: int
    num_queries: int
    first: int
    part_step: int
    query_step: int

    def read(self, q: Tensor) -> Tensor:
        row, head, _ = q.stride()
        shape = (self.num_parts, self.num_queries, q.shape[1], q.shape[2])
        stride = (self.part_step * row, self.query_step * row, head, 1)
        return q.as_strided(shape, stride, q.storage_offset() + self.first * row)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Rows anywhere, copied together."""

    shape: tuple[int, int]
    rows: Tensor  # part after part

    def read(self, q: Tensor) -> Tensor:
        return q.index_select(0, self.rows).view(*self.shape, q.shape[1], q.shape[2])


def find_queries(rows: Longs) -> Queries:
    """Return how to read these rows [parts, queries]: in place if they are evenly spaced."""
    parts, queries = rows.shape
    first = int(rows[0, 0])
    part_step = int(rows[1, 0]) - first if parts > 1 else 0
    query_step = int(rows[0, 1]) - first if queries > 1 else 0
    even = first + np.arange(parts)[:, None] * part_step + np.arange(queries) * query_step
    if part_step >= 0 and query_step >= 0 and np.array_equal(rows, even):
        return _Even(parts, queries, first, part_step, query_step)
    return _Listed((parts, queries), torch.from_numpy(rows.reshape(-1)))
