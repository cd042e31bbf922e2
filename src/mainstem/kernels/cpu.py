"""Span attention for CPUs: planned once per step, run once per layer.

Spans become *parts*, and parts of like shape become *buckets*, one kernel call each:

    span, plain            q x keys                     one part
    span, causal, n > 1    q x past keys | triangle     two parts: every query sees all the past
    ... and n >= 256       the same for each 128 q      the kernel would compute the whole square
    span, causal, n = 1    q x keys                     one part: a lone query sees everything

    bucket   [parts, heads, queries, dim] x [parts, kv_heads, keys, dim]

Pages lie head by head, so that neighbouring pages are one run of slots:

    kv       [2, kv_heads, pages * page_size, dim]      K, then V

A bucket whose parts are evenly spaced runs of equal length reads them where they are (_Windows).
Others are collected (_Gather), by whole pages, triangles by slot; what lies behind a part's last
key is masked and set to zero, since a slot nobody wrote may hold NaN, and 0 * NaN is NaN.

torch's fused CPU attention answers with the log-sum-exp beside the output. A token that lies in
several parts gets their outputs weighted by softmax over these, in fp32 (RelayAttention Eq. 11).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Spans

Longs = NDArray[np.int64]

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_MAX_BUCKET_ELEMENTS = 1 << 22  # of gathered keys: 16 MB in fp32
_MAX_PADDED_QUERIES = 16  # parts with more queries are batched only at equal length
_CALL_SLOTS = 256  # what can be gathered in the time of one more kernel call
_TRIANGLE = 128  # queries in a piece of a long causal part
_MAX_PIECED_PAST = 2048  # keys; before more, pieces lose at the past what they gain at the triangle
_MIN_SPLIT_KEYS = 256  # a shorter piece costs more in the merge than the other core saves
_MIN_SPLIT_WORK = 1 << 16  # queries x keys below which nothing is worth splitting


def move_pages(joint: Tensor, source: Tensor, target: Tensor, turns: Tensor) -> None:
    """Write the pages `source` to the pages `target`, their keys turned; V goes along.

    joint: [2, pages, kv_heads, page_size, dim], K first, the two dims of a rotary pair adjacent;
    turns: [moves, 1, 1, rotary_dim / 2] complex. Pages are read before any is written.
    """
    moved = joint.index_select(1, source)
    rotary_dim = 2 * turns.shape[-1]
    part = moved[0, ..., :rotary_dim]
    pairs = torch.view_as_complex(part.float().reshape(*part.shape[:-1], -1, 2))
    part.copy_(torch.view_as_real(pairs * turns).flatten(-2))
    joint.index_copy_(1, target, moved)


@dataclass(frozen=True, slots=True)
class PageShape:
    """What the plan must know of q and the pages."""

    num_heads: int
    num_kv_heads: int
    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Some query rows x some keys, which begin `first` slots into a page run."""

    rows: Longs
    pages: Longs
    first: int
    num_keys: int
    is_triangle: bool


