"""Measures latency at a rate of arrivals: requests arrive one by one, in one process.

No prompt is known before it arrives, so nothing is planned. A request's time counts from the moment
it was due, even if the engine was too busy to take it at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

import numpy as np

from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.plan import Int32s, Prompts
from mainstem.core.request import Request
from mainstem.engine.engine import Engine
from mainstem_bench.feed import greedy
from mainstem_bench.profile import ProfileWindow
from mainstem_bench.report import spread


@dataclass(slots=True)
class TimedAnswer:
    """When a request was due and when its tokens came, in seconds since the start."""

    due_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def total_s(self) -> float:
        return self.token_s[-1] - self.due_s


def arrival_times(count: int, rate: float, seed: int = 0) -> list[float]:
    """Return the seconds at which `count` requests of a Poisson process are due, `rate` per
    second."""
    rng = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate)
        times.append(now_s)
    return times


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it is due, and the number of tokens in its answer."""

    due_s: float
    prompt_ids: Int32s
    output: int
    expected_tokens: int | None = None  # length that the engine expects; None: it estimates one


def run_arrivals(
    engine: Engine,
    prompts: Prompts,
    output: int,
    rate: float,
    window: ProfileWindow | None = None,
) -> dict[str, object]:
    """Measure the latencies of all prompts, which arrive at `rate`; every answer has `output`
    tokens."""
    counters = Counters().attach(engine.bus)
    after_step = None if window is None else window.watch(len(prompts) * output)
    times = arrival_times(len(prompts), rate)
    arrivals = [Arrival(due_s, prompts[place], output) for place, due_s in enumerate(times)]

    def look() -> None:
        if after_step is not None:
            after_step(counters)

    began_s = perf_counter()
    answers = answer_arrivals(engine, arrivals, look)
    seconds = perf_counter() - began_s
    return summary(answers, output, seconds) | {
        "arrivals_per_s": rate,
        "saving_ratio": round(counters.saving_ratio, 4),
        "preemptions": counters.preemptions,
        "steps": counters.steps,
    }


def answer_arrivals(
    engine: Engine, arrivals: Sequence[Arrival], after_step: Callable[[], None] = lambda: None
) -> list[TimedAnswer]:
    """Answer requests in the order they are due; each is submitted when it is due."""
    answers = [TimedAnswer(arrival.due_s) for arrival in arrivals]
    num_submitted = 0
    began_s = perf_counter()
    while num_submitted < len(arrivals) or engine.has_work:
        now_s = perf_counter() - began_s
        while num_submitted < len(arrivals) and arrivals[num_submitted].due_s <= now_s:
            arrival = arrivals[num_submitted]
            name, sampling = RequestId(str(num_submitted)), greedy(arrival.output)
            expected = arrival.expected_tokens
            engine.submit(Request(name, arrival.prompt_ids, sampling, expected_tokens=expected))
            num_submitted += 1
        if not engine.has_work:
            sleep(arrivals[num_submitted].due_s - now_s)
            continue
        outputs = engine.step()
        now_s = perf_counter() - began_s
        for news in outputs:
            answers[int(news.request_id)].token_s += [now_s] * len(news.token_ids)
        after_step()
    return answers


def summary(answers: list[TimedAnswer], output: int, seconds: float) -> dict[str, object]:
    """Return mean and quantiles over requests or, for the time between tokens, over all gaps. Names
    are as in `bench serve`."""
    done = [answer for answer in answers if len(answer.token_s) == output]
    gaps = [gap for answer in done for gap in np.diff(answer.token_s).tolist()]
    return {
        "requests": len(answers),
        "completed": len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        **spread("ttft_ms", [answer.first_token_s for answer in done]),
        **spread("itl_ms", gaps),
        **spread("e2e_ms", [answer.total_s for answer in done]),
        **spread("norm_ms", [answer.total_s / output for answer in done]),
    }
