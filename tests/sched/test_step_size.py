"""The token budget of steps shrinks at once and grows back slowly."""

import pytest

from mainstem.sched.step_size import StepSize


def good_steps_until_larger(size: StepSize) -> int:
    for count in range(1, 1000):
        if size.note_good():
            return count
    raise AssertionError("steps never grow")


def test_the_wait_doubles_once_for_each_growth_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mainstem.sched.step_size.GROW_STEPS", 4)
    size = StepSize(1024, 1024)
    assert size.shrink()
    assert size.shrink()
    assert size.tokens == 256
    assert good_steps_until_larger(size) == 4
    assert size.shrink()  # 512 did not fit
    assert size.shrink()  # nor did 256: nothing has grown since
    assert size.tokens == 128
    assert good_steps_until_larger(size) == 8
