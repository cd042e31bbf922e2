"""Measures host work per step, without a model: the scheduler's next_step and commit at 1,000
running sequences."""

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser
from mainstem.core.config import SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.request import Delivery, Request
from mainstem.kv.store import KVStore
from mainstem.sched.scheduler import Scheduler
from mainstem_bench.feed import greedy
from mainstem_bench.report import load_average, show
from mainstem_bench.virtual_engine import some_result

VOCAB = 30_000
Milliseconds = NDArray[np.float64]


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench host", description=__doc__)
    made.add_argument("--seqs", type=positive_count, default=1000)
    made.add_argument("--groups", type=positive_count, default=64)
    made.add_argument("--prefix", type=int, default=2000)
    made.add_argument("--own", type=int, default=200)
    made.add_argument("--steps", type=positive_count, default=200)
    made.add_argument("--streaming", action="store_true", help="hand out each token as it comes")
    made.add_argument("--json", action="store_true")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    show("host", measure(args), args.json)
    return 0


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Return the median milliseconds of next_step and commit while all sequences decode, and while
    some of them end."""
    load = load_average()
    steady = _run(args, lambda index: args.steps + 50)
    # a few sequences end in each step
    ending = _run(args, lambda index: 20 + (index * 7919) % args.steps)
    return {
        "seqs": args.seqs,
        "groups": args.groups,
        "next_step_ms": round(float(np.median(steady[:, 0])), 3),
        "commit_ms": round(float(np.median(steady[:, 1])), 3),
        "total_ms": round(float(np.median(steady.sum(axis=1))), 3),
        "total_ms_with_endings": round(float(np.median(ending.sum(axis=1))), 3),
        "load_before": load,
    }


def _run(args: argparse.Namespace, max_tokens: Callable[[int], int]) -> Milliseconds:
    """Return the milliseconds of (next_step, commit) for each decode step. Sequences that end are
    not replaced."""
    rng = np.random.default_rng(0)
    bus = EventBus()
    pages_each = -(-(args.own + args.steps + 100) // 16)
    num_pages = args.groups * (args.prefix // 16 + 1) + (args.seqs + 64) * (pages_each + 2)
    store = KVStore(num_pages, 16, b"bench", bus)
    scheduler = Scheduler(SchedConfig(chunk_tokens=1 << 22), store, VOCAB, 1 << 20, bus)
    heads = [rng.integers(0, VOCAB, args.prefix) for _ in range(args.groups)]
    delivery = Delivery.EACH_STEP if args.streaming else Delivery.AT_END
    for index in range(args.seqs):
        prompt = np.concatenate([heads[index % args.groups], rng.integers(0, VOCAB, args.own)])
        sampling = greedy(max_tokens(index))
        scheduler.submit(Request(RequestId(str(index)), prompt, sampling, delivery=delivery))
    times = []
    for _ in range(args.steps):
        begin = perf_counter()
        step = scheduler.next_step()
        if step is None:
            break
        built = perf_counter()
        result = some_result(step)
        ready = perf_counter()
        scheduler.commit(step, result)
        scheduler.take_outputs()
        times.append((built - begin, perf_counter() - ready))
    return np.array(times[1:]) * 1e3  # the first step is the prefill of everything
