"""How a use changes a page's rank, in lower tiers and on the device."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey
from mainstem.engine.engine import Engine
from mainstem.kv.eviction import POLICIES, Fifo, Lookahead, Lru, Ranking
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, root_key
from mainstem.kv.pool import PagePool
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import FakeRunner


@pytest.mark.parametrize("kind", POLICIES)
def test_numbers_and_arrays_get_the_same_rank(kind: str) -> None:
    ranking, ranks = POLICIES[kind], [0, 3, 7]
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
        index.order.touch(page)
        pool.give_back(page)
    index.order.touch(index.match(chains[0].keys)[0])
    assert index.evict(1) == 1
    assert (chains[0].keys[0] in index) == (left == "first")
    assert (chains[1].keys[0] in index) == (left == "second")
    index.check()


def test_the_device_evicts_awaited_pages_last() -> None:
    """Four chains of two pages. Chains 0 and 1, the least recently used, are awaited, 0 first."""
    pool = PagePool(8)
    index = PrefixIndex(pool, 4, EventBus(), Lookahead())
    root = root_key(b"model", 4, b"")
    chains = [PageChain.of(root, 4, np.arange(n, n + 8, dtype=np.int32)) for n in range(0, 80, 20)]
    for chain in chains:
        pages = pool.take(2)
        index.reserve(chain, 0, pages)
        index.commit(pages)
        index.order.touch(pages)
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
    """Random queues and amounts, compared with a sort over all pages. Evicted chains are computed
    again on other pages, so a page that was awaited may have another name at the next eviction."""
    rng = np.random.default_rng(seed)
    pool = PagePool(160)
    index = PrefixIndex(pool, 4, EventBus(), Lookahead())
    root = root_key(b"model", 4, b"")
    chains = [PageChain.of(root, 4, np.arange(n, n + 32, dtype=np.int32)) for n in range(20)]
    lengths = rng.integers(1, 9, 20).tolist()
    prefixes = [chain.keys[:length] for chain, length in zip(chains, lengths, strict=True)]
    used: list[int] = []

    def use(number: int) -> None:
        chain = chains[number]
        found, _ = index.match(chain.keys)
        pages = pool.take(8 - len(found))
        index.reserve(chain, len(found), pages)
        index.commit(pages)
        index.order.touch(np.append(found, pages))
        pool.give_back(pages)
        used[:] = [*(other for other in used if other != number), number]

    for number in rng.permutation(20).tolist():
        use(number)
    pinned = set(index.pin(index.match(chains[used[1]].keys[:3])[0].tolist()))
    where = {key: (n, d) for n, chain in enumerate(chains) for d, key in enumerate(chain.keys)}
    waiting = rng.permutation(20).tolist()
    for _ in range(60):
        awaited = [prefixes[number] for number in waiting[: rng.integers(0, 12)]]

        def worth(key: PageKey, awaited: list[tuple[PageKey, ...]] = awaited) -> tuple[int, ...]:
            number, depth = where[key]
            places = [-place for place, keys in enumerate(awaited) if key in keys]
            wait = (1, places[0]) if places else (0, used.index(number))
            return (key in pinned, *wait, -depth)

        count = int(rng.integers(1, 150))
        expected = sorted(index.ready_keys(), key=worth)[count:]
        index.evict(count, awaited)
        index.check()
        assert sorted(index.ready_keys()) == sorted(expected)
        pinned.intersection_update(expected)
        waiting = waiting[int(rng.integers(0, 3)) :] or rng.permutation(20).tolist()
        for number in rng.permutation(20).tolist():
            if pool.num_free >= 8 and rng.random() < 0.5:
                use(number)


def cached_by_policy(policy: str) -> list[int]:
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
    assert sum(cached_by_policy("lru")) <= 4  # each conversation evicts the next one
    ahead = cached_by_policy("lookahead")
    assert ahead[:2] == [20, 20]
    assert ahead[2] >= 16
