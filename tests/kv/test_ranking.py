"""What a use does to a page's rank, in lower tiers and on the device."""

import numpy as np
import pytest

from mainstem.core.events import EventBus
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, root_key
from mainstem.kv.pool import PagePool
from mainstem.kv.ranking import RANKINGS, Fifo, Lru, PolicyKind, Ranking


@pytest.mark.parametrize("kind", PolicyKind)
def test_numbers_and_arrays_are_ranked_alike(kind: PolicyKind) -> None:
    ranking, ranks = RANKINGS[kind], [0, 3, 7]
    alone = [ranking.used(rank, 9) for rank in ranks]
    together = np.zeros(3, np.int64)
    together[:] = ranking.used(np.array(ranks, np.int64), 9)
    assert together.tolist() == alone
    assert alone[0] == 9


@pytest.mark.parametrize(("ranking", "left"), [(Lru(), "first"), (Fifo(), "second")])
def test_the_device_gives_up_pages_by_rank(ranking: Ranking, left: str) -> None:
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
