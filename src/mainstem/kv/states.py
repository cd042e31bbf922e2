"""States of recurrent layers that are kept on the device, by the position they are valid at.

A page can be shared in part; a state is valid after exactly one token. So states are kept only
where some sequence will probably continue: where queued prompts part, at boundaries between
messages, at the end of prompts and of turns (sched/states.py decides).

    take -> a sequence's own slot --(its end: keep)--> kept --(worth least: take)--> ...
    take -> written once at a planned position, and kept -------^

Which kept state is worth least is decided by kv/eviction.py, as for pages: it is not pinned, no
waiting request will start from it, it was used long ago and is cheap to compute again.

Steps run in the order in which they are made, so a slot may be given to another sequence as soon as
the last step that reads it is made. Copies to and from the tiers below (kv/stored_states.py) run
beside the steps, so they hold their slots until they end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

import numpy as np

from mainstem.core.events import EventBus, StatesEvicted, StatesRefused
from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv.eviction import Lru, Ranking, StateOrder
from mainstem.kv.keys import PageChain

MARK = b"mainstem state 1"
NO_STATE = -1  # a sequence that begins with its first token
MAX_TRIED = 256  # states after the same page that are compared
PLAN_SHARE = 16  # evictions are planned for 1/16 of all slots: one costs as much as many


@dataclass(frozen=True, slots=True)
class StatePlace:
    """A position in a chain: after `tail`, which follows the page with the key `parent`. Chains of
    several tenants have the places up to the end of their public pages in common."""

    parent: PageKey
    tail: bytes  # token ids; less than a page
    chain: PageChain = field(compare=False, repr=False)  # one of those that pass it
    num_tokens: int = field(compare=False)

    @classmethod
    def of(cls, chain: PageChain, num_tokens: int) -> "StatePlace":
        """The place after the first `num_tokens` tokens of a chain."""
        depth = num_tokens // chain.page_size
        tail = chain.token_ids[depth * chain.page_size : num_tokens]
        return cls(chain.parent_of_rest(num_tokens), tail.tobytes(), chain, num_tokens)

    def is_before(self, other: "StatePlace") -> bool:
        """Whether the chain of `other` passes this place first."""
        if self.num_tokens >= other.num_tokens:
            return False
        chain, depth = other.chain, self.num_tokens // other.chain.page_size
        if depth and not chain.branches and chain.keys[depth - 1] != self.parent:
            return False  # nearly always: `keep` asks for many others
        return StatePlace.of(chain, self.num_tokens) == self

    def name(self) -> PageKey:
        """What sequences wait for: no page has this key."""
        return PageKey(sha256(MARK + self.parent + self.tail).digest())


class StateStore:
    """Lends slots to sequences, and keeps states while there is room.

    Invariant: a slot is free, owned by one sequence, lent for rows (kv/rows.py), kept, or used by a
    copy only; a kept one may be held by a copy, by sequences that will read it in their next step,
    and by sequences with rows, which read it in every step. Nobody writes a kept state.
    """

    def __init__(
        self,
        num_states: int,
        bus: EventBus | None = None,
        ranking: Ranking | None = None,
        cost: Callable[[int], float] = float,
    ) -> None:
        """`ranking` orders kept states of the same price; None: the least recently used one is
        evicted first. `cost` is that of the first tokens of a prompt, by number."""
        self.num_states = num_states
        self.awaited: Callable[[], Iterable[PageChain]] = tuple  # waiting prompts, the next first
        self._ranking = Lru() if ranking is None else ranking
        self._order = StateOrder(num_states, self._ranking)
        self._bus = EventBus() if bus is None else bus
        self._cost = cost
        self._victims: list[int] = []  # planned evictions, the next one last
        self._awaited_slots: set[int] = set()  # of waiting requests, when these were planned
        self._free = list(range(num_states - 1, -1, -1))
        self._slot_of: dict[StatePlace, int] = {}
        self._place_of: dict[int, StatePlace] = {}
        self._tails: dict[PageKey, dict[bytes, int]] = {}  # after each page, latest last
        self._readers = np.zeros(num_states, np.int32)
        self._copies = np.zeros(num_states, np.int32)
        self._left: set[int] = set()  # neither kept nor owned, but used by a copy
        self._times_kept = np.zeros(num_states, np.int64)
        self._num_evicted = self._num_refused = 0  # since `report`

    @property
    def num_kept(self) -> int:
        return len(self._slot_of)

    @property
    def num_owned(self) -> int:
        """Slots of running sequences, and those with their rows."""
        return self.num_states - len(self._free) - len(self._slot_of) - len(self._left)

    def take(self) -> int | None:
        """A slot for a new state; evicts the kept state of least worth that nobody uses. None:
        there is no such state."""
        if self._free:
            return self._free.pop()
        if (slot := self._victim()) is None:
            self._num_refused += 1
            return None
        self._evict(slot)
        return slot

    def take_for_guess(self, place: StatePlace) -> int | None:
        """A slot for a state where nobody is known to continue: a free one, or that of the next
        victim if it is worth less."""
        if self._free:
            return self._free.pop()
        if (slot := self._victim()) is None:
            return None
        before = self._order.without_guess(self.find(place.chain, place.num_tokens - 1)[1])
        cost, is_awaited = int(self._cost(place.num_tokens)), slot in self._awaited_slots
        if is_awaited or not self._order.is_below_guess(slot, cost, before):
            self._victims.append(slot)
            return None
        self._evict(slot)
        return slot

    def _evict(self, slot: int) -> None:
        self._order.note_evicted(slot)
        self._forget(self._place_of[slot])
        self._num_evicted += 1

    def report(self) -> None:
        """Publish how many states were evicted for others since the last call, and how often there
        was no slot for one."""
        if self._num_evicted:
            self._bus.publish(StatesEvicted(self._num_evicted))
        if self._num_refused:
            self._bus.publish(StatesRefused(self._num_refused))
        self._num_evicted = self._num_refused = 0

    def note_refused(self) -> None:
        """A sequence could have started otherwise, but has no slot."""
        self._num_refused += 1

    def has_room(self, count: int = 1, besides: int = NO_STATE) -> bool:
        """Whether `take` would return a slot, `count` times, and not the kept one `besides`."""
        if (missing := count - len(self._free)) <= 0:
            return True
        kept = self._slot_of.values()
        unused = (slot for slot in kept if slot != besides and not self._is_used(slot))
        return sum(1 for _ in islice(unused, missing)) == missing

    def give_back(self, slot: int) -> None:
        """A sequence does not need its own slot any more."""
        self._free.append(slot)

    def keep(self, place: StatePlace, slot: int, *, is_guess: bool = False) -> bool:
        """Keep the state in `slot`, which was taken before, as the most recently used. False, and
        the slot is free: this state is kept already. `is_guess`: nobody is known to continue
        there."""
        if place in self._slot_of:
            self._use(self._slot_of[place])
            self._free.append(slot)
            return False
        _, before = self.find(place.chain, place.num_tokens - 1)
        before = self._order.without_guess(before)
        cost, place_of = int(self._cost(place.num_tokens)), self._place_of
        deeper = [] if is_guess else self._order.after(before, cost)
        after = [each for each in deeper if place.is_before(place_of[each])]
        self._order.insert(slot, cost, before, after, is_guess=is_guess)
        self._slot_of[place] = slot
        self._place_of[slot] = place
        self._times_kept[slot] += 1
        self._tails.setdefault(place.parent, {})[place.tail] = slot
        return True

    def has(self, place: StatePlace) -> bool:
        return place in self._slot_of

    def version(self, place: StatePlace) -> tuple[int, int] | None:
        """The slot of a kept state, and a number that is another one if the state was evicted in
        the meantime and kept again."""
        slot = self._slot_of.get(place)
        return None if slot is None else (slot, int(self._times_kept[slot]))

    def find(self, chain: PageChain, num_tokens: int) -> tuple[int, int]:
        """The deepest kept state within the first `num_tokens` of a chain: its position and slot;
        0 and NO_STATE if there is none."""
        page_size = chain.page_size
        for depth in range(num_tokens // page_size, -1, -1):
            first = depth * page_size
            if (tails := self._tails.get(chain.parent(depth))) is not None:
                rest = chain.token_ids[first : min(num_tokens, first + page_size)].tobytes()
                latest = list(tails)[-MAX_TRIED:]
                fitting = [tail for tail in latest if rest.startswith(tail)]
                if fitting:
                    tail = max(fitting, key=len)
                    num_found = first + len(tail) // chain.token_ids.itemsize
                    return num_found, tails[tail]
            if chain.branches:  # one may begin here: the state before it has no mark
                tails = self._tails.get(chain.parent_unbranched(depth), {})
                if b"" in tails:
                    return first, tails[b""]
        return 0, NO_STATE

    def adopt(self, slot: int) -> int:
        """Give a kept state, which nobody else uses, to the sequence that holds it."""
        assert self._readers[slot] == 1, "another sequence is about to read this state"
        assert not self._copies[slot], "a copy uses this state"
        self._readers[slot] = 0
        self._forget(self._place_of[slot])
        return slot

    def may_adopt(self, slot: int) -> bool:
        """Whether the sequence that holds a kept state is the only one that uses it."""
        return bool(self._readers[slot] == 1 and not self._copies[slot])

    def num_readers(self, slot: int) -> int:
        """The sequences that hold a kept state."""
        return int(self._readers[slot])

    def hold(self, slot: int) -> None:
        """A sequence will read a kept state in its next step: it is not evicted before."""
        if slot != NO_STATE:
            self._readers[slot] += 1

    def expect(self, chain: PageChain) -> None:
        """A request for a chain was queued: its state leaves the plan of evictions."""
        if self._victims and self._order.sees_queue:
            self._spare([self.find(chain, len(chain.token_ids) - 1)[1]])

    def note_start(self, slot: int) -> None:
        """A sequence starts from a kept state."""
        if slot != NO_STATE:
            self._use(slot)

    def pin(self, chain: PageChain) -> StatePlace | None:
        """Pin the deepest kept state of a chain: it is evicted only after all others. Pass the
        returned value to `unpin`."""
        _, slot = self.find(chain, len(chain.token_ids))
        if slot == NO_STATE:
            return None
        self._order.pin(slot)
        self._spare([slot])
        return self._place_of[slot]

    def unpin(self, place: StatePlace) -> None:
        """End a pin; a state that was evicted is skipped."""
        if (slot := self._slot_of.get(place)) is not None:
            self._order.unpin(slot)

    def release(self, slots: Int32s) -> None:
        """The steps that read these states are made. Slots that are not kept are ignored."""
        for slot in slots.tolist():
            if slot in self._place_of:
                self._readers[slot] -= 1

    def is_kept(self, slot: int) -> bool:
        return slot in self._place_of

    def is_free(self, slot: int) -> bool:
        return slot in self._free

    def begin_copy(self, slot: int) -> None:
        """A copy uses the slot: it is not lent to others until the copy ends."""
        self._copies[slot] += 1

    def end_copy(self, slot: int) -> None:
        self._copies[slot] -= 1
        if not self._copies[slot] and slot in self._left:
            self._left.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all states, and free all slots that no copy uses; no sequence has any."""
        self._slot_of.clear()
        self._place_of.clear()
        self._tails.clear()
        self._order, self._victims = StateOrder(self.num_states, self._ranking), []
        self._readers[:] = 0
        self._left = set(np.flatnonzero(self._copies).tolist())
        self._free = [slot for slot in range(self.num_states - 1, -1, -1) if slot not in self._left]

    def forget_kept(self) -> None:
        """Forget every kept state that nobody is about to read."""
        for place, slot in list(self._slot_of.items()):
            if not self._readers[slot]:
                self._forget(place)
                if self._copies[slot]:
                    self._left.add(slot)
                else:
                    self._free.append(slot)

    def _is_used(self, slot: int) -> bool:
        return bool(self._readers[slot] or self._copies[slot])

    def _use(self, slot: int) -> None:
        self._order.use(slot)
        self._spare([slot])

    def _spare(self, slots: Iterable[int]) -> None:
        """States are worth more than when evictions were planned."""
        for slot in slots:
            if slot in self._victims:
                self._victims.remove(slot)

    def _victim(self) -> int | None:
        """The kept state that is evicted next, of those that nobody uses."""
        planned = [slot for slot in self._victims if not self._is_used(slot)]
        self._victims = planned or self._plan_victims()
        return self._victims.pop() if self._victims else None

    def _plan_victims(self) -> list[int]:
        awaited = [self.find(chain, len(chain.token_ids) - 1)[1] for chain in self.awaited()]
        self._awaited_slots = set(awaited)
        unused = [slot for slot in self._place_of if not self._is_used(slot)]
        order = self._order.sort(unused, [slot for slot in awaited if slot != NO_STATE])
        return order[: 1 + self.num_states // PLAN_SHARE][::-1]

    def _forget(self, place: StatePlace) -> None:
        slot = self._slot_of.pop(place)
        self._spare([slot, *self._order.after(slot)])
        self._order.remove(slot)
        del self._place_of[slot]
        tails = self._tails[place.parent]
        del tails[place.tail]
        if not tails:
            del self._tails[place.parent]

    def check(self) -> None:
        """Raise if a slot was lost or is used twice."""
        kept = set(self._slot_of.values())
        assert len(kept) == len(self._slot_of) == len(self._place_of), "a slot is kept twice"
        assert not kept & set(self._free), "a kept slot is free"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert (self._readers >= 0).all(), "a state was released twice"
        assert not self._readers[self._free].any(), "a free slot has readers"
        assert not self._copies[self._free].any(), "a copy uses a free slot"
        assert (self._copies >= 0).all(), "a copy ended twice"
        assert not self._left & (kept | set(self._free)), "a slot is left over, and not"
        assert all(self._copies[slot] for slot in self._left), "a slot was lost after a copy"
        count = sum(map(len, self._tails.values()))
        assert count == len(self._slot_of), "a state is filed under no page"
        for place, slot in self._slot_of.items():
            for after in self._order.after(slot):
                assert place.is_before(self._place_of[after]), "a state has another one before it"
