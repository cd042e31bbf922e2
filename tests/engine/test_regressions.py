"""Regressions: failed launches, leases that block a start, priorities, odd requests."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError, InvalidRequest, OutOfDeviceMemory
from mainstem.core.events import Event, EventBus, SequenceFinished, StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import InFlight, Step, StepResult
from mainstem.engine.engine import Engine
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer
from tests.work import instructions


class FailingRunner(FakeRunner):
    """Raises `error` instead of launching step number `when`."""

    error: type[BaseException] = RuntimeError
    when = 0

    def launch(self, step: Step) -> InFlight:
        self.when -= 1
        if self.when == -1:
            raise self.error
        return super().launch(step)


def an_engine_over(runner: FailingRunner, num_pages: int, page_size: int) -> Engine:
    bus = EventBus()
    store = KVStore(num_pages, page_size, b"fake", bus)
    return Engine(Scheduler(SchedConfig(), store, VOCAB, 10_000, bus), runner, bus)


@pytest.mark.parametrize("can_overlap", [False, True])
def test_a_failed_launch_leaves_nothing_running(can_overlap: bool) -> None:
    """`LLM.generate` and `mainstem chat` step until there is no work, also after Ctrl-C."""
    runner = FailingRunner(64, 4, VOCAB, can_overlap)
    runner.error, runner.when = KeyboardInterrupt, 2
    engine = an_engine_over(runner, 64, 4)
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, [a_request([1, 2, 3], 8, name="a")])
    engine.abort(RequestId("a"))
    run_all(engine, [], max_steps=50)


class InterruptedRunner(FakeRunner):
    """Ctrl-C comes when step number `when` is launched, before the engine has recorded the
    launch."""

    when = 2

    @property
    def can_overlap(self) -> bool:
        if len(self.steps) == self.when + 1:
            self.when = -1
            raise KeyboardInterrupt
        return self._can_overlap


def check_goes_on(engine: Engine) -> None:
    """After Ctrl-C, running requests can be aborted, and others are answered as usual."""
    for name in "abc":
        engine.abort(RequestId(name))
    run_all(engine, [], max_steps=50)
    got = run_all(engine, [a_request([1, 2, 3, 4, 5], 8, name="d")], max_steps=50)
    assert got.tokens["d", 0] == fake_answer([1, 2, 3, 4, 5], 8, VOCAB)


@pytest.mark.parametrize("can_overlap", [False, True])
def test_an_interrupt_right_after_a_launch_does_not_lose_the_step(can_overlap: bool) -> None:
    engine = an_engine(runner=InterruptedRunner(64, 4, VOCAB, can_overlap))
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, [a_request([1, 2, 3], 8, name="a"), a_request([1, 2], 9, name="b")])
    check_goes_on(engine)


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("kind", [SequenceFinished, StepFinished])
def test_an_interrupt_while_a_step_is_committed_loses_no_answer(
    kind: type[Event], can_overlap: bool
) -> None:
    """The interrupt comes in a listener, which is called in the middle of the commit."""
    bus = EventBus()
    engine = an_engine(bus=bus, can_overlap=can_overlap)
    pressed: list[Event] = []

    def press(event: Event) -> None:
        if not pressed and (kind is SequenceFinished or engine.num_running):
            pressed.append(event)
            raise KeyboardInterrupt

    bus.subscribe(kind, press)
    lengths = {"a": 3, "b": 6, "c": 3}
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, [a_request([1, 2, 3], n, name=name) for name, n in lengths.items()])
    check_goes_on(engine)


@pytest.mark.parametrize("can_overlap", [False, True])
def test_pages_of_a_failed_step_are_not_served_from_the_cache(can_overlap: bool) -> None:
    engine = an_engine_over(FailingRunner(64, 4, VOCAB, can_overlap), 64, 4)
    prompt = list(range(20))
    engine.submit(a_request(prompt, 4, name="a"))
    assert engine.step() == []
    engine.abort(RequestId("a"))
    got = run_all(engine, [a_request([*prompt, 7], 4, name="b")], max_steps=50)
    assert got.tokens["b", 0] == fake_answer([*prompt, 7], 4, VOCAB)


def test_a_similar_page_does_not_keep_a_large_prompt_from_starting() -> None:
    """The prompt needs all 4 pages, so it cannot keep a lease on the similar page to copy from
    it."""
    engine = an_engine(num_pages=4, page_size=4)
    run_all(engine, [a_request([1, 2, 3, 4], 2)])
    prompt = [1, 2, *range(50, 63)]
    got = run_all(engine, [a_request(prompt, 1, name="b")], max_steps=50)
    assert got.tokens["b", 0] == fake_answer(prompt, 1, VOCAB)


def test_a_prefix_is_not_evicted_before_its_tail() -> None:
    """Copying from a page is no use of it: otherwise it would be younger than its prefix."""
    engine = an_engine(num_pages=12, page_size=2)
    run_all(engine, [a_request([1, 2, 3, 4, 5, 6, 9], 1)])
    run_all(engine, [a_request([1, 2, 3, 4, 5, 8], 1)])  # copies from [5 6], ends at once
    run_all(engine, [a_request(list(range(20, 41)), 1)])  # 11 of 12 pages
    got = run_all(engine, [a_request([1, 2, 3, 4, 5, 6, 9], 1, name="a")])
    assert got.outputs[-1].num_cached_tokens > 0


def test_no_request_waits_for_a_page_that_is_ready() -> None:
    engine = an_engine(12, 2, SchedConfig(chunk_tokens=2), can_overlap=True)
    run_all(engine, [a_request([1, 2, 3, 4, 5, 6, 9], 1)])
    run_all(engine, [a_request([1, 2, 3, 4, 5, 8], 1)])  # copies from [5 6]
    large = a_request(list(range(20, 41)), 1)  # evicts all pages but [1 2]
    engine.submit(large)
    engine.step()
    engine.abort(large.request_id)
    run_all(engine, [])
    gone = a_request([1, 2, 3, 4, 5, 6, 11, 12, 13], 1)
    engine.submit(gone)
    engine.step()
    engine.abort(gone.request_id)  # in flight: its pages are LOADING for one more step
    got = run_all(engine, [a_request([1, 2, 3, 4, 5, 6, 15, 16], 1, name="e")], max_steps=100)
    assert ("e", 0) in got.reasons


def test_answers_of_unknown_length_do_not_run_one_by_one() -> None:
    engine = an_engine(num_pages=1000, page_size=16, max_model_len=8192)
    for i in range(50):
        sampling = SamplingParams(temperature=0.0, max_tokens=None)
        engine.submit(a_request([i, 1, 2], sampling=sampling))
    for _ in range(20):
        engine.step()
    assert engine.num_running > 10


def steps_until_heard(engine: Engine, name: str) -> int:
    for number in range(200):
        if any(output.request_id == name for output in engine.step()):
            return number
    return 200


def test_an_urgent_request_does_not_wait_for_a_long_prompt() -> None:
    engine = an_engine(num_pages=400, config=SchedConfig(chunk_tokens=8))
    engine.submit(a_request([i % 90 for i in range(400)], 1, priority=5))
    engine.step()
    engine.submit(a_request([1, 2, 3], 1, name="urgent", priority=0))
    assert steps_until_heard(engine, "urgent") < 5


@pytest.mark.parametrize("num_cached", [0, 40])
def test_a_cached_prompt_does_not_wait_for_a_long_one_but_a_new_prompt_does(
    num_cached: int,
) -> None:
    engine = an_engine(num_pages=400, config=SchedConfig(chunk_tokens=8))
    cached = list(range(40))
    run_all(engine, [a_request(cached[: num_cached or 1], 1)])
    engine.submit(a_request([i % 90 for i in range(7, 407)], 1))
    engine.step()
    engine.submit(a_request([*cached, 50], 1, name="late"))
    num_steps = steps_until_heard(engine, "late")
    assert num_steps < 5 if num_cached else num_steps > 40


def test_cached_prompts_do_not_stop_a_long_one() -> None:
    """In every step more of them arrive than a step has tokens."""
    engine = an_engine(num_pages=400, config=SchedConfig(chunk_tokens=8))
    cached = list(range(40))
    run_all(engine, [a_request(cached, 1)])
    engine.submit(a_request([i % 90 for i in range(7, 407)], 1, name="long"))
    for _ in range(100):
        for _ in range(10):
            engine.submit(a_request([*cached, 50], 1))
        if any(output.request_id == "long" for output in engine.step()):
            return
    pytest.fail("the long prompt is not done")


def test_an_urgent_request_starts_though_decodes_fill_the_chunk() -> None:
    engine = an_engine(num_pages=600, config=SchedConfig(chunk_tokens=4))
    for i in range(4):
        engine.submit(a_request([i, 1], 100, priority=5))
    for _ in range(8):
        engine.step()
    engine.submit(a_request([9, 9], 1, name="urgent", priority=0))
    assert steps_until_heard(engine, "urgent") < 5


def test_a_name_is_refused_until_its_aborted_request_has_ended() -> None:
    engine = an_engine()
    engine.submit(a_request([1, 2, 3], 4, name="a"))
    engine.step()
    engine.abort(RequestId("a"))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.submit(a_request([4, 5, 6], 4, name="a"))


@pytest.mark.parametrize("ids", [np.array([2**32 + 5]), np.array([1.9]), [2**31]])
def test_ids_that_do_not_fit_int32_are_refused(ids: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        Request(RequestId("a"), ids)  # type: ignore[arg-type]  # wrong on purpose


def test_the_callers_array_stays_writable() -> None:
    ids = np.array([1, 2], np.int32)
    Request(RequestId("a"), ids)
    ids[0] = 3


def test_launching_counts_as_device_time() -> None:
    """CpuRunner computes in `launch`."""
    bus = EventBus()
    counters = Counters().attach(bus)
    run_all(an_engine(bus=bus), [a_request(list(range(90)), 8)])
    assert counters.device_s > 1e-4 * counters.steps


def test_prompt_logprobs_are_computed_for_one_answer_only() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    sampling = SamplingParams(n=4, temperature=0.0, max_tokens=1, prompt_logprobs=0)
    run_all(an_engine(bus=bus), [a_request(list(range(36)), sampling=sampling)])
    assert counters.computed_tokens < 2 * 36


def test_a_prompt_of_one_token_has_no_prompt_logprob() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = run_all(an_engine(), [a_request([1], sampling=sampling)]).outputs
    assert output.prompt_logprobs == (None,)


def test_a_closed_engine_has_no_work() -> None:
    engine = an_engine()
    engine.submit(a_request([1, 2, 3], 3))
    engine.step()
    engine.close()
    assert not engine.has_work


@pytest.mark.parametrize("setting", [{"seed": 2**63}, {"max_model_len": 1}])
def test_settings_under_which_no_request_can_run_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SchedConfig(**setting)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("place", ["sched.scheduler.build_step", "sched.table.SeqTable.enter"])
def test_an_error_in_the_scheduler_loses_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that the scheduler had allocated are not filled; the sequence is queued again."""
    engine = an_engine(num_pages=32, page_size=4)
    first, prompt = list(range(12)), [*range(12), 40, 41, 42]
    run_all(engine, [a_request(first, 3)])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(f"mainstem.{place}", fail)
        engine.submit(a_request(prompt, 4, name="b"))
        assert engine.step() == []
        engine.check()
    got = run_all(engine, [], max_steps=50)
    assert got.tokens["b", 0] == fake_answer(prompt, 4, VOCAB)


