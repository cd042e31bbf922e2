"""Which pages stay, move and leave: single rules, comparison with a simple model, random calls."""

import tracemalloc
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mainstem.core.errors import ConfigError
from mainstem.kv.eviction import POLICIES
from mainstem.kv.places import HOST, Moves
from mainstem.kv.policy import PolicyConfig, TierPolicy
from tests.work import instructions

DISK, REMOTE = 1, 2
SEEING = ["lookahead", "belady"]
BLIND = ["lru", "fifo"]


def a_policy(
    host: int, disk: int = 0, kind: str = "lookahead", ttl_s: float | None = None
) -> TierPolicy[str]:
    return TierPolicy(PolicyConfig((host, disk), kind, headroom=0.0, ttl_s=ttl_s))


def tiers(policy: TierPolicy[str], keys: Sequence[str]) -> str:
    """A letter per page: h, d, r, or a dot for none."""
    letter = {HOST: "h", DISK: "d", REMOTE: "r", None: "."}
    return "".join(letter[policy.tier_of(key)] for key in keys)


@pytest.mark.parametrize("kind", POLICIES)
def test_the_tail_of_a_chain_is_evicted_first(kind: str) -> None:
    policy = a_policy(4, kind=kind)
    policy.admit("abcd", 0)
    assert policy.choose_victims(HOST, 2).drop == ["d", "c"]
    assert tiers(policy, "abcd") == "hh.."


@pytest.mark.parametrize("kind", ["lookahead", "lru"])
def test_without_a_queue_the_least_recently_used_page_is_evicted(kind: str) -> None:
    policy = a_policy(3, kind=kind)
    for now, key in enumerate("abca"):
        policy.admit(key, now)
    assert policy.admit("x", 9).drop == ["b"]


def test_fifo_ignores_use() -> None:
    policy = a_policy(3, kind="fifo")
    for now, key in enumerate("abca"):
        policy.admit(key, now)
    assert policy.admit("x", 9).drop == ["a"]


@pytest.mark.parametrize("kind", SEEING)
def test_pages_that_requests_wait_for_are_not_evicted(kind: str) -> None:
    policy = a_policy(3, kind=kind)
    policy.admit("a", 0)
    policy.expect("job", "a")
    policy.admit("b", 1)
    policy.admit("c", 2)
    assert policy.admit("x", 3).drop == ["b"]
    assert policy.admit("y", 4).drop == ["c"]
    assert tiers(policy, "axy") == "hhh"


@pytest.mark.parametrize("kind", BLIND)
def test_lru_and_fifo_do_not_see_the_queue(kind: str) -> None:
    policy = a_policy(1, kind=kind)
    policy.admit("a", 0)
    policy.expect("job", "a")
    assert policy.admit("b", 1).drop == ["a"]
    assert policy.num_queued == 0


def test_awaited_pages_of_the_last_request_in_the_queue_are_evicted_first() -> None:
    """Figure 9 of the AttentionStore paper: host and disk are full of waiting jobs' pages."""
    policy = a_policy(2, 2)
    for now, key in enumerate("3412"):
        policy.admit(key, now)
    for job in "1234":
        policy.expect(job, job)
    policy.choose_prefetch(10)
    assert tiers(policy, "1234") == "hhdd"
    moves = policy.choose_victims(HOST, 1)  # 2 is needed later than 1 and sooner than 3 and 4
    assert moves.write == ["2"]
    assert moves.drop == ["4"]
    assert tiers(policy, "1234") == "hdd."


def test_a_page_worth_less_than_all_others_is_refused() -> None:
    policy = a_policy(2)
    policy.admit("ab", 0)
    policy.expect("job", "ab")
    assert policy.admit("xy", 1).drop == ["x", "y"]
    assert tiers(policy, "abxy") == "hh.."


def test_a_page_without_room_in_host_memory_goes_straight_to_disk() -> None:
    policy = a_policy(2, 2)
    policy.admit("ab", 0)
    policy.expect("job", "ab")
    assert policy.admit("xy", 1).write == ["x", "y"]
    assert tiers(policy, "abxy") == "hhdd"


