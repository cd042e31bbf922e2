"""Joins the outputs that several kernel calls give for the same token (see attention.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.kernels.attention.cpu.keys import Longs


class Partial(NamedTuple):
    """Output of a bucket's queries over its keys, and the lse."""

    out: Tensor  # [parts, heads, queries, dim]
    lse: Tensor  # [parts, heads, queries]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some of a bucket's output rows go. No token occurs twice."""

    bucket: int
    rows: slice
    kept: Tensor | None  # which of `rows`; None: all
    tokens: slice | Tensor


class Merge:
    """Joins the buckets' outputs into one row per token."""

    def __init__(self, owners: list[Longs], num_tokens: int) -> None:
        """`owners` [parts, queries] of each bucket say which token an output row belongs to;
        num_tokens for padding."""
        self._num_tokens = num_tokens
        everything = slice(0, num_tokens)
        places = [
            place for i, rows in enumerate(owners) for place in _find_places(i, rows, num_tokens)
        ]
        # a bucket with every token in order comes first: the others are added to it
        places.sort(key=lambda place: not _is_run(place, everything))
        self._places = places
        self._is_covered = _is_run(places[0], everything)
        self._sizes = [rows.size for rows in owners]
        self._plan_weights(np.concatenate([rows.reshape(-1) for rows in owners]))

    def _plan_weights(self, rows: Longs) -> None:
        """Make a table of each token's output rows, and note where each output row is in the
        table."""
        num_tokens = self._num_tokens
        order = np.argsort(rows, kind="stable")
        order = order[: np.searchsorted(rows[order], num_tokens)]
        tokens = rows[order]
        counts = np.bincount(tokens, minlength=num_tokens)
        assert counts.min() > 0, "a token lies in no span"
        starts = np.cumsum(counts) - counts
        self._width = int(counts.max())
        columns = np.arange(self._width)
        is_there = columns < counts[:, None]
        # absent entries repeat the token's first entry; a bias of -inf gives them no weight
        table = order[starts[:, None] + np.where(is_there, columns, 0)]
        self._table = torch.from_numpy(table.reshape(-1))
        self._bias = None
        if not is_there.all():
            bias = np.where(is_there, 0.0, -np.inf).astype(np.float32)
            self._bias = torch.from_numpy(bias)[:, :, None]
        entry = np.zeros(len(rows), np.int64)
        entry[order] = tokens * self._width + np.arange(len(order)) - starts[tokens]
        self._entry = torch.from_numpy(entry)

    def run(self, parts: list[Partial], sinks: Tensor | None = None) -> Tensor:
        """Return [tokens, heads, dim]. A head's sink counts as one more output row of each token:
        a row of zeros, with the sink as its lse."""
        heads, dim = parts[0].out.shape[1], parts[0].out.shape[3]
        # the kernel lays its output out as [parts, queries, heads, dim]
        outs = [part.out.transpose(1, 2).reshape(-1, heads, dim).float() for part in parts]
        weights = None
        if self._width > 1 or sinks is not None:
            lses = [part.lse.transpose(1, 2).reshape(-1, heads) for part in parts]
            weights = self._weights(lses, sinks)
        result = None if self._is_covered else outs[0].new_zeros(self._num_tokens, heads, dim)
        for place in self._places:
            out = outs[place.bucket][place.rows]
            if weights is not None:
                out *= weights[place.bucket][place.rows]
            if place.kept is not None:
                out = out.index_select(0, place.kept)
            if result is None:
                result = out
            elif isinstance(place.tokens, slice):
                result[place.tokens] += out
            else:
                result.index_add_(0, place.tokens, out)
        assert result is not None
        return result.to(parts[0].out.dtype)

    def _weights(self, lses: list[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Return the weight of each output row and head, in fp32: the softmax over the rows of a
        token."""
        lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        heads = lse.shape[1]
        lse = lse.index_select(0, self._table).view(-1, self._width, heads)
        if self._bias is not None:
            lse += self._bias
        if sinks is not None:
            sink_rows = sinks.to(lse.dtype).expand(self._num_tokens, 1, heads)
            lse = torch.cat((lse, sink_rows), dim=1)
        weights = torch.softmax(lse, dim=1)[:, : self._width].reshape(-1, heads)
        return list(
            torch.split_with_sizes(weights.index_select(0, self._entry)[..., None], self._sizes)
        )


def _is_run(place: _Place, tokens: slice) -> bool:
    return isinstance(place.tokens, slice) and place.tokens == tokens


def _find_places(bucket: int, owners: Longs, num_tokens: int) -> Iterator[_Place]:
    """Yield one place for the whole bucket, or one for each part if parts have tokens in
    common."""
    flat = owners.reshape(-1)
    real = flat[flat < num_tokens]
    if len(np.unique(real)) == len(real):
        owners = flat[None]
    width = owners.shape[1]
    for index, part in enumerate(owners):
        rows = slice(index * width, (index + 1) * width)
        kept = np.flatnonzero(part < num_tokens)
        tokens = part[kept]
        is_run = len(kept) == width and (np.diff(tokens) == 1).all()
        yield _Place(
            bucket,
            rows,
            None if len(kept) == width else torch.from_numpy(kept),
            slice(int(tokens[0]), int(tokens[-1]) + 1) if is_run else torch.from_numpy(tokens),
        )
