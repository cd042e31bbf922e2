"""The engine over tiers: evicted pages come back, and the answers stay the same."""

from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np
import pytest

from mainstem.core.events import (
    EventBus,
    PagesEvicted,
    PagesLoaded,
    PagesLost,
    SavesSkipped,
    StoreOpened,
)
from mainstem.core.metrics import Counters
from mainstem.kv.finder import Match
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import StoredRun
from mainstem.sched.loading import Loader
from tests import fakes
from tests.builders import VOCAB, Collector, a_request, run_all, until_idle
from tests.fakes import fake_answer
from tests.kv.faulty import FaultyFiles
from tests.kv.tiered import Tiered, a_tiered_engine
from tests.waiting import until
from tests.work import instructions

RNG = np.random.default_rng(0)
CHATS = [[first, *RNG.integers(0, VOCAB, 29).tolist()] for first in range(6)]


def ask(tiered: Tiered, prompts: list[list[int]], max_tokens: int = 4) -> list[int]:
    """Answer prompts at once and check the answers; returns cached tokens of each."""
    requests = [a_request(prompt, max_tokens) for prompt in prompts]
    got = run_all(tiered.engine, requests)
    cached = {str(output.request_id): output.num_cached_tokens for output in got.outputs}
    for request, prompt in zip(requests, prompts, strict=True):
        assert got.tokens[str(request.request_id), 0] == fake_answer(prompt, max_tokens, VOCAB)
    return [cached[str(request.request_id)] for request in requests]


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("preload", ["auto", "all", "0", "1"])
@pytest.mark.parametrize("patience", [0, 3])
@pytest.mark.parametrize("has_disk", [False, True])
def test_pages_evicted_from_the_device_come_back(
    can_overlap: bool, preload: str, patience: int, has_disk: bool, tmp_path: Path
) -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(
        num_pages=24,
        num_slots=80,
        disk_dir=tmp_path if has_disk else None,
        bus=bus,
        can_overlap=can_overlap,
        preload=preload,
    )
    tiered.copier.patience = patience
    for chat in CHATS:
        assert ask(tiered, [chat]) == [0]
        tiered.store.flush()
    turns = [[*chat, *fake_answer(chat, 4, VOCAB), 7, 7] for chat in CHATS]
    for turn in turns:
        # 30 prompt tokens and 3 of the 4 answered ones are cached: 8 full pages of 4
        assert ask(tiered, [turn]) == [32]
    assert counters.loaded_pages["host"] >= 8 * 4
    tiered.engine.close()


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo"])
def test_requests_that_load_pages_at_the_same_time_get_right_answers(
    policy: str, tmp_path: Path
) -> None:
    tiered = a_tiered_engine(
        num_pages=40, num_slots=40, disk_dir=tmp_path, num_records=200, policy=policy
    )
    for chat in CHATS:
        ask(tiered, [chat])
    cached = ask(tiered, [[*chat, 1, 2, 3] for chat in CHATS])
    assert sum(cached) > 0
    ask(tiered, [[*CHATS[0], *CHATS[1]], [*CHATS[0], *CHATS[2]], CHATS[3]])
    tiered.engine.close()


def test_pages_outlive_the_engine_on_disk(tmp_path: Path) -> None:
    tiered = a_tiered_engine(disk_dir=tmp_path)
    for chat in CHATS[:3]:
        ask(tiered, [chat])
    tiered.engine.close()
    bus = EventBus()
    counters = Counters().attach(bus)
    opened: list[StoreOpened] = []
    bus.subscribe(StoreOpened, opened.append)
    again = a_tiered_engine(disk_dir=tmp_path, bus=bus)
    assert opened == [StoreOpened(str(tmp_path), 3 * 8, None)]
    for chat in CHATS[:3]:
        assert ask(again, [chat]) == [28]
    assert counters.loaded_pages["disk"] + counters.prefetched_pages >= 3 * 7
    again.engine.close()