def test_a_chain_longer_than_the_host_keeps_its_head_there() -> None:
    policy = a_policy(2, 3)
    assert policy.admit("abcdef", 0).drop == ["f"]
    assert tiers(policy, "abcdef") == "hhddd."


def test_prefetch_loads_the_page_needed_soonest_and_keeps_the_disk_copy() -> None:
    policy = a_policy(2, 10)
    for now, key in enumerate("abcdef"):
        policy.admit(key, now)
    assert tiers(policy, "abcdef") == "ddddhh"
    policy.expect("later", "b")
    policy.expect("sooner", "a", place=-5)
    moves = policy.choose_prefetch(1)
    assert moves.load == ["a"]
    assert policy.choose_prefetch(9).load == ["b"]
    assert policy.places("a") == 0b11
    assert tiers(policy, "abcdef") == "hhdddd"


def test_prefetch_stops_when_the_host_is_full() -> None:
    policy = a_policy(2, 10)
    for now, key in enumerate("abcdef"):
        policy.admit(key, now)
    for job in "abcd":
        policy.expect(job, job)
    assert policy.choose_prefetch(9).load == ["a", "b"]
    policy.dismiss("a")
    assert policy.choose_prefetch(9).load == ["c"]
    policy.check()


def test_prefetch_leaves_the_headroom_free() -> None:
    policy: TierPolicy[int] = TierPolicy(PolicyConfig((10, 100), headroom=0.2))
    policy.admit(range(30), 0)
    policy.choose_victims(HOST, 10)
    policy.expect("job", range(30))
    assert len(policy.choose_prefetch(99).load) == 8
    policy.admit(range(40, 42), 1)
    assert policy.num_pages(HOST) == 10
    policy.make_headroom()
    assert policy.num_pages(HOST) == 8


def test_an_evicted_page_that_is_needed_soon_is_prefetched_again() -> None:
    policy = a_policy(2, 4)
    policy.admit("ab", 0)
    policy.expect("job", "ab")
    policy.choose_prefetch(9)
    policy.choose_victims(HOST, 1)
    assert tiers(policy, "ab") == "hd"
    assert policy.choose_prefetch(9).load == ["b"]


def test_a_page_with_a_disk_copy_is_released_without_a_write() -> None:
    policy = a_policy(1, 2)
    policy.admit("a", 0)
    assert policy.back_up(DISK, "a").write == ["a"]
    moves = policy.admit("b", 1)
    assert moves.free == ["a"]
    assert not moves.write


def test_pages_that_return_from_disk_after_a_long_pause_evict_nothing() -> None:
    policy = a_policy(2, 9)
    for now, key in enumerate("abcd"):
        policy.admit(key, now)
    assert tiers(policy, "abcd") == "ddhh"
    assert not policy.keep("a", 4)  # all host pages were used later than `a`
    assert tiers(policy, "abcd") == "ddhh"
    policy.note_use("a", 5)
    policy.keep("a", 6)
    assert tiers(policy, "abcd") == "hddh"


def test_loading_a_page_counts_as_a_use() -> None:
    """A running conversation is not the least recently used."""
    policy = a_policy(2, 9)
    for now, key in enumerate("xyab"):
        policy.admit(key, now)
    policy.note_use("x", 4)
    assert tiers(policy, "xyab") == "ddhh"
    policy.keep("a", 5)  # `a` is loaded from host memory: its conversation runs
    policy.keep("x", 6)
    assert tiers(policy, "xyab") == "hdhd"


def test_kept_pages_evict_nothing_that_requests_wait_for() -> None:
    policy = a_policy(2, 9)
    for now, key in enumerate("abc"):
        policy.admit(key, now)
    policy.expect("job", "bc")
    policy.note_use("a", 3)
    policy.expect("own", "a")
    assert not policy.keep("a", 4)
    assert tiers(policy, "abc") == "dhh"


def test_pages_that_return_from_disk_after_a_long_pause_use_free_host_memory() -> None:
    policy: TierPolicy[str] = TierPolicy(PolicyConfig((10, 90), headroom=0.2))
    policy.recover(DISK, "zyxwvutsrqponmlkjihgfedcba", 0)
    assert not policy.keep("lmnopqrstu", 1)
    assert tiers(policy, "lmnopqrstu") == "hhhhhhhhdd"


