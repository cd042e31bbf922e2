"""How fast an engine is: a prompt, a step with one answer or with many, a load from host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep
from typing import Protocol

import numpy as np

from mainstem.core.config import DEFAULT_CHUNK_TOKENS, EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, PagesLoaded
from mainstem.core.ids import RequestId
from mainstem.core.request import Output, Request
from mainstem.core.step import Int32s
from mainstem.engine.engine import Engine
from mainstem_bench.arrivals import TimedAnswer
from mainstem_bench.feed import greedy
from mainstem_bench.settings import kv_token_bytes
from mainstem_bench.shapes import SHAPES
from mainstem_simulate.service import GB, ServiceRates
from mainstem_simulate.trace_records import Trace

MOST_IDS = 30_000  # ids of prompts are below this
PROBE_TOKENS = 16  # of an answer
PROBES = 3  # runs of each measurement; the median counts


class TimedEngine(Protocol):
    """An engine and its clock."""

    @property
    def now_s(self) -> float: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Output]: ...

    def wait_until(self, at_s: float) -> None: ...


class RealTime:
    """A TimedEngine whose seconds are those of the clock on the wall."""

    def __init__(self, engine: Engine) -> None:
        self.submit, self.step = engine.submit, engine.step
        self._engine = engine

    @property
    def now_s(self) -> float:
        return perf_counter()

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def wait_until(self, at_s: float) -> None:
        sleep(max(0.0, at_s - perf_counter()))


@dataclass(frozen=True, slots=True)
class Speeds:
    """What an engine needs for prompts and steps, as measured."""

    prompt_tokens_per_s: float  # beside the reading of the weights
    weights_s: float  # a decode step without K and V to read
    token_s: float  # what each token that is read adds to it

    @classmethod
    def measured(cls, engine: TimedEngine, trace: Trace, config: EngineConfig) -> "Speeds":
        """Run prompts as long as the trace's are on average: one alone, and many together."""
        length, num_ids = mean_prompt(trace), num_prompt_ids(config)
        rng = np.random.default_rng(99)

        def ask(count: int, output: int) -> list[TimedAnswer]:
            prompts = [rng.integers(10, num_ids, length).astype(np.int32) for _ in range(count)]
            return answer_at_once(engine, prompts, output)

        assert config.cache.kv_tokens is not None
        most = config.cache.kv_tokens // (length + PROBE_TOKENS + config.cache.page_size)
        batch = max(2, min(config.sched.max_seqs or most, most))
        # long enough that the first answer still runs when the last prompt is computed
        together = PROBE_TOKENS + 2 * -(
            -batch * length // (config.sched.chunk_tokens or DEFAULT_CHUNK_TOKENS)
        )
        alone = [ask(1, PROBE_TOKENS)[0] for _ in range(PROBES)]
        alone_s = median(_step_s(answer, answer.token_s[-1]) for answer in alone)
        many_s = median(_last_step_s(ask(batch, together)) for _ in range(PROBES))
        token_s = max(0.0, many_s - alone_s) / ((batch - 1) * length)
        weights_s = max(alone_s - token_s * length, 1e-9)
        first_s = median(answer.first_token_s for answer in alone)
        return cls(length / max(first_s - weights_s, 1e-9), weights_s, token_s)


def answer_at_once(
    engine: TimedEngine, prompts: Sequence[Int32s], output: int
) -> list[TimedAnswer]:
    """Submit prompts together, and take the times of their tokens."""
    answers = [TimedAnswer(engine.now_s) for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(RequestId(str(index)), prompt, greedy(output)))
    while engine.has_work:
        for news in engine.step():
            answers[int(news.request_id)].token_s += [engine.now_s] * len(news.token_ids)
    return answers


def _last_step_s(answers: Sequence[TimedAnswer]) -> float:
    """The time of a step with all answers: after the last prompt, before the first end."""
    return _step_s(answers[-1], min(answer.token_s[-1] for answer in answers))


def _step_s(answer: TimedAnswer, until_s: float) -> float:
    gaps = np.diff([at_s for at_s in answer.token_s if at_s <= until_s] or answer.token_s)
    return float(np.median(gaps))


def host_gb_per_s(engine: Engine, bus: EventBus, config: EngineConfig, trace: Trace) -> float:
    """The speed of a load from host memory; that of a link nobody uses if there is none."""
    if not config.store.host_gb:
        return ServiceRates().host_gb_per_s
    page_bytes = config.cache.page_size * kv_token_bytes(config)
    rng, seen = np.random.default_rng(98), list[float]()
    length, num_ids = mean_prompt(trace), num_prompt_ids(config)

    def note(event: PagesLoaded) -> None:
        if event.seconds:
            seen.append(event.num_pages * page_bytes / GB / event.seconds)

    with bus.guests():
        bus.subscribe(PagesLoaded, note)
        for _ in range(PROBES):
            prompt = rng.integers(10, num_ids, length).astype(np.int32)
            for _ in range(2):
                answer_at_once(RealTime(engine), [prompt], 1)
                engine.flush()
                engine.clear_device()
    if not seen:
        raise ConfigError("the engine computes rather than loads: set --store-fetch always")
    return median(seen)


def num_prompt_ids(config: EngineConfig) -> int:
    return min(SHAPES[config.model.model].vocab_size, MOST_IDS)


def mean_prompt(trace: Trace) -> int:
    """The mean length of its prompts."""
    return max(2, sum(each.input_tokens for each in trace.requests) // len(trace.requests))


def chunk_tokens(config: EngineConfig) -> int:
    return config.sched.chunk_tokens or DEFAULT_CHUNK_TOKENS
