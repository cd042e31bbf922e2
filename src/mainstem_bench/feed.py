"""Runs an engine on a job whose prompts are all given: plans them, announces the order, and submits
a few at a time while the engine runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np

from mainstem.batch.supply import Supply
from mainstem.core.events import StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.plan import Int32s, Int64s, Prompts
from mainstem.core.request import (
    Delivery,
    FinishReason,
    Request,
    SamplingParams,
    Scoring,
    TokenLogprobs,
)
from mainstem.engine.engine import Engine
from mainstem.plan.order import new_tokens, shared_with_next
from mainstem.plan.planner import PlanConfig, plan_prompts


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def greedy_request(
    name: str, ids: Sequence[int] | Int32s, output: int, delivery: Delivery = Delivery.EACH_STEP
) -> Request:
    """A request whose answer is greedy and has exactly `output` tokens, as the engine expects."""
    ids, sampling = np.asarray(ids, np.int32), greedy(output)
    return Request(RequestId(name), ids, sampling, delivery=delivery, expected_tokens=output)


def submit_all(engine: Engine, name: str, prompts: list[list[int]], outputs: list[int]) -> None:
    """Submit greedy requests, each with a fixed number of tokens, all at once and in this order."""
    for index, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        engine.submit(greedy_request(f"{name}-{index}", ids, output, Delivery.AT_END))


@dataclass(frozen=True, slots=True)
class Order:
    """The prompts of a job in the order they are submitted."""

    members: Int64s  # prompt indices
    shared_with_next: Int32s | None  # number of leading tokens; None: nothing was planned

    @classmethod
    def as_given(cls, prompts: Prompts) -> "Order":
        return cls(np.arange(len(prompts)), None)

    @classmethod
    def planned(
        cls, prompts: Prompts, outputs: Int64s, config: PlanConfig | None = None
    ) -> "Order":
        """The planned order; `outputs` [prompts] are the lengths of the answers."""
        plan = plan_prompts(prompts, config, max_tokens=outputs)
        return cls(plan.members.astype(np.int64), shared_with_next(plan))

    def new_tokens(self, prompts: Prompts) -> Int64s:
        """Return [places] how many tokens of each prompt will probably be computed."""
        return new_tokens(prompts.num_tokens[self.members], self.shared_with_next)


class Submits(Protocol):
    """An Engine, or a Scheduler without one."""

    @property
    def step_tokens(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    def expect(self, shared_with_next: Int32s) -> int: ...
    def submit(self, request: Request) -> None: ...


class Feed:
    """Submits a job's prompts in order, when its Supply says so."""

    def __init__(
        self,
        engine: Submits,
        prompts: Prompts,
        order: Order,
        outputs: Int64s,
        scorings: Sequence[Scoring] | None = None,
    ) -> None:
        """`outputs` [prompts] are the lengths of the answers; `scorings` are the logprobs to ask
        for."""
        self._scorings = scorings
        self._engine = engine
        self._prompts = prompts
        self._order = order.members.tolist()
        self._outputs = outputs
        self._expected = round(float(outputs.mean()))
        self._new_tokens = order.new_tokens(prompts).tolist()
        self._first_place: int | None = None
        if order.shared_with_next is not None:
            self._first_place = engine.expect(order.shared_with_next)
        self._num_submitted = 0
        self._supply = Supply(engine.step_tokens)

    @property
    def is_empty(self) -> bool:
        return self._num_submitted == len(self._order)

    def top_up(self) -> None:
        """Submit the prompts that should be queued before the next step."""
        self._supply.begin_step()
        while not self.is_empty and self._supply.has_room(self._engine.num_waiting):
            self._submit_next()

    def _submit_next(self) -> None:
        place = self._num_submitted
        index = self._order[place]
        output = int(self._outputs[index])
        self._engine.submit(
            Request(
                RequestId(str(index)),
                self._prompts[index],
                greedy(output),
                delivery=Delivery.AT_END,
                plan_place=None if self._first_place is None else self._first_place + place,
                expected_tokens=self._expected,
                scoring=None if self._scorings is None else self._scorings[index],
            )
        )
        self._num_submitted += 1
        self._supply.note(self._new_tokens[place])


@dataclass(slots=True)
class StepLog:
    """Times of a job's steps; attach it when the job begins."""

    began_s: float = 0.0
    ended_s: float = 0.0  # end of the last step that was committed
    device_s: float = 0.0
    host_s: float = 0.0
    num_steps: int = 0
    largest_step_tokens: int = 0
    # for each step: when it was committed (seconds since the job began), its tokens, its prompt
    # tokens
    ends_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)

    @classmethod
    def attach(cls, engine: Engine) -> "StepLog":
        log = cls(began_s=perf_counter())
        engine.bus.subscribe(StepFinished, log._add)
        return log

    @property
    def busy(self) -> float:
        """The share of the time, from start to last step, in which the device computed."""
        wall_s = self.ended_s - self.began_s
        return min(1.0, self.device_s / wall_s) if wall_s > 0 else 0.0

    def _add(self, event: StepFinished) -> None:
        self.ended_s = perf_counter()
        self.ends_s.append(self.ended_s - self.began_s)
        self.num_tokens.append(event.num_tokens)
        self.num_prompt_tokens.append(event.num_prompt_tokens)
        self.device_s += event.device_s
        self.host_s += event.host_s
        self.num_steps += 1
        self.largest_step_tokens = max(self.largest_step_tokens, event.num_tokens)


@dataclass(slots=True)
class JobRun:
    """The result of a job."""

    seconds: float = 0.0
    plan_s: float = 0.0
    submit_s: float = 0.0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by prompt index
    logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    steps: StepLog = field(default_factory=StepLog)


def run_job(
    engine: Engine,
    prompts: Prompts,
    output: int | Int64s,
    is_planned: bool,
    after_step: Callable[[Counters], None] = lambda _: None,
    scorings: Sequence[Scoring] | None = None,
    plan: PlanConfig | None = None,
) -> JobRun:
    """Answer every prompt greedily or, with `scorings`, score it. `output` is the length of all
    answers, or an array of lengths. The time includes planning (with `plan`) and submitting.

    Raises AssertionError if an answer is missing or short.
    """
    counters = Counters().attach(engine.bus)
    began_s = perf_counter()
    outputs = np.broadcast_to(np.asarray(output, np.int64), len(prompts))
    order = Order.planned(prompts, outputs, plan) if is_planned else Order.as_given(prompts)
    feed = Feed(engine, prompts, order, outputs, scorings)
    run = JobRun(plan_s=perf_counter() - began_s, counters=counters)
    run.steps = StepLog.attach(engine)
    while not feed.is_empty or engine.has_work:
        submitting_s = perf_counter()
        feed.top_up()
        run.submit_s += perf_counter() - submitting_s
        for news in engine.step():
            assert news.finish_reason is FinishReason.LENGTH, f"{news.request_id} ended early"
            run.answers[int(news.request_id)] = news.token_ids
            if news.prompt_logprobs is not None:
                run.logprobs[int(news.request_id)] = news.prompt_logprobs
        after_step(counters)
    run.seconds = perf_counter() - began_s
    assert len(run.answers) == len(prompts), "an answer is missing"
    is_whole = (len(tokens) == outputs[index] for index, tokens in run.answers.items())
    assert all(is_whole), "an answer is short"
    return run