@pytest.mark.parametrize("kind", ["lookahead", "lru"])
def test_some_conversations_that_return_in_turn_stay_in_host_memory(kind: str) -> None:
    """Three chains fit, six return in turn: with LRU each would evict the one needed next."""
    policy = a_policy(12, 99, kind)
    chains = [[f"{chain}-{page}" for page in range(4)] for chain in range(6)]
    for chain in chains:
        policy.admit(chain, 0)
    hits = []
    for now in range(1, 5):
        hits.append(0)
        for chain in chains:
            hits[-1] += policy.tiers_of(chain).count(HOST)
            policy.keep(chain, now)
            policy.note_use(chain, now)
    assert hits == ([12] * 4 if kind == "lookahead" else [0] * 4)


def test_if_most_chains_return_soon_any_that_returns_evicts_the_least_recently_used() -> None:
    policy = a_policy(120, 999)
    chains = [[f"{chain}-{page}" for page in range(4)] for chain in range(60)]
    for chain in chains:
        policy.admit(chain, 0)
    for now in range(1, 10):  # only the last two chains return
        for chain in chains[58:]:
            policy.keep(chain, now)
            policy.note_use(chain, now)
    policy.keep(chains[0], 10)
    assert not any(policy.tiers_of(chains[0]))
    assert HOST not in policy.tiers_of(chains[30])  # the first of the thirty chains in host memory
    policy.admit(["1-4"], 11, after=["1-3"])
    assert policy.tier_of("1-4") == HOST
    policy.drop(["1-4", *(key for chain in chains for key in chain)])  # now the store is empty
    for chain in chains:
        policy.admit(chain, 12)
    policy.keep(chains[0], 13)
    assert HOST not in policy.tiers_of(chains[0])


def test_a_kept_page_is_not_evicted_for_itself() -> None:
    policy = a_policy(1, 2)
    for now, key in enumerate("abc"):
        policy.admit(key, now)
    assert tiers(policy, "abc") == "ddh"
    for now in range(3, 9):  # the page that `a` replaces needs room on disk, where `a` is
        policy.keep("a", now)
        policy.note_use("a", now)
        policy.check()
    assert tiers(policy, "a") == "h"


def test_a_chain_that_returns_often_enters_host_memory_full_of_others() -> None:
    policy = a_policy(12, 99)
    chains = [[f"{chain}-{page}" for page in range(4)] for chain in range(6)]
    for chain in chains:
        policy.admit(chain, 0)
    for now in range(1, 3):
        assert HOST not in policy.tiers_of(chains[0])
        policy.keep(chains[0], now)
        policy.note_use(chains[0], now)
    assert not any(policy.tiers_of(chains[0]))


@pytest.mark.parametrize("kind", ["lookahead", "lru"])
def test_new_pages_of_a_chain_that_is_only_on_disk_evict_nothing(kind: str) -> None:
    policy = a_policy(2, 9, kind)
    policy.admit("ab", 0)
    policy.admit("xy", 1)
    assert tiers(policy, "abxy") == "ddhh"
    policy.admit("cd", 2, after="bc")
    assert tiers(policy, "cdxy") == ("ddhh" if kind == "lookahead" else "hhdd")
    policy.admit("z", 3, after="y")
    assert tiers(policy, "z") == "h"


def test_copies_of_host_pages_are_evicted_first_on_disk() -> None:
    policy = a_policy(2, 1)
    policy.admit("a", 0)
    policy.back_up(DISK, "a")
    policy.admit("b", 1)
    policy.note_use("a", 2)
    moves = policy.admit("c", 3)
    assert (moves.free, moves.write, moves.drop) == (["a"], ["b"], [])
    assert tiers(policy, "abc") == "hdh"


def test_unused_pages_expire_even_if_a_request_waits_for_them() -> None:
    policy = a_policy(9, ttl_s=10)
    for key in "abc":
        policy.admit(key, 0)
    policy.note_use("b", 5)
    policy.expect("job", "c")
    assert policy.expire(9.9) == []
    assert policy.expire(10) == ["a", "c"]
    assert policy.expire(15) == ["b"]


