"""How fast an engine is: a prompt, a step with one answer or with many, a load from host memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep
from typing import Protocol

import numpy as np

from mainstem.core.config import DEFAULT_CHUNK_TOKENS, EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, PagesLoaded, StepFinished
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
ANSWER = 16  # tokens of an answer
PROBES = 3  # runs of each measurement; the median counts
DISK_PROBES = 8
LONG = 8  # times the mean prompt is a prompt whose load is timed


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
    """What an engine's steps take, as measured: the sum of these parts."""

    weights_s: float  # a step
    answer_s: float  # each answer in it
    token_s: float  # each token of their contexts
    prompts: tuple[tuple[int, float], ...]  # prompt tokens in the step, and their seconds

    @classmethod
    def measured(
        cls, engine: TimedEngine, bus: EventBus, trace: Trace, config: EngineConfig
    ) -> "Speeds":
        """Run prompts of many lengths alone, and answers: one, and many with short and with long
        contexts."""
        length, num_ids, page = mean_prompt(trace), num_prompt_ids(config), config.cache.page_size
        assert config.cache.kv_tokens is not None
        rng, room = np.random.default_rng(99), config.cache.kv_tokens
        steps = list[StepFinished]()

        def ask(count: int, prompt: int, output: int) -> list[StepFinished]:
            """Return the steps of these prompts."""
            steps.clear()
            prompts = [rng.integers(10, num_ids, prompt).astype(np.int32) for _ in range(count)]
            answer_at_once(engine, prompts, output)
            return steps

        with bus.guests():
            bus.subscribe(StepFinished, steps.append)
            most = min(room // 2, chunk_tokens(config))
            lengths = [2**power for power in range(4, most.bit_length())]
            alone = {
                size: median(
                    max(step.device_s for step in ask(1, size, 1) if step.num_prompt_tokens)
                    for _ in range(PROBES)
                )
                for size in lengths
            }
            batch = max(2, min(config.sched.max_seqs or room, room // (length + ANSWER + page)))
            # the first answer still runs when the last prompt is computed
            output = ANSWER + 2 * -(-batch * length // chunk_tokens(config))
            found = [
                _decoding(ask(count, prompt, output), count)
                for count, prompt in ((1, page), (batch, page), (batch, length))
            ]
        seconds = np.array([step_s for _, _, step_s in found])
        parts = np.array([[1, count, keys] for count, keys, _ in found])
        weights_s, answer_s, token_s = np.linalg.lstsq(parts, seconds, rcond=None)[0].tolist()
        weights_s = max(weights_s, 1e-9)
        prompts = tuple((size, max(step_s - weights_s, 0.0)) for size, step_s in alone.items())
        return cls(weights_s, max(answer_s, 0.0), max(token_s, 0.0), prompts)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of the largest step."""
        size, seconds = self.prompts[-1]
        return size / max(seconds, 1e-9)


def _decoding(steps: Sequence[StepFinished], count: int) -> tuple[int, float, float]:
    """Of those steps that have a token of `count` answers and no prompt: their number of answers,
    tokens in context, and seconds."""
    found = [step for step in steps if not step.num_prompt_tokens and step.num_seqs == count]
    keys = float(np.median([step.key_tokens_seen for step in found]))
    return count, keys, median(step.device_s for step in found)


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


def host_gb_per_s(engine: Engine, bus: EventBus, config: EngineConfig, trace: Trace) -> float:
    """The speed of a load from host memory; that of a link nobody uses if there is none."""
    if not config.store.host_gb:
        return ServiceRates().host_gb_per_s
    assert config.cache.kv_tokens is not None
    rng, num_ids = np.random.default_rng(98), num_prompt_ids(config)
    host_tokens = int(config.store.host_gb * GB / kv_token_bytes(config))
    length = min(LONG * mean_prompt(trace), config.cache.kv_tokens // 2, host_tokens // 2)
    with _Loads.seen(bus, config, "host") as loads:
        for _ in range(PROBES):
            prompt = rng.integers(10, num_ids, length).astype(np.int32)
            for _ in range(2):
                answer_at_once(RealTime(engine), [prompt], 1)
                engine.flush()
                engine.clear_device()
    if not loads.num:
        raise ConfigError("the engine computes rather than loads: set --store-fetch always")
    return loads.gb_per_s


def disk_gb_per_s(
    engine: Engine, bus: EventBus, config: EngineConfig, histories: Sequence[Sequence[int]]
) -> float:
    """The speed of loads from disk: of the latest of these conversations that no longer fit into
    host memory. `histories` are in the order of their last turns. Without a disk: that of a disk
    nobody uses."""
    if config.store.disk_dir is None:
        return ServiceRates().disk_gb_per_s
    left = (config.store.host_gb or 0.0) * GB / kv_token_bytes(config)
    with _Loads.seen(bus, config, "disk") as loads:
        for history in reversed(histories):
            left -= len(history)
            if left < 0 and loads.num < DISK_PROBES:
                engine.clear_device()
                answer_at_once(RealTime(engine), [np.array(history, np.int32)], 1)
                engine.flush()
    return loads.gb_per_s if loads.num else ServiceRates().disk_gb_per_s


class _Loads:
    """The speed of loads whose slowest tier is this one."""

    def __init__(self, tier: str, page_gb: float) -> None:
        self.num, self._gb, self._seconds = 0, 0.0, 0.0
        self._tier, self._page_gb = tier, page_gb

    @property
    def gb_per_s(self) -> float:
        return self._gb / self._seconds

    @classmethod
    @contextmanager
    def seen(cls, bus: EventBus, config: EngineConfig, tier: str) -> Iterator["_Loads"]:
        page_gb = config.cache.page_size * kv_token_bytes(config) / GB
        loads = cls(tier, page_gb)
        with bus.guests():
            bus.subscribe(PagesLoaded, loads._note)
            yield loads

    def _note(self, event: PagesLoaded) -> None:
        if event.tier == self._tier and event.seconds:
            self.num += 1
            self._gb += event.num_pages * self._page_gb
            self._seconds += event.seconds


def num_prompt_ids(config: EngineConfig) -> int:
    return min(SHAPES[config.model.model].vocab_size, MOST_IDS)


def mean_prompt(trace: Trace) -> int:
    """The mean length of its prompts."""
    return max(2, sum(each.input_tokens for each in trace.requests) // len(trace.requests))


def chunk_tokens(config: EngineConfig) -> int:
    return config.sched.chunk_tokens or DEFAULT_CHUNK_TOKENS
