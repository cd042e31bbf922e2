"""Steps that fail: a single failure only costs time; a request whose steps always fail ends with an
error and no other request does; a lost engine raises."""

from collections.abc import Callable

import numpy as np
import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.errors import EngineLost, OutOfDeviceMemory
from mainstem.core.events import EventBus, SequenceFinished, StepFailed, StepsResized
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import FinishReason, Request, SamplingParams
from mainstem.core.step import InFlight, Step, StepResult
from mainstem.engine.engine import MAX_BLAMED, MAX_FAILURES, Engine
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.starting import Starter
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import FakeRunner, fake_answer

POISON = 96  # a token id that no answer here has


class PoisonedRunner(FakeRunner):
    """Fails the steps for which `fails` is true, at the launch or when they are waited for."""

    def __init__(self, can_overlap: bool, fails: Callable[[Step], bool], at_wait: bool) -> None:
        super().__init__(256, 4, VOCAB, can_overlap)
        self._fails = fails
        self._at_wait = at_wait
        self.num_launched = 0

    def launch(self, step: Step) -> InFlight:
        self.num_launched += 1
        is_failing = self._fails(step)
        if is_failing and not self._at_wait:
            raise RuntimeError("poison")
        done = super().launch(step)
        return _Failing() if is_failing else done


class _Failing:
    def wait(self) -> StepResult:
        raise RuntimeError("poison")

    def has_ended(self) -> bool:
        return True


def an_engine_over(
    runner: FakeRunner, max_step_tokens: int | None = None, num_pages: int = 256
) -> Engine:
    bus = EventBus()
    store = KVStore(num_pages, 4, b"fake", bus)
    config = SchedConfig(chunk_tokens=max_step_tokens)
    scheduler = Scheduler(config, store, VOCAB, 1000, bus, max_step_tokens=max_step_tokens)
    return Engine(scheduler, runner, bus)


def has_poison(step: Step) -> bool:
    return bool(np.isin(step.token_ids, [POISON]).any())


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[7, 7, 7, 7, *rng.integers(0, 90, 6 + index).tolist()] for index in range(count)]


both_ways = pytest.mark.parametrize(
    ("can_overlap", "at_wait"), [(False, False), (False, True), (True, False), (True, True)]
)


@both_ways
def test_a_step_that_fails_once_loses_no_answer(can_overlap: bool, at_wait: bool) -> None:
    left = [4]

    def fails(_: Step) -> bool:
        left[0] -= 1
        return left[0] == 0

    engine = an_engine_over(PoisonedRunner(can_overlap, fails, at_wait))
    counters = Counters().attach(engine.bus)
    asked = prompts(5)
    got = run_all(engine, [a_request(p, 9, name=str(i)) for i, p in enumerate(asked)], 200)
    for index, prompt in enumerate(asked):
        assert got.tokens[str(index), 0] == fake_answer(prompt, 9, VOCAB)
        assert got.reasons[str(index), 0] is FinishReason.LENGTH
    assert counters.failed_steps == 1


@both_ways
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_poisonous_request_ends_and_the_others_are_answered(
    can_overlap: bool, at_wait: bool, place: int
) -> None:
    runner = PoisonedRunner(can_overlap, has_poison, at_wait)
    engine = an_engine_over(runner)
    asked = prompts(7)
    asked[place] = [*asked[place], POISON, 5]
    got = run_all(engine, [a_request(p, 6, name=str(i)) for i, p in enumerate(asked)], 200)
    for index, prompt in enumerate(asked):
        if index != place:
            assert got.tokens[str(index), 0] == fake_answer(prompt, 6, VOCAB)
    assert got.reasons[str(place), 0] is FinishReason.ERROR
    (last,) = [output for output in got.outputs if output.finish_reason is FinishReason.ERROR]
    assert last.fault == "RuntimeError: poison"
    assert runner.num_launched < 80  # each suspect runs alone once


@both_ways
def test_a_poisonous_request_that_arrives_later_does_not_end_running_ones(
    can_overlap: bool, at_wait: bool
) -> None:
    engine = an_engine_over(PoisonedRunner(can_overlap, has_poison, at_wait))
    asked = prompts(3)
    requests = [a_request(p, 12, name=str(i)) for i, p in enumerate(asked)]
    for request in requests:
        engine.submit(request)
    early = [output for _ in range(4) for output in engine.step()]
    got = run_all(engine, [a_request([1, 2, POISON], 4, name="poison", priority=-1)], 300)
    for index, prompt in enumerate(asked):
        told = [t for o in early if o.request_id == str(index) for t in o.token_ids]
        assert told + got.tokens[str(index), 0] == fake_answer(prompt, 12, VOCAB)
    assert got.reasons["poison", 0] is FinishReason.ERROR