def test_an_aborted_request_does_not_count_as_use_of_its_pages() -> None:
    policy = a_policy(2)
    policy.admit("a", 0)
    policy.admit("b", 1)
    policy.expect("job", "a")
    policy.dismiss("job")
    policy.dismiss("job")
    assert policy.admit("c", 2).drop == ["a"]


def test_without_prefetch_finished_requests_leak_no_memory() -> None:
    """Without a disk `choose_prefetch` is never called."""
    policy = a_policy(10)
    policy.expect("waits", ["kept"])
    tracemalloc.start()
    for job in range(2000):
        policy.expect(job, [f"{job}-{page}" for page in range(5)])
        policy.dismiss(job)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000
    policy.check()


def test_leaving_a_long_queue_takes_no_search_through_it() -> None:
    """Leaving a queue 64 times as long is about the same work."""

    def work(num_waiting: int) -> int:
        policy, keys = a_policy(100), [str(number) for number in range(50)]
        for job in range(num_waiting):
            policy.expect(job, keys)
        return instructions(lambda: policy.dismiss(num_waiting - 1))

    assert work(6400) < 2 * work(100)


def test_entering_the_queue_takes_no_work_for_each_page() -> None:
    """Pages that are wanted again are not filed again before their turn to leave comes."""

    def work(num_pages: int) -> int:
        policy, keys = a_policy(2000), [str(number) for number in range(num_pages)]
        policy.admit(keys, 0)
        return instructions(lambda: policy.expect("job", keys))

    assert work(1000) < work(10) + 50


def test_a_page_that_was_wanted_and_used_in_the_meantime_leaves_in_its_new_order() -> None:
    policy = a_policy(3)
    for when, key in enumerate("abc"):
        policy.admit(key, when)
    policy.expect("job", "a")
    policy.note_use("b", 4)
    policy.dismiss("job")
    assert [policy.admit(key, 5).drop for key in "xyz"] == [["a"], ["c"], ["b"]]


def test_if_too_many_pages_are_found_at_the_start_the_first_are_dropped() -> None:
    policy = a_policy(1, 2)
    moves = policy.recover(DISK, "abc", 0)
    assert moves.drop == ["a"]
    assert tiers(policy, "abc") == ".dd"


