"""Which kept state is evicted: by pin, queue, last use and price, as kv/eviction.py says."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.request import SamplingParams
from mainstem.core.step import Int32s
from mainstem.engine.engine import Engine
from mainstem.kv.eviction import MOST_USES
from mainstem.kv.keys import PageChain, root_key
from mainstem.kv.states import NO_STATE, StatePlace, StateStore
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import FakeRunner

PAGE = 4
ROOT = root_key(b"model", PAGE, b"")


def a_chain(*tokens: Int32s) -> PageChain:
    return PageChain.of(ROOT, PAGE, np.concatenate(tokens))


def tokens(seed: int, count: int) -> Int32s:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def keep(store: StateStore, chain: PageChain, num_tokens: int) -> StatePlace:
    place, slot = StatePlace.of(chain, num_tokens), store.take()
    assert slot is not None
    store.keep(place, slot)
    store.check()
    return place


def test_a_state_shortly_after_another_goes_before_one_that_is_far() -> None:
    """The one that goes was used last."""
    store, chain, other = StateStore(3), a_chain(tokens(1, 120)), a_chain(tokens(2, 30))
    first, second = keep(store, chain, 100), keep(store, other, 30)
    near = keep(store, chain, 120)
    store.take()
    assert store.has(first)
    assert store.has(second)
    assert not store.has(near)


def test_a_fork_that_two_prompts_used_outlives_ends_of_prompts() -> None:
    """After its second use, six prompts of the same length end in a store of four states."""
    store, shared = StateStore(4), tokens(1, 100)
    fork = keep(store, a_chain(shared, tokens(2, 9)), 100)
    _, slot = store.find(a_chain(shared, tokens(3, 9)), 109)
    store.note_start(slot)
    for seed in range(10, 16):
        keep(store, a_chain(tokens(seed, 100)), 100)
    assert store.has(fork)


def test_a_fork_that_nobody_uses_leaves() -> None:
    store = StateStore(4)
    fork = keep(store, a_chain(tokens(1, 100)), 100)
    for _ in range(50):
        store.note_start(store.find(a_chain(tokens(1, 100)), 100)[1])
    for seed in range(10, 10 + 8 * MOST_USES):
        keep(store, a_chain(tokens(seed, 100)), 100)
    assert not store.has(fork)


def test_the_state_after_an_evicted_one_is_worth_more() -> None:
    store, chain = StateStore(3), a_chain(tokens(1, 140))
    first, second = keep(store, chain, 20), keep(store, chain, 60)
    other = keep(store, a_chain(tokens(2, 50)), 50)
    keep(store, a_chain(tokens(3, 500)), 500)
    assert not store.has(first)  # 20 tokens
    keep(store, a_chain(tokens(4, 500)), 500)
    assert not store.has(other)  # 50 tokens, and `second` is worth 60 since `first` is gone
    assert store.has(second)


def test_a_state_that_is_kept_between_two_others_lowers_the_price_of_the_second() -> None:
    store, chain = StateStore(4), a_chain(tokens(1, 140))
    keep(store, chain, 20)
    deep, other = keep(store, chain, 140), keep(store, a_chain(tokens(2, 50)), 50)
    between = keep(store, chain, 120)
    store.take()  # `deep` or the first: 20 tokens each, and the first was used longer ago
    store.take()
    assert not store.has(deep)
    assert store.has(between)
    assert store.has(other)


@pytest.mark.parametrize("pinned", [False, True])
def test_states_of_waiting_prompts_and_pinned_ones_go_last(pinned: bool) -> None:
    store, chain = StateStore(3), a_chain(tokens(1, 30))
    wanted = keep(store, chain, 9)
    pin = store.pin(chain) if pinned else None
    if not pinned:
        store.awaited = lambda: [chain]
    for seed in range(10, 30):
        keep(store, a_chain(tokens(seed, 50)), 50)
    assert store.has(wanted)
    store.awaited = tuple
    if pin is not None:
        store.unpin(pin)
    for seed in range(40, 60):
        keep(store, a_chain(tokens(seed, 50)), 50)
    assert not store.has(wanted)


def test_the_next_request_comes_before_the_last() -> None:
    store = StateStore(2)
    chains = [a_chain(tokens(seed, 30)) for seed in range(2)]
    soon, late = (keep(store, chain, 20) for chain in chains)
    store.awaited = lambda: chains
    store.take()
    assert store.has(soon)
    assert not store.has(late)


def test_a_request_that_is_queued_after_evictions_were_planned_keeps_its_state() -> None:
    """In a store of 32 states, three evictions are planned at once: of the least recently used."""
    store = KVStore(64, PAGE, b"model", EventBus(), num_states=32)
    assert store.states is not None
    chains = [store.chain(tokens(seed, 30), b"") for seed in range(32)]
    places = [keep(store.states, chain, 20) for chain in chains]
    waiting: list[PageChain] = []
    store.watch_queue(lambda _: waiting)
    store.states.take()
    waiting.append(chains[1])
    store.expect(0, chains[1])
    store.states.take()
    assert [place for place in places if not store.states.has(place)] == [places[0], places[2]]


class Model:
    """What is kept, and what each state is worth, by the definition."""

    def __init__(self) -> None:
        self.clock = 0
        self.kept: dict[StatePlace, tuple[int, int]] = {}  # when it was used, and how often

    def use(self, place: StatePlace) -> None:
        self.clock += 1
        self.kept[place] = self.clock, min(self.kept.get(place, (0, 0))[1] + 1, MOST_USES)

    def worth(self, place: StatePlace) -> tuple[int, int]:
        before = [0]
        for other in self.kept:
            num_tokens = other.num_tokens
            if num_tokens < place.num_tokens and np.array_equal(
                other.chain.token_ids[:num_tokens], place.chain.token_ids[:num_tokens]
            ):
                before.append(num_tokens)
        used, num_uses = self.kept[place]
        return used + num_uses * (place.num_tokens - max(before)), used

    def evict(self) -> StatePlace:
        victim = min(self.kept, key=self.worth)
        self.clock = max(self.clock, self.worth(victim)[0])
        del self.kept[victim]
        return victim


@pytest.mark.parametrize("seed", range(12))
def test_random_trees_are_evicted_as_defined(seed: int) -> None:
    """In a store so small that each eviction is planned by itself."""
    rng, store, model = np.random.default_rng(seed), StateStore(9), Model()
    stems = [rng.integers(0, 3, rng.integers(4, 60)).astype(np.int32) for _ in range(4)]
    for _ in range(300):
        stem = stems[rng.integers(len(stems))]
        kept = stem[: rng.integers(1, len(stem) + 1)]
        chain = a_chain(kept, rng.integers(0, 3, rng.integers(4, 30)).astype(np.int32))
        num_tokens = int(rng.integers(PAGE, len(chain.token_ids) + 1))
        if rng.random() < 0.4:
            found, slot = store.find(chain, num_tokens)
            store.note_start(slot)
            if slot != NO_STATE:
                model.use(StatePlace.of(chain, found))
            continue
        stems[rng.integers(len(stems))] = chain.token_ids
        place, lent = StatePlace.of(chain, num_tokens), store.take()
        assert lent is not None
        if len(model.kept) == 9:
            gone = model.evict()
            assert not store.has(gone)
        assert all(map(store.has, model.kept))
        store.keep(place, lent)
        model.use(place)
        store.check()


def test_a_shared_beginning_stays_between_requests_that_share_nothing() -> None:
    """Of each six requests, one has the system prompt, in a store of eight states: with the least
    recently used state evicted first, the prompt's state would be gone each time."""
    rng = np.random.default_rng(7)
    engine = an_engine(4096, 16, can_overlap=True, num_states=8)
    system = rng.integers(0, VOCAB, 600).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    starts: list[int] = []
    for number in range(36):
        has_system = number % 6 == 0
        prompt = (system if has_system else []) + rng.integers(0, VOCAB, 50).tolist()
        keep_tokens = 600 if has_system else 0
        asked = a_request(prompt, name=str(number), sampling=sampling, keep_tokens=keep_tokens)
        found = run_all(engine, [asked])
        if has_system:
            starts.append(found.outputs[0].num_cached_tokens)
    assert starts == [0] + [600] * 5


