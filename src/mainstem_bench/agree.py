"""Conversations on an engine in real time, and the same in the simulator: do they agree?

    engine      turns come when the trace says: a user thinks after each answer, then asks again
    simulator   the same trace, with the speeds that this engine showed before the clock started

Weights and tokens are random; lengths and times are the trace's. Each way is run by both: `store`
keeps pages on the device and in lower tiers, `recompute` keeps nothing. Sizes are the engine's
flags: --kv-tokens, --host-gb, --disk-dir, --disk-gb, --max-seqs. `hit_points` is by how many points
the simulated hit rate is higher; ratios are simulated / engine.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np

from mainstem.cli.flag_types import comma_list, one_of, positive, positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import DType, EngineConfig, Share, StoreConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, PagesLoaded
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.kv.stack import SLACK
from mainstem_bench.arrivals import Arrival, TimedAnswer, answer_arrivals
from mainstem_bench.feed import greedy
from mainstem_bench.machine import Machine
from mainstem_bench.paper.lengths import shipped
from mainstem_bench.report import load_average, show_all
from mainstem_bench.settings import empty_folder, kv_token_bytes, random_config, settings
from mainstem_bench.shapes import SHAPES
from mainstem_simulate.service import GB, Batching, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, simulate
from mainstem_simulate.trace_records import ReadOptions, Trace
from mainstem_simulate.traces import read_trace

MOST_IDS = 30_000  # ids of prompts are below this
WAYS = ("store", "recompute")
PROBE_TOKENS = 16  # of an answer
PROBES = 3  # runs of each measurement of a speed; the median counts


@dataclass(frozen=True, slots=True)
class Speeds:
    """What an engine needs for a prompt, a step and a load, as measured."""

    prefill_tokens_per_s: float
    weights_s: float  # a decode step without K and V to read
    token_s: float  # what each token that is read adds to it
    host_gb_per_s: float
    disk_gb_per_s: float

    @property
    def rates(self) -> ServiceRates:
        return ServiceRates(
            self.prefill_tokens_per_s,
            host_gb_per_s=self.host_gb_per_s,
            disk_gb_per_s=self.disk_gb_per_s,
        )

    def batching(self, max_running: int) -> Batching:
        return Batching(max_running, self.weights_s, self.token_s)

    @classmethod
    def measured(
        cls,
        engine: Engine,
        bus: EventBus,
        trace: Trace,
        config: EngineConfig,
        disk_gb_per_s: float,
    ) -> "Speeds":
        """Run prompts as long as the trace's are on average: one alone, many together, and one
        whose pages are loaded."""
        lengths = [each.input_tokens for each in trace.requests]
        length, num_ids = max(2, sum(lengths) // len(lengths)), _num_ids(config)
        rng = np.random.default_rng(99)

        def ask(count: int) -> list[TimedAnswer]:
            prompts = [rng.integers(10, num_ids, length).astype(np.int32) for _ in range(count)]
            return answer_arrivals(engine, [Arrival(0.0, ids, PROBE_TOKENS) for ids in prompts])

        assert config.cache.kv_tokens is not None
        most = config.cache.kv_tokens // (length + PROBE_TOKENS + config.cache.page_size)
        batch = max(2, min(config.sched.max_seqs or most, most))
        alone = [ask(1)[0] for _ in range(PROBES)]
        alone_s = median(_step_s(answer) for answer in alone)
        many_s = median(_step_s(ask(batch)[-1]) for _ in range(PROBES))
        token_s = max(0.0, many_s - alone_s) / ((batch - 1) * length)
        return cls(
            length / median(answer.first_token_s for answer in alone),
            max(alone_s - token_s * length, 1e-9),
            token_s,
            _load_gb_per_s(engine, bus, config, length),
            disk_gb_per_s,
        )


def _step_s(answer: TimedAnswer) -> float:
    """The time of a decode step."""
    return float(np.median(np.diff(answer.token_s)))


def _load_gb_per_s(engine: Engine, bus: EventBus, config: EngineConfig, length: int) -> float:
    """The speed of a load from host memory; that of a link nobody uses if there is none."""
    if not config.store.host_gb:
        return ServiceRates().host_gb_per_s
    page_bytes = config.cache.page_size * kv_token_bytes(config)
    rng, seen = np.random.default_rng(98), list[float]()
    num_ids = _num_ids(config)

    def note(event: PagesLoaded) -> None:
        if event.seconds:
            seen.append(event.num_pages * page_bytes / GB / event.seconds)

    with bus.guests():
        bus.subscribe(PagesLoaded, note)
        for _ in range(PROBES):
            prompt = rng.integers(10, num_ids, length).astype(np.int32)
            for _ in range(2):
                answer_arrivals(engine, [Arrival(0.0, prompt, 1)])
                engine.flush()
                engine.clear_device()
    if not seen:
        raise ConfigError("the engine computes rather than loads: set --store-fetch always")
    return median(seen)


def _num_ids(config: EngineConfig) -> int:
    return min(SHAPES[config.model.model].vocab_size, MOST_IDS)


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench agree", description=__doc__)
    made.add_argument(
        "trace", type=Path, nargs="?", help="a trace of conversations (default: ShareGPT's lengths)"
    )
    made.add_argument("--model-shape", choices=list(SHAPES), default="tiny")
    made.add_argument("--way", type=comma_list(one_of(WAYS)), default=list(WAYS), metavar="WAY")
    flag = partial(add_flag, made)
    flag("--turns", positive_count, "turns that are asked, of all conversations", 200)
    flag("--rate", positive, "conversations that start in a second", 1.0, metavar="R")
    flag("--pace", positive, "thinking takes this many times less than in the trace", 1.0)
    flag("--context-tokens", positive_count, "longest conversation", 2048)
    flag(
        "--disk-bandwidth",
        positive,
        "what the simulated disk reads in a second",
        ServiceRates().disk_gb_per_s,
        metavar="GB",
    )
    flag("--seed", int, "seed of arrivals and tokens", 0)
    made.add_argument("--json", action="store_true", help="one JSON line for each way")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    config = random_config(args, args.model_shape, 4 * args.context_tokens)
    if config.model.dtype is DType.AUTO and not Machine.of(config).has_gpu:
        config = replace(config, model=replace(config.model, dtype=DType.FP32))
    trace = _trace(args, config.cache.page_size)
    results = (
        {"way": way} | compare(_as(way, config), trace, args.seed, args.disk_bandwidth)
        for way in args.way
    )
    about = {
        "turns": len(trace.requests), "rate": args.rate, "pace": args.pace,
        "context_tokens": args.context_tokens, "settings": settings(config),
    }  # fmt: skip
    show_all("agree", results, args.json, about)
    return 0


def _trace(args: argparse.Namespace, page_tokens: int) -> Trace:
    options = ReadOptions(
        page_tokens=page_tokens,
        rate=args.rate / args.pace,  # all times are divided by the pace afterwards
        context_tokens=args.context_tokens,
        limit=args.turns,
        seed=args.seed,
    )
    if args.trace is not None:
        trace = read_trace(args.trace, options)
    else:
        with shipped("sharegpt_session_lengths.jsonl.gz") as path:
            trace = read_trace(path, options)
    return faster(trace, args.pace)


def faster(trace: Trace, pace: float) -> Trace:
    """The same trace in 1/pace of its time."""
    requests = [
        replace(each, arrival_s=each.arrival_s / pace, think_s=each.think_s / pace)
        for each in trace.requests
    ]
    return replace(trace, requests=requests)


def _as(way: str, config: EngineConfig) -> EngineConfig:
    """The settings of a way; see the module."""
    if way == "store":
        return config
    sched = replace(config.sched, share=Share.NONE)
    return replace(config, sched=sched, store=StoreConfig())


def compare(
    config: EngineConfig, trace: Trace, seed: int, disk_gb_per_s: float
) -> dict[str, object]:
    """Run the trace on the engine, then in the simulator."""
    load = load_average()
    if config.store.disk_dir is None:
        speeds, engine = _in_engine(config, trace, seed, disk_gb_per_s)
    else:
        with empty_folder(config.store.disk_dir) as folder:
            store = replace(config.store, disk_dir=folder)
            speeds, engine = _in_engine(replace(config, store=store), trace, seed, disk_gb_per_s)
    simulated = in_simulator(config, trace, speeds)
    return {
        "hit_rate": engine["hit_rate"],
        "hit_points": round(100 * (simulated["hit_rate"] - engine["hit_rate"]), 2),
        "ttft_s": engine["ttft_s"],
        "ttft_ratio": round(simulated["ttft_s"] / engine["ttft_s"], 4),
        "device_s": engine["device_s"],
        "device_ratio": round(simulated["device_s"] / engine["device_s"], 4),
        "in_engine": engine,
        "in_simulator": simulated,
        "speeds": asdict(speeds),
        "load_before": load,
    }


def _in_engine(
    config: EngineConfig, trace: Trace, seed: int, disk_gb_per_s: float
) -> tuple[Speeds, dict[str, float]]:
    bus = EventBus()
    engine = build_random_engine(SHAPES[config.model.model], config, bus)
    try:
        speeds = Speeds.measured(engine, bus, trace, config, disk_gb_per_s)
        engine.clear_cache()
        counters = Counters().attach(bus)
        answers = play(engine, trace, _num_ids(config), seed)
        engine.check()
    finally:
        engine.close()
    return speeds, _summary(answers, counters, config)


def play(engine: Engine, trace: Trace, num_ids: int, seed: int) -> list[TimedAnswer]:
    """Ask all turns, each when its user has read the answer before it and has thought. Prompts
    contain the engine's own answers."""
    requests, rng = trace.requests, np.random.default_rng(seed)
    followers = {each.previous: index for index, each in enumerate(requests)}
    coming = [(each.arrival_s, i) for i, each in enumerate(requests) if each.previous is None]
    heapify(coming)
    answers = [TimedAnswer(0.0) for _ in requests]
    histories: dict[int, list[int]] = {}  # of each session
    began_s = perf_counter()
    while coming or engine.has_work:
        now_s = perf_counter() - began_s
        while coming and coming[0][0] <= now_s:
            due_s, index = heappop(coming)
            answers[index].due_s = due_s
            history = histories.setdefault(requests[index].session, [])
            num_new = max(1, requests[index].input_tokens - len(history))
            history += rng.integers(10, num_ids, num_new).tolist()
            prompt = np.array(history, np.int32)
            sampling = greedy(max(1, requests[index].output_tokens))
            engine.submit(Request(RequestId(str(index)), prompt, sampling))
        if not engine.has_work:
            sleep(coming[0][0] - now_s)
            continue
        outputs = engine.step()
        now_s = perf_counter() - began_s
        for news in outputs:
            index = int(news.request_id)
            if news.fault is not None:
                raise RuntimeError(f"turn {index} failed: {news.fault}")
            answers[index].token_s += [now_s] * len(news.token_ids)
            histories[requests[index].session] += news.token_ids
            follower = followers.get(index)
            if news.finish_reason is not None and follower is not None:
                heappush(coming, (now_s + requests[follower].think_s, follower))
    return answers


