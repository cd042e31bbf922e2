"""Saves and loads when there is little room for them."""

from pathlib import Path

import numpy as np
import pytest

from mainstem.core.events import EventBus, SavesSkipped
from mainstem.core.ids import PageKey
from mainstem.core.metrics import Counters
from mainstem.core.step import Int32s
from mainstem.kv.loading import StoredRun
from tests.builders import VOCAB, a_request, run_all
from tests.kv.faulty import FaultyFiles
from tests.kv.tiered import Tiered, a_tiered_engine

RNG = np.random.default_rng(0)


def store_on_disk(folder: Path, prompts: list[list[int]]) -> None:
    """Store the 4-token pages of prompts on disk only."""
    tiered = a_tiered_engine(num_pages=200, num_slots=200, disk_dir=folder, num_records=200)
    run_all(tiered.engine, [a_request(prompt, 1) for prompt in prompts])
    tiered.engine.close()


def again_from_disk(folder: Path, num_pages: int, num_slots: int) -> tuple[Tiered, Counters]:
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(num_pages, 4, num_slots, folder, num_records=200, bus=bus)
    return tiered, counters


@pytest.mark.parametrize("num_slots", [2, 8, 24, 40, 80])
def test_a_history_larger_than_host_memory_is_loaded_in_pieces(
    num_slots: int, tmp_path: Path
) -> None:
    prompt = RNG.integers(0, VOCAB, 200).tolist()
    store_on_disk(tmp_path, [prompt])
    tiered, _ = again_from_disk(tmp_path, 80, num_slots)
    got = run_all(tiered.engine, [a_request([*prompt, 1], 1)])
    assert [output.num_cached_tokens for output in got.outputs] == [200]
    tiered.engine.close()


def test_pages_of_waiting_requests_are_prefetched(tmp_path: Path) -> None:
    """The device has room for one request; pages of the others are prefetched meanwhile."""
    prompts = [[first, *RNG.integers(0, VOCAB, 31).tolist()] for first in range(5)]
    store_on_disk(tmp_path, prompts)
    tiered, counters = again_from_disk(tmp_path, num_pages=12, num_slots=80)
    requests = [a_request([*prompt, 1], 8) for prompt in prompts]
    got = run_all(tiered.engine, requests)
    assert {output.num_cached_tokens for output in got.outputs} == {32}
    assert counters.prefetched_pages > 0
    assert counters.loaded_pages["host"] > 0
    tiered.engine.close()


def test_nothing_is_prefetched_while_a_load_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[first, *RNG.integers(0, VOCAB, 31).tolist()] for first in range(5)]
    store_on_disk(tmp_path, prompts)
    tiered, counters = again_from_disk(tmp_path, num_pages=12, num_slots=80)
    monkeypatch.setattr(type(tiered.store.loader), "is_reading", True)
    run_all(tiered.engine, [a_request([*prompt, 1], 8) for prompt in prompts])
    assert counters.prefetched_pages == 0
    assert counters.loaded_pages["disk"] == 5 * 8
    tiered.engine.close()


def test_closing_ends_when_host_memory_refuses_postponed_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Postponed saves start when an earlier save ends. Here none is under way: host memory refuses
    the first pages of the write buffer."""
    bus = EventBus()
    skipped: list[SavesSkipped] = []
    bus.subscribe(SavesSkipped, skipped.append)
    tiered = a_tiered_engine(num_pages=16, num_slots=4, max_model_len=64, bus=bus)
    engine, saver = tiered.engine, tiered.store.saver
    wanted = list(range(1, 13))  # 3 pages, all that host memory holds
    run_all(engine, [a_request(wanted, 1)])
    engine.flush()
    long = [50 + index % 40 for index in range(44)]  # 11 pages: more than the write buffer
    engine.submit(a_request(long, 1, name="first", priority=0))
    engine.submit(a_request([*wanted, *long[:30]], 2, name="wants the stored pages", priority=5))
    engine.step()
    assert not saver.num_saving
    flush, num_rounds = saver.flush, 0

    def count_rounds() -> None:
        nonlocal num_rounds
        num_rounds += 1
        assert num_rounds < 10, "flush does not end"
        flush()

    monkeypatch.setattr(saver, "flush", count_rounds)
    tiered.store.flush()
    assert skipped[-1] == SavesSkipped(3, "host", "no room in host memory")
    engine.close()


def test_only_as_many_postponed_pages_are_examined_as_can_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered = a_tiered_engine(num_pages=64, num_slots=64, chunk_tokens=128)
    saver = tiered.store.saver
    monkeypatch.setattr(saver, "_save_room", lambda count: min(count, 2))
    index, looked_at = saver._index, list[int]()
    named = index.named

    def count_pages(pages: Int32s) -> dict[PageKey, int]:
        looked_at.append(len(pages))
        return named(pages)

    tiered.engine.submit(a_request(RNG.integers(0, VOCAB, 80).tolist(), 4))
    tiered.engine.step()
    assert len(saver._postponed) == 18
    monkeypatch.setattr(index, "named", count_pages)
    saver._save_postponed()
    assert len(saver._postponed) == 16
    assert set(looked_at) == {2}
    run_all(tiered.engine, [])
    tiered.engine.flush()
    assert tiered.stack.num_pages("host") == 20
    tiered.engine.close()


def test_a_load_is_startable_when_it_will_end_before_the_next_step_begins() -> None:
    """Loads are copied one after the other, so the second also waits for the first."""
    tiered = a_tiered_engine(num_pages=32, num_slots=32)
    prompts = [[first, *RNG.integers(0, VOCAB, 15).tolist()] for first in range(2)]
    run_all(tiered.engine, [a_request(prompt, 1) for prompt in prompts])
    tiered.engine.flush()
    tiered.engine.clear_device()
    tiered.copier.patience = 1000  # copies make no progress
    store, loader = tiered.store, tiered.store.loader
    nothing = np.empty(0, np.int32)
    for prompt in prompts:
        chain = store.chain(np.array(prompt, np.int32), b"")
        assert store.load(StoredRun(chain, 0, 4), nothing, start_layers=loader.num_layers)
    load_s = loader.links[0].pass_s(4 * loader.page_bytes)
    assert [len(store.poll(part * load_s)) // 4 for part in (0.0, 0.9, 1.1, 1.9, 2.1)] == [
        0,
        0,
        1,
        0,
        1,
    ]
    tiered.copier.patience = 0
    tiered.engine.close()


def test_pages_wait_on_the_device_for_a_slow_disk(tmp_path: Path) -> None:
    """Host memory is full of pages that are not yet on disk; even so, no page is refused."""
    FaultyFiles.reset()
    FaultyFiles.writes.extend(["slow"] * 40)
    bus = EventBus()
    skipped: list[SavesSkipped] = []
    bus.subscribe(SavesSkipped, skipped.append)
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(64, 4, 6, tmp_path, num_records=64, files=FaultyFiles, bus=bus)
    prompts = [[first, *RNG.integers(0, VOCAB, 19).tolist()] for first in range(8)]
    run_all(tiered.engine, [a_request(prompt, 1) for prompt in prompts])
    tiered.engine.flush()
    assert not skipped
    assert counters.saved_pages["disk"] == 40
    tiered.engine.check()
    tiered.engine.close()
