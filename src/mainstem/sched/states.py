"""States of recurrent layers: which slot each sequence reads and writes, and where states are kept.

    prompt a   |---------- 1,500 shared ----------|----- own ------|
    prompt b   |---------- 1,500 shared ----------|---- own ----|
                                                  ^ a's chunk is cut here, and the state is kept:
                                                    b waits for it, and starts here one step later

A prompt is cut where a queued or running prompt parts from it, at boundaries that its request names
(the ends of messages), at the end of pages that are public to all tenants, where it parts from a
cached prompt, and at its last page. Where others will part from it may be unknown, as in questions
about a document in the same message. So a prompt is also cut 512, 2,048, 8,192, ... tokens before
its end: one that parts from it d tokens before the end computes at most 512 or 4 d shared tokens
again, and is then cut where they part. Cuts cost no step: a chunk is run in several segments, and
the state after each is written to a slot of its own. Another sequence can read such a state only in
a later step.

With tiers below the device (kv/stored_states.py), a prompt is also cut at the ends of the pages
before these positions, since only states at the end of a page are stored. An answer passes such
places while it runs, and the last one before its end is wanted. So a decode has two slots, and from
the end of a page on it writes to the other one: the slot left behind has the state at that place.

    slot 1   |--- writes ---|   state at 16   |--- writes ---|   state at 48
    slot 2                  |--- writes ------|   state at 32   |--- writes --->
                            16                32             48
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from mainstem.core.ids import PageKey, SeqSlot
from mainstem.core.step import Int32s, StateUse, StepId
from mainstem.kv.finder import Lookup, Match
from mainstem.kv.keys import PageChain
from mainstem.kv.states import NO_STATE, StatePlace, StateStore
from mainstem.kv.store import KVStore
from mainstem.sched.batching import Chunk, StepWork
from mainstem.sched.queue import Candidate
from mainstem.sched.rows import SequenceRows
from mainstem.sched.sequence import SeqState, Sequence
from mainstem.sched.stored_starts import StoredStarts
from mainstem.sched.table import NO_ROWS, SeqTable

NEAR_END = 512  # tokens between the end of a prompt and the first state before it
FARTHER = 4  # how much farther from the end each further one is


class SequenceStates:
    """The states of running sequences, and the plan of which to keep."""

    def __init__(
        self,
        store: KVStore,
        states: StateStore,
        table: SeqTable,
        unfinished: Callable[[], list[Sequence]],
    ) -> None:
        """`unfinished` returns the running sequences whose prompts are being computed."""
        self._store = store
        self._states = states
        self._table = table
        self._unfinished = unfinished
        self._page_size = store.page_size
        self._stored = StoredStarts.of(store)
        self._num_spares = 0  # second slots of decodes
        # of sequences that read a state and never write one
        self.rows = None if store.rows is None else SequenceRows(store.rows, states, table)
        # of prompts that are being computed, and whether they are guesses
        self._cuts: dict[Sequence, dict[int, bool]] = {}

    # --- where to start -------------------------------------------------------------------------

    def find(self, found: Candidate, *, whole_pages: bool = False) -> Candidate:
        """Cut the cached part of a sequence to the deepest state, or make the sequence wait for a
        state that another one is about to write. With `whole_pages` it does not share a page in
        part."""
        chain, match = found.chain, found.match
        if chain is None or found.awaited is not None:
            return found
        if match.loads is not None:  # a part of a page may be copied: not before it is loaded
            loading = reversed(chain.keys[: len(match.pages)])
            awaited = next(key for key in loading if not self._store.is_ready(key))
            return replace(found, awaited=awaited)
        page_size = self._page_size
        num_matched = len(match.pages) * page_size
        if not whole_pages:
            num_matched += match.similar_tokens
        num_reusable = found.sequence.num_reusable(found.num_known)
        num_wanted, slot = self._states.find(chain, num_reusable)
        position = num_wanted
        if num_wanted > num_matched:
            if (key := self._page_in_progress(chain, num_wanted)) is not None:
                return replace(found, awaited=key)
            position, slot = self._states.find(chain, num_matched)
        while whole_pages and position % page_size:
            position, slot = self._states.find(chain, position // page_size * page_size)
        if (name := self._await_fork(found, chain, max(position, num_wanted))) is not None:
            return replace(found, awaited=name)
        num_pages, num_more = divmod(position, page_size)
        similar: int | None = None
        if num_more:
            inside = num_pages < len(match.pages)
            similar = int(match.pages[num_pages]) if inside else match.similar_page
        cut = Match(match.pages[:num_pages], Lookup.MISS, None, similar, num_more)
        start = replace(found, match=cut, state=slot, num_matched=num_matched)
        return start if self._stored is None else self._stored.look_up(start, match, position)

    def _page_in_progress(self, chain: PageChain, num_tokens: int) -> PageKey | None:
        """The key of the page that ends the first `num_tokens`, if a step is about to fill it."""
        depth, num_more = divmod(num_tokens, self._page_size)
        if not num_more:
            return None
        first = depth * self._page_size
        return self._store.loading_follower(
            chain.parent(depth), chain.token_ids[first : first + num_more]
        )

    def _await_fork(self, found: Candidate, chain: PageChain, position: int) -> PageKey | None:
        """The state to wait for, because a prompt that is being computed will reach it and it is
        deeper than `position`."""
        best = position
        num_reusable = found.sequence.num_reusable(found.num_known)
        for other in self._unfinished():
            assert other.slot is not None
            depth = best // self._page_size  # the page that two chains with a deeper fork share
            keys = () if other.chain is None else other.chain.keys
            if keys[depth : depth + 1] != chain.keys[depth : depth + 1]:
                continue
            shared = self._shared(other, chain, num_reusable)
            computed = int(self._table.computed[other.slot])
            if shared >= best + self._page_size and shared > computed:
                self._plan(other, [shared])
                best = shared
        return StatePlace.of(chain, best).name() if best > position else None

    def _shared(self, other: Sequence, chain: PageChain, most: int) -> int:
        """How many leading tokens a prompt and a chain have in common, at most `most`. The page
        in which they part must be one that the prompt fills, or it cannot be found."""
        if other.chain is None:
            return 0
        shared = min(other.chain.num_common(chain), most)
        return self._findable(shared, len(other.chain.token_ids))

    def _findable(self, position: int, num_tokens: int) -> int:
        """The deepest position up to this one whose tokens are in pages that have names, in a
        prompt of `num_tokens`: its last page is not full."""
        return min(position, num_tokens // self._page_size * self._page_size)

    def may_start(self, found: Candidate, budget: int) -> bool:
        """Whether there is a slot for another sequence, whose first chunk has up to `budget`
        tokens. Sequences that will fold their rows keep the slots that they will need."""
        rows = self.rows
        if self._has_room():
            return True
        position = len(found.match.pages) * self._page_size + found.match.similar_tokens
        if rows is not None and rows.may_start(found, position, budget):
            return True
        self._states.note_refused()
        return False

    def _has_room(self) -> bool:
        """Whether there is a slot for a state besides those that folds will need."""
        return self._states.has_room(1 + (0 if self.rows is None else self.rows.num_kept))

    def start(
        self,
        slot: SeqSlot,
        found: Candidate,
        coming: Iterable[Sequence],
        planned: Iterable[int],
        budget: int,
    ) -> None:
        """A sequence starts from its state, with a chunk of up to `budget` tokens. It is cut where
        sequences that are `coming` part from it, and at `planned` positions."""
        table, states, has_room = self._table, self._states, self._has_room()
        states.note_start(found.state)
        states.hold(found.state)  # so that it is not evicted for the slot of its own
        table.state_own[slot] = table.state_spare[slot] = NO_STATE
        table.state_read[slot] = found.state
        sequence, chain = found.sequence, found.chain
        begin = int(table.computed[slot])
        if chain is not None and self._stored is not None and found.state != NO_STATE:
            self._stored.note_use(chain, begin)
        met = self._common(sequence, coming)
        forks = [*planned, *met]
        if self.rows is not None and self.rows.fit(found, begin, budget):
            is_best = self.rows.may_fold(slot) and self._prefers_rows(found, begin, forks)
            if (is_best or not has_room or not states.has_room()) and self.rows.start(slot):
                return
        own = states.take()
        table.state_own[slot] = states.adopt(found.state) if own is None else own
        if chain is None:
            return
        last = found.num_known - 1  # it is always computed, for its logits
        wanted = self._wanted_after(found, last) if self._may_return(sequence) else []
        # tiers below the device would have to store these states, too
        if wanted and self._stored is None:
            self._plan(sequence, self._before_end(begin, last), are_guesses=True)
        wanted += planned
        cuts = {self._findable(min(position, last), found.num_known) for position in wanted}
        if sequence.chain is not None:
            cuts |= {self._findable(position, len(sequence.chain.token_ids)) for position in met}
        self._plan(sequence, cuts)

    def _may_return(self, sequence: Sequence) -> bool:
        """Whether a prompt, or its answer, may be continued by requests that nobody has announced.
        What prompts of a plan share is known: its forks. Tiers below the device keep states for
        another job."""
        return sequence.request.plan_place is None or self._stored is not None

    def _wanted_after(self, found: Candidate, last: int) -> list[int]:
        """Where the continuation of a prompt may begin."""
        whole_pages = last // self._page_size * self._page_size
        return [last, whole_pages, *self._named(found)]

    def _before_end(self, begin: int, last: int) -> Iterable[int]:
        """Places at growing distances before the end of a prompt that starts at `begin`."""
        distance = NEAR_END
        while (position := (last - distance) // self._page_size * self._page_size) > begin:
            yield position
            distance *= FARTHER

    def _named(self, found: Candidate) -> list[int]:
        """Where other prompts may part from this one, as far as it says so: at the end of what is
        cached, at the ends of messages, and where other tenants find no more pages."""
        request, chain = found.sequence.request, found.chain
        public_tokens = 0 if chain is None else chain.public_tokens
        public_pages = public_tokens // self._page_size * self._page_size
        return [found.num_matched, request.keep_tokens, *request.boundaries, public_pages]

    def _common(self, sequence: Sequence, coming: Iterable[Sequence]) -> list[int]:
        """How many leading tokens a sequence that starts now has in common with each other."""
        if (chain := sequence.chain) is None:
            return []
        return [
            min(chain.num_common(theirs), other.num_reusable(len(theirs.token_ids)))
            for other in coming
            if other is not sequence and (theirs := other.chain) is not None
        ]

    def _prefers_rows(self, found: Candidate, begin: int, forks: list[int]) -> bool:
        """Whether others read the state at `begin`, too, and no state is wanted far after it. All
        that will be shared with prompts of a plan is known: its forks."""
        request = found.sequence.request
        has_siblings = self._states.num_readers(found.state) > 1 or max(forks, default=0) >= begin
        wanted = forks
        if request.plan_place is None:
            wanted = [*self._named(found), *forks]
        is_shared = max(wanted, default=0) >= begin + self._page_size
        return has_siblings and not is_shared and request.session is None

    def meet(self, arrived: Sequence) -> None:
        """A sequence was queued: cut the prompts that are being computed where it parts from
        them."""
        if (chain := arrived.chain) is None:
            return
        most = arrived.num_reusable(len(chain.token_ids))
        for other in self._unfinished():
            self._plan(other, [self._shared(other, chain, most)])

    def _plan(
        self, sequence: Sequence, positions: Iterable[int], *, are_guesses: bool = False
    ) -> None:
        """Keep states at these positions of a prompt that is being computed."""
        cuts, page_size = self._cuts.setdefault(sequence, {}), self._page_size
        for position in positions:
            cuts[position] = are_guesses and cuts.get(position, True)
            if self._stored is not None:
                cuts[position // page_size * page_size] = False

    # --- steps ----------------------------------------------------------------------------------

    def use(self, work: StepWork) -> tuple[StateUse, list[PageKey]]:
        """The slots of the step that is being made. Also returns the names of states that nobody
        has to wait for any longer: they can be read from the next step on, or are not kept."""
        table, decodes = self._table, work.decodes
        slots = np.concatenate([decodes, np.array([c.slot for c in work.chunks], np.int32)])
        reads = table.state_read[slots]
        self._change_slots(decodes)
        self._cut_instead_of_rows(work.chunks)
        own = table.state_own[slots]
        rows = None if self.rows is None else self.rows.use(slots)
        table.state_read[slots] = own if rows is None else np.where(own == NO_STATE, reads, own)
        starts, writes, counts = list[int](), own[: len(decodes)].tolist(), list[int]()
        kept: dict[StatePlace, tuple[int, bool]] = {}
        names: list[PageKey] = []
        held_next: list[int] = []
        first = len(decodes)
        for chunk in work.chunks:
            begin, end = chunk.num_before, chunk.num_before + len(chunk.token_ids)
            num_segments = 1
            last = int(table.state_own[chunk.slot])
            has_rows = last == NO_STATE  # and writes no state
            for position, is_guess in self._take_cuts(chunk.slot, end):
                place = self._place(chunk.slot, position)
                names.append(place.name())
                if has_rows or place in kept or self._states.has(place):
                    continue
                states = self._states
                free = states.take_for_guess(place) if is_guess else states.take()
                if free is None:
                    continue
                kept[place] = free, is_guess
                if position == end:
                    last = free
                else:
                    starts.append(first + position - begin)
                    writes.append(free)
                    num_segments += 1
            if last != table.state_own[chunk.slot]:
                table.state_read[chunk.slot] = last
                held_next.append(last)
            first += len(chunk.token_ids)
            starts.append(first)
            writes.append(last)
            counts.append(num_segments)
        for place, (free, is_guess) in kept.items():
            self._keep(place, free, is_written=False, is_guess=is_guess)
        for state in held_next:
            self._states.hold(state)
        self._states.release(reads[(reads != own) & (reads != NO_STATE) & (own != NO_STATE)])
        if rows is not None and self.rows is not None:
            self.rows.end_folds(slots)
        ones = np.arange(len(decodes) + 1, dtype=np.int32)
        segments = len(decodes) + np.cumsum(counts, dtype=np.int32)
        return StateUse(
            reads=reads,
            segment_starts=np.concatenate([ones, np.array(starts, np.int32)]),
            writes=np.array(writes, np.int32),
            seq_segments=np.concatenate([ones, segments]),
            rows=None if rows is None else rows[0],
            counts=None if rows is None else rows[1],
        ), names

    def _cut_instead_of_rows(self, chunks: list[Chunk]) -> None:
        """Prompts that start with rows, and in which others wait for a state, get a slot for their
        own state after all, if there is one that no other sequence needs for a fold."""
        if self.rows is None:
            return
        for chunk in chunks:
            if self.rows.has(chunk.slot) and self._table.sequence(chunk.slot) in self._cuts:
                if not self._states.has_room(1 + self.rows.num_kept_besides(chunk.slot)):
                    continue
                if (own := self._states.take()) is not None:
                    self._table.state_own[chunk.slot] = own
                    self.rows.leave(chunk.slot)

    def _change_slots(self, decodes: Int32s) -> None:
        """At the end of a page a decode writes to its other slot from now on, if there are tiers
        for the state that it leaves behind. A third of the slots may be such second ones."""
        if self._stored is None:
            return
        table = self._table
        # a decode that reads a kept state has just come to the end of its prompt; one that folds
        # its rows has no state of its own yet, even if it folds in place
        is_due = (table.computed[decodes] % self._page_size == 0) & (
            table.state_read[decodes] == table.state_own[decodes]
        )
        is_due &= table.row_slot[decodes] == NO_ROWS
        due = decodes[is_due]
        for slot in due[table.state_spare[due] == NO_STATE].tolist():
            if (spare := self._take_spare()) is None:
                break
            table.state_spare[slot] = spare
        due = due[table.state_spare[due] != NO_STATE]
        left = table.state_own[due]
        table.state_own[due] = table.state_spare[due]
        table.state_spare[due] = left

    def _take_spare(self) -> int | None:
        """A second slot for a decode; it can do without."""
        is_enough = 3 * (self._num_spares + 1) > self._states.num_states
        if is_enough or not self._has_room():
            return None
        self._num_spares += 1
        return self._states.take()

    def _keep(
        self, place: StatePlace, slot: int, *, is_written: bool, is_guess: bool = False
    ) -> None:
        if self._states.keep(place, slot, is_guess=is_guess) and self._stored is not None:
            self._stored.states.note_kept(place, is_written=is_written)

    def launched(self, step_id: StepId) -> None:
        """The step was made."""
        self._states.report()
        if self._stored is not None:
            self._stored.states.launched(step_id)

    def settle(self, step_id: StepId) -> None:
        """Steps up to this one have ended."""
        if self._stored is not None:
            self._stored.states.settle(step_id)

    def _take_cuts(self, slot: SeqSlot, end: int) -> list[tuple[int, bool]]:
        """The planned positions up to `end`, in order, and whether each is a guess; they are done
        with."""
        sequence = self._table.sequence(slot)
        if (planned := self._cuts.get(sequence)) is None:
            return []
        reached = {position: planned.pop(position) for position in list(planned) if position <= end}
        if end >= self._table.prefill_end[slot]:
            del self._cuts[sequence]
        begin = int(self._table.computed[slot])
        least = max(begin, self._page_size - 1)
        return sorted(cut for cut in reached.items() if cut[0] > least)

    def _place(self, slot: SeqSlot, position: int) -> StatePlace:
        sequence = self._table.sequence(slot)
        assert sequence.chain is not None
        chain = sequence.chain
        if position > len(chain.token_ids):  # tokens of an answer, after a preemption
            chain = chain.extended(self._table.tokens(slot, 0, position))
        return StatePlace.of(chain, position)

    def leave(self, slot: SeqSlot) -> list[PageKey]:
        """A sequence leaves: keep its state, if it is known which tokens are in it. Returns the
        names of states that it will not write any more."""
        table, sequence = self._table, self._table.sequence(slot)
        planned = self._cuts.pop(sequence, {})
        names = [self._place(slot, position).name() for position in planned]
        own, read = int(table.state_own[slot]), int(table.state_read[slot])
        had_rows = self.rows is not None and self.rows.leave(slot)
        if read not in (own, NO_STATE):
            self._states.release(np.array([read], np.int32))
        num_tokens = int(table.computed[slot])
        num_known = int(table.prompt_len[slot]) + table.num_read_back(slot)
        chain = sequence.chain
        if chain is not None and num_known > len(chain.token_ids):
            chain = chain.extended(table.tokens(slot, 0, num_known))
        self._leave_spare(slot, chain, num_known)
        if own == NO_STATE:
            return names
        is_useful = self._page_size <= num_tokens <= num_known
        if sequence.state is SeqState.DONE:  # not preempted
            is_useful &= self._may_return(sequence)
        if chain is None or read != own or had_rows or not is_useful:
            self._states.give_back(own)
            return names
        depth, num_more = divmod(num_tokens, self._page_size)
        if num_more:
            self._store.name_tail(chain, num_tokens, int(table.page_table[slot, depth]))
        self._keep(StatePlace.of(chain, num_tokens), own, is_written=True)
        return names

    def _leave_spare(self, slot: SeqSlot, chain: PageChain | None, num_known: int) -> None:
        """Keep what is in a decode's second slot: the state at the end of its last full page. It
        has no token too many, even if the sequence's own state has."""
        table = self._table
        if (spare := int(table.state_spare[slot])) == NO_STATE:
            return
        table.state_spare[slot] = NO_STATE
        self._num_spares -= 1
        page_size = self._page_size
        num_tokens = (int(table.computed[slot]) - 1) // page_size * page_size
        if chain is None or num_tokens > num_known:
            self._states.give_back(spare)
        else:
            self._keep(StatePlace.of(chain, num_tokens), spare, is_written=True)

    def clear(self) -> None:
        """After a failed step: no state can be trusted."""
        self._cuts.clear()
        self._num_spares = 0
        if self.rows is not None:
            self.rows.clear()
        self._store.clear_states()