def test_the_queue_window_is_capacity_divided_by_mean_size() -> None:
    assert PolicyConfig((100, 900)).window_length(25.0) == 40
    assert PolicyConfig((0, 0)).window_length(25.0) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"tier_pages": (-1,)},
        {"tier_pages": ()},
        {"tier_pages": (1, -1)},
        {"tier_pages": (1,), "headroom": 1.0},
        {"tier_pages": (1,), "ttl_s": 0.0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PolicyConfig(**wrong)  # type: ignore[arg-type]


# -- compared with a model that scans all pages ----------------------------------------------------


def random_chains(seed: int, length: int) -> list[list[int]]:
    """Prompts that share prefixes: paths from the root of a random tree."""
    random, parents = Random(seed), {0: -1}
    chains: list[list[int]] = []
    for new in count(1):
        if len(chains) == length:
            return chains
        at = random.choice(list(parents)[-40:])
        if random.random() < 0.6:
            parents[new] = at
            at = new
        chain = []
        while at >= 0:
            chain.append(at)
            at = parents[at]
        chains.append(chain[::-1])
    raise AssertionError


def hits_of_policy(chains: list[list[int]], config: PolicyConfig, known: int) -> int:
    policy: TierPolicy[int] = TierPolicy(config)
    hits = num_known = 0
    for index, chain in enumerate(chains):
        for ahead in range(num_known, min(index + 1 + known, len(chains))):
            policy.expect(ahead, chains[ahead])
            num_known = ahead + 1
        policy.choose_prefetch(10**9)
        hits += policy.match(chain)
        policy.finish(index, chain, index)
        policy.make_headroom()
        policy.check()
    return hits


def hits_of_model(chains: list[list[int]], capacity: int, known: int) -> int:
    """Belady for one tier by a full scan: the page with the furthest next use is evicted first."""
    stored: dict[int, int] = {}  # page -> last use
    hits = 0
    for index, chain in enumerate(chains):
        hits += next((i for i, key in enumerate(chain) if key not in stored), len(chain))
        stored.update(dict.fromkeys(chain, index))
        ahead = chains[index + 1 : index + 1 + known]

        def keep_first(
            key: int, ahead: list[list[int]] = ahead, depths: dict[int, int] = stored
        ) -> tuple[int, int, int]:
            wanted = next((i for i, later in enumerate(ahead) if key in later), None)
            depth = next(c.index(key) for c in chains if key in c)
            return (0, wanted, depth) if wanted is not None else (1, -depths[key], depth)

        for key in sorted(stored, key=keep_first)[capacity:]:
            del stored[key]
    return hits


@pytest.mark.parametrize("known", [0, 3, 30])
@pytest.mark.parametrize("capacity", [3, 12, 40])
def test_belady_hits_as_many_pages_as_a_full_scan(capacity: int, known: int) -> None:
    chains = random_chains(capacity, 120)
    config = PolicyConfig((capacity,), kind="belady")
    assert hits_of_policy(chains, config, known) == hits_of_model(chains, capacity, known)


def test_two_tiers_hit_as_many_pages_as_one_of_their_total_size() -> None:
    """Except for a few hits: a page that moves up keeps its disk place until it has arrived."""
    chains = random_chains(7, 200)
    for kind in ("lookahead", "lru"):
        one = hits_of_policy(chains, PolicyConfig((30,), kind=kind), 20)
        two = hits_of_policy(chains, PolicyConfig((10, 20), kind, headroom=0.0), 20)
        assert one == pytest.approx(two, rel=0.03), kind


def test_a_longer_view_of_the_queue_never_costs_hits() -> None:
    chains = random_chains(3, 200)
    config = PolicyConfig((10, 20), headroom=0.0)
    hits = [hits_of_policy(chains, config, known) for known in (0, 5, 20, 200)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]


# -- any order of calls ----------------------------------------------------------------------------

KEYS = st.integers(0, 30)
CHAIN = st.builds(lambda start, size: range(start, start + size), KEYS, st.integers(1, 6))


class PolicyMachine(RuleBasedStateMachine):
    """Any order of calls keeps the tiers consistent, and the moves match their contents."""

    @initialize(tier_pages=st.sampled_from([(6,), (6, 9), (6, 9, 12)]))
    def open(self, tier_pages: tuple[int, ...]) -> None:
        self.policy: TierPolicy[int] = TierPolicy(PolicyConfig(tier_pages, headroom=0.2, ttl_s=20))
        # the bytes of a store that carries out every move
        self.tiers: list[set[int]] = [set() for _ in tier_pages]
        self.tickets: list[int] = []
        self.now = 0.0
        self.names = count()

    def stored(self) -> set[int]:
        return set().union(*self.tiers)

    def carry_out(self, moves: Moves[int], in_hand: Sequence[int] = ()) -> None:
        """Carry out moves as a store would; `in_hand` are pages just computed or read."""
        lists = [*moves.load, *moves.write, *moves.free, *moves.drop]
        assert len(set(lists)) == len(lists), "a page is moved twice"
        assert set(moves.write) <= self.stored() | set(in_hand), "bytes to write are not available"
        assert set(moves.load) <= self.stored() - self.tiers[HOST], "bytes to load are missing"
        for key in in_hand:
            if self.policy.tier_of(key) == HOST:
                self.tiers[HOST].add(key)
        for key in lists:
            places = self.policy.places(key)
            had = sum(1 << tier for tier, pages in enumerate(self.tiers) if key in pages)
            new = places & ~had
            assert not new or key in moves.write or (new == 1 and key in moves.load)
            assert bool(places) == (key not in moves.drop)
            self.put(key)

    def put(self, key: int) -> None:
        """Put a page's bytes where the policy says."""
        for tier, pages in enumerate(self.tiers):
            (pages.add if self.policy.places(key) >> tier & 1 else pages.discard)(key)

    @rule(keys=CHAIN)
    def admit(self, keys: range) -> None:
        self.now += 1
        self.carry_out(self.policy.admit(keys, self.now), keys)

    @rule(keys=CHAIN)
    def admit_after(self, keys: range) -> None:
        self.now += 1
        before = range(keys.start - 1, keys.stop - 1)
        self.carry_out(self.policy.admit(keys, self.now, before), keys)

    @rule(keys=CHAIN)
    def keep(self, keys: range) -> None:
        read = [key for key in keys if self.policy.tier_of(key)]
        self.carry_out(self.policy.keep(keys, self.now), read)

    @rule(keys=CHAIN, data=st.data())
    def finish(self, keys: range, data: st.DataObject) -> None:
        if self.tickets:
            index = data.draw(st.integers(0, len(self.tickets) - 1))
            ticket = self.tickets.pop(index)
            self.carry_out(self.policy.finish(ticket, keys, self.now), keys)

    @rule(keys=CHAIN)
    def use(self, keys: range) -> None:
        self.policy.note_use(keys, self.now)

    @rule(keys=CHAIN, place=st.none() | st.integers(-1000, 1000))
    def expect(self, keys: range, place: int | None) -> None:
        ticket = next(self.names)
        if place is not None:
            place = place * 10_000 + ticket  # unique
        self.policy.expect(ticket, keys, place)
        self.tickets.append(ticket)

    @rule(data=st.data())
    def dismiss(self, data: st.DataObject) -> None:
        if self.tickets:
            index = data.draw(st.integers(0, len(self.tickets) - 1))
            self.policy.dismiss(self.tickets.pop(index))

    @rule(limits=st.tuples(st.integers(0, 8), st.integers(0, 8)))
    def prefetch(self, limits: tuple[int, int]) -> None:
        before = [set(pages) for pages in self.tiers]
        limits = limits[: len(self.tiers) - 1]  # type: ignore[assignment]
        moves = self.policy.choose_prefetch(*limits)
        loaded, faster = set(moves.load), set[int]()
        for limit, pages in zip(limits, before[1:], strict=True):
            assert len(loaded & pages - faster) <= limit
            faster |= pages
        self.carry_out(moves)

    @rule(data=st.data(), num=st.integers(0, 5))
    def victims(self, data: st.DataObject, num: int) -> None:
        tier = data.draw(st.integers(0, len(self.tiers) - 1))
        self.carry_out(self.policy.choose_victims(tier, num))

    @rule(num=st.integers(0, 5))
    def free(self, num: int) -> None:
        waited_for = {key for key in self.tiers[HOST] if key in self.policy._next_use}
        self.carry_out(self.policy.free_unawaited(num))
        assert waited_for <= self.tiers[HOST], "a page that is waited for left the host"

    @rule()
    def headroom(self) -> None:
        self.carry_out(self.policy.make_headroom())

    @rule(key=KEYS)
    def lose(self, key: int) -> None:
        self.policy.drop([key])
        self.put(key)

    @rule(keys=CHAIN, data=st.data())
    def lose_from(self, keys: range, data: st.DataObject) -> None:
        tier = data.draw(st.integers(0, len(self.tiers) - 1))
        self.policy.drop_from(tier, keys)
        self.tiers[tier] -= set(keys)

    @rule(keys=CHAIN, data=st.data())
    def back_up(self, keys: range, data: st.DataObject) -> None:
        tier = data.draw(st.integers(0, len(self.tiers) - 1))
        if tier:
            self.carry_out(self.policy.back_up(tier, keys))

    @rule(keys=CHAIN, data=st.data())
    def find_in_tier(self, keys: range, data: st.DataObject) -> None:
        """Another process has put pages into a lower tier."""
        tier = data.draw(st.integers(0, len(self.tiers) - 1))
        if tier:
            self.tiers[tier] |= set(keys)
            self.carry_out(self.policy.recover(tier, keys, self.now))
            for key in keys:
                self.put(key)

    @rule(seconds=st.integers(0, 30))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        for key in self.policy.expire(self.now):
            self.put(key)

    @invariant()
    def policy_is_whole(self) -> None:
        self.policy.check()
        stored = self.stored()
        assert self.policy.table.stored.keys() == stored
        for key in stored:
            had = sum(1 << tier for tier, pages in enumerate(self.tiers) if key in pages)
            assert self.policy.places(key) == had


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