@both_ways
@pytest.mark.parametrize("count", [6, 20])
def test_poisonous_requests_in_a_row_do_not_end_the_engine(
    can_overlap: bool, at_wait: bool, count: int
) -> None:
    engine = an_engine_over(PoisonedRunner(can_overlap, has_poison, at_wait))
    asked = prompts(count + 3)
    poisoned = [[*prompt, POISON, 5] for prompt in asked[:count]]
    requests = [a_request(p, 6, name=str(i)) for i, p in enumerate(poisoned + asked[count:])]
    got = run_all(engine, requests, 400)
    for index in range(count):
        assert got.reasons[str(index), 0] is FinishReason.ERROR
    for index in range(count, count + 3):
        assert got.tokens[str(index), 0] == fake_answer(asked[index], 6, VOCAB)


@both_ways
def test_all_answers_of_a_poisonous_request_end_together(can_overlap: bool, at_wait: bool) -> None:
    runner = PoisonedRunner(can_overlap, has_poison, at_wait)
    engine = an_engine_over(runner)
    six = SamplingParams(n=6, max_tokens=6)
    good = prompts(1)[0]
    requests = [a_request([1, POISON], sampling=six, name="bad"), a_request(good, 6, name="good")]
    got = run_all(engine, requests, 100)
    assert [got.reasons["bad", index] for index in range(6)] == [FinishReason.ERROR] * 6
    assert got.tokens["good", 0] == fake_answer(good, 6, VOCAB)
    assert runner.num_launched < 16  # one of the six is tried alone


@both_ways
@pytest.mark.parametrize("count", [10, 20, 200])
def test_an_engine_whose_steps_all_fail_is_lost_and_blames_no_request(
    can_overlap: bool, at_wait: bool, count: int
) -> None:
    runner = PoisonedRunner(can_overlap, lambda _: True, at_wait)
    engine = an_engine_over(runner, num_pages=4096)
    ended: list[SequenceFinished] = []
    engine.bus.subscribe(SequenceFinished, ended.append)
    with pytest.raises(EngineLost, match="poison"):
        run_all(engine, [a_request(prompt, 3) for prompt in prompts(count)], 1000)
    assert not ended
    assert runner.num_launched <= MAX_FAILURES + MAX_BLAMED
    assert engine.num_waiting == count
    engine.check()


def test_an_engine_that_fails_every_lone_request_is_lost() -> None:
    engine = an_engine_over(PoisonedRunner(False, lambda _: True, False))
    for _ in range(MAX_FAILURES - 1):
        run_all(engine, [a_request([1, 2, 3], 3)], 20)
    with pytest.raises(EngineLost):
        run_all(engine, [a_request([1, 2, 3], 3)], 20)


def test_good_answers_between_poisonous_requests_keep_the_engine_from_being_lost() -> None:
    engine = an_engine_over(PoisonedRunner(False, has_poison, False))
    for number in range(3 * MAX_FAILURES):
        asked = [1, 2, 3] if number % 4 == 3 else [1, 2, POISON]
        run_all(engine, [a_request(asked, 3)], 20)


def test_between_two_suspects_another_sequence_runs() -> None:
    tried: list[list[int]] = []

    def fails(step: Step) -> bool:
        if step.num_decodes == 0:
            tried.append([int(step.token_ids[start]) for start in step.seq_starts[:-1]])
        return has_poison(step)

    engine = an_engine_over(PoisonedRunner(False, fails, False))
    for first in (1, 2):
        engine.submit(a_request([first, POISON], 4))
    while len(tried) < 2:
        engine.step()
    got = run_all(engine, [a_request([first, 5], 4, name=str(first)) for first in (3, 4)], 100)
    assert tried[:5] == [[1, 2], [1, 2], [1], [3], [2]]
    assert got.tokens["3", 0] == fake_answer([3, 5], 4, VOCAB)
    assert got.tokens["4", 0] == fake_answer([4, 5], 4, VOCAB)


def test_requests_at_fault_end_when_the_others_are_aborted() -> None:
    """No other request is left to show that steps without the bad ones succeed."""
    engine = an_engine_over(PoisonedRunner(False, has_poison, False))
    failed: list[StepFailed] = []
    engine.bus.subscribe(StepFailed, failed.append)
    for name, prompt in (("bad", [1, POISON]), ("worse", [2, POISON]), ("x", [3, 4])):
        engine.submit(a_request(prompt, 5, name=name))
    while len(failed) < 3:
        engine.step()
    for name in ("worse", "x"):
        engine.abort(RequestId(name))
    got = run_all(engine, [], 20)
    assert got.reasons["bad", 0] is FinishReason.ERROR
    assert got.reasons["x", 0] is FinishReason.ABORT
    run_all(engine, [a_request([1, 5], 2, name="bad")], 20)  # the name is free again


class OverlapCounter(PoisonedRunner):
    """Counts the steps that were launched while another ran."""

    def __init__(self, fails: Callable[[Step], bool]) -> None:
        super().__init__(True, fails, False)
        self.num_running = 0
        self.num_overlapped = 0

    def launch(self, step: Step) -> InFlight:
        done = super().launch(step)
        self.num_overlapped += self.num_running > 0
        self.num_running += 1
        return _Counted(self, done)

    def drain(self) -> None:
        self.num_running = 0


