"""Makes the spans of a step's attention: one for each shared run with all its readers, and one for
each sequence's own tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import Bools, Int32s, Spans
from mainstem.sched.sharing import ROOT, SharingTree

# (readers, tokens) of shared runs -> which runs get a span
WorthSharing = Callable[[Int32s, Int32s], Bools]


def share_all(readers: Int32s, tokens: Int32s) -> Bools:
    """Make a span of every run with two readers or more."""
    return readers >= 2


def share_none(readers: Int32s, tokens: Int32s) -> Bools:
    """Make no shared spans: each run is stored once, but every sequence reads it ("vLLM-PS" in
    RelayAttention)."""
    return np.zeros(len(readers), np.bool_)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The shared spans of a step, and where each sequence's own span begins."""

    query_counts: Int32s
    query_rows: Int32s
    page_counts: Int32s
    page_ids: Int32s
    own_first: Int32s  # [seqs] page index
    key_positions: Int32s  # position of the first key: of the shared spans, then of the own spans


@dataclass(slots=True)
class _Kept:
    """What steps have in common until a sequence starts, ends or reads further into its prompt.
    Pages are those of the last step: in the next one, a sequence has the same, or one more."""

    seen: tuple[int, bytes, bytes, bytes]
    shared: _Shared
    query_starts: Int32s
    query_rows: Int32s
    is_causal: Bools
    num_pages: Int32s  # [seqs] of own spans
    page_starts: Int32s
    page_ids: Int32s


