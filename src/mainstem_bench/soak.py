"""Runs thousands of short random requests with aborts, priorities and too little KV memory.

Fails if anything is lost: every answer must end exactly once, every page must be freed, and the
device's memory must not grow. Weights are random; prompts begin with one of a few shared heads.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from tqdm import tqdm

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Delivery, FinishReason, Output, Request, SamplingParams
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem_bench.machine import Machine, process_bytes
from mainstem_bench.report import load_average, show
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES

KV_TOKENS = 8192  # far less than open requests need
MAX_OPEN = 256  # requests
HEAD_TOKENS = (0, 16, 40)  # lengths of shared beginnings
MAX_OWN_TOKENS = 32
# maximum tokens of an answer, used in turn, so that the engine's expectations are wrong
OUTPUT_TOKENS = (400, 8, 8, 8)
TURN_REQUESTS = 128  # requests with one of these maximums, before the next
ABORTED = 0.15  # of the requests
LATEST_ABORT = 40  # at most this many steps after a request was submitted
CHECK_EVERY = 500  # steps
EOS_ID = 7
FIRST_PART = 0.25  # share of the requests; after these, memory must not grow
ALLOWED_GROWTH_BYTES = 16 << 20  # bytes of the device's memory, since allocators round


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench soak", description=__doc__)
    made.add_argument("--requests", type=positive_count, default=20_000, metavar="N")
    made.add_argument("--model-shape", choices=list(SHAPES), default="tiny")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="one line")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.requests < 4:
        raise ConfigError(f"--requests must be at least 4, got {args.requests}")
    config = random_config(args, args.model_shape, KV_TOKENS)
    show("soak", soak(args.requests, args.seed, config), args.json)
    return 0


def soak(num_requests: int, seed: int, config: EngineConfig) -> dict[str, object]:
    """Run all requests in two parts, and compare the memory at the ends of both parts, when the
    engine is idle."""
    load, machine = load_average(), Machine.of(config)
    shape = SHAPES[config.model.model]
    engine = build_random_engine(shape, config)
    counters = Counters().attach(engine.bus)
    requests = RandomRequests(shape.vocab_size, seed)
    first_part = max(1, int(FIRST_PART * num_requests))
    began_s = perf_counter()
    crowd = Crowd(engine, requests)
    with tqdm(total=num_requests, unit="req", disable=None) as bar:
        crowd.run(first_part, bar.update)
        device_before, host_before = machine.held_bytes(), process_bytes()
        crowd.run(num_requests - first_part, bar.update)
    device_grown = machine.held_bytes() - device_before
    host_grown = process_bytes() - host_before
    assert device_grown <= ALLOWED_GROWTH_BYTES, f"device memory grew by {device_grown} bytes"
    if counters.preemptions == 0:
        reason = "KV memory must run out: use more --requests, or fewer --kv-tokens"
        raise ConfigError(f"nothing was preempted; {reason}")
    assert crowd.ends.total() == crowd.num_answers, "an answer never ended"
    engine.clear_cache()
    engine.check()
    assert engine.snapshot().num_cached_pages == 0, "a page is still cached"
    engine.close()
    return {
        "model_shape": config.model.model,
        "requests": num_requests,
        "answers": crowd.num_answers,
        "ends": {reason.value: count for reason, count in sorted(crowd.ends.items(), key=str)},
        "preemptions": counters.preemptions,
        "evicted_pages": counters.evicted_pages,
        "steps": counters.steps,
        "generated_tokens": counters.generated_tokens,
        "saving_ratio": round(counters.saving_ratio, 4),
        "seconds": round(perf_counter() - began_s, 2),
        "device_growth_mb": round(device_grown / 1e6, 2),
        "host_growth_mb": round(host_grown / 1e6, 2),
        **measured_on(config, load),
    }


class RandomRequests:
    """Yields requests of every kind without end; equal seeds give equal requests."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._heads = [self._tokens(length) for length in HEAD_TOKENS]
        self._num_made = 0

    def next(self) -> Request:
        rng = self._rng
        ids = rng.choice(self._heads) + self._tokens(rng.randint(1, MAX_OWN_TOKENS))
        self._num_made += 1
        return Request(
            RequestId(str(self._num_made)),
            np.array(ids, np.int32),
            self._sampling(),
            eos_ids=(EOS_ID,),
            priority=rng.choice((-1, 0, 0, 0, 2)),
            delivery=rng.choice(list(Delivery)),
            expected_tokens=1,  # far too low, so that too many sequences start
        )

    def abort_after(self) -> int | None:
        """Return the number of steps after which the caller aborts; None if it waits for the
        answer."""
        rng = self._rng
        return rng.randint(0, LATEST_ABORT) if rng.random() < ABORTED else None

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        is_greedy = rng.random() < 0.6
        most_tokens = OUTPUT_TOKENS[self._num_made // TURN_REQUESTS % len(OUTPUT_TOKENS)]
        return SamplingParams(
            n=2 if rng.random() < 0.05 else 1,
            max_tokens=rng.randint(1, most_tokens),
            temperature=0.0 if is_greedy else rng.uniform(0.2, 1.5),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 40)),
            frequency_penalty=0.5 if rng.random() < 0.1 else 0.0,
            ignore_eos=rng.random() < 0.5,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._vocab_size) for _ in range(count)]


@dataclass(slots=True)
class Crowd:
    """Callers of one engine: they submit, wait or abort, and check every output."""

    engine: Engine
    requests: RandomRequests
    num_answers: int = 0
    ends: Counter[FinishReason] = field(default_factory=Counter)
    _open: dict[tuple[RequestId, int], int] = field(default_factory=dict)  # most tokens to come
    _aborts: dict[int, list[RequestId]] = field(default_factory=dict)  # by step
    _num_steps: int = 0

    def run(self, num_requests: int, show: Callable[[], object] = lambda: None) -> None:
        """Send `num_requests` more requests, wait until the engine is idle, and check it."""
        num_left = num_requests
        while num_left or self.engine.has_work:
            while num_left and len(self._open) < MAX_OPEN:
                self._submit(self.requests.next())
                num_left -= 1
                show()
            for request_id in self._aborts.pop(self._num_steps, ()):
                self.engine.abort(request_id)
            for output in self.engine.step():
                self._hear(output)
            self._num_steps += 1
            if self._num_steps % CHECK_EVERY == 0:
                self.engine.check()
        assert not self._open, f"{len(self._open)} answers never ended"
        self.engine.check()

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)
        assert request.sampling.max_tokens is not None
        for index in range(request.sampling.n):
            self._open[request.request_id, index] = request.sampling.max_tokens
        self.num_answers += request.sampling.n
        delay = self.requests.abort_after()
        if delay is not None:
            self._aborts.setdefault(self._num_steps + delay, []).append(request.request_id)

    def _hear(self, output: Output) -> None:
        key = (output.request_id, output.index)
        assert key in self._open, f"news of an answer that is not open: {key}"
        self._open[key] -= len(output.token_ids)
        left = self._open[key]
        assert left >= 0, f"{key} is longer than max_tokens"
        reason = output.finish_reason
        if reason is not None:
            assert reason is not FinishReason.LENGTH or left == 0, f"{key} is too short"
            del self._open[key]
            self.ends[reason] += 1
