"""Spans of layers with a window: a token sees its last `window` keys, its own included.

A step has one list of spans. For each window that its layers have, the list is clipped once:

    window 20         0               16              32              48     pages of 16
    query at 45                                 |xxxxxxxxxxxxxxxxxxx         sees 26 to 45
    query at 50                                      |xxxxxxxxxxxxxxxxxxx    sees 31 to 50
    clipped           left out        | first keys 10 and 15

Pages in front that no query of a span sees are left out, and so are queries that see none of its
keys; spans without queries are dropped. Prompts are cut into runs of queries, so that each run
reads its own window and not that of the whole prompt. Kernels still mask keys in front: fewer than
a page (or `align_tokens`) plus the distance from the first query of a span to its last.

Nothing here needs torch.
"""

import numpy as np

from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import Int32s, Spans

# Queries of a prompt that read their keys together: a quarter of the window, within these bounds.
# Fewer would leave a kernel's tiles empty, more would read keys that most of them do not see.
LEAST_QUERIES, MOST_QUERIES = 64, 256


def clip_spans(
    spans: Spans, positions: Int32s, window: int, page_size: int, align_tokens: int | None = None
) -> Spans:
    """The spans for layers whose tokens see their last `window` keys.

    `positions` are those of the packed tokens. Spans that begin at multiples of `align_tokens` (a
    page unless given) in their sequences still do after clipping.
    """
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    lows = positions[spans.query_rows] - (window - 1)
    lows -= spans.key_positions.repeat(queries)
    if lows.max(initial=0) <= 0:
        return spans
    first_keys = np.maximum(lows, 0)
    span, queries, keys = _cut_prompts(spans, queries, lows, window)
    query_rows, is_seen = spans.query_rows, lows < keys.repeat(queries)
    if not is_seen.all():
        query_rows, first_keys = query_rows[is_seen], first_keys[is_seen]
        num_before = starts_of(is_seen.astype(np.int32))[starts_of(queries)]
        queries = num_before[1:] - num_before[:-1]
    if not queries.all():
        is_left = queries > 0
        span, queries, keys = span[is_left], queries[is_left], keys[is_left]
    query_starts = starts_of(queries)
    align = align_tokens or page_size
    unseen = np.minimum.reduceat(first_keys, query_starts[:-1]) // align * align
    first_keys -= unseen.repeat(queries)
    keys = keys - unseen
    pages = -(-keys // page_size)
    page_starts = starts_of(pages)
    first_pages = spans.page_starts[span] + unseen // page_size
    places = np.arange(page_starts[-1])  # numpy's own index type: 32-bit ones take twice the time
    places += (first_pages - page_starts[:-1]).astype(np.int64).repeat(pages)
    return Spans(
        query_starts=query_starts,
        query_rows=query_rows,
        page_starts=page_starts,
        page_ids=spans.page_ids[places],
        key_tokens=keys,
        is_causal=spans.is_causal[span],
        key_positions=spans.key_positions[span] + unseen,
        first_keys=first_keys if first_keys.any() else None,
    )


def _cut_prompts(
    spans: Spans, queries: Int32s, lows: Int32s, window: int
) -> tuple[Int32s, Int32s, Int32s]:
    """Spans cut into runs of queries: which span, how many queries, how many of its keys.

    Only causal spans are cut, and only if some of their queries do not see the first key. The
    queries of other spans share their reads.
    """
    run = min(max(window // 4, LEAST_QUERIES), MOST_QUERIES)
    all_spans = np.arange(len(spans), dtype=np.int32)
    is_cut = spans.is_causal & (queries > run)
    is_cut &= lows[spans.query_starts[1:] - 1] > 0  # of the last query, if any
    if not is_cut.any():
        return all_spans, queries, spans.key_tokens
    runs = np.where(is_cut, -(-queries // run), 1).astype(np.int32)
    span = all_spans.repeat(runs)
    left = queries[span] - ragged_arange(runs) * run  # queries from this run on
    counts = np.where(is_cut[span], np.minimum(left, run), left)
    return span, counts, spans.key_tokens[span] - (left - counts)
