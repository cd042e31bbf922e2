"""Drives an engine through prompts that are all known: planned, announced, fed a little ahead."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from mainstem.apps.jobs.ordering import shared_with_next
from mainstem.core.events import StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.plan import Int32s, Int64s, Prompts
from mainstem.core.request import Delivery, FinishReason, Request, SamplingParams
from mainstem.engine.engine import Engine
from mainstem.plan.planner import plan_prompts

CHUNK_TOKENS = 8192  # at least what a step takes where the engine chooses its size itself
LEAST_NEW_TOKENS = 16  # of a prompt whose prefix may be cached or not


@dataclass(frozen=True, slots=True)
class Order:
    """The prompts of a job in the order they are submitted."""

    members: Int64s  # prompt indices
    shared_with_next: Int32s | None  # leading tokens; None: nothing was planned

    @classmethod
    def as_given(cls, prompts: Prompts) -> "Order":
        return cls(np.arange(len(prompts)), None)

    @classmethod
    def planned(cls, prompts: Prompts, outputs: Int64s) -> "Order":
        """`outputs` [prompts]: tokens that each will be answered with."""
        plan = plan_prompts(prompts, max_tokens=outputs)
        return cls(plan.members.astype(np.int64), shared_with_next(plan))

    def new_tokens(self, prompts: Prompts) -> Int64s:
        """[places] tokens of each prompt that the one before it does not share, or the least that
        may be left of it to compute where that is not known.
        """
        lengths = prompts.num_tokens[self.members]
        if self.shared_with_next is None:
            return np.minimum(lengths, LEAST_NEW_TOKENS)
        lengths[1:] -= self.shared_with_next[:-1]
        return lengths


class Feed:
    """Submits a job's prompts in order, a little ahead of need.

    What a step takes is counted in tokens to compute, so that is what is kept waiting. Submitting
    a prompt hashes its pages: all of a job at once would keep the device idle at the start, a few
    at a time are hashed while it computes.
    """

    def __init__(self, engine: Engine, prompts: Prompts, order: Order, output: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._order = order.members.tolist()
        self._sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._output = output
        self._new_before: Int64s = np.r_[0, np.cumsum(order.new_tokens(prompts))]
        self._first_place: int | None = None
        if order.shared_with_next is not None:
            self._first_place = engine.expect(order.shared_with_next)
        self._num_submitted = 0

    @property
    def is_empty(self) -> bool:
        return self._num_submitted == len(self._order)

    def top_up(self, ahead_tokens: int) -> None:
        """Submit until `ahead_tokens` are waiting to be computed, or nothing is left."""
        while not self.is_empty and self._waiting_tokens() < ahead_tokens:
            self._submit_next()

    def _waiting_tokens(self) -> int:
        """The last prompts submitted are those that wait."""
        first = max(0, self._num_submitted - self._engine.num_waiting)
        return int(self._new_before[self._num_submitted] - self._new_before[first])

    def _submit_next(self) -> None:
        place = self._num_submitted
        index = self._order[place]
        self._engine.submit(
            Request(
                RequestId(str(index)),
                self._prompts[index],
                self._sampling,
                delivery=Delivery.AT_END,
                plan_place=None if self._first_place is None else self._first_place + place,
                expected_tokens=self._output,
            )
        )
        self._num_submitted += 1


@dataclass(slots=True)
class StepLog:
    """What the steps of a job took; attach it when the job begins."""

    began_s: float = 0.0
    ended_s: float = 0.0  # of the last step that was committed
    device_s: float = 0.0
    host_s: float = 0.0
    num_steps: int = 0
    largest_step_tokens: int = 0

    @classmethod
    def attach(cls, engine: Engine) -> "StepLog":
        log = cls(began_s=perf_counter())
        engine.bus.subscribe(StepFinished, log._add)
        return log

    @property
    def busy(self) -> float:
        """The part of the time from the first step to the last in which the device computed."""
        wall_s = self.ended_s - self.began_s
        return min(1.0, self.device_s / wall_s) if wall_s > 0 else 0.0

    def _add(self, event: StepFinished) -> None:
        self.ended_s = perf_counter()
        self.device_s += event.device_s
        self.host_s += event.host_s
        self.num_steps += 1
        self.largest_step_tokens = max(self.largest_step_tokens, event.num_tokens)


@dataclass(slots=True)
class JobRun:
    """A job that has run."""

    seconds: float = 0.0
    plan_s: float = 0.0
    submit_s: float = 0.0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by prompt index
    counters: Counters = field(default_factory=Counters)
    steps: StepLog = field(default_factory=StepLog)


def run_job(
    engine: Engine,
    prompts: Prompts,
    output: int,
    is_planned: bool,
    chunk_tokens: int = CHUNK_TOKENS,
    after_step: Callable[[Counters], None] = lambda _: None,
) -> JobRun:
    """Answer every prompt with `output` tokens, greedily. Planning and submitting are in the time.

    Prompts for one step wait before the first, for two steps of `chunk_tokens` from then on.
    Raises AssertionError if an answer is missing or short.
    """
    counters = Counters().attach(engine.bus)
    began_s = perf_counter()
    if is_planned:
        order = Order.planned(prompts, np.full(len(prompts), output))
    else:
        order = Order.as_given(prompts)
    feed = Feed(engine, prompts, order, output)
    run = JobRun(plan_s=perf_counter() - began_s, counters=counters)
    run.steps = StepLog.attach(engine)
    while not feed.is_empty or engine.has_work:
        submitting_s = perf_counter()
        feed.top_up(2 * chunk_tokens if run.steps.num_steps else chunk_tokens)
        run.submit_s += perf_counter() - submitting_s
        for news in engine.step():
            assert news.finish_reason is FinishReason.LENGTH, f"{news.request_id} ended early"
            run.answers[int(news.request_id)] = news.token_ids
        after_step(counters)
    run.seconds = perf_counter() - began_s
    assert len(run.answers) == len(prompts), "an answer is missing"
    assert all(len(tokens) == output for tokens in run.answers.values()), "an answer is short"
    return run
