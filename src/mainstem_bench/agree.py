"""Conversations on an engine in real time, and the same in the simulator: do they agree?

    engine      turns come when the trace says: a user thinks after each answer, then asks again
    simulator   the same trace, with the speeds that this engine showed before the clock started
    --virtual   no device: the engine's scheduler, with the times of an H200's cost model

Weights and tokens are random; lengths and times are the trace's. Each way is run by both: `store`
keeps pages on the device and in lower tiers, `recompute` keeps nothing. Sizes are the engine's
flags: --kv-tokens, --host-gb, --disk-dir, --disk-gb, --max-seqs. `hit_points` is by how many points
the simulated hit rate is higher; ratios are simulated / engine.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from mainstem.cli.flag_types import comma_list, one_of, positive, positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import (
    DEFAULT_CHUNK_TOKENS,
    DType,
    EngineConfig,
    SchedConfig,
    Share,
    StoreConfig,
)
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request
from mainstem.engine.build import build_random_engine
from mainstem.kv.stack import SLACK
from mainstem.plan.cost import H200, full_speed_tokens
from mainstem_bench.arrivals import TimedAnswer
from mainstem_bench.feed import greedy
from mainstem_bench.limit import ModelCost
from mainstem_bench.machine import Machine
from mainstem_bench.paper.lengths import shipped
from mainstem_bench.report import load_average, show_all
from mainstem_bench.settings import empty_folder, kv_token_bytes, random_config, settings
from mainstem_bench.shapes import SHAPES
from mainstem_bench.speeds import RealTime, Speeds, TimedEngine, host_gb_per_s, num_prompt_ids
from mainstem_bench.virtual_engine import ELEMENT_BYTES, VirtualEngine
from mainstem_simulate.service import GB, Batching, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, simulate
from mainstem_simulate.trace_records import ReadOptions, Trace
from mainstem_simulate.traces import read_trace

WAYS = ("store", "recompute")


@dataclass(frozen=True, slots=True)
class Served:
    """What the simulator is told of the engine."""

    speeds: Speeds
    host_gb_per_s: float
    disk_gb_per_s: float

    @property
    def links(self) -> dict[str, float]:
        return {"host_gb_per_s": self.host_gb_per_s, "disk_gb_per_s": self.disk_gb_per_s}

    @property
    def rates(self) -> ServiceRates:
        return ServiceRates(self.speeds.prompt_tokens_per_s, **self.links)

    def batching(self, sched: SchedConfig, num_requests: int) -> Batching:
        speeds = self.speeds
        return Batching(
            sched.max_seqs or num_requests,
            speeds.weights_s,
            speeds.token_s,
            sched.chunk_tokens or DEFAULT_CHUNK_TOKENS,
            shares_device=True,
        )


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
    made.add_argument("--virtual", action="store_true", help="no device: see above")
    flag("--seed", int, "seed of arrivals and tokens", 0)
    made.add_argument("--json", action="store_true", help="one JSON line for each way")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    kv_tokens = 4 * args.context_tokens
    config = random_config(args, args.model_shape, kv_tokens, is_virtual=args.virtual)
    if args.virtual:
        config = _on_an_h200(config)
    elif config.model.dtype is DType.AUTO and not Machine.of(config).has_gpu:
        config = replace(config, model=replace(config.model, dtype=DType.FP32))
    trace = _trace(args, config.cache.page_size)
    serve = _in_virtual_time if args.virtual else partial(_in_engine, disk=args.disk_bandwidth)
    results = (
        {"way": way} | compare(_as(way, config), trace, partial(serve, seed=args.seed))
        for way in args.way
    )
    about = {
        "turns": len(trace.requests), "rate": args.rate, "pace": args.pace,
        "context_tokens": args.context_tokens, "virtual": args.virtual,
        "settings": settings(config),
    }  # fmt: skip
    show_all("agree", results, args.json, about)
    return 0


def _on_an_h200(config: EngineConfig) -> EngineConfig:
    """The settings of a virtual engine."""
    if config.store.host_gb:
        raise ConfigError("--virtual has no lower tiers: leave --host-gb out")
    if config.sched.chunk_tokens is not None:
        return config
    tokens = full_speed_tokens(H200, SHAPES[config.model.model].moved_bytes_per_param)
    return replace(config, sched=replace(config.sched, chunk_tokens=tokens))


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
    config: EngineConfig,
    trace: Trace,
    serve: Callable[[EngineConfig, Trace], tuple[Served, dict[str, float]]],
) -> dict[str, object]:
    """Run the trace on the engine, then in the simulator."""
    load = load_average()
    served, engine = serve(config, trace)
    simulated = in_simulator(config, trace, served)
    return {
        "hit_rate": engine["hit_rate"],
        "hit_points": round(100 * (simulated["hit_rate"] - engine["hit_rate"]), 2),
        "ttft_s": engine["ttft_s"],
        "ttft_ratio": round(simulated["ttft_s"] / engine["ttft_s"], 4),
        "device_s": engine["device_s"],
        "device_ratio": round(simulated["device_s"] / engine["device_s"], 4),
        "in_engine": engine,
        "in_simulator": simulated,
        "speeds": asdict(served.speeds) | served.links,
        "load_before": load,
    }


def _in_engine(
    config: EngineConfig, trace: Trace, seed: int, disk: float
) -> tuple[Served, dict[str, float]]:
    if config.store.disk_dir is not None:
        with empty_folder(config.store.disk_dir) as folder:
            store = replace(config.store, disk_dir=folder)
            return _on_device(replace(config, store=store), trace, seed, disk)
    return _on_device(config, trace, seed, disk)


def _on_device(
    config: EngineConfig, trace: Trace, seed: int, disk: float
) -> tuple[Served, dict[str, float]]:
    bus = EventBus()
    engine = build_random_engine(SHAPES[config.model.model], config, bus)
    try:
        timed = RealTime(engine)
        speeds = Speeds.measured(timed, trace, config)
        served = Served(speeds, host_gb_per_s(engine, bus, config, trace), disk)
        engine.clear_cache()
        counters = Counters().attach(bus)
        answers = play(timed, trace, num_prompt_ids(config), seed)
        engine.check()
    finally:
        engine.close()
    return served, _summary(answers, counters, config)


def _in_virtual_time(
    config: EngineConfig, trace: Trace, seed: int
) -> tuple[Served, dict[str, float]]:
    spec, kv_tokens = SHAPES[config.model.model], config.cache.kv_tokens
    assert kv_tokens is not None

    def an_engine() -> VirtualEngine:
        model = ModelCost.of(spec, ELEMENT_BYTES)
        return VirtualEngine(model, spec.vocab_size, kv_tokens, config.sched)

    engine, rates = an_engine(), ServiceRates()
    speeds = Speeds.measured(an_engine(), trace, config)
    answers = play(engine, trace, num_prompt_ids(config), seed)
    engine.scheduler.check()
    served = Served(speeds, rates.host_gb_per_s, rates.disk_gb_per_s)
    return served, _summary(answers, engine.counters, config)


def play(engine: TimedEngine, trace: Trace, num_ids: int, seed: int) -> list[TimedAnswer]:
    """Ask all turns, each when its user has read the answer before it and has thought. Prompts
    contain the engine's own answers."""
    requests, rng = trace.requests, np.random.default_rng(seed)
    followers = {each.previous: index for index, each in enumerate(requests)}
    coming = [(each.arrival_s, i) for i, each in enumerate(requests) if each.previous is None]
    heapify(coming)
    answers = [TimedAnswer(0.0) for _ in requests]
    histories: dict[int, list[int]] = {}  # of each session
    began_s = engine.now_s
    while coming or engine.has_work:
        while coming and coming[0][0] <= engine.now_s - began_s:
            due_s, index = heappop(coming)
            answers[index].due_s = due_s
            history = histories.setdefault(requests[index].session, [])
            num_new = max(1, requests[index].input_tokens - len(history))
            history += rng.integers(10, num_ids, num_new).tolist()
            prompt = np.array(history, np.int32)
            sampling = greedy(max(1, requests[index].output_tokens))
            engine.submit(Request(RequestId(str(index)), prompt, sampling))
        if not engine.has_work:
            engine.wait_until(began_s + coming[0][0])
            continue
        outputs = engine.step()
        now_s = engine.now_s - began_s
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


def in_simulator(config: EngineConfig, trace: Trace, served: Served) -> dict[str, float]:
    """The same trace in virtual time, with tiers of the same sizes."""
    store, has_disk = config.store, config.store.disk_dir is not None
    if config.sched.share is Share.NONE:
        trace = replace(
            trace, requests=[replace(each, keys=(), kept=()) for each in trace.requests]
        )
    token_bytes = kv_token_bytes(config)
    assert config.cache.kv_tokens is not None
    report = simulate(
        trace,
        SimulationConfig(
            token_bytes,
            host_gb=(store.host_gb or 0.0) * (1 - 1 / SLACK),  # the rest is for copies in flight
            disk_gb=store.disk_gb if has_disk else 0.0,
            device_gb=config.cache.kv_tokens * token_bytes / GB,
            policy=store.policy,
            queue=Queue.ARRIVALS,
            rates=served.rates,
            batching=served.batching(config.sched, len(trace.requests)),
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
