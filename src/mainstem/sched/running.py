"""Sequences that run: their slots and pages, from the start until no step uses them any more."""

import numpy as np

from mainstem.core.errors import OutOfPages
from mainstem.core.ids import SeqSlot
from mainstem.core.snapshot import PromptView
from mainstem.core.step import Int32s, Step, StepId
from mainstem.kv.keys import PageChain, PageName
from mainstem.kv.store import KVStore
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.sequence import SeqState, Sequence, urgency
from mainstem.sched.sharing import SharingTree
from mainstem.sched.states import SequenceStates
from mainstem.sched.table import SeqTable
from mainstem.sched.windows import SequenceWindows

FORKS_AHEAD = 4096  # later prompts of a plan whose forks are looked for


class PlannedOrder:
    """The announced order of a known workload: what each prompt shares with the next.

    Prompts start in this order. If `last` is the last that has started, later prompts can still use
    some leading tokens of prompt i: the least number that two neighbours from i to `last` + 1 have
    in common.
    """

    def __init__(self) -> None:
        self._shared_with_next: Int32s = np.empty(64, np.int32)
        self._length = 0
        self._last_started = -1

    def announce(self, shared_with_next: Int32s) -> int:
        """Add prompts at the end; returns the place of the first."""
        first, self._length = self._length, self._length + len(shared_with_next)
        if self._length > len(self._shared_with_next):
            grown = np.empty(2 * self._length, np.int32)
            grown[:first] = self._shared_with_next[:first]
            self._shared_with_next = grown
        self._shared_with_next[first : self._length] = shared_with_next
        return first

    def start(self, plan_place: int) -> None:
        """Record that all answers to the prompt at `plan_place` have started."""
        self._last_started = max(self._last_started, plan_place)

    def tokens_wanted(self, plan_place: int) -> int | None:
        """Return how many leading tokens of the prompt at `plan_place` are shared by prompts that
        have not started. None: all tokens, because other answers to this prompt have not
        started."""
        between = self._shared_with_next[plan_place : self._last_started + 1]
        return int(between.min()) if len(between) else None

    def forks(self, plan_place: int) -> list[int]:
        """The numbers of leading tokens that the prompt at `plan_place` shares with later ones."""
        following = self._shared_with_next[plan_place : min(self._length, plan_place + FORKS_AHEAD)]
        found: list[int] = []  # every number that is less than all before it; few are
        while len(following):
            found.append(int(following[0]))
            is_less = following < found[-1]
            following = following[is_less.argmax() :] if is_less.any() else following[:0]
        return found[::-1]

    def __len__(self) -> int:
        return self._length