def an_engine_by(policy: str) -> Engine:
    bus = EventBus()
    store = KVStore(4096, 16, b"fake", bus, config=StoreConfig(policy=policy), num_states=8)
    scheduler = Scheduler(SchedConfig(chunk_tokens=512, max_seqs=1), store, VOCAB, 10_000, bus)
    return Engine(scheduler, FakeRunner(4096, 16, VOCAB, can_overlap=True, num_states=8), bus)


def start_after_others(engine: Engine, system: list[int], num_others: int) -> int:
    """Where a prompt starts that waits behind long prompts of others."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    prompts = [rng.integers(0, VOCAB, 500).tolist() for _ in range(num_others)]
    prompts.append([*system, *rng.integers(0, VOCAB, 20).tolist()])
    asked = [a_request(p, name=str(i), sampling=sampling) for i, p in enumerate(prompts)]
    found = run_all(engine, asked)
    last = str(num_others)
    return next(o.num_cached_tokens for o in found.outputs if str(o.request_id) == last)


@pytest.mark.parametrize(("policy", "start"), [("lookahead", 48), ("lru", 0)])
def test_the_state_of_a_queued_prompt_stays_if_the_policy_sees_the_queue(
    policy: str, start: int
) -> None:
    engine, system = an_engine_by(policy), list(range(48))
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    run_all(engine, [a_request([*system, 7, 7], name="x", sampling=sampling, keep_tokens=48)])
    assert start_after_others(engine, system, 12) == start


@pytest.mark.parametrize(("is_pinned", "start"), [(True, 48), (False, 0)])
def test_a_pinned_prefix_keeps_its_state(is_pinned: bool, start: int) -> None:
    engine, system = an_engine_by("lru"), list(range(48))
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    run_all(engine, [a_request([*system, 7, 7], name="x", sampling=sampling, keep_tokens=48)])
    ids = np.array(system, np.int32)
    assert engine.pin("app", [ids]) == 3
    if not is_pinned:
        assert engine.pin("app", ()) == 0
    assert start_after_others(engine, system, 12) == start


def guess(store: StateStore, chain: PageChain, num_tokens: int) -> StatePlace | None:
    place = StatePlace.of(chain, num_tokens)
    if (slot := store.take_for_guess(place)) is None:
        return None
    store.keep(place, slot, is_guess=True)
    store.check()
    return place


def test_a_guess_leaves_before_states_that_are_wanted() -> None:
    """One of 240 tokens, an eighth of whose price is less than 40."""
    store, chain = StateStore(3), a_chain(tokens(1, 300))
    early = keep(store, a_chain(tokens(2, 40)), 40)
    guessed, end = guess(store, chain, 240), keep(store, chain, 300)
    assert guessed is not None
    keep(store, a_chain(tokens(3, 40)), 40)
    assert store.has(early)
    assert store.has(end)
    assert not store.has(guessed)


def test_a_guess_does_not_lower_the_price_of_the_state_after_it() -> None:
    """The end is 20 tokens after the guess, and 120 after the state before both."""
    store, chain = StateStore(4), a_chain(tokens(1, 140))
    keep(store, chain, 20)
    guess(store, chain, 120)
    end, other = keep(store, chain, 140), keep(store, a_chain(tokens(2, 50)), 50)
    for _ in range(3):  # the state before, the guess, and the other one
        assert store.take() is not None
    assert store.has(end)
    assert not store.has(other)


def test_a_guess_takes_no_slot_from_a_state_of_more_worth() -> None:
    store = StateStore(1)
    kept = keep(store, a_chain(tokens(1, 60)), 60)
    assert guess(store, a_chain(tokens(2, 200)), 200) is None
    assert store.has(kept)
    better = guess(store, a_chain(tokens(3, 800)), 800)
    assert better is not None
    assert not store.has(kept)


def test_a_guess_takes_no_slot_from_a_pinned_state() -> None:
    store, chain = StateStore(1), a_chain(tokens(1, 60))
    keep(store, chain, 60)
    store.pin(chain)
    assert guess(store, a_chain(tokens(3, 8000)), 8000) is None


def test_a_guess_takes_no_slot_from_a_state_that_a_request_waits_for() -> None:
    store, chain = StateStore(1), a_chain(tokens(1, 60))
    keep(store, chain, 50)
    store.awaited = lambda: [chain]
    assert guess(store, a_chain(tokens(3, 8000)), 8000) is None