class _Counted:
    def __init__(self, runner: OverlapCounter, done: InFlight) -> None:
        self._runner = runner
        self._done = done

    def wait(self) -> StepResult:
        self._runner.num_running -= 1
        return self._done.wait()

    def has_ended(self) -> bool:
        return self._done.has_ended()


def test_a_suspect_that_waits_does_not_slow_other_requests_for_long() -> None:
    runner = OverlapCounter(lambda _: runner.num_launched == 2)
    engine = an_engine_over(runner, num_pages=40)
    waits = list(range(20))
    engine.submit(a_request(waits, 20, name="waits"))
    while runner.num_launched < 2:
        engine.step()
    got = run_all(engine, [a_request([1, 2, 3], 140, priority=-1)], 400)
    assert len(got.tokens["waits", 0]) == 20
    assert runner.num_overlapped > 90


def test_a_lone_request_is_tried_twice() -> None:
    runner = PoisonedRunner(False, lambda _: True, False)
    engine = an_engine_over(runner)
    got = run_all(engine, [a_request([1, 2, 3], 3, name="a")], 20)
    assert got.reasons["a", 0] is FinishReason.ERROR
    assert runner.num_launched == 2
    assert not engine.has_work


def test_an_error_while_a_step_is_made_ends_the_request_that_causes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, a grammar may fail to compute which tokens may follow."""
    engine = an_engine_over(FakeRunner(256, 4, VOCAB))
    look_up = Starter._look_up

    def broken(starter: Starter, sequence: object) -> object:
        if POISON in sequence.request.prompt_ids:  # type: ignore[attr-defined]
            raise RuntimeError("poison")
        return look_up(starter, sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(Starter, "_look_up", broken)
    asked = prompts(3)
    requests = [a_request(p, 6, name=str(i)) for i, p in enumerate(asked)]
    requests.insert(1, a_request([POISON, 2, 3], 6, name="poison"))
    got = run_all(engine, requests, 200)
    assert got.reasons["poison", 0] is FinishReason.ERROR
    for index, prompt in enumerate(asked):
        assert got.tokens[str(index), 0] == fake_answer(prompt, 6, VOCAB)


def test_an_aborted_suspect_does_not_hold_up_the_others() -> None:
    engine = an_engine_over(PoisonedRunner(False, has_poison, False))
    failed: list[StepFailed] = []
    engine.bus.subscribe(StepFailed, failed.append)
    good = prompts(2)
    for name, prompt in (("bad", [1, POISON]), ("x", good[0]), ("y", good[1])):
        engine.submit(a_request(prompt, 5, name=name))
    while len(failed) < 2:
        engine.step()
    engine.abort(RequestId("bad"))
    got = run_all(engine, [], 100)
    assert got.tokens["x", 0] == fake_answer(good[0], 5, VOCAB)
    assert got.tokens["y", 0] == fake_answer(good[1], 5, VOCAB)


# --- steps that do not fit the device -------------------------------------------------------------


class SmallRunner(FakeRunner):
    """Has memory for steps of up to `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__(4096, 4, VOCAB)
        self.most = most
        self.largest = 0

    def launch(self, step: Step) -> InFlight:
        if step.num_tokens > self.most:
            raise OutOfDeviceMemory("too large")
        self.largest = max(self.largest, step.num_tokens)
        return super().launch(step)


def long_requests(count: int) -> list[Request]:
    rng = np.random.default_rng(5)
    return [a_request(rng.integers(0, 90, 400).tolist(), 2) for _ in range(count)]


def test_steps_return_to_full_size_when_memory_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mainstem.sched.step_size.GROW_STEPS", 10)
    runner = SmallRunner(most=128)
    engine = an_engine_over(runner, max_step_tokens=512, num_pages=4096)
    sizes: list[int] = []
    engine.bus.subscribe(StepsResized, lambda event: sizes.append(event.num_tokens))
    run_all(engine, long_requests(2), 200)
    assert sizes == [256, 128]
    assert runner.largest <= 128
    runner.most = 10_000
    run_all(engine, long_requests(40), 400)
    assert sizes == [256, 128, 256, 512]
    assert runner.largest == 512


def test_full_size_steps_that_keep_failing_are_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mainstem.sched.step_size.GROW_STEPS", 4)
    engine = an_engine_over(SmallRunner(most=300), max_step_tokens=512, num_pages=4096)
    sizes: list[int] = []
    engine.bus.subscribe(StepsResized, lambda event: sizes.append(event.num_tokens))
    got = run_all(engine, long_requests(60), 400)
    assert len(got.reasons) == 60
    assert sizes.count(256) <= 6  # in 94 steps; with a retry every 4 steps it would be 20
    assert set(sizes) == {256, 512}
