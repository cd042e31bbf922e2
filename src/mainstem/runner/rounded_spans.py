"""A step's spans where full pages are rounded: a token reads its own page as it was computed, and
every page before it rounded.

    prompt's chunk            page 0   page 1   page 2   page 3       r: rounded, o: open
      tokens of page 1          r        o
      tokens of page 2          r        r        o
      tokens of page 3          r        r        r        o

So a token reads the same numbers whether its prompt is computed at once, in chunks, token by token,
or after a part of it was found in a cache. The triangle of rounded pages is read in squares: the
later half of a chunk's pages reads the earlier half, and so on in each half.

    r                square of 1 page
    r r              square of 2 pages: tokens of pages 3 and 4 read pages 1 and 2
    r r r            square of 1 page
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import Int32s, Int64s, Spans


@dataclass(frozen=True, slots=True)
class OpenPages:
    """The pages that a step writes to, in the order of its tokens."""

    pages: Int32s
    seq_slots: Int32s
    first_offsets: Int32s  # where the step's tokens begin; earlier steps wrote those before
    end_offsets: Int32s
    of_token: Int32s  # [tokens] the place of each token's page in these lists


def open_pages(
    write_slots: Int64s, seq_slots: Int32s, seq_starts: Int32s, page_size: int
) -> OpenPages:
    """Find the pages that a step writes to. Tokens of a sequence are neighbours."""
    pages, offsets = np.divmod(write_slots, page_size)
    is_first = np.ones(len(pages), np.bool_)
    is_first[1:] = pages[1:] != pages[:-1]
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(pages)) - 1
    slots = seq_slots.repeat(seq_starts[1:] - seq_starts[:-1])
    return OpenPages(
        pages=pages[firsts].astype(np.int32),
        seq_slots=slots[firsts],
        first_offsets=offsets[firsts].astype(np.int32),
        end_offsets=(offsets[lasts] + 1).astype(np.int32),
        of_token=(is_first.cumsum() - 1).astype(np.int32),
    )


class _Blocks(NamedTuple):
    """Parts of spans: some of their rows with some of their keys."""

    span: Int32s
    first_row: Int32s  # of query_rows
    num_rows: Int32s
    first_key: Int32s
    num_keys: Int32s


def split_spans(
    spans: Spans, positions: Int32s, opened: OpenPages, page_size: int, num_pages: int
) -> Spans:
    """The same attention, each span over rounded pages or over one open page. Open page number i
    (of `opened`) gets the id `num_pages` + i."""
    assert spans.first_keys is None, "windows are clipped after pages are told apart"
    span_of = np.arange(len(spans), dtype=np.int32).repeat(np.diff(spans.query_starts))
    own = positions[spans.query_rows] // page_size * page_size  # where each token's page begins
    own -= spans.key_positions[span_of]
    rounded = np.minimum(own, spans.key_tokens[span_of])  # keys that each token reads rounded
    whole = _whole_rows(spans, rounded)
    squares = _squares(spans, rounded)
    last = _own_pages(spans, span_of, own)
    columns = zip(whole, squares, last, strict=True)
    blocks = _Blocks(*(np.concatenate(each).astype(np.int32) for each in columns))
    num_plain = len(whole.span) + len(squares.span)
    pages = -(-blocks.num_keys // page_size)
    places = ragged_arange(pages) + (
        spans.page_starts[blocks.span] + blocks.first_key // page_size
    ).repeat(pages)
    ids = spans.page_ids[places]
    if len(last.span):
        ids[-len(last.span) :] = num_pages + opened.of_token[spans.query_rows[last.first_row]]
    rows = ragged_arange(blocks.num_rows) + blocks.first_row.repeat(blocks.num_rows)
    is_open = np.arange(len(blocks.span)) >= num_plain
    return Spans(
        query_starts=starts_of(blocks.num_rows),
        query_rows=spans.query_rows[rows],
        page_starts=starts_of(pages),
        page_ids=ids,
        key_tokens=blocks.num_keys,
        is_causal=is_open & (blocks.num_rows > 1),
        key_positions=spans.key_positions[blocks.span] + blocks.first_key,
    )


def _whole_rows(spans: Spans, rounded: Int32s) -> _Blocks:
    """All rows of each span with the rounded pages that all of them read."""
    num_keys = np.minimum.reduceat(rounded, spans.query_starts[:-1])
    num_rows = np.diff(spans.query_starts)
    span = np.flatnonzero(num_keys > 0).astype(np.int32)
    no_keys = np.zeros(len(span), np.int32)
    return _Blocks(span, spans.query_starts[span], num_rows[span], no_keys, num_keys[span])


def _squares(spans: Spans, rounded: Int32s) -> _Blocks:
    """The other rounded pages of spans whose rows are in several pages."""
    most = np.maximum.reduceat(rounded, spans.query_starts[:-1])
    least = np.minimum.reduceat(rounded, spans.query_starts[:-1])
    found: list[tuple[int, int, int, int, int]] = []
    for span in np.flatnonzero(most > least).tolist():
        first, end = spans.query_starts[span : span + 2].tolist()
        keys, starts = np.unique(rounded[first:end], return_index=True)
        assert (np.diff(rounded[first:end]) >= 0).all(), "rows of a span are out of order"
        for low, middle, high in _halves(0, len(keys)):
            row = first + int(starts[middle])
            last = first + int(starts[high]) if high < len(keys) else end
            num_keys = int(keys[middle] - keys[low])
            found.append((span, row, last - row, int(keys[low]), num_keys))
    return _Blocks(*np.array(found, np.int32).reshape(-1, 5).T)


def _halves(low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Halve a range again and again; the first half has a power of two."""
    if high - low < 2:
        return
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    yield low, middle, high
    yield from _halves(low, middle)
    yield from _halves(middle, high)


def _own_pages(spans: Spans, span_of: Int32s, own: Int32s) -> _Blocks:
    """The rows of each page that is written, with the keys of this page."""
    entries = np.flatnonzero(own < spans.key_tokens[span_of]).astype(np.int32)
    span, start = span_of[entries], own[entries]
    is_first = np.ones(len(entries), np.bool_)
    is_first[1:] = (span[1:] != span[:-1]) | (start[1:] != start[:-1])
    firsts = np.flatnonzero(is_first)
    ends = np.append(firsts[1:], len(entries)).astype(np.int32)
    span, start = span[firsts], start[firsts]
    # the last row of a causal span sees all keys, the row before it one less
    hidden = spans.query_starts[span + 1] - 1 - entries[ends - 1]
    seen = spans.key_tokens[span] - hidden * spans.is_causal[span]
    return _Blocks(span, entries[firsts], ends - firsts, start, seen - start)
