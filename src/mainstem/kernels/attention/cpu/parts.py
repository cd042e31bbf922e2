"""Spans -> parts -> groups of parts that run as one kernel call (see attention.py)."""

from collections.abc import Iterator

import numpy as np
import torch

from mainstem.core.step import Spans
from mainstem.kernels.attention.cpu.keys import KeyPart, Longs, PageShape, find_windows

_MAX_BUCKET_ELEMENTS = 1 << 22  # of gathered keys, or of a mask: 16 MB in fp32
_MAX_PADDED_QUERIES = 16  # with this many queries or more, only parts of equal length are batched
_CALL_SLOTS = 256  # gathering this many slots takes as long as one more kernel call
_TRIANGLE = 128  # queries in a piece of a long causal span
_MAX_PIECED_PAST = 2048  # with more past keys, cutting a part costs more than it saves
_MIN_SPLIT_KEYS = 256  # with shorter pieces, the merge costs more than a second core saves
_MIN_SPLIT_WORK = 1 << 16  # queries x keys below which nothing is worth splitting


def cut_parts(spans: Spans, page_size: int) -> Iterator[KeyPart]:
    """Cut causal spans into past and triangle, unless some query does not see the first key. Parts
    without keys or queries are left out."""
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
        if spans.first_keys is not None:
            firsts = spans.first_keys[query_starts[index] : query_starts[index + 1]]
            if firsts.any():
                hidden = np.arange(num_queries)[::-1] if is_causal else np.zeros(num_queries, int)
                seen = np.stack((firsts, num_keys - hidden), axis=1).astype(np.int64)
                count = max(1, _MAX_BUCKET_ELEMENTS // num_keys)  # the mask has a cell for each key
                for i in range(0, num_queries, count):
                    some = slice(i, i + count)
                    yield KeyPart(rows[some], pages, 0, num_keys, False, seen[some])
                continue
        if not is_causal or num_queries == 1:
            yield KeyPart(rows, pages, 0, num_keys, False)
            continue
        past = num_keys - num_queries
        assert past >= 0, "a causal span has more queries than keys"
        for piece in _pieces(rows, past):
            if past:
                yield KeyPart(piece, pages, 0, past, False)
            yield KeyPart(piece, pages, past, len(piece), True)
            past += len(piece)


def _pieces(rows: Longs, past: int) -> list[Longs]:
    """Return the query rows of each piece of a causal span. A long span is cut, because the kernel
    computes a triangle of up to 512 queries as a square, at twice the cost."""
    if len(rows) < 2 * _TRIANGLE or past > _MAX_PIECED_PAST:
        return [rows]
    return [rows[i : i + _TRIANGLE] for i in range(0, len(rows), _TRIANGLE)]


def group_parts(parts: list[KeyPart], shape: PageShape) -> Iterator[list[KeyPart]]:
    """Group parts that run well together: of the same kind, with similar numbers of keys and,
    except triangles, with the same number of queries."""
    groups: dict[tuple[bool, bool, int, int], list[KeyPart]] = {}
    for part in parts:
        num_queries = len(part.rows)
        is_padded = part.is_triangle or num_queries < _MAX_PADDED_QUERIES
        key = (
            part.is_triangle,
            part.seen is not None,
            0 if part.is_triangle else num_queries,
            0 if is_padded else part.num_keys,
        )
        groups.setdefault(key, []).append(part)
    for group in groups.values():
        for bucket in _in_place(group, shape) or _of_like_length(group, shape):
            if group[0].seen is None:
                yield from _split(bucket, shape)
            else:
                yield from _few_at_once(bucket)


def _few_at_once(bucket: list[KeyPart]) -> Iterator[list[KeyPart]]:
    """Split a bucket so that the mask of each piece has a bounded size."""
    cells = len(bucket[0].rows) * bucket[0].num_keys  # mask cells of the longest part
    count = max(1, _MAX_BUCKET_ELEMENTS // cells)
    for first in range(0, len(bucket), count):
        yield bucket[first : first + count]


def _in_place(group: list[KeyPart], shape: PageShape) -> list[list[KeyPart]]:
    """Group parts by length; return no groups unless all parts can be read in place and that is
    worth the extra calls."""
    by_length: dict[int, list[KeyPart]] = {}
    for part in group:
        by_length.setdefault(part.num_keys, []).append(part)
    buckets = list(by_length.values())
    is_worth = (len(buckets) - 1) * _CALL_SLOTS <= sum(part.num_keys for part in group)
    return buckets if is_worth and all(find_windows(b, shape) for b in buckets) else []


def _of_like_length(group: list[KeyPart], shape: PageShape) -> Iterator[list[KeyPart]]:
    """Group parts whose numbers of keys differ by at most a quarter, or by 16. A group has at most
    as many parts as may be gathered at once."""
    bucket: list[KeyPart] = []
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


def _split(bucket: list[KeyPart], shape: PageShape) -> Iterator[list[KeyPart]]:
    """Cut a single long part into equal runs of pages if that balances the load of the cores."""
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
    if folds(num_queries, group):
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
        KeyPart(part.rows, part.pages[i * run : (i + 1) * run], 0, run * page_size, False)
        for i in range(pieces)
    ]
    yield cuts
    rest = part.num_keys - pieces * run * page_size
    if rest:
        yield [KeyPart(part.rows, part.pages[pieces * run :], 0, rest, False)]


def folds(num_queries: int, group: int) -> bool:
    """Whether the kernel takes larger blocks if the queries of `group` heads lie end to end.

    The kernel takes 32 rows at a time if there are fewer than 192, 64 from 192 rows on (6 %
    faster), and 256 from 768 rows on.
    """
    return group > 1 and num_queries * group >= 192


def _idle_share(tasks: int, threads: int) -> float:
    rounds = -(-tasks // threads)
    return 1.0 - tasks / (rounds * threads)
