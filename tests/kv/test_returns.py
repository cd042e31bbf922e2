"""Conversations return from host memory at once, and beginning a load takes host time; in virtual
time."""

from random import Random

import pytest

from mainstem.core.events import PagesEvicted
from mainstem.core.step import Int32s, Step
from mainstem.kv.transfer import LoadId
from tests.kv.virtual import (
    HOST_BYTES_PER_S,
    PAGE_BYTES,
    PAGE_SIZE,
    VirtualCard,
    VirtualClock,
    VirtualCopier,
    VirtualTransfer,
    a_virtual_card,
)

HISTORY, NEW, OUTPUT, AT_ONCE = 2000, 100, 16, 8
DEVICE_TOKENS = 64_000  # 30 conversations
PASS_S = HISTORY / PAGE_SIZE * PAGE_BYTES / HOST_BYTES_PER_S  # that a history takes on the link


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(monkeypatch)


def load_slowly(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, host_s: float) -> None:
    """From now on, the host takes `host_s` to begin a load."""
    begin_load = VirtualCopier.load

    def load(
        copier: VirtualCopier,
        load_id: LoadId,
        slots: Int32s,
        pages: Int32s,
        parts: Int32s | None = None,
    ) -> VirtualTransfer:
        clock.sleep(host_s)
        return begin_load(copier, load_id, slots, pages, parts)

    monkeypatch.setattr(VirtualCopier, "load", load)


def a_card_with_histories(
    clock: VirtualClock, num_sessions: int
) -> tuple[VirtualCard, list[list[int]]]:
    """All histories are in host memory, the latest also on the device."""
    card = a_virtual_card(clock, DEVICE_TOKENS, 100 * HISTORY // PAGE_SIZE, 1e9)
    rng = Random(0)
    histories = [[rng.randrange(97) for _ in range(HISTORY)] for _ in range(num_sessions)]
    for first in range(0, num_sessions, AT_ONCE):
        card.ask(histories[first : first + AT_ONCE], OUTPUT)
    card.engine.flush()
    for history in histories:
        history.extend([7] * OUTPUT + [rng.randrange(97) for _ in range(NEW)])
    return card, histories


def test_a_step_has_what_arrived_while_other_loads_were_begun(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, histories = a_card_with_histories(clock, AT_ONCE)
    card.engine.clear_device()
    card.ask(histories, 1)  # the engine learns how fast the link is
    card.engine.clear_device()
    load_slowly(clock, monkeypatch, 1.1 * PASS_S)
    make_step = card.engine._next_step
    made: list[Step | None] = []

    def next_step() -> Step | None:
        made.append(make_step())
        return made[-1]

    monkeypatch.setattr(card.engine, "_next_step", next_step)
    card.ask(histories, 1)
    assert made[0] is not None


def test_an_eviction_makes_room_for_several_histories(clock: VirtualClock) -> None:
    card, histories = a_card_with_histories(clock, 5 * AT_ONCE)
    evicted: list[PagesEvicted] = []
    card.engine.bus.subscribe(PagesEvicted, evicted.append)
    card.ask(histories[:AT_ONCE], 1)
    assert card.counters.loaded_pages["host"] > 0.9 * AT_ONCE * HISTORY / PAGE_SIZE
    assert 0 < len(evicted) <= AT_ONCE // 2
    assert sum(each.num_pages for each in evicted) < 2 * AT_ONCE * HISTORY / PAGE_SIZE
