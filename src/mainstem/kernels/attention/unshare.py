"""The same attention with fewer Partials: each sequence reads shared runs again.

A token that lies in one uncut span needs no Partial. If a step has more Partials than there is room
for, the shared runs of a sequence are joined with its own run:

    plain  rows 0 1 2 3    pages A B
    causal rows 0 1        pages C        ->   causal rows 0 1    pages A B C
    causal rows 2 3        pages D             causal rows 2 3    pages A B D

Runs are joined in the order of their positions, and each before the last must fill its pages. With
windows a row keeps its first key in the first run, since a row that sees some of that run sees all
keys after it.
"""

import numpy as np

from mainstem.core.ragged import starts_of
from mainstem.core.step import Spans


def unshare(spans: Spans, page_size: int, least_queries: int) -> Spans:
    """Join each span of at least `least_queries` tokens with the runs before it, if it is the last
    span of all its tokens and the runs before it are the same for all of them.

    Spans that cannot be joined stay as they are. Slow, but rarely needed.
    """
    rows_of = [rows.tolist() for rows in np.split(spans.query_rows, spans.query_starts[1:-1])]
    runs_of: dict[int, list[int]] = {}  # the spans of a token, by position
    for span in spans.key_positions.argsort(kind="stable").tolist():
        for row in rows_of[span]:
            runs_of.setdefault(row, []).append(span)
    is_full = ~spans.is_causal & (spans.key_tokens == np.diff(spans.page_starts) * page_size)
    joined: dict[int, list[int]] = {}  # last span -> all spans that are joined, itself included
    for span in range(len(spans)):
        if len(rows_of[span]) >= least_queries:
            runs = runs_of[rows_of[span][0]]
            have_same = runs[-1] == span and all(runs_of[row] == runs for row in rows_of[span])
            if have_same and is_full[runs[:-1]].all():
                joined[span] = runs
    made = []
    for span in range(len(spans)):
        rows = rows_of[span]
        if span not in joined:
            rows = [row for row in rows if runs_of[row][-1] not in joined]
        if rows:
            made.append((joined.get(span, [span]), rows))
    return _joined(spans, made)


def _joined(spans: Spans, made: list[tuple[list[int], list[int]]]) -> Spans:
    """New spans: each has the keys of some spans and some rows."""
    pages_of = np.split(spans.page_ids, spans.page_starts[1:-1])
    pages = [np.concatenate([pages_of[run] for run in runs]) for runs, _ in made]
    first_keys = None
    if spans.first_keys is not None:
        span_of = np.arange(len(spans)).repeat(np.diff(spans.query_starts)).tolist()
        places = zip(span_of, spans.query_rows.tolist(), strict=True)
        first_key = dict(zip(places, spans.first_keys.tolist(), strict=True))
        keys = [first_key[runs[0], row] for runs, rows in made for row in rows]
        first_keys = np.array(keys, np.int32)
    return Spans(
        query_starts=starts_of(np.array([len(rows) for _, rows in made], np.int32)),
        query_rows=np.array([row for _, rows in made for row in rows], np.int32),
        page_starts=starts_of(np.array(list(map(len, pages)), np.int32)),
        page_ids=np.concatenate([*pages, spans.page_ids[:0]]),
        key_tokens=np.array([spans.key_tokens[runs].sum() for runs, _ in made], np.int32),
        is_causal=spans.is_causal[[runs[-1] for runs, _ in made]],
        key_positions=spans.key_positions[[runs[0] for runs, _ in made]],
        first_keys=first_keys,
    )
