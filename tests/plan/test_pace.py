"""When the requests of a job start: as few steps as memory allows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.plan.pace import EqualRequests, Limits, Pace, latest_starts

RELAY = EqualRequests(count=1000, prompt_tokens=64, output_tokens=128)
ROOM = 158_000  # for 822 of them, full-grown


def largest_need(starts: list[float], requests: EqualRequests) -> float:
    """Most tokens held at once, step by step, by requests that start so (first step first)."""
    output = requests.output_tokens
    return max(
        sum(
            count * (requests.prompt_tokens + now - begun)
            for begun, count in enumerate(starts)
            if begun <= now <= begun + output
        )
        for now in range(len(starts) + output + 1)
    )


def run(requests: EqualRequests, limits: Limits) -> list[int]:
    """How many start in each step when all that may start do."""
    pace, left, started = Pace(requests, limits), requests.count, []
    while left:
        started.append(min(pace.allowance(left), limits.step_tokens // 64))
        left -= started[-1]
    return started


def test_starts_without_a_limit_on_steps_follow_the_formula() -> None:
    starts, _ = latest_starts(RELAY, Limits(ROOM, page_tokens=0, step_tokens=1 << 40))
    formula = 192 * math.log(1000 * 192 / ROOM)
    assert len(starts) == pytest.approx(formula, abs=2)
    assert starts[0] == pytest.approx(ROOM / 192)  # what fits beside nothing else goes last


def test_all_requests_run_side_by_side() -> None:
    """Two waves take 256 steps."""
    started = run(RELAY, Limits(ROOM, page_tokens=16, step_tokens=4096))
    assert len(started) + 128 < 200
    assert largest_need([float(count) for count in started], RELAY) <= ROOM


@pytest.mark.parametrize(
    ("count", "prompt", "output"),
    [(700, 64, 128), (1600, 325, 100), (6400, 325, 100), (240, 4200, 100), (1000, 1500, 100)],
)
def test_nothing_is_held_back_where_steps_are_the_limit(
    count: int, prompt: int, output: int
) -> None:
    room = ROOM if prompt == 64 else 450_000
    pace = Pace(EqualRequests(count, prompt, output), Limits(room, 16, step_tokens=4096))
    in_step = 4096 // (prompt + output)
    for left in range(count, 0, -max(in_step, 1)):
        assert pace.allowance(left) >= min(left, in_step)


@given(
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(60, 1000),
    st.sampled_from([64, 512]),
)
def test_schedules_fit_and_start_everybody(
    count: int, prompt: int, output: int, room: int, step_tokens: int
) -> None:
    requests = EqualRequests(count, prompt, output)
    starts, _ = latest_starts(requests, Limits(room, page_tokens=0, step_tokens=step_tokens))
    assert sum(starts) == pytest.approx(count)
    assert largest_need(starts[::-1], requests) <= room * (1 + 1e-6)


@given(st.integers(1, 100), st.integers(1, 60), st.integers(1, 30), st.integers(20, 1000))
def test_a_pace_never_holds_back_for_ever(count: int, prompt: int, output: int, room: int) -> None:
    pace = Pace(EqualRequests(count, prompt, output), Limits(room, 16, step_tokens=256))
    left, num_steps = count, 0
    while left:
        left -= pace.allowance(left)
        num_steps += 1
        assert num_steps <= count * (output + 2)


def test_who_could_not_start_when_due_is_still_due() -> None:
    pace = Pace(RELAY, Limits(ROOM, page_tokens=16, step_tokens=4096))
    due = pace.allowance(1000)
    assert 0 < due < 10
    for _ in range(100):
        assert 0 < pace.allowance(1000) < 10
