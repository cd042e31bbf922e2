"""Pages on their way down and up when there is little room for them."""

from pathlib import Path

import numpy as np
import pytest

from mainstem.core.events import EventBus, SavesSkipped
from mainstem.core.metrics import Counters
from tests.builders import VOCAB, a_request, run_all
from tests.kv.tiered import Tiered, a_tiered_engine

RNG = np.random.default_rng(0)


def store_on_disk(folder: Path, prompts: list[list[int]]) -> None:
    """Have prompts of 4-token pages on disk, and nothing in memory."""
    tiered = a_tiered_engine(num_pages=200, num_slots=200, disk_dir=folder, num_records=200)
    run_all(tiered.engine, [a_request(prompt, 1) for prompt in prompts])
    tiered.engine.close()


def again_from_disk(folder: Path, num_pages: int, num_slots: int) -> tuple[Tiered, Counters]:
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(num_pages, 4, num_slots, folder, num_records=200, bus=bus)
    return tiered, counters


@pytest.mark.parametrize("num_slots", [2, 8, 24, 40, 80])
def test_a_history_longer_than_host_memory_comes_up_in_pieces(
    num_slots: int, tmp_path: Path
) -> None:
    prompt = RNG.integers(0, VOCAB, 200).tolist()
    store_on_disk(tmp_path, [prompt])
    tiered, _ = again_from_disk(tmp_path, 80, num_slots)
    got = run_all(tiered.engine, [a_request([*prompt, 1], 1)])
    assert [output.num_cached_tokens for output in got.outputs] == [200]
    tiered.engine.close()


def test_what_those_that_wait_need_is_read_ahead(tmp_path: Path) -> None:
    """The device has room for one at a time: the others are in host memory when it is their
    turn."""
    prompts = [[first, *RNG.integers(0, VOCAB, 31).tolist()] for first in range(5)]
    store_on_disk(tmp_path, prompts)
    tiered, counters = again_from_disk(tmp_path, num_pages=12, num_slots=80)
    requests = [a_request([*prompt, 1], 8) for prompt in prompts]
    got = run_all(tiered.engine, requests)
    assert {output.num_cached_tokens for output in got.outputs} == {32}
    assert counters.prefetched_pages > 0
    assert counters.loaded_pages["host"] > 0
    tiered.engine.close()


def test_closing_ends_when_host_memory_refuses_what_was_postponed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write buffer takes the first pages, host memory refuses them: none is being saved whose
    end would be the moment to try the others."""
    bus = EventBus()
    skipped: list[SavesSkipped] = []
    bus.subscribe(SavesSkipped, skipped.append)
    tiered = a_tiered_engine(num_pages=16, num_slots=4, max_model_len=64, bus=bus)
    engine, tiers = tiered.engine, tiered.tiers
    wanted = list(range(1, 13))  # 3 pages, all that host memory holds
    run_all(engine, [a_request(wanted, 1)])
    engine.flush()
    long = [50 + index % 40 for index in range(44)]  # 11 pages: more than the write buffer
    engine.submit(a_request(long, 1, name="first", priority=0))
    engine.submit(a_request([*wanted, *long[:30]], 2, name="wants the stored pages", priority=5))
    engine.step()
    assert not tiers.num_pages_saving
    flush, num_rounds = tiers.flush, 0

    def count_rounds() -> None:
        nonlocal num_rounds
        num_rounds += 1
        assert num_rounds < 10, "flush does not end"
        flush()

    monkeypatch.setattr(tiers, "flush", count_rounds)
    tiered.store.flush()
    assert skipped[-1] == SavesSkipped(3, "host", "no room in host memory")
    engine.close()
