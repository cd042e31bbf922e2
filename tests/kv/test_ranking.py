"""What a use does to a page's rank, in lower tiers and on the device."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig, StoreConfig, StorePolicy
from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey
from mainstem.engine.engine import Engine
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, root_key
from mainstem.kv.pool import PagePool
from mainstem.kv.ranking import RANKINGS, Fifo, Lookahead, Lru, PolicyKind, Ranking
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import FakeRunner


@pytest.mark.parametrize("kind", PolicyKind)
def test_numbers_and_arrays_are_ranked_alike(kind: PolicyKind) -> None:
    ranking, ranks = RANKINGS[kind], [0, 3, 7]
    alone = [ranking.used(rank, 9) for rank in ranks]
    together = np.zeros(3, np.int64)
    together[:] = ranking.used(np.array(ranks, np.int64), 9)
    assert together.tolist() == alone
    assert alone[0] == 9


@pytest.mark.parametrize(("ranking", "left"), [(Lru(), "first"), (Fifo(), "second")])
def test_the_device_evicts_pages_by_rank(ranking: Ranking, left: str) -> None:
    pool = PagePool(2)
    index = PrefixIndex(pool, 4, EventBus(), ranking)
    root = root_key(b"model", 4, b"")
    chains = [PageChain.of(root, 4, np.arange(n, n + 4, dtype=np.int32)) for n in (0, 50)]
    for chain in chains:
        page = pool.take(1)
        index.reserve(chain, 0, page)
        index.commit(page)
        index.touch(page)
        pool.give_back(page)
    index.touch(index.match(chains[0].keys)[0])
    assert index.evict(1) == 1
    assert (chains[0].keys[0] in index) == (left == "first")
    assert (chains[1].keys[0] in index) == (left == "second")
    index.check()


def test_the_device_evicts_awaited_pages_last() -> None:
    """Four chains of two pages; requests wait for the two least recently used, the first sooner."""
    pool = PagePool(8)
    index = PrefixIndex(pool, 4, EventBus(), Lookahead())
    root = root_key(b"model", 4, b"")
    chains = [PageChain.of(root, 4, np.arange(n, n + 8, dtype=np.int32)) for n in range(0, 80, 20)]
    for chain in chains:
        pages = pool.take(2)
        index.reserve(chain, 0, pages)
        index.commit(pages)
        index.touch(pages)
        pool.give_back(pages)
    awaited = [chains[0].keys, chains[1].keys, (*chains[0].keys[:1], *chains[1].keys[1:])]
    order: list[PageKey] = []
    for _ in range(8):
        before = set(index.ready_keys())
        index.evict(1, awaited)
        order += before - set(index.ready_keys())
        index.check()
    unwaited = [*reversed(chains[2].keys), *reversed(chains[3].keys)]
    assert order == [*unwaited, *reversed(chains[1].keys), *reversed(chains[0].keys)]


@pytest.mark.parametrize("seed", range(8))
def test_the_device_evicts_by_pin_then_queue_then_use_then_depth(seed: int) -> None:
    """Random queues and amounts, compared with a sort over all pages."""
    rng = np.random.default_rng(seed)
    pool = PagePool(160)
    index = PrefixIndex(pool, 4, EventBus(), Lookahead())
    root = root_key(b"model", 4, b"")
    chains = [PageChain.of(root, 4, np.arange(n, n + 32, dtype=np.int32)) for n in range(20)]
    for chain in chains:
        pages = pool.take(8)
        index.reserve(chain, 0, pages)
        index.commit(pages)
        pool.give_back(pages)
    used = rng.permutation(20).tolist()
    for number in used:
        index.touch(index.match(chains[number].keys)[0])
    index.pin(index.match(chains[used[1]].keys[:3])[0].tolist())
    where = {key: (n, d) for n, chain in enumerate(chains) for d, key in enumerate(chain.keys)}
    while len(index):
        asked = rng.permutation(20)[: rng.integers(0, 12)]
        awaited = [chains[number].keys[: rng.integers(1, 9)] for number in asked]

        def worth(key: PageKey, awaited: list[tuple[PageKey, ...]] = awaited) -> tuple[int, ...]:
            number, depth = where[key]
            places = [-place for place, keys in enumerate(awaited) if key in keys]
            is_pinned = number == used[1] and depth < 3
            wait = (1, places[0]) if places else (0, used.index(number))
            return (is_pinned, *wait, -depth)

        count = int(rng.integers(1, 30))
        expected = sorted(index.ready_keys(), key=worth)[count:]
        index.evict(count, awaited)
        index.check()
        assert sorted(index.ready_keys()) == sorted(expected)


def cached_by_policy(policy: StorePolicy) -> list[int]:
    """Cached tokens of four conversations queued after a new request, which takes 8 of 24 pages.
    The first conversation in the queue was used longest ago."""
    bus = EventBus()
    store = KVStore(24, 4, b"fake", bus, config=StoreConfig(policy=policy))
    scheduler = Scheduler(SchedConfig(), store, VOCAB, 10_000, bus)
    engine = Engine(scheduler, FakeRunner(24, 4, VOCAB, can_overlap=False), bus)
    chats = [list(range(first, first + 20)) for first in range(0, 80, 20)]
    for chat in chats:
        run_all(engine, [a_request(chat, 1)])
    turns = [a_request([*chat, 1, 2], 1, name=f"turn-{i}") for i, chat in enumerate(chats)]
    got = run_all(engine, [a_request(list(range(96, 64, -1)), 1), *turns])
    cached = {str(output.request_id): output.num_cached_tokens for output in got.outputs}
    return [cached[str(turn.request_id)] for turn in turns]


def test_the_policy_of_the_store_reaches_the_device() -> None:
    assert sum(cached_by_policy(StorePolicy.LRU)) <= 4  # each evicts the next one
    ahead = cached_by_policy(StorePolicy.LOOKAHEAD)
    assert ahead[:2] == [20, 20]
    assert ahead[2] >= 16