class RunningSet:
    """The sequences that hold a slot, and through it pages.

    A sequence that ends while a step in flight uses its slot leaves `slots` at once, but keeps slot
    and pages until that step commits.
    """

    def __init__(self, store: KVStore, queue: WaitingQueue, vocab_size: int) -> None:
        """If a page will never be filled, the sequences in `queue` that wait for it are
        unparked."""
        self.store = store
        self.page_size = store.page_size
        self.table = SeqTable(vocab_size)
        self.tree = SharingTree()
        self.slots: Int32s = np.empty(0, np.int32)  # in the order in which sequences started
        self.queue = queue
        self.order = PlannedOrder()
        self.in_flight: Step | None = None  # launched, and not committed yet
        self.states: SequenceStates | None = None
        if store.states is not None:
            self.states = SequenceStates(store, store.states, self.table, self.unfinished)
        self.windows: SequenceWindows | None = None
        if store.parts is not None:
            self.windows = SequenceWindows(
                store.parts, self.table, store.page_size, self.unfinished
            )
        self._leaving: list[SeqSlot] = []  # ended, but used by the step in flight
        self._last_names: dict[SeqSlot, PageName] = {}  # of an answer's last named page
        # pages that a step copies or moves, leased until it commits
        self._sources: list[tuple[StepId, Int32s]] = []

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """The number of slots in use, also by the step in flight alone. Slots are numbered from 0,
        and no number is as large as the largest count so far."""
        return self.table.num_used

    @property
    def is_settled(self) -> bool:
        """Whether no step is in flight, and every slot of an ended sequence is free."""
        return self.in_flight is None and not self._leaving

    def enter(self, sequence: Sequence, pages: Int32s, num_cached: int, expected: int) -> SeqSlot:
        """Give a waiting sequence a slot; `num_cached` of its tokens are in `pages` already."""
        num_known = len(sequence.request.prompt_ids) + len(sequence.output_ids)
        slot = self.table.enter(sequence, pages, num_cached, expected)
        self.tree.attach(slot, pages[: num_known // self.page_size])
        self.slots = np.append(self.slots, np.int32(slot))
        return slot

    def plan_folds(self, decodes: Int32s) -> Int32s:
        """Give state slots to decodes that need one now, and return those that may decode; raises
        OutOfStates."""
        if self.states is None or self.states.rows is None:
            return decodes
        return self.states.rows.plan_folds(decodes)

    def add_pages(self, slots: Int32s) -> None:
        """Take a page for each of these slots; raises OutOfPages, and takes none."""
        pages = self.store.take(len(slots))
        if self.windows is not None:
            try:
                self.windows.extend_decodes(slots, pages)
            except OutOfPages:
                self.store.release(pages)
                raise
        self.table.append_pages(slots, pages)

    def launch(self, step: Step, sources: Int32s) -> None:
        """A step was made; it copies or moves the pages `sources`, which were leased for it."""
        if len(sources):
            self._sources.append((step.step_id, sources))
        self.in_flight = step
        if self.windows is not None:
            self.windows.made(step.step_id, step.seq_slots)

    def leave(self, slot: SeqSlot) -> None:
        """A sequence ended or is preempted: it is released as soon as no step uses its slot. After
        an error in here, call `clear`."""
        self.table.is_alive[slot] = False
        step = self.in_flight
        if step is not None and self.table.last_step[slot] == step.step_id:
            self._leaving.append(slot)
        else:
            self._release(slot)
        self.slots = self.slots[self.slots != slot]

    def settle(self, step_id: StepId) -> None:
        """Steps up to this one are done: free what only they used."""
        if self.states is not None:
            self.states.settle(step_id)
        if self.store.parts is not None:
            self.store.parts.settled(step_id)
        for slot in list(self._leaving):
            if self.table.last_step[slot] <= step_id:
                self._release(slot)
                self._leaving.remove(slot)
        while self._sources and self._sources[0][0] <= step_id:
            for source in self._sources.pop(0)[1]:
                self.store.release(source[None])

    def clear(self) -> None:
        """Remove all sequences, even after an interrupted `leave`; the store frees the pages."""
        self.table.clear()
        self.tree = SharingTree(self.tree.version + 1)
        self.slots = np.empty(0, np.int32)
        self.in_flight = None
        self._leaving.clear()
        self._last_names.clear()
        self._sources.clear()
        if self.states is not None:
            self.states.clear()
        if self.windows is not None:
            self.windows.clear()

    def forget_names(self) -> None:
        """No page of a running sequence has a name any longer."""
        self._last_names.clear()

    def note_named(self, slot: SeqSlot, chain: PageChain) -> None:
        """The pages of this chain, which has tokens of the answer, too, are named already."""
        if chain.keys:
            self._last_names[slot] = chain.last_name()

    def name_filled(self, slots: Int32s) -> None:
        """Tokens of these slots were read back: name the pages that answers have filled by now, so
        that they are saved to lower tiers. If there are no lower tiers, or pages are saved only at
        the end, pages are named when the sequence leaves instead. The last token is not in a page
        yet: its id is known, but its K and V are not computed."""
        if not self.store.saver.saves_while_decoding:
            return
        table, page_size = self.table, self.page_size
        num_filled = table.total[slots] - table.pending[slots] - 1
        is_due = (num_filled % page_size == 0) & (num_filled > table.prompt_len[slots])
        if is_due.any():
            self._name(slots[is_due].tolist(), (num_filled[is_due] // page_size).tolist())

    def _name(self, slots: list[int], num_full: list[int]) -> None:
        """Name the first `num_full` pages of each slot, except those that have names already."""
        table, page_size = self.table, self.page_size
        names: list[PageName] = []
        pages: list[Int32s] = []
        rows: list[Int32s] = []
        for slot, end in zip(slots, num_full, strict=True):
            if (chain := table.sequence(slot).chain) is None:
                continue
            last = self._last_names.get(SeqSlot(slot))
            before = chain.keys[-1:] if last is None else (last.key,)
            if before and not self.store.is_ready(before[0]):
                # the page that had this name was evicted or never filled: name all pages again
                names += chain.names()
                rows.append(chain.token_ids[: len(chain.keys) * page_size])
                pages.append(table.page_table[slot, : len(chain.keys)])
                last = None
            first = len(chain.keys) if last is None else last.depth + 1
            if end <= first:
                continue
            tokens = table.tokens(slot, first * page_size, end * page_size)
            added = chain.next_names(last, tokens)
            names += added
            rows.append(tokens)
            pages.append(table.page_table[slot, first:end])
            self._last_names[SeqSlot(slot)] = added[-1]
        if names:
            tokens = np.concatenate(rows).reshape(-1, page_size)
            self.store.name(np.concatenate(pages), names, tokens)

    def victim(self) -> SeqSlot:
        """The running sequence to preempt: the least urgent; on a tie, the last to arrive."""
        priority = self.table.priority[self.slots]
        least = self.slots[priority == priority.max()]
        return SeqSlot(int(least[self.table.arrival[least].argmax()]))

    def has_answers(self) -> bool:
        """Whether a sequence is past its prompt."""
        table, slots = self.table, self.slots
        return bool((table.computed.take(slots) >= table.prefill_end.take(slots)).any())

    def unfinished(self) -> list[Sequence]:
        """Sequences whose prompts are being computed, the most urgent first."""
        table, slots = self.table, self.slots
        under_way = slots[table.computed.take(slots) < table.prefill_end.take(slots)]
        if len(under_way) == 0:
            return []
        return sorted(map(table.sequence, under_way.tolist()), key=urgency)

    def prompts(self) -> tuple[PromptView, ...]:
        """The progress of prompts that are being computed."""
        views = []
        for sequence in self.unfinished():
            assert sequence.slot is not None
            num_computed = int(self.table.computed[sequence.slot])
            views.append(PromptView(sequence.request.request_id, num_computed))
        return tuple(views)

    def num_unfinished_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        table, slots = self.table, self.slots
        return int(np.maximum(table.prefill_end[slots] - table.computed[slots], 0).sum())

    def check(self) -> None:
        """Raise if a slot was lost or a page is shared wrongly."""
        self.tree.check()
        assert self.table.num_used == len(self.slots) + len(self._leaving), "a slot was lost"
        if self.windows is not None:
            self.windows.check(np.append(self.slots, np.array(self._leaving, np.int32)))

    def _release(self, slot: SeqSlot) -> None:
        """Free slot and pages; full pages whose tokens were all read back stay as cache."""
        table, store = self.table, self.store
        sequence = table.sequence(slot)
        pages = table.pages(slot)
        if (chain := sequence.chain) is not None:
            self.queue.unpark(store.abort(pages))
            num_known = len(chain.token_ids) + len(table.output_ids(slot))
            most = num_known - (self.states is None)
            num_full = min(int(table.computed[slot]), most) // self.page_size
            if num_full >= len(chain.keys):  # some pages of the prompt may have no name yet
                self._name([slot], [num_full])
        if self.states is not None:
            self.queue.unpark(self.states.leave(slot))
        if self.windows is not None:
            self.windows.leave(slot)
        num_wanted = None
        if sequence.state is SeqState.DONE and sequence.request.plan_place is not None:
            num_tokens = self.order.tokens_wanted(sequence.request.plan_place)
            num_wanted = None if num_tokens is None else num_tokens // self.page_size
        store.give_back(pages, num_wanted)
        self.tree.detach(slot)
        self._last_names.pop(slot, None)
        table.leave(slot)
