"""Pages on their way down and up when there is little room for them."""

import pytest

from mainstem.core.events import EventBus, SavesSkipped
from tests.builders import a_request, run_all
from tests.kv.tiered import a_tiered_engine


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
