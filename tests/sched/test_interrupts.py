"""Ctrl-C as a sequence starts or leaves: at whatever line it comes, nothing is lost."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from mainstem.engine.engine import Engine
from mainstem.kv.pool import PagePool
from mainstem.kv.store import KVStore
from mainstem.sched.running import RunningSet
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.sharing import SharingTree
from mainstem.sched.starting import Starter
from mainstem.sched.table import SeqTable
from tests.builders import VOCAB, Collector, a_request, an_engine
from tests.fakes import fake_answer
from tests.kv.tiered import a_tiered_engine

if TYPE_CHECKING:
    from _typeshed import TraceFunction

Function = Callable[..., object]

STARTING: list[Function] = [
    Starter._try_start,
    Starter._start_leased,
    PagePool.take,
    RunningSet.enter,
    SeqTable.enter,
    SharingTree.attach,
]
LEAVING: list[Function] = [
    RunningSet.leave,
    RunningSet.settle,
    RunningSet._release,
    KVStore.give_back,
    PagePool.give_back,
    SharingTree.detach,
    SeqTable.leave,
]
PROMPTS = [[7, 7, 7, 7, 9], [7, 7, 7, 7, 8, 5], [7, 7, 7, 7, 8, 5, 1]]
NUM_TOKENS = [1, 7, 5]
ANSWERS = {
    (str(number), 0): fake_answer(prompt, length, VOCAB)
    for number, (prompt, length) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True))
}


class Interrupt:
    """Raises KeyboardInterrupt once, before the line that is number `when` of those that the
    functions run."""

    def __init__(self, functions: list[Function], when: int) -> None:
        self._codes = {function.__code__ for function in functions}
        self.num_left = when

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        return self._on_line if frame.f_code in self._codes else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        self.num_left -= event == "line"
        if self.num_left == 0:
            raise KeyboardInterrupt  # which ends the tracing
        return self._on_line


def run_through(engine: Engine) -> Collector:
    collector = Collector()
    for number, (prompt, length) in enumerate(zip(PROMPTS, NUM_TOKENS, strict=True)):
        engine.submit(a_request(prompt, length, name=str(number), expected_tokens=1))
    for _ in range(100):
        with suppress(KeyboardInterrupt):
            collector.add(engine.step())
        engine.check()
        if not engine.has_work:
            return collector
    raise AssertionError("the engine did not come to rest")


def interrupt_everywhere(make_engine: Callable[[], Engine], functions: list[Function]) -> int:
    """Run through, once for each line that the functions run; returns how many that are."""
    for when in range(1, 2000):
        engine = make_engine()
        with Interrupt(functions, when) as interrupt:
            got = run_through(engine)
        assert got.tokens == ANSWERS
        engine.close()
        if interrupt.num_left > 0:
            return when - 1
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize(
    ("functions", "can_overlap"),
    [(STARTING, False), (LEAVING, False), (LEAVING, True)],
    ids=["starting", "leaving", "leaving after the step in flight"],
)
def test_an_interrupt_at_any_line_costs_nothing(
    functions: list[Function], can_overlap: bool
) -> None:
    num_lines = interrupt_everywhere(lambda: an_engine(can_overlap=can_overlap), functions)
    assert num_lines > 100


def test_an_interrupt_as_one_is_preempted_costs_nothing() -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    run_through(an_engine(13, 1, bus=bus))
    assert preempted
    functions: list[Function] = [Scheduler._preempt, RunningSet.leave, SeqTable.leave]
    interrupt_everywhere(lambda: an_engine(13, 1), functions)


def test_an_interrupt_while_pages_are_copied_costs_nothing() -> None:
    """What copies hold stays theirs."""

    def make_engine() -> Engine:
        tiered = a_tiered_engine(num_pages=8)
        tiered.copier.patience = 3
        return tiered.engine

    interrupt_everywhere(make_engine, [RunningSet._release, PagePool.give_back])


def test_an_interrupt_as_a_request_is_aborted_costs_the_others_nothing() -> None:
    for when in range(1, 500):
        engine, collector = an_engine(), Collector()
        for number in (1, 2):
            engine.submit(a_request(PROMPTS[number], NUM_TOKENS[number], name=str(number)))
        engine.submit(a_request([7, 7, 7, 7, 3], 50, name="aborted"))
        for _ in range(3):
            collector.add(engine.step())
        with suppress(KeyboardInterrupt), Interrupt(LEAVING, when) as interrupt:
            engine.abort(RequestId("aborted"))
        engine.check()
        while engine.has_work:
            collector.add(engine.step())
            engine.check()
        for name in ("1", "2"):
            assert collector.tokens[name, 0] == ANSWERS[name, 0]
        if interrupt.num_left > 0:
            assert when > 10
            return
    raise AssertionError("there is no end to it")
