"""The same attention with fewer Partials: each sequence reads shared runs again.

A token that lies in one span needs no Partial. If a step has more Partials than there is room for,
the shared runs of a sequence are joined with its own run:

    plain  rows 0 1 2 3    pages A B
    causal rows 0 1        pages C        ->   causal rows 0 1    pages A B C
    causal rows 2 3        pages D             causal rows 2 3    pages A B D

Runs are joined in the order of their positions, and each before the last must fill its pages. With
windows the rows' first keys are those of the first run: a row that sees some of it sees all that
follows.
"""

import numpy as np

from mainstem.core.step import Int32s, Spans


def unshare(spans: Spans, page_size: int, least_queries: int) -> Spans:
    """Join the runs above every span that is the last of its tokens and has at least
    `least_queries` of them.

    Tokens whose spans cannot be joined keep them. Slow, but rarely needed.
    """
    starts = spans.query_starts.tolist()
    span_of = np.repeat(np.arange(len(spans)), np.diff(spans.query_starts))
    by_token = np.lexsort((spans.key_positions[span_of], spans.query_rows))
    tokens = spans.query_rows[by_token]
    begins = np.flatnonzero(np.r_[True, tokens[1:] != tokens[:-1]]) if len(tokens) else tokens
    above = {
        int(tokens[begin]): tuple(span_of[by_token[begin:end]].tolist())
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True)
    }
    num_pages = np.diff(spans.page_starts)
    is_full = ~spans.is_causal & (spans.key_tokens == num_pages * page_size)
    joined: dict[int, tuple[int, ...]] = {}
    for last in range(len(spans)):
        rows = spans.query_rows[starts[last] : starts[last + 1]].tolist()
        if len(rows) < least_queries:
            continue
        runs = above[rows[0]]
        if (
            runs[-1] == last
            and all(above[row] == runs for row in rows)
            and is_full[list(runs[:-1])].all()
        ):
            joined[last] = runs
    is_left = np.array([above[row][-1] not in joined for row in spans.query_rows.tolist()])
    return _rebuilt(spans, joined, is_left)


def _rebuilt(spans: Spans, joined: dict[int, tuple[int, ...]], is_left: np.ndarray) -> Spans:
    """The spans that are not joined, with the rows left in them, and the joined spans."""
    rows, pages, keys, is_causal, positions, first_keys = [], [], [], [], [], []
    for span in range(len(spans)):
        chosen = slice(spans.query_starts[span], spans.query_starts[span + 1])
        queries, runs = spans.query_rows[chosen], joined.get(span)
        if runs is None:
            queries, runs = queries[is_left[chosen]], (span,)
        if not len(queries):
            continue
        rows.append(queries)
        pages += [spans.page_ids[spans.page_starts[r] : spans.page_starts[r + 1]] for r in runs]
        keys.append((sum(map(len, pages[-len(runs) :])), int(spans.key_tokens[list(runs)].sum())))
        is_causal.append(bool(spans.is_causal[span]))
        positions.append(spans.key_positions[runs[0]])
        first_keys.append(_first_keys(spans, runs[0], queries))
    counts = np.array(keys, np.int32).reshape(-1, 2)
    return Spans(
        query_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        query_rows=np.concatenate(rows) if rows else spans.query_rows,
        page_starts=np.concatenate(([0], np.cumsum(counts[:, 0]))).astype(np.int32),
        page_ids=np.concatenate(pages) if pages else spans.page_ids,
        key_tokens=counts[:, 1].copy(),
        is_causal=np.array(is_causal, np.bool_),
        key_positions=np.array(positions, np.int32),
        first_keys=None
        if spans.first_keys is None
        else np.concatenate([*first_keys, spans.first_keys[:0]]),
    )


def _first_keys(spans: Spans, span: int, rows: Int32s) -> Int32s:
    """Of some of the rows of a span."""
    if spans.first_keys is None:
        return rows[:0]
    chosen = slice(spans.query_starts[span], spans.query_starts[span + 1])
    order = np.argsort(spans.query_rows[chosen])
    places = np.searchsorted(spans.query_rows[chosen], rows, sorter=order)
    return spans.first_keys[chosen][order[places]]
