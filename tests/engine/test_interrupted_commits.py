"""Errors and interrupts during a commit: answers are right, and every output is delivered."""

from collections.abc import Callable

import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.errors import EngineLost
from mainstem.core.events import EventBus, StepFailed
from mainstem.core.ids import RequestId
from mainstem.core.request import Delivery, FinishReason, Request, SamplingParams
from mainstem.core.step import InFlight, Step, StepResult
from mainstem.engine.engine import Engine
from mainstem.kv.saving import PageSaver
from mainstem.kv.store import KVStore
from mainstem.sched.outputs import OutputMaker
from mainstem.sched.running import RunningSet
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.table import SeqTable
from tests.builders import VOCAB, Collector, a_request, an_engine
from tests.fakes import FakeRunner, fake_answer

PROMPTS = [[7, 7, 7, 7, 7, 20 + number, 3 * number] for number in range(4)]
NUM_TOKENS = [3, 9, 1, 6]
PLACES = [
    (PageSaver, "settle"),
    (KVStore, "give_back"),
    (OutputMaker, "keep_logprobs"),
    (SeqTable, "append_samples"),
    (OutputMaker, "stream"),
    (RunningSet, "settle"),
    (Scheduler, "_publish_step"),
]


def fail_at(
    place: tuple[type, str], call: int, error: BaseException, patch: pytest.MonkeyPatch
) -> list[int]:
    """Make call number `call` of a method raise at its start; returns a counter of calls."""
    owner, name = place
    method = getattr(owner, name)
    calls = [0]

    def fail(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return method(*args, **kwargs)

    patch.setattr(owner, name, fail)
    return calls


def requests() -> list[Request]:
    """Requests of every kind: delivered at each step or at the end, with logprobs, with a stop
    token."""
    eos = fake_answer(PROMPTS[3], 6, VOCAB)[4]
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1)
    return [
        a_request(PROMPTS[0], 3, name="0"),
        a_request(PROMPTS[1], sampling=with_logprobs, name="1"),
        a_request(PROMPTS[2], 1, name="2", delivery=Delivery.AT_END),
        a_request(PROMPTS[3], 6, name="3", eos_ids=(eos,)),
    ]


def run_through(engine: Engine) -> Collector:
    collector = Collector()
    for request in requests():
        engine.submit(request)
    for _ in range(200):
        if not engine.has_work:
            return collector
        try:
            collector.add(engine.step())
        except KeyboardInterrupt:
            continue
        engine.check()
    raise AssertionError("the engine still has work")


@pytest.mark.parametrize("error", [RuntimeError("no copy"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_a_commit_that_fails_loses_no_token(
    place: tuple[type, str], can_overlap: bool, error: BaseException
) -> None:
    expected = run_through(an_engine(can_overlap=can_overlap))
    assert expected.tokens["1", 0] == fake_answer(PROMPTS[1], 9, VOCAB)
    for call in range(1, 40):
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(place, call, error, patch)
            got = run_through(an_engine(can_overlap=can_overlap))
        assert got.tokens == expected.tokens
        assert got.reasons == expected.reasons
        assert sum(len(output.logprobs) for output in got.outputs) == 9
        if calls[0] < call:
            assert call > 3
            return


class FailingRunner(FakeRunner):
    """Once `error` is set, waiting for a step raises it."""

    def __init__(self) -> None:
        super().__init__(64, 4, VOCAB, can_overlap=True)
        self.error: BaseException | None = None
        self.is_closed = False

    def launch(self, step: Step) -> InFlight:
        return _Failing(super().launch(step), lambda: self.error)

    def close(self) -> None:
        self.is_closed = True


class _Failing:
    def __init__(self, done: InFlight, error: Callable[[], BaseException | None]) -> None:
        self._done = done
        self._error = error

    def wait(self) -> StepResult:
        error = self._error()
        if error is not None:
            raise error
        return self._done.wait()

    def has_ended(self) -> bool:
        return self._done.has_ended()


def test_after_an_interrupt_the_next_step_delivers_pending_outputs() -> None:
    runner = FailingRunner()
    engine = an_engine(runner=runner)
    engine.submit(a_request(PROMPTS[0], 5, name="a"))
    engine.submit(a_request(PROMPTS[1], 5, name="b"))
    engine.step()
    engine.abort(RequestId("b"))
    runner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    runner.error = None
    told = [(output.request_id, output.finish_reason) for output in engine.step()]
    assert ("b", FinishReason.ABORT) in told


def test_a_lost_engine_still_delivers_final_outputs() -> None:
    runner = FailingRunner()
    engine = an_engine(runner=runner)
    for number in range(12):
        engine.submit(a_request([number, 1, 2], 5, name=str(number)))
    runner.error = RuntimeError("no device")
    failed: list[StepFailed] = []
    engine.bus.subscribe(StepFailed, failed.append)
    while len(failed) < 13:  # two failures of all 12 together, 11 of single requests
        assert engine.step() == []
    assert engine.step() == []  # launches
    engine.abort(RequestId("3"))
    with pytest.raises(EngineLost):
        engine.step()
    runner.error = None
    told = [(output.request_id, output.finish_reason) for output in engine.step()]
    assert ("3", FinishReason.ABORT) in told


@pytest.mark.parametrize("error", [RuntimeError("no device"), KeyboardInterrupt()], ids=str)
def test_closing_over_a_step_that_fails_closes_everything(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, bus = FailingRunner(), EventBus()
    store = KVStore(64, 4, b"fake", bus)
    closed: list[bool] = []
    monkeypatch.setattr(store, "close", lambda: closed.append(True))
    engine = Engine(Scheduler(SchedConfig(), store, VOCAB, 1000, bus), runner, bus)
    engine.submit(a_request(PROMPTS[0], 5))
    engine.step()
    runner.error = error
    if isinstance(error, Exception):
        engine.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert closed
    assert runner.is_closed
    assert store.num_cached_pages == 0  # the failed step may have written anything to these pages
    assert store.num_held() == 0