@pytest.mark.parametrize("fault", FaultyFiles.READ_FAULTS)
def test_a_page_that_cannot_be_read_is_computed(fault: str, tmp_path: Path) -> None:
    FaultyFiles.reset()
    tiered = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    bus = EventBus()
    lost: list[PagesLost] = []
    bus.subscribe(PagesLost, lost.append)
    again = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles, bus=bus)
    FaultyFiles.reads.extend([fault] * 2)
    ask(again, [CHATS[0]])
    expected = {"eio": "EIO", "flip": "checksum", "short": "truncated", "gone": "missing"}
    if fault == "slow":
        assert lost == []
    else:
        assert lost == [PagesLost(1, "disk", expected[fault])] * 2
    ask(again, CHATS[1:4])
    assert ask(again, [CHATS[0]]) == [28], "the lost pages were saved again"
    again.engine.close()
    FaultyFiles.reset()


@pytest.mark.parametrize("fault", FaultyFiles.WRITE_FAULTS)
def test_a_page_that_cannot_be_written_stays_in_host_memory(fault: str, tmp_path: Path) -> None:
    FaultyFiles.reset()
    FaultyFiles.writes.extend([fault] * 3)
    bus = EventBus()
    skipped: list[SavesSkipped] = []
    bus.subscribe(SavesSkipped, skipped.append)
    tiered = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles, bus=bus, num_slots=80)
    for chat in CHATS[:4]:
        ask(tiered, [chat])
    assert ask(tiered, [CHATS[0]]) == [28]
    tiered.store.flush()
    reasons = {event.reason for event in skipped if event.tier == "disk"}
    expected = {"eio": {"EIO"}, "full": {"disk full"}}.get(fault, set())
    # while the disk counts as full, pages are not even given to it
    assert reasons - {"no room on disk"} == expected
    tiered.engine.close()
    FaultyFiles.reset()
    again = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles)
    for chat in CHATS[:4]:
        ask(again, [chat])
    again.engine.close()