class SpanBuilder:
    """Makes the spans of a step from page tables and the sharing tree.

    From one decode step to the next only own spans grow. Everything else is kept until a sequence
    starts, ends or reads further into its prompt.
    """

    def __init__(
        self,
        page_size: int,
        worth_sharing: WorthSharing,
        max_levels: int | None = None,
        align_tokens: int | None = None,
    ) -> None:
        """`max_levels` limits how many shared spans one sequence may read; those nearest the root
        are kept. Spans begin at multiples of `align_tokens` in their sequences (a page unless
        given)."""
        self.page_size = page_size
        self._align_pages = 1 if align_tokens is None else align_tokens // page_size
        self._max_levels = max_levels
        self._worth_sharing = worth_sharing
        self._kept: _Kept | None = None

    def build(
        self,
        tree: SharingTree,
        slots: Int32s,
        seq_starts: Int32s,
        num_before: Int32s,
        page_table: Int32s,
    ) -> Spans:
        """Return the spans. `num_before` tokens of each sequence precede its tokens in this
        step."""
        num_readable = np.minimum(num_before // self.page_size, tree.end.take(tree.stems_of(slots)))
        seen = (tree.version, slots.tobytes(), seq_starts.tobytes(), num_readable.tobytes())
        kept = self._kept
        if kept is None or kept.seen != seen:
            shared = self._share(tree, slots, seq_starts, num_readable)
            self._kept = kept = _without_pages(seen, shared, seq_starts)
        own_first = kept.shared.own_first
        num_keys = num_before + (seq_starts[1:] - seq_starts[:-1]) - own_first * self.page_size
        _read_pages(kept, -(-num_keys // self.page_size), slots, page_table)
        shared_keys = kept.shared.page_counts * self.page_size
        return Spans(
            kept.query_starts, kept.query_rows, kept.page_starts, kept.page_ids,
            key_tokens=np.concatenate([shared_keys, num_keys]),
            is_causal=kept.is_causal,
            key_positions=kept.shared.key_positions,
        )  # fmt: skip

    def _share(
        self, tree: SharingTree, slots: Int32s, seq_starts: Int32s, num_readable: Int32s
    ) -> _Shared:
        """Choose which runs get a span.

        A sequence reads a stem together with others once all pages of the stem are among its first
        `num_readable`, which are computed. A run without a span is read as part of the runs below
        it.
        """
        empty = np.empty(0, np.int32)
        own_first = np.zeros(len(slots), np.int32)
        nothing = _Shared(empty, empty, empty, empty, own_first, own_first)
        seqs, stems = _ancestry(tree, slots, num_readable)
        if len(stems) == 0:
            return nothing
        order = np.argsort(stems, kind="stable")
        seqs, stems = seqs[order], stems[order]
        first = np.flatnonzero(np.r_[True, stems[1:] != stems[:-1]])
        unique = stems[first]
        readers = np.diff(np.r_[first, len(stems)]).astype(np.int32)
        ends = self._aligned(tree.end[unique])
        length = (ends - self._aligned(tree.end[tree.parent[unique]])) * self.page_size
        chosen = self._worth_sharing(readers, length) & (readers >= 2)
        if self._max_levels is not None:
            chosen &= _num_chosen_above(tree, unique, chosen) < self._max_levels
        if not chosen.any():
            return nothing
        begin = self._aligned(_nearest_chosen_end(tree, unique, chosen))
        chosen &= begin < ends  # nothing is left of a run that is shorter than the alignment
        if not chosen.any():
            return nothing
        begin = begin[chosen]
        members = seqs[np.repeat(chosen, readers)]
        unique, ends, readers = unique[chosen], ends[chosen], readers[chosen]
        np.maximum.at(own_first, members, np.repeat(ends, readers))
        counts = np.diff(seq_starts)[members]
        bounds = zip(unique.tolist(), begin.tolist(), (ends - begin).tolist(), strict=True)
        return _Shared(
            query_counts=np.add.reduceat(counts, starts_of(readers)[:-1]),
            query_rows=np.repeat(seq_starts[members], counts) + ragged_arange(counts),
            page_counts=ends - begin,
            page_ids=np.concatenate(
                [tree.pages(stem, page)[:count] for stem, page, count in bounds]
            ),
            own_first=own_first,
            key_positions=np.concatenate([begin, own_first]) * np.int32(self.page_size),
        )

    def _aligned(self, pages: Int32s) -> Int32s:
        return pages // self._align_pages * self._align_pages


def _without_pages(
    seen: tuple[int, bytes, bytes, bytes], shared: _Shared, seq_starts: Int32s
) -> _Kept:
    counts = seq_starts[1:] - seq_starts[:-1]
    own_rows = np.arange(seq_starts[-1], dtype=np.int32)
    is_causal = np.zeros(len(shared.query_counts) + len(counts), np.bool_)
    is_causal[len(shared.query_counts) :] = counts > 1
    none = np.zeros_like(counts)
    return _Kept(
        seen, shared,
        query_starts=starts_of(np.concatenate([shared.query_counts, counts])),
        query_rows=np.concatenate([shared.query_rows, own_rows]),
        is_causal=is_causal,
        num_pages=none,
        page_starts=starts_of(np.concatenate([shared.page_counts, none])),
        page_ids=shared.page_ids,
    )  # fmt: skip


def _read_pages(kept: _Kept, num_pages: Int32s, slots: Int32s, page_table: Int32s) -> None:
    """Give each own span its first `num_pages` pages. Most steps add a page to a few spans, or to
    none."""
    added = num_pages - kept.num_pages
    grown = added.nonzero()[0]
    if len(grown) == 0:
        return
    if (added[grown] == 1).all():
        last = kept.shared.own_first[grown] + num_pages[grown] - 1
        at = kept.page_starts[len(kept.shared.page_counts) + 1 :][grown]
        kept.page_ids = np.insert(kept.page_ids, at, page_table[slots[grown], last])
    else:
        offsets = ragged_arange(num_pages) + kept.shared.own_first.repeat(num_pages)
        own_pages = page_table[slots.repeat(num_pages), offsets]
        kept.page_ids = np.concatenate([kept.shared.page_ids, own_pages])
    kept.num_pages = num_pages
    kept.page_starts = starts_of(np.concatenate([kept.shared.page_counts, num_pages]))


def _ancestry(tree: SharingTree, slots: Int32s, num_readable: Int32s) -> tuple[Int32s, Int32s]:
    """Return every pair (sequence of the step, stem of which it can read all pages)."""
    seqs = np.arange(len(slots), dtype=np.int32)
    stems = tree.stems_of(slots)
    all_seqs: list[Int32s] = []
    all_stems: list[Int32s] = []
    while True:
        inside = stems != ROOT
        if not inside.all():
            seqs, stems = seqs[inside], stems[inside]
        if len(seqs) == 0:
            break
        readable = tree.end[stems] <= num_readable[seqs]
        all_seqs.append(seqs[readable])
        all_stems.append(stems[readable])
        stems = tree.parent[stems]
    if not all_seqs:
        empty = np.empty(0, np.int32)
        return empty, empty
    return np.concatenate(all_seqs), np.concatenate(all_stems)


def _nearest_chosen_end(tree: SharingTree, stems: Int32s, chosen: Bools) -> Int32s:
    """Return the page index after the nearest ancestor with a span; 0 if there is none.

    `stems` is sorted. An ancestor of a readable stem is readable, so `stems` has all ancestors.
    """
    begin = np.zeros(len(stems), np.int32)
    undecided = np.arange(len(stems))
    above = tree.parent[stems]
    while len(undecided):
        inside = above != ROOT
        undecided, above = undecided[inside], above[inside]
        place = np.searchsorted(stems, above)
        found = chosen[place]
        begin[undecided[found]] = tree.end[above[found]]
        undecided, above = undecided[~found], tree.parent[above[~found]]
    return begin


def _num_chosen_above(tree: SharingTree, stems: Int32s, chosen: Bools) -> Int32s:
    """Return how many ancestors of each of the sorted `stems` are chosen."""
    count = np.zeros(len(stems), np.int32)
    place, above = np.arange(len(stems)), tree.parent[stems]
    while len(place):
        inside = above != ROOT
        place, above = place[inside], above[inside]
        count[place] += chosen[np.searchsorted(stems, above)]
        above = tree.parent[above]
    return count