class LateRunner(FakeRunner):
    """The host runs ahead: a step is computed only when the caller waits for it, or for all
    steps."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size, VOCAB, can_overlap=True)
        self._late: list[tuple[Step, list[StepResult]]] = []
        self.fails = False

    def launch(self, step: Step) -> InFlight:
        if self.fails:
            self.fails = False
            raise OutOfDeviceMemory
        results: list[StepResult] = []
        self._late.append((step, results))
        return _LateStep(self, results)

    def compute(self) -> None:
        step, results = self._late.pop(0)
        results.append(super().launch(step).wait())

    def drain(self) -> None:
        while self._late:
            self.compute()


class _LateStep:
    def __init__(self, runner: LateRunner, results: list[StepResult]) -> None:
        self._runner = runner
        self._results = results

    def wait(self) -> StepResult:
        while not self._results:
            self._runner.compute()
        return self._results[0]

    def has_ended(self) -> bool:
        return bool(self._results)


def test_a_step_still_on_the_device_does_not_write_to_pages_of_others() -> None:
    """A launch fails while the previous step runs. That step's pages are not free until it ends."""
    runner = LateRunner(16, 4)
    bus = EventBus()
    store = KVStore(16, 4, b"fake", bus)
    scheduler = Scheduler(SchedConfig(), store, VOCAB, 1000, bus, max_step_tokens=512)
    engine = Engine(scheduler, runner, bus)
    long, other = list(range(40, 80)), list(range(1, 30))
    engine.submit(a_request(long, 6, name="long"))
    engine.step()
    runner.fails = True
    engine.submit(a_request(other, 4, name="other", priority=-1))
    got = run_all(engine, [], max_steps=100)
    assert got.tokens["long", 0] == fake_answer(long, 6, VOCAB)
    assert got.tokens["other", 0] == fake_answer(other, 4, VOCAB)
    assert not runner._late


def test_submitting_a_request_does_not_search_pending_outputs() -> None:
    """Many requests are aborted, and others arrive before any output was delivered."""
    engine = an_engine()
    names = [str(number) for number in range(3000)]
    for name in names:
        engine.submit(a_request([1, 2], name=name))

    first, second = a_request([1, 2], name="before"), a_request([1, 2], name="after")
    before = instructions(lambda: engine.submit(first))
    for name in names:
        engine.abort(RequestId(name))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.submit(a_request([1, 2], name="7"))
    assert instructions(lambda: engine.submit(second)) < before + 1000
    for name in ("before", "after"):
        engine.abort(RequestId(name))
    engine.step()
    engine.submit(a_request([1, 2], name="7"))
