"""Span attention for CPUs: planned once per step, run once per layer.

Spans become *parts*, and parts of like shape become *buckets*, one kernel call each:

    span, plain            q x keys                     one part
    span, causal, n > 1    q x past keys | triangle     two parts: all n queries see all the past
    ... and n >= 256       the same for each 128 q      saves half a square; not with a long past
    span, causal, n = 1    q x keys                     one part: a lone query sees everything
    with a window          q x keys, masked             one part, if a query does not see key 0

    bucket   [parts, heads, queries, dim] x [parts, kv_heads, keys, dim]

Pages lie head by head, so that neighbouring pages are one run of slots:

    kv       [2, kv_heads, pages * page_size, dim]      K, then V

If the parts of a bucket are evenly spaced runs of equal length, their keys are read in place
(Windows); queries likewise (queries.py). Otherwise keys are copied together (Gather), by whole
pages, or by slot for triangles. Slots after a part's last key are masked and set to zero: a slot
that was never written may hold NaN, and 0 * NaN is NaN.

torch's fused CPU attention returns the log-sum-exp with the output. The outputs of a token that
lies in several parts are summed, weighted by the softmax of their log-sum-exps, in fp32
(RelayAttention Eq. 11). Sinks take part in this softmax. torch's kernel has no softcap; scores
with a softcap are computed in softcap.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention.cpu.keys import (
    KeyPart,
    Keys,
    Longs,
    PageShape,
    find_windows,
    gather,
)
from mainstem.kernels.attention.cpu.merge import Merge, Partial
from mainstem.kernels.attention.cpu.parts import cut_parts, folds, group_parts
from mainstem.kernels.attention.cpu.queries import Queries, find_queries
from mainstem.kernels.attention.cpu.softcap import attend_capped

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class _Scores:
    """How products of queries and keys become scores."""

    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parts that run as one kernel call."""

    queries: Queries
    keys: Keys
    mask: Tensor | None  # additive: [parts, 1, 1, keys], with windows [parts, 1, queries, keys]
    is_triangle: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: _Scores) -> Partial:
        """q [tokens, heads, dim] over collected k and v."""
        q, scale = self.queries.read(q), scores.scale
        if scores.softcap is not None:
            found = attend_capped(q, k, v, self._whole_mask(q), scale, scores.softcap)
            return Partial(*found)
        has_mask_of_rows = self.mask is not None and self.mask.shape[2] > 1
        can_fold = not self.is_triangle and not has_mask_of_rows
        if can_fold and folds(q.shape[1], q.shape[2] // k.shape[1]):
            return self._attend_folded(q, k, v, scale)
        q = q.transpose(1, 2)
        return Partial(
            *_flash_attention(q, k, v, 0.0, self.is_triangle, attn_mask=self.mask, scale=scale)
        )

    def _whole_mask(self, q: Tensor) -> Tensor | None:
        """Return the mask. The mask of a triangle is written out in full."""
        if not self.is_triangle:
            return self.mask
        count = q.shape[1]
        return torch.full((count, count), float("-inf"), dtype=q.dtype).triu(1)[None, None]

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """q [parts, queries, heads, dim]; the heads of one KV head become rows of one matrix."""
        parts, queries, heads, dim = q.shape
        kv_heads = k.shape[1]
        q = q.view(parts, queries, kv_heads, -1, dim).transpose(1, 2)
        q = q.reshape(parts, kv_heads, -1, dim)
        out, lse = _flash_attention(q, k, v, 0.0, False, attn_mask=self.mask, scale=scale)
        out = out.view(parts, kv_heads, queries, -1, dim).transpose(1, 2)
        lse = lse.view(parts, kv_heads, queries, -1).transpose(1, 2)
        return Partial(
            out.reshape(parts, queries, heads, dim).transpose(1, 2),
            lse.reshape(parts, queries, heads).transpose(1, 2),
        )


class SpanPlan:
    """A step's attention, ready to run on every layer."""

    def __init__(self, buckets: list[_Bucket], merge: Merge, scores: _Scores) -> None:
        self._buckets = buckets
        self._merge = merge
        self._scores = scores
        self._scratch: Tensor | None = None  # memory for gathered K and V, reused by each bucket

    @property
    def num_gathered_slots(self) -> int:
        """The number of rows of K and V, of all heads, that are copied before they are read."""
        return sum(bucket.keys.room for bucket in self._buckets)

    def run(self, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [tokens, heads, dim] -> [tokens, heads, dim]. kv is contiguous, as drawn above; `sinks`
        [heads] are scores that get weight in the softmax and have a value of 0."""
        scratch = self._room(kv)
        partials = [
            bucket.attend(q, *bucket.keys.read(kv, scratch), self._scores)
            for bucket in self._buckets
        ]
        return self._merge.run(partials, sinks)

    def _room(self, kv: Tensor) -> Tensor:
        """Return scratch memory. It is kept between layers: page faults of new memory cost more
        than the copy."""
        if self._scratch is None:
            largest = max(bucket.keys.room for bucket in self._buckets)
            self._scratch = kv.new_empty(largest * kv.shape[3])
        return self._scratch


def plan(
    spans: Spans,
    num_tokens: int,
    shape: PageShape,
    scale: float,
    softcap: float | None = None,
) -> SpanPlan:
    """Prepare a step's attention. Every token must lie in a span that has keys, and see at least
    one key of each of its spans. With a softcap, scores become softcap * tanh(score / softcap)."""
    parts = list(cut_parts(spans, shape.page_size))
    buckets = []
    owners = []
    for members in group_parts(parts, shape):
        bucket, bucket_owners = _make_bucket(members, num_tokens, shape)
        buckets.append(bucket)
        owners.append(bucket_owners)
    return SpanPlan(buckets, Merge(owners, num_tokens), _Scores(scale, softcap))


def _make_bucket(parts: list[KeyPart], num_tokens: int, shape: PageShape) -> tuple[_Bucket, Longs]:
    """Return the bucket, and [parts, queries] the token of each of its output rows (num_tokens for
    padding)."""
    is_triangle = parts[0].is_triangle
    num_queries = max(len(part.rows) for part in parts)
    owners = np.full((len(parts), num_queries), num_tokens, dtype=np.int64)
    rows = np.empty((len(parts), num_queries), dtype=np.int64)
    for index, part in enumerate(parts):
        count = len(part.rows)
        owners[index, :count] = part.rows
        rows[index, :count] = part.rows
        rows[index, count:] = part.rows[0]
    lengths = np.array([part.num_keys for part in parts])
    hidden = _hidden_keys(parts, lengths)
    mask = None
    if hidden is not None:
        mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0)))[:, None]
    bucket = _Bucket(
        queries=find_queries(rows),
        keys=find_windows(parts, shape) or gather(parts, lengths, shape),
        mask=mask,
        is_triangle=is_triangle,
    )
    return bucket, owners


def _hidden_keys(parts: list[KeyPart], lengths: Longs) -> NDArray[np.bool_] | None:
    """Return [parts, rows or 1, keys]: whether a key is hidden from a row. None if no mask is
    needed: all rows see all keys, or the parts are triangles."""
    num_keys = int(lengths.max())
    keys = np.arange(num_keys)
    seen = [part.seen for part in parts if part.seen is not None]
    if seen:
        bounds = np.stack(seen)[..., None]
        return (keys < bounds[:, :, 0]) | (keys >= bounds[:, :, 1])
    if parts[0].is_triangle or lengths.min() == num_keys:
        return None
    return keys >= lengths[:, None, None]
