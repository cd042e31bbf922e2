"""A damaged page on disk costs only itself, if loading what follows it is faster than computing."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import numpy as np
import pytest

from mainstem.core.events import EventBus, PagesLoaded, PagesLost
from mainstem.core.ids import PageKey
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.segments import ALIGNMENT
from mainstem.kv.tier import Read, Written
from mainstem.sched.fetching import Fetching
from mainstem.sched.loading import Loader
from mainstem.sched.queue import Candidate
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.tiered import Tiered, a_tiered_engine

PAGE_SIZE = 4
NUM_PAGES = 72  # read in three pieces
CHAT = np.random.default_rng(1).integers(0, VOCAB, NUM_PAGES * PAGE_SIZE + 2).tolist()


def open_engine(folder: Path, bus: EventBus | None = None, can_overlap: bool = False) -> Tiered:
    return a_tiered_engine(
        num_pages=256,
        page_size=PAGE_SIZE,
        num_slots=256,
        num_records=256,
        disk_dir=folder,
        bus=bus,
        can_overlap=can_overlap,
    )


def ask(tiered: Tiered, prompts: list[list[int]]) -> list[int]:
    """Answer prompts at once and check the answers; returns cached tokens of each."""
    requests = [a_request(prompt, 4) for prompt in prompts]
    got = run_all(tiered.engine, requests)
    cached = {output.request_id: output.num_cached_tokens for output in got.outputs}
    for request, prompt in zip(requests, prompts, strict=True):
        assert got.tokens[str(request.request_id), 0] == fake_answer(prompt, 4, VOCAB)
    return [cached[request.request_id] for request in requests]


def damage(folder: Path, key: PageKey) -> None:
    """Overwrite 4 bytes of a page."""
    with closing(connect(folder / "index.sqlite")) as index:
        (record,) = index.execute("SELECT record FROM pages WHERE key = ?", (key,)).fetchone()
    with (folder / "0000.pages").open("rb+") as file:
        os.pwrite(file.fileno(), b"\xff\xfe\xfd\xfc", record * ALIGNMENT + 8)


@pytest.mark.parametrize("patience", [0, 3])
@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("bad", [(0,), (1,), (20,), (32,), (20, 21, 40), (71,)])
def test_pages_before_a_damaged_one_are_loaded(
    bad: tuple[int, ...], can_overlap: bool, patience: int, tmp_path: Path
) -> None:
    tiered = open_engine(tmp_path)
    ask(tiered, [CHAT])
    chain = tiered.store.chain(np.array(CHAT, np.int32), b"")
    tiered.engine.close()
    for number in bad:
        damage(tmp_path, chain.keys[number])
    bus, lost, loaded = EventBus(), list[PagesLost](), list[PagesLoaded]()
    bus.subscribe(PagesLost, lost.append)
    bus.subscribe(PagesLoaded, loaded.append)
    again = open_engine(tmp_path, bus, can_overlap)
    again.copier.patience = patience
    cached = ask(again, [CHAT, [*CHAT[:200], 1]])
    num_intact = NUM_PAGES - len(bad)
    assert cached[0] >= PAGE_SIZE * num_intact, "only the damaged pages are computed"
    # the other waits for pages of the first; how many, depends on when loads end
    num_shared = 200 // PAGE_SIZE
    assert cached[1] >= PAGE_SIZE * (num_shared - sum(number < num_shared for number in bad))
    assert lost == [PagesLost(1, "disk", "checksum")] * len(bad)
    assert sum(event.num_pages for event in loaded) >= num_intact - 1
    assert ask(again, [CHAT])[0] >= NUM_PAGES * PAGE_SIZE
    again.engine.flush()
    again.engine.clear_device()
    assert ask(again, [CHAT]) == [NUM_PAGES * PAGE_SIZE], "the damaged pages were saved again"
    again.engine.close()


def test_damaged_pages_next_to_each_other_are_noticed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is read by another thread: the load has ended at the first when the second ends."""
    tiered = open_engine(tmp_path)
    ask(tiered, [CHAT])
    chain = tiered.store.chain(np.array(CHAT, np.int32), b"")
    tiered.engine.close()
    for number in (20, 21):
        damage(tmp_path, chain.keys[number])
    first, second = chain.keys[20], chain.keys[21]
    late: list[Written | Read] = []
    poll = DiskTier.poll

    def poll_second_later(tier: DiskTier) -> Iterator[Written | Read]:
        if first not in again.stack.stored_keys()["disk"]:
            yield from late
            late.clear()
        for done in poll(tier):
            if done.key == second and not late and done.problem is not None:
                late.append(done)
            else:
                yield done

    monkeypatch.setattr(DiskTier, "poll", poll_second_later)
    again = open_engine(tmp_path)
    assert ask(again, [CHAT]) == [PAGE_SIZE * (NUM_PAGES - 2)]
    again.engine.check()
    again.engine.close()


def test_what_follows_a_damaged_page_is_computed_if_it_is_not_worth_loading_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence has stopped after the page, to load the rest, and must go on at once."""
    tiered = open_engine(tmp_path)
    ask(tiered, [CHAT])
    chain = tiered.store.chain(np.array(CHAT, np.int32), b"")
    tiered.engine.close()
    damage(tmp_path, chain.keys[20])
    stopped: list[int] = []
    stop, is_worth_it = Loader.stop_at_gap, Fetching.is_worth_it

    def stop_at_gap(loader: Loader, found: Candidate, num_cached: int) -> None:
        stop(loader, found, num_cached)
        stopped.append(len(loader.gap_ends))

    def is_worth_it_before(*args: Any) -> bool:
        return not stopped and is_worth_it(*args)

    monkeypatch.setattr(Loader, "stop_at_gap", stop_at_gap)
    monkeypatch.setattr(Fetching, "is_worth_it", is_worth_it_before)
    again = open_engine(tmp_path)
    assert ask(again, [CHAT]) == [20 * PAGE_SIZE]
    assert stopped == [1, 0], "it stopped once, and started again without a gap"
    again.engine.check()
    again.engine.close()
