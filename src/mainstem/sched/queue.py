"""Waiting sequences: in order of priority and arrival, or parked on what they wait for."""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mainstem.core.ids import PageKey, RequestId
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.finder import Match
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import StoredRun
from mainstem.kv.places import StoredCounts
from mainstem.kv.states import NO_STATE, StatePlace
from mainstem.sched.important import Weighing
from mainstem.sched.prompt_logprobs import PromptLogprobs
from mainstem.sched.sequence import SeqState, Sequence, urgency

OVERTAKEN = 64  # a sequence that arrived this many places earlier is not overtaken
LOOK_AHEAD = 64  # up to 64 parked and 64 queued sequences: the device evicts their pages last
LAST = 2  # rank of a request at fault: it does not start again
LIGHT = 4  # a prompt is light if at most 1/4 of its tokens are left to compute

# a page that is computed or loaded, a cut that is being chosen, logprobs that another computes
Awaited = PageKey | Weighing | PromptLogprobs
_Entry = tuple[int, int, int, int, Sequence]  # rank, priority, turn, arrival


@dataclass(frozen=True, slots=True)
class StoredStart:
    """A state deeper in a chain than where a sequence could start now, and what must be loaded to
    start there: the state, or pages before it, or both."""

    place: StatePlace
    is_on_device: bool
    run: StoredRun  # pages to load; maybe none
    there: Int32s  # pages before these, which are on the device
    counts: StoredCounts  # pages and pieces to load, and the tokens that this saves


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence and its cached pages."""

    sequence: Sequence
    num_known: int  # number of tokens in its prompt and its output so far
    chain: PageChain | None  # names of the pages of these tokens; None: nothing is shared
    match: Match
    awaited: Awaited | None = None  # it cannot start before this is there
    logprobs: Collection[TokenLogprobs | None] = ()  # of its first tokens, if wanted
    state: int = NO_STATE  # slot of the recurrent layers' state after the cached tokens
    num_matched: int = 0  # cached tokens, with or without a state after them
    stored: StoredStart | None = None  # a deeper start, if the model has recurrent layers

    @property
    def to_load(self) -> StoredCounts:
        """What lower tiers have for the sequence."""
        return self.match.stored if self.stored is None else self.stored.counts

    @property
    def num_pages_to_load(self) -> int:
        """Device pages that loading it takes."""
        return self.match.stored.num_pages if self.stored is None else self.stored.run.num_pages

    def pages_to_find(self, page_size: int) -> range:
        """Page numbers after the cached ones that may be loaded from lower tiers."""
        end = self.sequence.num_reusable(self.num_known) // page_size
        return range(len(self.match.pages), end)


class WaitingQueue:
    """A heap of sequences ready to start, and those that are parked.

    A preempted sequence keeps its arrival number and so returns to its old place. Sequences that
    were aborted while they waited are dropped at the head, or many at once. Suspects
    (sched/retry.py) go first: nothing else can run while they are tried. There is one exception: if
    a request is at fault and no other step has succeeded since, suspects go last, because other
    sequences can show that steps still succeed.

    A sequence whose tokens are cached or loaded but for a few overtakes some that compute theirs,
    also prompts in progress: it delays them only by its few new tokens, and would otherwise wait
    for all their tokens.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        # sched/retry.py changes these three, then calls `reorder`
        self.suspects: set[Sequence] = set()
        self.at_fault: dict[RequestId, str] = {}  # requests that failed alone, and the error
        self.suspects_last = False
        self._parked: dict[Awaited, list[Sequence]] = defaultdict(list)
        self._num_parked = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) + self._num_parked - self._num_dead

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, self._entry(sequence))

    def refill(self, sequences: Iterable[Sequence]) -> None:
        """Reset the queue to these sequences. None is parked."""
        self._heap = [self._entry(sequence) for sequence in sequences]
        heapq.heapify(self._heap)
        self._parked.clear()
        self._num_parked = self._num_dead = 0

    def reorder(self) -> None:
        """Sort the queue again, because sequences became suspects or were cleared."""
        self.suspects_last = bool(self.at_fault)
        self._heap = [self._entry(entry[-1]) for entry in self._heap]
        heapq.heapify(self._heap)

    def _entry(self, sequence: Sequence) -> _Entry:
        rank = int((sequence in self.suspects) == self.suspects_last)
        if sequence.request.request_id in self.at_fault:
            rank = LAST
        priority, arrival = urgency(sequence)
        turn = arrival - OVERTAKEN if sequence.is_light else arrival
        return (rank, priority, turn, arrival, sequence)

    def move_up(self, sequence: Sequence, num_to_compute: int) -> None:
        """Let one of the `first` sequences overtake if only `num_to_compute` of its tokens are left
        to compute and that is few, because the others are cached, or a load was started for
        them."""
        if LIGHT * num_to_compute > len(sequence.request.prompt_ids):
            return
        sequence.is_light = True
        heap = self._heap
        index = next(i for i, entry in enumerate(heap) if entry[-1] is sequence)
        heap[index] = self._entry(sequence)
        while index and heap[index] < heap[parent := (index - 1) // 2]:
            heap[index], heap[parent] = heap[parent], heap[index]
            index = parent

    def head(self) -> Sequence | None:
        """The next sequence to start, which stays in the queue; never one that is at fault."""
        while self._heap and self._heap[0][-1].state is SeqState.DONE:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][-1] if self._heap and self._heap[0][0] != LAST else None

    def starts_before(self, sequence: Sequence, started: Sequence) -> bool:
        """Whether a waiting sequence starts before a prompt in progress goes on."""
        if sequence.is_light and sequence.request.priority == started.request.priority:
            return sequence.arrival - OVERTAKEN < started.arrival
        return sequence.request.priority < started.request.priority

    def first(self, count: int) -> list[Sequence]:
        """About the next `count` sequences to start; fewer, up to a half, if some of them were
        aborted."""
        near = self._near(count)
        living = [seq for seq in near if seq.state is not SeqState.DONE]
        if 2 * len(living) < len(near):
            self._bury()  # rare enough: `count` / 2 were aborted since the last time
            living = self._near(count)
        return [seq for seq in living if seq.request.request_id not in self.at_fault]

    def _near(self, count: int) -> list[Sequence]:
        """About the next `count` sequences, aborted ones included."""
        return [entry[-1] for entry in sorted(self._heap[: 2 * count])[:count]]

    def coming(self) -> list[Sequence]:
        """The next sequences, parked ones first."""
        parked = [seq for waiting in self._parked.values() for seq in waiting]
        parked = [seq for seq in parked if seq.state is not SeqState.DONE]
        return sorted(parked, key=urgency)[:LOOK_AHEAD] + self.first(LOOK_AHEAD)

    def awaited(self, most_pages: int) -> list[PageChain]:
        """Return the chains of waiting prompts, roughly in the order they start and up to
        about `most_pages`. Parked sequences come first, since their pages are being loaded or
        computed."""
        found: list[PageChain] = []
        for seq in self.coming():
            if most_pages <= 0:
                break
            if seq.chain is not None:
                found.append(seq.chain)
                most_pages -= len(seq.chain.keys)
        return found

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[-1]

    def park(self, sequence: Sequence, awaited: Awaited) -> None:
        """Park a sequence until `awaited` is ready, or is certain never to be ready."""
        self._parked[awaited].append(sequence)
        self._num_parked += 1

    def unpark(self, awaited: Iterable[Awaited]) -> None:
        """Let sequences that are parked on one of these try again."""
        for key in self._parked.keys() & awaited if self._parked else ():
            for sequence in self._parked.pop(key):
                self._num_parked -= 1
                self.push(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Note that a waiting sequence was aborted; its state says so already."""
        assert sequence.state is SeqState.DONE
        self._num_dead += 1
        if self._num_dead > 64 and 2 * self._num_dead > len(self._heap) + self._num_parked:
            self._bury()

    def _bury(self) -> None:
        """Drop all dead sequences at once, so that they do not pile up."""
        living = [entry for entry in self._heap if entry[-1].state is not SeqState.DONE]
        heapq.heapify(living)
        self._heap = living
        for key, parked in list(self._parked.items()):
            self._parked[key] = [s for s in parked if s.state is not SeqState.DONE]
            if not self._parked[key]:
                del self._parked[key]
        self._num_parked = sum(map(len, self._parked.values()))
        self._num_dead = 0