def _summary(
    answers: Sequence[TimedAnswer], counters: Counters, config: EngineConfig
) -> dict[str, float]:
    page_bytes = config.cache.page_size * kv_token_bytes(config)
    page_share = config.cache.page_size / counters.prompt_tokens
    loaded = counters.loaded_pages
    first_s = sorted(answer.first_token_s for answer in answers)
    return {
        "hit_rate": counters.saving_ratio,
        "hit_rate_dram": loaded["host"] * page_share,
        "hit_rate_disk": loaded["disk"] * page_share,
        "ttft_s": sum(first_s) / len(first_s),
        "p95_ttft_s": first_s[int(0.95 * (len(first_s) - 1))],
        "prefill_tokens": counters.computed_tokens,
        "device_s": counters.device_s,
        "loaded_gb": sum(loaded.values()) * page_bytes / GB,
        "total_s": max(answer.token_s[-1] for answer in answers),
    }


def in_simulator(config: EngineConfig, trace: Trace, speeds: Speeds) -> dict[str, float]:
    """The same trace in virtual time, with tiers of the same sizes."""
    store, has_disk = config.store, config.store.disk_dir is not None
    is_kept = config.sched.share is not Share.NONE
    token_bytes = kv_token_bytes(config)
    assert config.cache.kv_tokens is not None
    report = simulate(
        trace,
        SimulationConfig(
            token_bytes,
            host_gb=(store.host_gb or 0.0) * (1 - 1 / SLACK),  # the rest is for copies in flight
            disk_gb=store.disk_gb if has_disk else 0.0,
            device_gb=config.cache.kv_tokens * token_bytes / GB if is_kept else 0.0,
            policy=store.policy,
            queue=Queue.ARRIVALS,
            rates=speeds.rates,
            batching=speeds.batching(config.sched.max_seqs or len(trace.requests)),
        ),
    )
    return {
        "hit_rate": report.hit_rate,
        "hit_rate_dram": report.hit_rate_dram,
        "hit_rate_disk": report.hit_rate_disk,
        "ttft_s": report.mean_ttft_s,
        "p95_ttft_s": report.p95_ttft_s,
        "prefill_tokens": report.prefill_tokens,
        "device_s": report.device_s,
        "loaded_gb": report.loaded_gb,
        "total_s": report.virtual_s,
    }
