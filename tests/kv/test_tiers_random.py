"""Random saves, loads and queues over tiers that are slow, full or fail. No threads.

Bytes and policy must agree: a page is in the tier that the policy says, or in none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest

from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv import loading, saving, stack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import Answer, Emptied, FoundPage, Read, ReadJob, WriteJob, Written
from mainstem.kv.transfer import LoadId, SharedLink

TOKENS = b"tokens"
TTL_S = 100.0
NUM_CHAINS = 6
CHAIN_PAGES = 5


@dataclass
class _Copy:
    num_left: int  # calls until it is done

    def num_layers_done(self) -> int:
        self.num_left -= 1
        return int(self.num_left < 0)

    def wait(self) -> None:
        self.num_left = 0

    def seconds(self) -> float:
        return 1e-3


class _Copier:
    num_layers = 1
    page_bytes = 8

    def __init__(self, rng: Random, num_slots: int) -> None:
        self.num_slots = num_slots
        self._rng = rng
        self._bytes = memoryview(bytearray(8))

    def slot(self, slot: int) -> memoryview:
        return self._bytes

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> _Copy:
        return _Copy(self._rng.randint(0, 3))

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> _Copy:
        return _Copy(self._rng.randint(0, 3))

    def forget(self, load_id: LoadId) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class _Lower:
    """A tier below host memory; reads and writes end at some later `poll`."""

    def __init__(self, rng: Random, name: str, num_places: int) -> None:
        self.name = name
        self.is_shared = name == "remote"
        self.is_open = self.can_write = True
        self.num_places = num_places
        self.link = SharedLink(1e9)
        self.num_writes_pending = 0
        self.is_full = False
        self._rng = rng
        self._num_slack = 2
        self._taken: set[PageKey] = set()
        self._there: set[PageKey] = set()
        self._under_way: list[WriteJob | ReadJob | Sequence[PageKey] | Emptied] = []

    def recover(self) -> Sequence[FoundPage]:
        return []

    def opened(self, num_pages: int) -> None: ...

    def take_place(self, key: PageKey) -> bool:
        assert key not in self._taken
        if self.is_full or len(self._taken) >= self.num_places + self._num_slack:
            return False
        self._taken.add(key)
        return True

    def delete(self, key: PageKey) -> None:
        jobs = [job for job in self._under_way if isinstance(job, WriteJob | ReadJob)]
        assert key not in {job.key for job in jobs}, "a page is deleted while it is copied"
        self._taken.remove(key)
        self._there.discard(key)

    def touch(self, used_at: dict[PageKey, float]) -> None: ...
    def end_soon(self) -> None: ...
    def close(self) -> None: ...

    def write(self, job: WriteJob) -> None:
        assert job.key in self._taken
        self.num_writes_pending += 1
        self._under_way.append(job)

    def read(self, jobs: Sequence[ReadJob], limit_s: float) -> None:
        assert self._there.issuperset(job.key for job in jobs), "a page to read is not stored"
        self._under_way += jobs

    def ask(self, keys: Sequence[PageKey]) -> None:
        self._under_way.append(keys)

    def fail(self) -> None:
        """The server was lost and may be empty now."""
        self._under_way.append(Emptied())

    def flush(self) -> None:
        """Does nothing: later calls of `poll` return the writes."""

    def poll(self) -> Iterator[Written | Read | Answer | Emptied]:
        while self._under_way and self._rng.random() < 0.7:
            job = self._under_way.pop(0)
            if isinstance(job, Emptied):
                yield job
                continue
            if not isinstance(job, WriteJob | ReadJob):
                found = job[: self._rng.randint(0, len(job))]
                self._there.update(found)
                self._taken.update(found)
                yield Answer(job[-1], found)
                continue
            problem = "EIO" if self._rng.random() < 0.1 else None
            if isinstance(job, WriteJob):
                self.num_writes_pending -= 1
                (self._there.add if problem is None else self._taken.remove)(job.key)
                yield Written(job.key, problem)
            else:
                yield Read(job.key, len(job.buffer), 0.0, 1e-3, problem)


class _Driver:
    def __init__(self, seed: int, num_stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng = Random(seed)
        self.now_s = 0.0
        for module in (loading, saving, stack):
            for name in ("monotonic", "time", "perf_counter"):
                monkeypatch.setattr(module, name, lambda: self.now_s, raising=False)
        names = [[], ["disk"], ["remote"], ["disk", "remote"]][num_stack]
        self.below = [_Lower(rng, name, rng.randint(2, 14)) for name in names]
        kind = rng.choice(["lookahead", "lookahead", "lru"])
        copier = _Copier(rng, rng.randint(2, 10))
        bus = EventBus()
        self.stack = stack.TierStack(bus, copier, self.below, kind, TTL_S)
        self.store = KVStore(1000, 4, b"fake", bus, self.stack)
        self.chains = [
            [PageKey(f"{chain}-{page}".encode()) for page in range(CHAIN_PAGES)]
            for chain in range(NUM_CHAINS)
        ]
        self.tickets: list[int] = []
        self.new_tickets = count()
        self.awaited: set[PageKey] = set()

    def act(self) -> None:
        store, rng = self.store, self.rng
        saver, loader = store.saver, store.loader
        keys = rng.choice(self.chains)[: rng.randint(1, CHAIN_PAGES)]
        match rng.randrange(11):
            case 0 | 1:
                missing = [number for number, key in enumerate(keys) if not self.stack.has(key)]
                new = missing[: saver.make_room(len(missing))]
                if new:
                    after = [keys[max(0, number - 1)] for number in new]
                    pages = store.take(len(new))
                    saver.copy_down(pages, [keys[n] for n in new], after, [TOKENS] * len(new))
                    store.release(pages)
            case 2 if (found := loader.stored(keys)).num_pages:
                pages_there = store.stack.pages.leading(keys[: found.num_pages])
                wanted = keys[: loading.num_together(pages_there, 3)]
                pages = store.take(len(wanted))
                load = loader.copy_up(wanted, pages, 1)
                store.release(pages[0 if load is None else len(load.pages) :])
            case 3:
                self.tickets.append(next(self.new_tickets))
                self.stack.policy.expect(self.tickets[-1], keys, self.tickets[-1])
            case 4 if self.tickets:
                store.dismiss(self.tickets.pop(rng.randrange(len(self.tickets))))
            case 5:
                loader.prefetch()
            case 6 if self.below:
                rng.choice(self.below).is_full = rng.random() < 0.5
            case 9 if self.below:
                asked = loader.questions.ask(keys)
                assert asked is None or loader.questions.is_open(asked)
                if asked is not None and loader.questions.awaits(asked, 3.0):
                    self.awaited.add(asked)
            case 10 if rng.random() < 0.2 and self.below and self.below[-1].is_shared:
                self.below[-1].fail()
            case 7 if rng.random() < 0.2:
                self.now_s += TTL_S / 2
            case 8 if rng.random() < 0.1:
                self.stack.clear()
            case _:
                self.stack.note_use(keys)
        self.now_s += 1.0
        self.awaited.difference_update(store.poll())
        store.check()


@pytest.mark.parametrize("stack", range(4), ids=["host", "disk", "remote", "both"])
@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(n, marks=pytest.mark.slow) for n in range(16, 60))]
)
def test_bytes_and_policy_agree(seed: int, stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(seed, stack, monkeypatch)
    for _ in range(150):
        driver.act()
    driver.store.saver.flush()
    for _ in range(100):
        driver.awaited.difference_update(driver.store.poll())
    assert not driver.awaited, "a request would wait for ever"
    driver.store.check()
    assert driver.store.num_copies == 0
    driver.stack.clear()
    driver.store.check()
    assert sum(map(driver.stack.num_pages, ("host", "disk", "remote"))) == 0
