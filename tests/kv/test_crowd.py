"""Conversations that return in crowds, more than device and host memory hold, in virtual time."""

from random import Random

import pytest

from tests.kv.virtual import PAGE_SIZE, VirtualClock, a_virtual_card

SESSIONS, AT_ONCE = 48, 16
HISTORY, NEW, OUTPUT = 2000, 100, 16
DEVICE_TOKENS = 44_000  # 20 of them
HOST_PAGES = 18 * HISTORY // PAGE_SIZE


def turn_means(clock: VirtualClock, host_pages: int, disk_bytes_per_s: float) -> list[float]:
    """Mean seconds to the first token of turns 2 and 3."""
    card = a_virtual_card(clock, DEVICE_TOKENS, host_pages, disk_bytes_per_s)
    rng = Random(0)
    histories = [[rng.randrange(97) for _ in range(HISTORY)] for _ in range(SESSIONS)]
    means = []
    for _ in range(3):
        first_s: list[float] = []
        for begin in range(0, SESSIONS, AT_ONCE):
            first_s += card.ask(histories[begin : begin + AT_ONCE], OUTPUT)
        card.engine.flush()
        means.append(sum(first_s) / SESSIONS)
        for history in histories:
            history.extend([7] * OUTPUT + [rng.randrange(97) for _ in range(NEW)])
    card.engine.check()
    return means[1:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(monkeypatch)


@pytest.mark.parametrize(("disk_gb_per_s", "most"), [(0.5, 0.7), (1.5, 0.68), (4.0, 0.55)])
def test_disk_and_device_together_beat_the_device(
    clock: VirtualClock, disk_gb_per_s: float, most: float
) -> None:
    computed = turn_means(clock, 0, 0.0)
    loaded = turn_means(clock, HOST_PAGES, disk_gb_per_s * 1e9)
    for computed_s, loaded_s in zip(computed, loaded, strict=True):
        assert loaded_s < most * computed_s
