"""A step's attention as spans: shared runs once for all their readers, own tokens apart."""

from collections.abc import Callable

import numpy as np

from mainstem.core.step import Bools, Int32s, Spans
from mainstem.sched.sharing import ROOT, SharingTree

# (readers, tokens) of shared runs -> which are worth a span of their own
WorthSharing = Callable[[Int32s, Int32s], Bools]


def share_all(readers: Int32s, tokens: Int32s) -> Bools:
    """Every run with two readers or more."""
    return readers >= 2


def share_none(readers: Int32s, tokens: Int32s) -> Bools:
    """Nobody shares a read (RelayAttention's comparison "vLLM-PS": stored once, read by each)."""
    return np.zeros(len(readers), np.bool_)


class SpanBuilder:
    """Makes the spans of a step from page tables and the sharing tree."""

    def __init__(self, page_size: int, worth_sharing: WorthSharing) -> None:
        self.page_size = page_size
        self._worth_sharing = worth_sharing

    def build(
        self,
        tree: SharingTree,
        slots: Int32s,
        seq_starts: Int32s,
        num_before: Int32s,
        page_table: Int32s,
    ) -> Spans:
        """`num_before` tokens of each sequence precede its tokens in this step."""
        counts = np.diff(seq_starts)
        own_first = np.zeros(len(slots), np.int32)  # page index at which the own span begins
        shared = self._shared_spans(
            tree, slots, seq_starts, num_before // self.page_size, own_first
        )
        num_keys = num_before + counts - own_first * self.page_size
        num_own_pages = -(-num_keys // self.page_size)
        rows = np.repeat(slots, num_own_pages)
        own_pages = page_table[
            rows, ragged_arange(num_own_pages) + np.repeat(own_first, num_own_pages)
        ]
        query_counts, query_rows, page_counts, pages, key_tokens = shared
        return Spans(
            query_starts=starts_of(np.concatenate([query_counts, counts])),
            query_rows=np.concatenate([query_rows, np.arange(seq_starts[-1], dtype=np.int32)]),
            page_starts=starts_of(np.concatenate([page_counts, num_own_pages])),
            page_ids=np.concatenate([*pages, own_pages]),
            key_tokens=np.concatenate([key_tokens, num_keys]).astype(np.int32),
            is_causal=np.concatenate([np.zeros(len(key_tokens), np.bool_), counts > 1]),
        )

    def _shared_spans(
        self,
        tree: SharingTree,
        slots: Int32s,
        seq_starts: Int32s,
        num_readable: Int32s,
        own_first: Int32s,
    ) -> tuple[Int32s, Int32s, Int32s, list[Int32s], Int32s]:
        """Query counts, query rows, page counts, pages and key tokens of the shared spans.

        A sequence reads a stem with others once it has computed past it: `num_readable` pages.
        Moves `own_first` behind the last run each sequence shares. A run that is not worth a span
        is read with the runs below it.
        """
        empty = np.empty(0, np.int32)
        seqs, stems = _ancestry(tree, slots, num_readable)
        if len(stems) == 0:
            return empty, empty, empty, [], empty
        order = np.argsort(stems, kind="stable")
        seqs, stems = seqs[order], stems[order]
        first = np.flatnonzero(np.r_[True, stems[1:] != stems[:-1]])
        unique = stems[first]
        readers = np.diff(np.r_[first, len(stems)]).astype(np.int32)
        ends = tree.end[unique]
        length = (ends - tree.end[tree.parent[unique]]) * self.page_size
        chosen = self._worth_sharing(readers, length) & (readers >= 2)
        begin = _nearest_chosen_end(tree, unique, chosen)

        picked = np.flatnonzero(chosen)
        if len(picked) == 0:
            return empty, empty, empty, [], empty
        members = seqs[np.repeat(chosen, readers)]
        np.maximum.at(own_first, members, np.repeat(ends[picked], readers[picked]))
        counts = np.diff(seq_starts)[members]
        rows = np.repeat(seq_starts[members], counts) + ragged_arange(counts)
        query_counts = np.add.reduceat(counts, starts_of(readers[picked])[:-1])
        page_counts = (ends - begin)[picked]
        bounds = zip(unique[picked].tolist(), begin[picked].tolist(), strict=True)
        pages = [tree.pages(stem, page) for stem, page in bounds]
        return query_counts, rows.astype(np.int32), page_counts, pages, page_counts * self.page_size


def _ancestry(tree: SharingTree, slots: Int32s, num_readable: Int32s) -> tuple[Int32s, Int32s]:
    """Every pair (sequence of the step, stem whose pages it can all read)."""
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
    """Page index after the nearest ancestor with a span of its own; 0 where there is none.

    `stems` is sorted. An ancestor of a readable stem is readable, so all ancestors are in it.
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


def starts_of(counts: Int32s) -> Int32s:
    """Exclusive prefix sums: n + 1 entries."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def ragged_arange(counts: Int32s) -> Int32s:
    """0..c-1 for each count c, one after the other."""
    starts = starts_of(counts)
    return np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