class _Keys(Protocol):
    """Where a bucket's K and V are."""

    @property
    def room(self) -> int:
        """Rows of scratch memory that `read` wants: slots to copy, K and V of every head."""
        ...

    def read(self, kv: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, [parts, kv_heads, keys, dim]."""
        ...


@dataclass(frozen=True, slots=True)
class _Windows:
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
class _Gather:
    """Pages or slots anywhere, copied together."""

    num_parts: int
    num_keys: int
    rows: Tensor  # of kv seen as [..., unit * dim]: [2, parts, kv_heads, units]
    unit: int  # slots in one row: a whole page, or 1
    unused: Tensor | None  # collected slots behind a part's last key: they may hold anything

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


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parts that run as one kernel call."""

    num_parts: int
    num_queries: int
    rows: Tensor | None  # query rows, part after part; None: all tokens in order
    keys: _Keys
    mask: Tensor | None  # [parts, 1, 1, keys] additive
    is_triangle: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> "_Partial":
        """q [tokens, heads, dim] over collected k and v."""
        if self.rows is not None:
            q = q.index_select(0, self.rows)
        if self.num_queries == 1:
            q = q[:, :, None]
        elif not self.is_triangle and _folds(self.num_queries, q.shape[1] // k.shape[1]):
            return self._attend_folded(q, k, v, scale)
        else:
            shape = (self.num_parts, self.num_queries, q.shape[1], q.shape[2])
            q = q.view(shape).transpose(1, 2)
        return _Partial(
            *_flash_attention(q, k, v, 0.0, self.is_triangle, attn_mask=self.mask, scale=scale)
        )

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> "_Partial":
        """The query heads of one KV head as rows of one matrix."""
        parts, queries, heads, dim = self.num_parts, self.num_queries, q.shape[1], q.shape[2]
        kv_heads = k.shape[1]
        q = q.view(parts, queries, kv_heads, -1, dim).transpose(1, 2)
        q = q.reshape(parts, kv_heads, -1, dim)
        out, lse = _flash_attention(q, k, v, 0.0, False, scale=scale)
        out = out.view(parts, kv_heads, queries, -1, dim).transpose(1, 2)
        lse = lse.view(parts, kv_heads, queries, -1).transpose(1, 2)
        return _Partial(
            out.reshape(parts, queries, heads, dim).transpose(1, 2),
            lse.reshape(parts, queries, heads).transpose(1, 2),
        )


class _Partial(NamedTuple):
    """What a bucket's queries found among its keys."""

    out: Tensor  # [parts, heads, queries, dim]
    lse: Tensor  # [parts, heads, queries]


class SpanPlan:
    """A step's attention, ready to run on every layer."""

    def __init__(self, buckets: list[_Bucket], merge: "_Merge", scale: float) -> None:
        self._buckets = buckets
        self._merge = merge
        self._scale = scale
        self._scratch: Tensor | None = None  # for gathered K and V, bucket after bucket

    @property
    def num_gathered_slots(self) -> int:
        """K and V rows that are copied together before they are read, all heads counted."""
        return sum(bucket.keys.room for bucket in self._buckets)

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [tokens, heads, dim] -> [tokens, heads, dim]; kv as drawn above, contiguous."""
        scratch = self._room(kv)
        return self._merge.run(
            [
                bucket.attend(q, *bucket.keys.read(kv, scratch), self._scale)
                for bucket in self._buckets
            ]
        )

    def _room(self, kv: Tensor) -> Tensor:
        """Kept between layers: fresh memory would cost more in page faults than the copy."""
        if self._scratch is None:
            largest = max(bucket.keys.room for bucket in self._buckets)
            self._scratch = kv.new_empty(largest * kv.shape[3])
        return self._scratch


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some of a bucket's output rows go; no token twice."""

    bucket: int
    rows: slice
    kept: Tensor | None  # which of these rows; None: all
    tokens: slice | Tensor


class _Merge:
    """Joins the buckets' outputs into one row per token."""

    def __init__(self, owners: list[Longs], num_tokens: int) -> None:
        """`owners` [parts, queries] of each bucket say which token an output row belongs to;
        num_tokens for padding."""
        self._num_tokens = num_tokens
        everything = slice(0, num_tokens)
        places = [
            place for i, rows in enumerate(owners) for place in _find_places(i, rows, num_tokens)
        ]
        # one that has every token in order comes first: the others are added to it
        places.sort(key=lambda place: not _is_run(place, everything))
        self._places = places
        self._is_covered = _is_run(places[0], everything)
        self._sizes = [rows.size for rows in owners]
        self._plan_weights(np.concatenate([rows.reshape(-1) for rows in owners]))

    def _plan_weights(self, rows: Longs) -> None:
        """A table of each token's output rows, and where each output row is in it."""
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
        # absent entries repeat the token's own first one: finite wherever its answer is
        table = order[starts[:, None] + np.where(is_there, columns, 0)]
        self._table = torch.from_numpy(table.reshape(-1))
        self._bias = None
        if not is_there.all():
            bias = np.where(is_there, 0.0, -np.inf).astype(np.float32)
            self._bias = torch.from_numpy(bias)[:, :, None]
        entry = np.zeros(len(rows), np.int64)
        entry[order] = tokens * self._width + np.arange(len(order)) - starts[tokens]
        self._entry = torch.from_numpy(entry)

    def run(self, parts: list[_Partial]) -> Tensor:
        """[tokens, heads, dim]"""
        heads, dim = parts[0].out.shape[1], parts[0].out.shape[3]
        # the kernel lays its output out as [parts, queries, heads, dim]
        outs = [part.out.transpose(1, 2).reshape(-1, heads, dim).float() for part in parts]
        weights = None
        if self._width > 1:
            weights = self._weights([part.lse.transpose(1, 2).reshape(-1, heads) for part in parts])
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

    def _weights(self, lses: list[Tensor]) -> list[Tensor]:
        """Of each output row and head, in fp32: softmax over the rows of a token."""
        lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        heads = lse.shape[1]
        lse = lse.index_select(0, self._table).view(-1, self._width, heads)
        if self._bias is not None:
            lse += self._bias
        weights = torch.softmax(lse, dim=1).view(-1, heads)
        return list(
            torch.split_with_sizes(weights.index_select(0, self._entry)[..., None], self._sizes)
        )


def _is_run(place: _Place, tokens: slice) -> bool:
    return isinstance(place.tokens, slice) and place.tokens == tokens


def _find_places(bucket: int, owners: Longs, num_tokens: int) -> Iterator[_Place]:
    """The whole bucket, or each part when they are pieces over the same tokens."""
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


def plan(spans: Spans, num_tokens: int, shape: PageShape, scale: float) -> SpanPlan:
    """Prepare a step's attention. Every token must lie in a span that has keys."""
    parts = list(_parts(spans, shape.page_size))
    buckets = []
    owners = []
    for members in _bucket(parts, shape):
        bucket, bucket_owners = _make_bucket(members, num_tokens, shape)
        buckets.append(bucket)
        owners.append(bucket_owners)
    return SpanPlan(buckets, _Merge(owners, num_tokens), scale)


def _parts(spans: Spans, page_size: int) -> Iterator[_Part]:
    """Cut causal spans into past and triangle; leave out what has no keys or queries."""
    query_starts = spans.query_starts.tolist()
    page_starts = spans.page_starts.tolist()
    query_rows = spans.query_rows.astype(np.int64)
    page_ids = spans.page_ids.astype(np.int64)
    triples = zip(spans.key_tokens.tolist(), spans.is_causal.tolist(), strict=True)
    for index, (num_keys, is_causal) in enumerate(triples):
        rows = query_rows[query_starts[index] : query_starts[index + 1]]
        pages = page_ids[page_starts[index] : page_starts[index + 1]]
        assert num_keys <= len(pages) * page_size, "a span has more keys than its pages have slots"
        num_queries = len(rows)
        if num_queries == 0 or num_keys == 0:
            continue
        if not is_causal or num_queries == 1:
            yield _Part(rows, pages, 0, num_keys, False)
            continue
        past = num_keys - num_queries
        assert past >= 0, "a causal span has more queries than keys"
        for piece in _pieces(rows, past):
            if past:
                yield _Part(piece, pages, 0, past, False)
            yield _Part(piece, pages, past, len(piece), True)
            past += len(piece)


def _pieces(rows: Longs, past: int) -> list[Longs]:
    """Queries in the pieces in which they run: the kernel computes a triangle of up to 512 as a
    square, at twice the cost."""
    if len(rows) < 2 * _TRIANGLE or past > _MAX_PIECED_PAST:
        return [rows]
    return [rows[i : i + _TRIANGLE] for i in range(0, len(rows), _TRIANGLE)]


def _bucket(parts: list[_Part], shape: PageShape) -> Iterator[list[_Part]]:
    """Group parts that run well together: same kind, same queries, keys of like number."""
    groups: dict[tuple[bool, int, int], list[_Part]] = {}
    for part in parts:
        num_queries = len(part.rows)
        is_padded = part.is_triangle or num_queries < _MAX_PADDED_QUERIES
        key = (
            part.is_triangle,
            0 if part.is_triangle else num_queries,
            0 if is_padded else part.num_keys,
        )
        groups.setdefault(key, []).append(part)
    for group in groups.values():
        for bucket in _in_place(group, shape) or _of_like_length(group, shape):
            yield from _split(bucket, shape)


def _in_place(group: list[_Part], shape: PageShape) -> list[list[_Part]]:
    """Parts of equal length together, if all can be read in place and that is worth the calls."""
    by_length: dict[int, list[_Part]] = {}
    for part in group:
        by_length.setdefault(part.num_keys, []).append(part)
    buckets = list(by_length.values())
    is_worth = (len(buckets) - 1) * _CALL_SLOTS <= sum(part.num_keys for part in group)
    return buckets if is_worth and all(_find_windows(b, shape) for b in buckets) else []


def _of_like_length(group: list[_Part], shape: PageShape) -> Iterator[list[_Part]]:
    """Parts whose lengths differ by a quarter at most, as many as may be gathered at once."""
    bucket: list[_Part] = []
    for part in sorted(group, key=lambda part: -part.num_keys):
        if bucket:
            longest = bucket[0].num_keys
            size = (len(bucket) + 1) * longest * shape.num_kv_heads * 64
            is_near = part.num_keys * 4 >= longest * 3 or longest - part.num_keys <= 16
            if not is_near or size > _MAX_BUCKET_ELEMENTS:
                yield bucket
                bucket = []
        bucket.append(part)
    yield bucket


def _split(bucket: list[_Part], shape: PageShape) -> Iterator[list[_Part]]:
    """Cut a lone long part into equal runs of pages where that evens out the cores' load."""
    part = bucket[0]
    num_queries, page_size = len(part.rows), shape.page_size
    if (
        len(bucket) > 1
        or part.is_triangle
        or num_queries * part.num_keys < _MIN_SPLIT_WORK
        or num_queries >= 192
    ):
        yield bucket
        return
    threads = torch.get_num_threads()
    group = shape.num_heads // shape.num_kv_heads
    if _folds(num_queries, group):
        tasks = shape.num_kv_heads * -(-num_queries * group // 64)
    else:
        tasks = shape.num_heads * -(-num_queries // 32)
    pieces = 1
    while _idle_share(tasks * pieces, threads) > 0.05:
        pieces += 1
        if part.num_keys // pieces < _MIN_SPLIT_KEYS:
            yield bucket
            return
    run = part.num_keys // (pieces * page_size)  # pages in a piece
    if pieces == 1 or run == 0:
        yield bucket
        return
    cuts = [
        _Part(part.rows, part.pages[i * run : (i + 1) * run], 0, run * page_size, False)
        for i in range(pieces)
    ]
    yield cuts
    rest = part.num_keys - pieces * run * page_size
    if rest:
        yield [_Part(part.rows, part.pages[pieces * run :], 0, rest, False)]


def _folds(num_queries: int, group: int) -> bool:
    """Whether laying `group` heads' queries end to end lets the kernel take larger blocks.

    It takes 32 rows at a time below 192 and 64 from there on, which is 6 % faster; further up the
    copies cost what is gained.
    """
    return num_queries < 192 <= num_queries * group


def _idle_share(tasks: int, threads: int) -> float:
    rounds = -(-tasks // threads)
    return 1.0 - tasks / (rounds * threads)


def _make_bucket(parts: list[_Part], num_tokens: int, shape: PageShape) -> tuple[_Bucket, Longs]:
    """The bucket, and the token of each of its output rows [parts, queries] (num_tokens for
    padding)."""
    is_triangle = parts[0].is_triangle
    num_queries = max(len(part.rows) for part in parts)
    num_keys = max(part.num_keys for part in parts)
    owners = np.full((len(parts), num_queries), num_tokens, dtype=np.int64)
    rows = np.empty((len(parts), num_queries), dtype=np.int64)
    for index, part in enumerate(parts):
        count = len(part.rows)
        owners[index, :count] = part.rows
        rows[index, :count] = part.rows
        rows[index, count:] = part.rows[0]
    is_all = rows.size == num_tokens and np.array_equal(rows.reshape(-1), np.arange(num_tokens))
    lengths = np.array([part.num_keys for part in parts])
    mask = None
    if not is_triangle and lengths.min() < num_keys:
        hidden = np.arange(num_keys) >= lengths[:, None]
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))[:, None, None]
    bucket = _Bucket(
        num_parts=len(parts),
        num_queries=num_queries,
        rows=None if is_all else torch.from_numpy(rows.reshape(-1)),
        keys=_find_windows(parts, shape) or _gather(parts, lengths, shape),
        mask=mask,
        is_triangle=is_triangle,
    )
    return bucket, owners


def _find_windows(parts: list[_Part], shape: PageShape) -> _Windows | None:
    """The parts in place, if they are runs of neighbouring pages, equally long and evenly spaced.

    Runs of unequal length are not read in place: the slots behind a last key may be another's.
    """
    size = shape.page_size
    num_keys = parts[0].num_keys
    if any(part.num_keys != num_keys for part in parts):
        return None
    for part in parts:
        pages = part.pages[part.first // size : -(-(part.first + num_keys) // size)]
        if pages[-1] - pages[0] != len(pages) - 1 or (np.diff(pages) != 1).any():
            return None
    firsts = [int(part.pages[part.first // size]) * size + part.first % size for part in parts]
    steps = np.diff(firsts)
    if len(steps) and (steps[0] < 0 or (steps != steps[0]).any()):
        return None
    return _Windows(len(parts), num_keys, firsts[0], int(steps[0]) if len(steps) else 0)


def _gather(parts: list[_Part], lengths: Longs, shape: PageShape) -> _Gather:
    """Collect the parts: triangles by slot, others by whole pages."""
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
    heads = np.arange(2 * shape.num_kv_heads).reshape(2, 1, -1, 1)  # of K, then of V
    unused = None
    if lengths.min() < num_keys and not parts[0].is_triangle:
        behind = np.arange(units.shape[1] * unit) >= lengths[:, None, None]
        shape_of_keys = (2, len(parts), shape.num_kv_heads, behind.shape[2])
        unused = torch.from_numpy(np.flatnonzero(np.broadcast_to(behind, shape_of_keys)))
    return _Gather(
        num_parts=len(parts),
        num_keys=num_keys,
        rows=torch.from_numpy((heads * per_head + units[:, None]).reshape(-1)),
        unit=unit,
        unused=unused,
    )
