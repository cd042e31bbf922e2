"""More conversations return than device and host memory hold; in virtual time."""

from random import Random

import pytest

from tests.kv.virtual import PAGE_SIZE, VirtualClock, a_virtual_card

SESSIONS, AT_ONCE = 48, 16
HISTORY, NEW, OUTPUT = 2000, 100, 16
DEVICE_TOKENS = 44_000  # 20 conversations
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


@pytest.mark.parametrize(
    ("disk_gb_per_s", "most"),
    [(0.5, 0.7), pytest.param(1.5, 0.68, marks=pytest.mark.slow), (4.0, 0.55)],
)
def test_with_host_memory_and_a_disk_turns_start_sooner_than_without(
    clock: VirtualClock, disk_gb_per_s: float, most: float
) -> None:
    computed = turn_means(clock, 0, 0.0)
    loaded = turn_means(clock, HOST_PAGES, disk_gb_per_s * 1e9)
    for computed_s, loaded_s in zip(computed, loaded, strict=True):
        assert loaded_s < most * computed_s


def arrivals(num_sessions: int, num_turns: int, rate: float) -> list[tuple[float, list[int]]]:
    """Arrival time in s and prompt of each turn; each round is in another order."""
    rng, now_s = Random(0), 0.0
    histories = [[rng.randrange(97) for _ in range(HISTORY)] for _ in range(num_sessions)]
    found: list[tuple[float, list[int]]] = []
    for _ in range(num_turns):
        for session in rng.sample(range(num_sessions), num_sessions):
            now_s += rng.expovariate(rate)
            found.append((now_s, list(histories[session])))
            histories[session] += [rng.randrange(97) for _ in range(OUTPUT + NEW)]
    return found


def test_look_ahead_beats_lru_and_fifo_on_the_same_arrivals(clock: VirtualClock) -> None:
    """24 conversations arrive faster than they are answered. The device holds 4 of them, host
    memory 8, the disk all."""
    session_pages = (HISTORY + 3 * (OUTPUT + NEW)) // PAGE_SIZE
    coming = arrivals(24, 3, rate=60.0)
    mean_s, from_host, hits = {}, {}, {}
    for policy in ("lookahead", "lru", "fifo"):
        card = a_virtual_card(clock, 4 * session_pages * PAGE_SIZE, 8 * session_pages, 3e9, policy)
        mean_s[policy] = sum(card.replay(coming, OUTPUT)) / len(coming)
        from_host[policy] = card.counters.loaded_pages["host"]
        hits[policy] = card.counters.saving_ratio
        card.engine.check()
    for policy in ("lru", "fifo"):
        assert mean_s["lookahead"] < 0.9 * mean_s[policy]
        assert from_host["lookahead"] > 1.5 * from_host[policy]
        assert hits["lookahead"] > 1.5 * hits[policy]