def test_clearing_forgets_every_tier(tmp_path: Path) -> None:
    tiered = a_tiered_engine(disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.store.flush()
    assert tiered.stack.num_pages("host") == tiered.stack.num_pages("disk") == 8
    tiered.engine.clear_cache()
    assert tiered.stack.num_pages("host") == tiered.stack.num_pages("disk") == 0
    assert ask(tiered, [CHATS[0]]) == [0]
    tiered.engine.close()


@pytest.mark.parametrize("can_overlap", [False, True])
def test_clearing_forgets_pages_that_are_being_saved(tmp_path: Path, can_overlap: bool) -> None:
    tiered = a_tiered_engine(disk_dir=tmp_path, can_overlap=can_overlap)
    tiered.copier.patience = 1000  # number of polls before a copy is done
    ask(tiered, [CHATS[0]])
    assert tiered.engine.clear_cache() > 0
    assert tiered.stack.num_pages("host") == tiered.stack.num_pages("disk") == 0
    assert ask(tiered, [CHATS[0]]) == [0]
    tiered.engine.close()


def test_unused_pages_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = a_tiered_engine(disk_dir=tmp_path, ttl_s=100.0)
    ask(tiered, [CHATS[0]])
    tiered.store.flush()
    later = monotonic() + 1000.0
    monkeypatch.setattr("mainstem.kv.stack.monotonic", lambda: later)
    tiered.store.poll()
    assert tiered.stack.num_pages("host") == tiered.stack.num_pages("disk") == 0
    tiered.engine.check()
    tiered.engine.close()


def test_pages_that_no_longer_fit_on_the_disk_are_evicted_for_room(tmp_path: Path) -> None:
    tiered = a_tiered_engine(disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    bus, evicted = EventBus(), list[PagesEvicted]()
    bus.subscribe(PagesEvicted, evicted.append)
    again = a_tiered_engine(disk_dir=tmp_path, num_records=4, bus=bus)
    assert {(event.reason, event.tier) for event in evicted} == {("room", "disk")}
    again.engine.close()


def test_a_slow_disk_delays_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs no read is answered while the reads of another have not ended."""
    FaultyFiles.reset()
    tiered = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    again = a_tiered_engine(disk_dir=tmp_path, files=FaultyFiles, num_pages=32)
    may_read = Event()
    monkeypatch.setattr("tests.kv.faulty.sleep", lambda _: may_read.wait(60))
    FaultyFiles.reads.extend(["slow"] * 8)
    engine = again.engine
    engine.submit(a_request(CHATS[0], 4, name="slow"))
    for _ in range(5):
        engine.step()
    engine.submit(a_request(CHATS[1], 4, name="quick"))
    got = Collector()
    while not got.reasons:
        got.add(engine.step())
    assert [name for name, _ in got.reasons] == ["quick"]
    may_read.set()
    while engine.has_work:
        got.add(engine.step())
    for name, chat in (("slow", CHATS[0]), ("quick", CHATS[1])):
        assert got.tokens[name, 0] == fake_answer(chat, 4, VOCAB)
    engine.check()
    engine.close()
    FaultyFiles.reset()


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_if_host_memory_holds_only_some_chats_these_are_loaded_from_it(
    policy: str, tmp_path: Path
) -> None:
    """There are twelve chats of at least eight pages, and host memory holds six. A chat that
    returns from disk must not evict those that return next."""
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(24, 4, 64, tmp_path, num_records=200, bus=bus, policy=policy)
    turns = [[*chat[:-1], last] for chat in CHATS for last in (1, 2)]
    turns = [[index, *turn] for index, turn in enumerate(turns)]
    for number in range(3):
        before = counters.loaded_pages["host"]
        for turn in turns:
            ask(tiered, [turn])
            tiered.engine.flush()
        num_from_host = counters.loaded_pages["host"] - before
        if number:
            assert num_from_host >= 4 * 8 if policy == "lookahead" else num_from_host == 0
        turns = [[*turn, *fake_answer(turn, 4, VOCAB)] for turn in turns]
    tiered.engine.check()
    tiered.engine.close()


def test_a_request_with_its_history_in_host_memory_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request waits for the disk, the second loads from host memory."""
    tiered = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    again = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    ask(again, [CHATS[1]])
    again.engine.clear_device()
    monkeypatch.setattr(type(again.store.loader), "is_crowded", lambda *_: True)
    monkeypatch.setattr(type(again.store.loader), "prefetch", lambda _: None)
    again.engine.submit(a_request(CHATS[0], 4, name="from disk"))
    again.engine.submit(a_request(CHATS[1], 4, name="from host"))
    got = Collector()
    for _ in range(50):
        got.add(again.engine.step())
    assert [name for name, _ in got.reasons] == ["from host"]
    monkeypatch.undo()
    while again.engine.has_work:
        got.add(again.engine.step())
    cached = {str(output.request_id): output.num_cached_tokens for output in got.outputs}
    assert cached == {"from disk": 28, "from host": 28}
    for name, chat in (("from disk", CHATS[0]), ("from host", CHATS[1])):
        assert got.tokens[name, 0] == fake_answer(chat, 4, VOCAB)
    again.engine.check()
    again.engine.close()


def test_a_request_that_waits_for_a_busy_disk_is_not_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = a_tiered_engine(num_pages=80, num_slots=80, disk_dir=tmp_path)
    ask(tiered, CHATS)
    tiered.engine.close()
    again = a_tiered_engine(num_pages=80, num_slots=80, disk_dir=tmp_path)
    monkeypatch.setattr(type(again.store.loader), "is_crowded", lambda *_: True)
    monkeypatch.setattr(type(again.store.loader), "prefetch", lambda _: None)
    looked_up: list[PageChain] = []
    lookup = again.store.lookup

    def note(chain: PageChain, num_tokens: int) -> Match:
        looked_up.append(chain)
        return lookup(chain, num_tokens)

    monkeypatch.setattr(again.store, "lookup", note)
    got = Collector()
    for number, chat in enumerate(CHATS):
        again.engine.submit(a_request(chat, 4, name=str(number)))
    got.add(again.engine.step())
    assert len(looked_up) == len(CHATS) + 1  # the next request to run is looked up twice
    for _ in range(5):
        looked_up.clear()
        got.add(again.engine.step())
        assert len(looked_up) == 1
    monkeypatch.undo()
    while again.engine.has_work:
        got.add(again.engine.step())
    assert {output.num_cached_tokens for output in got.outputs} == {28}
    for number, chat in enumerate(CHATS):
        assert got.tokens[str(number), 0] == fake_answer(chat, 4, VOCAB)
    again.engine.check()
    again.engine.close()


def test_a_request_that_loses_its_loaded_pages_computes_them(tmp_path: Path) -> None:
    """Long histories are loaded in pieces. Two that do not fit on the device together would evict
    each other for ever if neither was computed."""
    tiered = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    again = a_tiered_engine(num_pages=40, num_slots=5, disk_dir=tmp_path)
    again.engine.submit(a_request(CHATS[0], 4, name="returns"))
    got = Collector()
    for outputs in until_idle(again.engine):
        got.add(outputs)
        if not again.engine.num_running:
            again.engine.clear_device()  # as if another request had taken the loaded pages
    assert got.tokens["returns", 0] == fake_answer(CHATS[0], 4, VOCAB)
    again.engine.check()
    again.engine.close()


def test_a_load_that_ends_during_a_flush_is_noticed(tmp_path: Path) -> None:
    tiered = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    again = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    again.engine.submit(a_request(CHATS[0], 4, name="returns"))
    got = Collector()
    got.add(again.engine.step())

    def has_ended() -> bool:
        again.engine.flush()
        return not again.store.loader.num_loads

    until(has_ended)
    for outputs in until_idle(again.engine):
        got.add(outputs)
    assert got.tokens["returns", 0] == fake_answer(CHATS[0], 4, VOCAB)
    again.engine.close()


def test_pages_of_an_urgent_request_are_prefetched_first(tmp_path: Path) -> None:
    tiered = a_tiered_engine(num_pages=40, disk_dir=tmp_path)
    ask(tiered, CHATS[:2])
    tiered.engine.close()
    # host memory has room for one of the two chats
    again = a_tiered_engine(num_pages=16, num_slots=8, disk_dir=tmp_path)
    again.engine.submit(a_request([9] * 40, 20))  # leaves no room on the device for a chat
    again.engine.step()
    again.engine.submit(a_request(CHATS[0], 4))
    again.engine.submit(a_request(CHATS[1], 4, priority=-1))
    chains = [again.store.chain(np.array(chat, np.int32), b"") for chat in CHATS[:2]]
    again.engine.step()

    def is_prefetched() -> bool:
        again.store.poll()  # as a step does; a slow disk may still read after the last step
        again.store.loader.prefetch()
        return not again.store.loader.stored(chains[1].keys).num_below

    until(is_prefetched)
    assert again.engine.num_waiting == 2
    assert [again.store.loader.stored(chain.keys).num_below for chain in chains] == [7, 0]
    again.engine.close()


def test_the_next_step_waits_for_a_disk_read_while_the_device_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request whose pages are read then joins that step."""
    tiered = a_tiered_engine(disk_dir=tmp_path)
    ask(tiered, [CHATS[0]])
    tiered.engine.close()
    FaultyFiles.reset()
    again = a_tiered_engine(num_pages=40, disk_dir=tmp_path, can_overlap=True, files=FaultyFiles)
    FaultyFiles.reads.extend(["slow"] * 8)
    ends_s = [0.0]  # when the step in flight ends
    may_read = Event()

    def lead_s(*_: object) -> float:
        """Asked while a step waits; only then are pages read."""
        if ends_s[0] > 0.0:
            may_read.set()
        return ends_s[0] - monotonic()

    monkeypatch.setattr("tests.kv.faulty.sleep", lambda _: may_read.wait(60))
    monkeypatch.setattr(fakes._Done, "has_ended", lambda _: monotonic() >= ends_s[0])
    monkeypatch.setattr(Loader, "lead_s", lead_s)
    again.engine.submit(a_request(CHATS[1], 20, name="runs"))
    again.engine.step()
    again.engine.submit(a_request(CHATS[0], 4, name="from disk"))
    again.engine.step()
    was_reading = [again.store.loader.is_reading]
    ends_s[0] = monotonic() + 300.0
    again.engine.step()
    was_reading.append(again.store.loader.is_reading)
    assert was_reading == [True, False], "the step did not wait for the read"
    assert monotonic() < ends_s[0] - 100.0, "the step waited longer than the read took"
    assert len(again.runner.steps[-1].seq_slots) == 2
    again.engine.close()
    FaultyFiles.reset()


def test_a_graceful_stop_saves_the_pages_in_the_write_buffer(tmp_path: Path) -> None:
    token_ids = [i * 7 % 97 for i in range(200)]  # 50 pages
    sizes = {"num_pages": 80, "num_slots": 80, "num_records": 100, "disk_dir": tmp_path}
    tiered = a_tiered_engine(**sizes, chunk_tokens=512)  # type: ignore[arg-type]
    run_all(tiered.engine, [a_request(token_ids, 1)])
    tiered.engine.close()
    again = a_tiered_engine(**sizes)  # type: ignore[arg-type]
    assert again.stack.num_pages("disk") == 50
    again.engine.close()


def test_many_requests_for_one_history_are_looked_up_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 50
    monkeypatch.setattr("mainstem.sched.starting.LOOK_UP_PAGES", most)
    tiered = a_tiered_engine(num_pages=200, num_slots=80)
    engine, store = tiered.engine, tiered.store
    history = RNG.integers(0, VOCAB, 80).tolist()  # 20 pages
    ask(tiered, [history])
    engine.flush()
    with store.distrust():
        pass  # the history is in host memory only
    tiered.copier.patience = 10**9
    engine.submit(a_request([1, 2, 3], 40, name="runs"))
    got = Collector()
    got.add(engine.step())
    lookup, num_looked_up = store.lookup, 0

    def count_pages(chain: PageChain, num_tokens: int) -> Match:
        nonlocal num_looked_up
        num_looked_up += num_tokens // 4
        return lookup(chain, num_tokens)

    monkeypatch.setattr(store, "lookup", count_pages)
    prompts = [[*history, number, 1] for number in range(16)]
    for number, prompt in enumerate(prompts):
        engine.submit(a_request(prompt, 2, name=str(number), priority=1))
    for _ in range(20):
        num_looked_up = 0
        got.add(engine.step())
        # one limit for prefetching, one for loading; the last lookup of each may exceed it
        assert num_looked_up < 2 * (most + 20)
    assert num_looked_up == 0, "all wait for the load"
    tiered.copier.patience = 0
    while engine.has_work:
        got.add(engine.step())
    for number, prompt in enumerate(prompts):
        assert got.tokens[str(number), 0] == fake_answer(prompt, 2, VOCAB)
    engine.close()


def test_the_seconds_of_a_load_from_several_tiers_count_once(tmp_path: Path) -> None:
    bus, loaded = EventBus(), list[PagesLoaded]()
    bus.subscribe(PagesLoaded, loaded.append)
    tiered = a_tiered_engine(num_slots=14, disk_dir=tmp_path, bus=bus)
    for chat in CHATS[:2]:  # 8 pages each: a part of the first chat leaves host memory
        ask(tiered, [chat])
        tiered.engine.flush()
    chain = tiered.store.chain(np.array(CHATS[0], np.int32), b"")
    stored = tiered.store.loader.stored(chain.keys)
    assert 0 < stored.num_below < stored.num_pages == len(chain.keys)
    tiered.engine.clear_device()
    pages = tiered.store.take(len(chain.keys))
    load = tiered.store.loader.copy_up(chain.keys, pages, 0)
    assert load is not None
    while tiered.store.num_copies:
        tiered.store.poll()
    assert [event.tier for event in loaded] == ["disk", "host"]
    assert sum(event.num_pages for event in loaded) == len(load.pages)
    assert loaded[0].seconds > 0
    assert loaded[1].seconds == 0


def test_a_load_takes_little_work_for_each_page() -> None:
    """From the lookup to its end: about 240 instructions a page, a call or two in each list."""

    def work(num_pages: int) -> int:
        tiered = a_tiered_engine(num_pages=300, num_slots=700, chunk_tokens=4096)
        rng, store = np.random.default_rng(num_pages), tiered.store
        prompt = rng.integers(0, VOCAB, 4 * num_pages + 1).tolist()
        run_all(tiered.engine, [a_request(prompt, 1)])
        store.flush()
        tiered.engine.clear_device()
        chain = store.chain(np.array(prompt, np.int32), b"")
        run, nothing = StoredRun(chain, 0, num_pages), np.empty(0, np.int32)

        def load() -> None:
            assert store.lookup(chain, 4 * num_pages).stored.num_pages == num_pages
            assert store.load(run, nothing, 1) == chain.keys[-1]
            while store.num_copies:
                store.poll()

        count = instructions(load)
        assert len(store.lookup(chain, 4 * num_pages).pages) == num_pages
        tiered.engine.close()
        return count

    assert work(220) - work(20) < 300 * 200
