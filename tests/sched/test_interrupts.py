"""Ctrl-C at any line: nothing is lost, and nothing is delivered twice."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.request import FinishReason
from mainstem.engine.engine import Engine
from mainstem.sched.outputs import OutputMaker
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import fake_answer
from tests.kv.tiered import a_tiered_engine

if TYPE_CHECKING:
    from _typeshed import TraceFunction

PACKAGES = tuple(f"mainstem/{name}/" for name in ("sched", "kv", "engine"))
NUM_PLACES = 60  # number of lines tested, spread evenly over those that run
TAKE_OUTPUTS = (Scheduler.take_outputs.__code__, OutputMaker.take.__code__)
PROMPTS = [[7, 7, 7, 7, 9], [7, 7, 7, 7, 8, 5], [7, 7, 7, 7, 8, 5, 1]]
NUM_TOKENS = [1, 7, 5]
ANSWERS = {
    (str(number), 0): fake_answer(prompt, length, VOCAB)
    for number, (prompt, length) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True))
}


class Interrupt:
    """Runs its block under `guarded_interrupts`, as calls of LLM do, and raises Ctrl-C once, before
    the `when`-th line that runs in PACKAGES."""

    def __init__(self, when: int) -> None:
        self._when = when
        self._guard = guarded_interrupts()
        self.num_lines = 0

    def __enter__(self) -> "Interrupt":
        self._guard.__enter__()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._guard.__exit__(None, None, None)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        # not in take_outputs: the engine cannot deliver again what it has returned
        is_ours = any(name in frame.f_code.co_filename for name in PACKAGES)
        return self._on_line if is_ours and frame.f_code not in TAKE_OUTPUTS else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        self.num_lines += event == "line"
        if event == "line" and self.num_lines == self._when:
            signal.raise_signal(signal.SIGINT)
        return self._on_line


def run_through(engine: Engine, when: int) -> tuple[Collector, int]:
    """Run with an interrupt; returns the outputs, and how many lines ran."""
    collector = Collector()
    requests = [
        a_request(prompt, length, name=str(number), expected_tokens=1)
        for number, (prompt, length) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True))
    ]
    with Interrupt(when) as interrupt:
        for request in requests:
            with suppress(KeyboardInterrupt):
                engine.submit(request)
        for _ in range(100):
            with suppress(KeyboardInterrupt):
                collector.add(engine.step())
                if not engine.has_work:
                    break
    assert not engine.has_work, "the engine still has work"
    engine.check()
    return collector, interrupt.num_lines


def interrupt_anywhere(make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    expected, num_lines = run_through(engine, 0)
    assert expected.tokens == ANSWERS
    engine.close()
    assert num_lines > 1000
    for when in range(1, num_lines, num_lines // NUM_PLACES):
        engine = make_engine()
        got, _ = run_through(engine, when)
        assert got.tokens == ANSWERS
        engine.close()


@pytest.mark.parametrize("can_overlap", [False, True])
def test_an_interrupt_at_any_line_costs_nothing(can_overlap: bool) -> None:
    interrupt_anywhere(lambda: an_engine(can_overlap=can_overlap))


def test_an_interrupt_right_after_another_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second interrupt comes before all requests are in the queue again."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for num_steps in range(6):
        engine = an_engine(can_overlap=True)
        collector = Collector()
        for number, (prompt, length) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True)):
            engine.submit(a_request(prompt, length, name=str(number)))
        for _ in range(num_steps):
            collector.add(engine.step())
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(engine, "_take_in", interrupt)
            patch.setattr(engine, "_recover", interrupt)
            collector.add(engine.step())
        for _ in range(50):
            collector.add(engine.step())
            engine.check()
        assert not engine.has_work, "the engine still has work"
        assert collector.tokens == ANSWERS
        engine.close()


def test_an_interrupt_while_a_sequence_is_preempted_costs_nothing() -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    run_through(an_engine(13, 1, bus=bus), 0)
    assert preempted
    interrupt_anywhere(lambda: an_engine(13, 1))


def test_an_interrupt_while_pages_are_copied_costs_nothing() -> None:
    """Pages that copies hold are not released."""

    def make_engine() -> Engine:
        tiered = a_tiered_engine(num_pages=8)
        tiered.copier.patience = 3
        return tiered.engine

    interrupt_anywhere(make_engine)


def test_after_an_interrupt_of_a_flush_no_write_stays_pending(tmp_path: Path) -> None:
    for when in range(1, 1000, 3):
        tiered = a_tiered_engine(num_pages=40, disk_dir=tmp_path / str(when))
        run_all(tiered.engine, [a_request(range(20), 4)])
        with suppress(KeyboardInterrupt), Interrupt(when) as interrupt:
            tiered.engine.flush()
        disk = tiered.stack.below[0][1]
        assert disk is not None
        disk.flush()
        tiered.stack.poll()
        assert disk.num_writes_pending == 0, "a finished write still counts as pending"
        tiered.engine.flush()
        tiered.engine.check()
        tiered.engine.close()
        if interrupt.num_lines < when:
            assert when > 30
            return
    raise AssertionError("the call runs more lines than were tested")


def test_an_interrupt_during_an_abort_costs_other_requests_nothing() -> None:
    for when in range(1, 500):
        engine, collector = an_engine(), Collector()
        for number in (1, 2):
            engine.submit(a_request(PROMPTS[number], NUM_TOKENS[number], name=str(number)))
        engine.submit(a_request([7, 7, 7, 7, 3], 50, name="aborted"))
        for _ in range(3):
            collector.add(engine.step())
        with suppress(KeyboardInterrupt), Interrupt(when) as interrupt:
            engine.abort(RequestId("aborted"))
        engine.check()
        while engine.has_work:
            collector.add(engine.step())
            engine.check()
        for name in ("1", "2"):
            assert collector.tokens[name, 0] == ANSWERS[name, 0]
        assert collector.reasons["aborted", 0] is FinishReason.ABORT
        if interrupt.num_lines < when:
            assert when > 30
            return
    raise AssertionError("the call runs more lines than were tested")


def test_an_interrupt_while_prompts_are_announced_costs_nothing() -> None:
    for when in range(1, 100):
        engine = an_engine()
        with suppress(KeyboardInterrupt), Interrupt(when) as interrupt:
            engine.expect(np.zeros(100, np.int32))
        first = engine.expect(np.zeros(200, np.int32))
        got = run_all(engine, [a_request([1, 2, 3, 4, 5], 1, plan_place=first + 199, name="last")])
        assert got.tokens["last", 0] == fake_answer([1, 2, 3, 4, 5], 1, VOCAB)
        if interrupt.num_lines < when:
            assert when > 5
            return
    raise AssertionError("the call runs more lines than were tested")
