"""Waiting sequences: in order of priority and arrival, or parked on a page that is being
computed or loaded."""

import heapq
from collections import defaultdict
from collections.abc import Iterable

from mainstem.core.ids import PageKey
from mainstem.sched.sequence import SeqState, Sequence, urgency

OVERTAKEN = 64  # a sequence that arrived this many places earlier is not overtaken
LOOK_AHEAD = 64  # up to 64 parked and 64 queued sequences: the device evicts their pages last
LIGHT = 4  # a loaded prompt overtakes only if at most 1/4 of its tokens are left to compute

_Entry = tuple[int, int, int, int, Sequence]  # rank, priority, turn, arrival


class WaitingQueue:
    """A heap of sequences ready to start, and those parked on a page that is LOADING.

    A preempted sequence keeps its arrival number and so returns to its old place. Sequences that
    were aborted while they waited are dropped at the head, or many at once. Suspects
    (sched/retry.py) go first: nothing else can run while they are tried. There is one exception: if
    a request is at fault and no other step has succeeded since, suspects go last, because other
    sequences can show that steps still succeed.

    A sequence whose history is loaded overtakes some sequences that compute theirs: it delays them
    only by its few new tokens, and would otherwise wait for all their tokens.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self.suspects_last = False
        self._parked: dict[PageKey, list[Sequence]] = defaultdict(list)
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

    def reorder(self, suspects_last: bool) -> None:
        """Sort the queue again, because sequences became suspects or were cleared."""
        self.suspects_last = suspects_last
        self._heap = [self._entry(entry[-1]) for entry in self._heap]
        heapq.heapify(self._heap)

    def _entry(self, sequence: Sequence) -> _Entry:
        rank = int(sequence.is_suspect == self.suspects_last)
        priority, arrival = urgency(sequence)
        left = sequence.num_to_compute  # None: not decided yet, or preempted since
        is_light = left is not None and LIGHT * left <= len(sequence.request.prompt_ids)
        turn = arrival - OVERTAKEN if sequence.has_fetched and is_light else arrival
        return (2 if sequence.is_at_fault else rank, priority, turn, arrival, sequence)

    def move_up(self, sequence: Sequence) -> None:
        """Move one of the `first` sequences to its new place, because a load was started for it."""
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
        return self._heap[0][-1] if self._heap and not self._heap[0][-1].is_at_fault else None

    def first(self, count: int) -> list[Sequence]:
        """About the next `count` sequences to start; fewer, up to a half, if some of them were
        aborted."""
        near = self._near(count)
        living = [seq for seq in near if seq.state is not SeqState.DONE]
        if 2 * len(living) < len(near):
            self._bury()  # rare enough: `count` / 2 were aborted since the last time
            living = self._near(count)
        return [seq for seq in living if not seq.is_at_fault]

    def _near(self, count: int) -> list[Sequence]:
        """About the next `count` sequences, aborted ones included."""
        return [entry[-1] for entry in sorted(self._heap[: 2 * count])[:count]]

    def awaited(self, most_pages: int) -> list[tuple[PageKey, ...]]:
        """Return the page chains of waiting prompts, roughly in the order they start and up to
        about `most_pages`. Parked sequences come first, since their pages are being loaded or
        computed."""
        parked = [seq for waiting in self._parked.values() for seq in waiting]
        parked = [seq for seq in parked if seq.state is not SeqState.DONE]
        coming = sorted(parked, key=urgency)[:LOOK_AHEAD] + self.first(LOOK_AHEAD)
        found: list[tuple[PageKey, ...]] = []
        for seq in coming:
            if most_pages <= 0:
                break
            if seq.chain is not None:
                found.append(seq.chain.keys)
                most_pages -= len(seq.chain.keys)
        return found

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[-1]

    def park(self, sequence: Sequence, awaited: PageKey) -> None:
        """Park a sequence until `awaited` is ready, or is certain never to be ready."""
        self._parked[awaited].append(sequence)
        self._num_parked += 1

    def unpark(self, keys: Iterable[PageKey]) -> None:
        """Let sequences that are parked on one of these pages try again."""
        if not self._parked:
            return
        for key in keys:
            for sequence in self._parked.pop(key, ()):
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
