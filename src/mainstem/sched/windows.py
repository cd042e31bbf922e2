"""Windows of running sequences: the windowed parts of pages that each needs (kv/parts.py).

    pages     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
    computed  |---------------------------|  ........ this step's chunk
    needed                | 3 | 4 | 5 | 6 | 7 | 8 |    part_first 3, part_end 9

Before a step, a sequence gets parts for the pages that the step fills. When the step is made, it no
longer needs those that its last window has passed. A window counts from the last full page, so that
a sequence that continues there finds it whole.

Windows are kept where somebody may continue: where a sequence started on cached pages, at the end
of a prompt and of a turn, at boundaries that the request names, and where prompts part.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.ragged import ragged_arange
from mainstem.core.step import Int32s, StepId
from mainstem.kv.finder import Match
from mainstem.kv.keys import PageChain
from mainstem.kv.parts import END, FORK, WindowParts
from mainstem.sched.sequence import Sequence
from mainstem.sched.sharing import SharingTree
from mainstem.sched.table import SeqTable

RESERVE_SHARE = 8  # up to 1/8 of all places stays free for prompts that are being computed


class SequenceWindows:
    """Which windowed parts running sequences need, and which windows are worth keeping."""

    def __init__(
        self,
        parts: WindowParts,
        table: SeqTable,
        page_size: int,
        unfinished: Callable[[], list[Sequence]],
    ) -> None:
        """`unfinished` returns the running sequences whose prompts are being computed."""
        self._parts = parts
        self._table = table
        self._page_size = page_size
        self._unfinished = unfinished
        # ends of windows to keep, in tokens, of prompts that are being computed; and their rank
        self._marks: dict[Sequence, dict[int, int]] = {}
        self._for_step: list[Int32s] = []  # pages that the step being made copies or moves
        self._to_come = 0  # parts that running sequences will take, by the forecast
        self._is_alone = True

    # --- may it start? --------------------------------------------------------------------------

    def hold(self, match: Match) -> None:
        """Need the last window of a match, whose pages were leased, until `release` or `start`."""
        self._parts.need(self._window(match.pages))

    def release(self, match: Match) -> None:
        self._parts.end(self._window(match.pages))

    def _window(self, pages: Int32s) -> Int32s:
        return pages[self._parts.first(len(pages)) :]

    def forecast(self, slots: Int32s, tree: SharingTree) -> None:
        """Note which sequences run before others may start, and what they share."""
        table, page_size = self._table, self._page_size
        tokens = table.expect_remaining(slots, at_least=page_size)
        tokens += table.total[slots] - table.computed[slots]
        begins = np.maximum(table.part_first[slots], tree.shared_ends(slots))
        own = np.maximum(table.part_end[slots] - begins, 0)
        grown = np.minimum(own + tokens // page_size + 1, self._parts.span + 2)
        self._to_come = int(np.maximum(grown - own, 0).sum())
        self._is_alone = not len(slots)

    def may_start(self, num_new: int, to_come: int, budget: int) -> bool:
        """Whether a sequence, whose match is held, may start: it takes `num_new` pages, and will
        probably produce `to_come` tokens. `budget` prompt tokens are left for the step."""
        parts = self._parts
        if self._is_alone:
            return parts.num_available >= 1
        reserve = min(-(-budget // self._page_size), parts.num_parts // RESERVE_SHARE)
        own = self._most(num_new + to_come // self._page_size + 1)
        return own + self._to_come + reserve <= parts.num_available

    def has_room(self, num_windows: int) -> bool:
        """Whether the windows of `num_windows` sequences that are loaded before their turn would
        stay, beside those of running sequences."""
        num_parts = num_windows * (self._parts.span + 2)
        return num_parts + self._to_come <= self._parts.num_available

    def _most(self, num_pages: int) -> int:
        """The parts that a sequence needs at most, if it fills `num_pages` pages."""
        return min(num_pages, self._parts.span + 2)

    # --- pages of a sequence --------------------------------------------------------------------

    def can_fill(self, num_pages: int, sources: Int32s) -> bool:
        """Whether a sequence that is about to start can have parts for `num_pages` pages, and one
        for the page that it fills next, while the step reads the parts of `sources`."""
        parts = self._parts
        if not parts.has(sources).all():
            return False
        num_held = int(np.count_nonzero(parts.needers[sources] == 0))
        return num_held + num_pages + 1 <= parts.num_available

    def usable_moves(self, cached: Int32s, sources: Int32s) -> int:
        """How many of the pages `sources` may be moved to follow `cached`: up to where a sequence
        can continue, and as many as there are parts for."""
        count = self._parts.deepest(np.concatenate([cached, sources])) - len(cached)
        while count > 0:
            begin = max(self._parts.first(len(cached) + count) - len(cached), 0)
            if self.can_fill(count - begin, np.unique(sources[begin:count])):
                return count
            count = self._parts.deepest(np.concatenate([cached, sources[: count - 1]]))
            count -= len(cached)
        return 0

    def start(self, slot: SeqSlot, match: Match, num_moved: int, sources: Int32s) -> None:
        """A sequence starts with the pages of a match, which is held. The step moves pages to its
        next `num_moved` pages from `sources`, or copies the first tokens of the source."""
        table, parts = self._table, self._parts
        num_cached = len(match.pages)
        is_copy = not num_moved and len(sources) > 0
        end = num_cached + num_moved + is_copy
        first = parts.first(num_cached + num_moved)
        pages = table.page_table[slot]
        before = parts.first(num_cached)
        used = np.unique(sources[max(first - num_cached, 0) :])
        parts.need(used)
        self._for_step.append(used)
        parts.need(pages[max(first, num_cached) : end])
        parts.note_start(pages[before:num_cached])
        parts.end(pages[before : max(before, min(first, num_cached))])
        table.part_first[slot], table.part_end[slot] = first, end
        self._to_come += self._most(int(table.num_pages[slot]) - num_cached + 1)
        self._is_alone = False

    def plan(self, sequence: Sequence, coming: Iterable[Sequence], planned: Iterable[int]) -> None:
        """Keep the windows of a prompt that has started at its end, at the boundaries that its
        request names, at `planned` positions, and where sequences that are `coming` part from
        it."""
        request = sequence.request
        num_known = len(request.prompt_ids) + len(sequence.output_ids)
        last = len(request.prompt_ids) - 1
        ends = [last, num_known - 1, *request.boundaries]
        forks = [request.keep_tokens, *planned]
        forks += {self._parting(sequence, other) for other in coming}
        marks = dict.fromkeys(ends, END) | dict.fromkeys(forks, FORK)
        self._marks[sequence] = {
            position: rank
            for position, rank in marks.items()
            if self._page_size <= position < num_known
        }

    def meet(self, arrived: Sequence) -> None:
        """A sequence was queued: keep the windows where it parts from prompts in progress."""
        for other in self._unfinished():
            if other in self._marks:
                self._marks[other][self._parting(other, arrived)] = FORK

    def _parting(self, sequence: Sequence, other: Sequence) -> int:
        """A position in the page in which two prompts part; 0: they share no page."""
        if sequence.chain is None or other.chain is None or sequence is other:
            return 0
        num_equal = _num_equal(sequence.chain, other.chain)
        most = len(sequence.chain.token_ids) - 1
        return min((num_equal + 1) * self._page_size - 1, most) if num_equal else 0

    def room(self, slot: SeqSlot) -> int:
        """How many tokens a sequence may have after the step, counted from its first."""
        return (int(self._table.part_end[slot]) + self._parts.num_available) * self._page_size

    def extend(self, slot: SeqSlot, num_tokens: int) -> None:
        """Get parts for a sequence's pages up to `num_tokens`, at most `room`."""
        begin, end = int(self._table.part_end[slot]), -(-num_tokens // self._page_size)
        if end > begin:
            self._parts.need(self._table.page_table[slot, begin:end])
            self._table.part_end[slot] = end

    def extend_decodes(self, slots: Int32s, pages: Int32s) -> None:
        """Get parts for new pages, one for each of these slots; raises OutOfPages."""
        self._parts.need(pages)
        self._table.part_end[slots] += 1

    # --- steps ----------------------------------------------------------------------------------

    def made(self, step_id: StepId, slots: Int32s) -> None:
        """A step was made, and `computed` counts its tokens: its sequences, in `slots`, no longer
        need what their windows have passed."""
        table, parts = self._table, self._parts
        parts.made(step_id)
        for pages in self._for_step:
            parts.end(pages)
        self._for_step.clear()
        if self._marks:
            self._keep_marked()
        first = np.maximum(table.computed[slots] // self._page_size - parts.span, 0)
        is_past = first > table.part_first[slots]
        if not is_past.any():
            return
        slots, first = slots[is_past], first[is_past]
        begins = table.part_first[slots]
        counts = first - begins
        columns = begins.repeat(counts) + ragged_arange(counts)
        parts.end(table.page_table[slots.repeat(counts), columns])
        table.part_first[slots] = first

    def _keep_marked(self) -> None:
        """Keep the windows that prompts have filled by now."""
        table, page_size = self._table, self._page_size
        for sequence, marks in list(self._marks.items()):
            slot = sequence.slot
            assert slot is not None
            computed = int(table.computed[slot])
            for mark in [mark for mark in marks if mark < computed]:
                first = max(self._parts.first(mark // page_size), int(table.part_first[slot]))
                pages = table.page_table[slot, first : mark // page_size + 1]
                self._parts.keep(pages, marks.pop(mark))
            if not marks or computed >= table.prefill_end[slot]:
                del self._marks[sequence]

    def leave(self, slot: SeqSlot) -> None:
        """A sequence leaves; its pages are still its own."""
        table = self._table
        self._marks.pop(table.sequence(slot), None)
        first, end = int(table.part_first[slot]), int(table.part_end[slot])
        pages = table.page_table[slot, first:end]
        self._parts.keep(pages[: int(table.computed[slot]) // self._page_size + 1 - first])
        self._parts.end(pages)
        table.part_first[slot] = table.part_end[slot] = 0

    def clear(self) -> None:
        """After a failed step; the store counts again."""
        self._marks.clear()
        self._for_step.clear()

    def check(self, slots: Int32s) -> None:
        """Raise if these running sequences lack a part, or need parts of too few pages."""
        table = self._table
        assert not self._for_step, "parts are held for a step that was not made"
        for slot in slots.tolist():
            pages = table.page_table[slot, table.part_first[slot] : table.part_end[slot]]
            assert (self._parts.needers[pages] > 0).all(), "a part that is needed has no needer"
            num_full = int(table.computed[slot]) // self._page_size
            assert table.part_first[slot] <= max(0, num_full - self._parts.span), "a part is gone"
            assert table.part_end[slot] * self._page_size >= table.computed[slot], "a part is gone"


def _num_equal(chain: PageChain, other: PageChain) -> int:
    """How many first pages two chains have in common: equal keys mean equal prefixes."""
    most = min(len(chain.keys), len(other.keys))
    differs = range(most)
    return bisect_left(differs, True, key=lambda i: chain.keys[i] != other.keys[i])
