"""Sequences that run: their slots and pages, from the start until no step uses them any more."""

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.snapshot import PromptView
from mainstem.core.step import Int32s, StepId
from mainstem.kv.keys import PageName
from mainstem.kv.store import KVStore
from mainstem.sched.admission import Outlook
from mainstem.sched.lookahead import PlannedOrder
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.sequence import SeqState, Sequence, urgency
from mainstem.sched.sharing import SharingTree
from mainstem.sched.table import SeqTable


class RunningSet:
    """The sequences that hold a slot, and through it pages.

    A sequence that ends while a step in flight uses its slot leaves `slots` at once, but keeps slot
    and pages until that step commits.
    """

    def __init__(
        self, store: KVStore, queue: WaitingQueue, order: PlannedOrder, vocab_size: int
    ) -> None:
        """If a page will never be filled, the sequences in `queue` that wait for it are
        unparked."""
        self.store = store
        self.page_size = store.page_size
        self.table = SeqTable(vocab_size)
        self.tree = SharingTree()
        self.slots: Int32s = np.empty(0, np.int32)  # in the order in which sequences started
        self._queue = queue
        self._order = order
        self._leaving: list[SeqSlot] = []  # ended, but used by the step in flight
        self._tried: Sequence | None = None  # the last sequence that started as a suspect

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that runs alone because steps failed with it, until it gets a token."""
        tried = self._tried
        is_tried = tried is not None and tried.is_suspect and tried.state is SeqState.RUNNING
        return tried if is_tried else None

    def enter(self, sequence: Sequence, pages: Int32s, num_cached: int, expected: int) -> SeqSlot:
        """Give a waiting sequence a slot; `num_cached` of its tokens are in `pages` already."""
        num_known = len(sequence.request.prompt_ids) + len(sequence.output_ids)
        slot = self.table.enter(sequence, pages, num_cached, expected)
        self.tree.attach(slot, pages[: num_known // self.page_size])
        self.slots = np.append(self.slots, np.int32(slot))
        if sequence.is_suspect:
            self._tried = sequence
        return slot

    def leave(self, slot: SeqSlot, in_flight: StepId | None) -> None:
        """A sequence ended or is preempted: it is released as soon as no step uses its slot. After
        an error in here, call `clear`."""
        self.table.is_alive[slot] = False
        if in_flight is not None and self.table.last_step[slot] == in_flight:
            self._leaving.append(slot)
        else:
            self._release(slot)
        self.slots = self.slots[self.slots != slot]

    def settle(self, step_id: StepId) -> None:
        """Steps up to this one are done: free what only they used."""
        for slot in list(self._leaving):
            if self.table.last_step[slot] <= step_id:
                self._release(slot)
                self._leaving.remove(slot)

    def clear(self) -> None:
        """Remove all sequences, even after an interrupted `leave`; the store frees the pages."""
        self.table.clear()
        self.tree = SharingTree(self.tree.version + 1)
        self.slots = np.empty(0, np.int32)
        self._leaving.clear()

    def last_step(self) -> StepId:
        """The last step that used any slot."""
        return StepId(int(self.table.last_step.max()))

    def name_filled(self, slots: Int32s) -> None:
        """Tokens of these slots were read back: name the pages that answers have filled by now, so
        that they are saved to lower tiers. If there are no lower tiers, or pages are saved only at
        the end, pages are named when the sequence leaves instead. The last token is not in a page
        yet: its id is known, but its K and V are not computed."""
        if not self.store.saves_while_decoding:
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
            sequence = table.sequence(slot)
            if (chain := sequence.chain) is None:
                continue
            last = sequence.last_name
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
            sequence.last_name = added[-1]
        if names:
            tokens = np.concatenate(rows).reshape(-1, page_size)
            self.store.name(np.concatenate(pages), names, tokens)

    def victim(self) -> SeqSlot:
        """The running sequence to preempt: the least urgent; on a tie, the last to arrive."""
        priority = self.table.priority[self.slots]
        least = self.slots[priority == priority.max()]
        return SeqSlot(int(least[self.table.arrival[least].argmax()]))

    def unfinished(self) -> list[Sequence]:
        """Sequences whose prompts are being computed, the most urgent first."""
        table, slots = self.table, self.slots
        under_way = slots[table.computed[slots] < table.prefill_end[slots]]
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

    def outlook(self) -> Outlook:
        """How long each sequence is expected to run, and the pages that it will give back."""
        in_tree, part = self.tree.shares(self.slots)
        return Outlook.of(
            remaining=self.table.expect_remaining(self.slots, at_least=self.page_size),
            own_pages=self.table.num_pages[self.slots] - in_tree + part,
        )

    def check(self) -> None:
        """Raise if a slot was lost or a page is shared wrongly."""
        self.tree.check()
        assert self.table.num_used == len(self.slots) + len(self._leaving), "a slot was lost"

    def _release(self, slot: SeqSlot) -> None:
        """Free slot and pages; full pages whose tokens were all read back stay as cache."""
        table, store = self.table, self.store
        sequence = table.sequence(slot)
        pages = table.pages(slot)
        if (chain := sequence.chain) is not None:
            self._queue.unpark(store.abort(pages))
            num_known = len(chain.token_ids) + len(table.output_ids(slot))
            num_full = min(int(table.computed[slot]), num_known - 1) // self.page_size
            if num_full >= len(chain.keys):  # some pages of the prompt may have no name yet
                self._name([slot], [num_full])
        num_wanted = None
        if sequence.state is SeqState.DONE and sequence.request.plan_place is not None:
            num_tokens = self._order.tokens_wanted(sequence.request.plan_place)
            num_wanted = None if num_tokens is None else num_tokens // self.page_size
        store.give_back(pages, num_wanted)
        self.tree.detach(slot)
        table.leave(slot)
