"""Conversations on an engine in real time, and the same in the simulator: do they agree?

    engine      turns come when the trace says: a user thinks after each answer, then asks again
    simulator   the same trace, with the speeds that this engine showed before the clock started
    --virtual   no device: the engine's scheduler, with the times of an H200's cost model

Weights and tokens are random; lengths and times are the trace's. Each way is run by both: `store`
keeps pages on the device and in lower tiers, `recompute` keeps nothing. Sizes are the engine's
flags: --kv-tokens, --host-gb, --disk-dir, --disk-gb, --max-seqs. `hit_points` is by how many points
the simulated hit rate is higher; ratios are simulated / engine. --again FILE repeats only the
simulation, beside the engine's results in the lines of FILE.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from mainstem.cli.flag_types import comma_list, one_of, positive, positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import (
    DType,
    EngineConfig,
    Share,
    StoreConfig,
)
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request
from mainstem.engine.build import build_random_engine, with_chunk
from mainstem.kv.stack import SLACK
from mainstem.plan.cost import H200, full_speed_tokens
from mainstem_bench.arrivals import TimedAnswer
from mainstem_bench.event_log import EventLog
from mainstem_bench.feed import greedy
from mainstem_bench.limit import ModelCost
from mainstem_bench.machine import Machine
from mainstem_bench.paper.lengths import shipped
from mainstem_bench.report import fingerprint, load_average, show_all
from mainstem_bench.settings import empty_folder, kv_token_bytes, random_config, settings
from mainstem_bench.shapes import SHAPES
from mainstem_bench.speeds import (
    RealTime,
    Speeds,
    TimedEngine,
    chunk_tokens,
    disk_gb_per_s,
    host_gb_per_s,
    num_prompt_ids,
)
from mainstem_bench.virtual_engine import ELEMENT_BYTES, VirtualEngine
from mainstem_simulate.service import GB, Batching, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, simulate
from mainstem_simulate.trace_records import ReadOptions, Trace, TraceRequest
from mainstem_simulate.traces import read_trace

WAYS = ("store", "recompute")
WARM_UP = 24  # turns


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes of an engine, and how it uses them."""

    token_bytes: float
    device_gb: float
    host_gb: float
    disk_gb: float
    policy: str
    max_running: int
    chunk_tokens: int
    is_kept: bool  # pages are kept for later turns

    @classmethod
    def of(cls, config: EngineConfig, num_requests: int) -> "Room":
        store, token_bytes = config.store, kv_token_bytes(config)
        assert config.cache.kv_tokens is not None
        return cls(
            token_bytes,
            device_gb=config.cache.kv_tokens * token_bytes / GB,
            host_gb=(store.host_gb or 0.0) * (1 - 1 / SLACK),  # the rest is for copies in flight
            disk_gb=0.0 if store.disk_dir is None else store.disk_gb,
            policy=store.policy,
            max_running=config.sched.max_seqs or num_requests,
            chunk_tokens=chunk_tokens(config),
            is_kept=config.sched.share is not Share.NONE,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What the simulator is told of the engine."""

    room: Room
    speeds: Speeds
    host_gb_per_s: float
    disk_gb_per_s: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Served":
        speeds = values["speeds"]
        prompts = tuple((size, seconds) for size, seconds in speeds["prompts"])
        return cls(
            Room(**values["room"]),
            Speeds(**{**speeds, "prompts": prompts}),
            values["host_gb_per_s"],
            values["disk_gb_per_s"],
        )

    @property
    def rates(self) -> ServiceRates:
        return ServiceRates(
            self.speeds.prompt_tokens_per_s,
            host_gb_per_s=self.host_gb_per_s,
            disk_gb_per_s=self.disk_gb_per_s,
        )

    @property
    def batching(self) -> Batching:
        speeds, room = self.speeds, self.room
        return Batching(
            room.max_running,
            speeds.weights_s,
            speeds.token_s,
            room.chunk_tokens,
            shares_device=True,
            answer_s=speeds.answer_s,
            prompts=speeds.prompts,
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
    made.add_argument(
        "--log", type=Path, metavar="FILE.jsonl.gz", help="write all steps, loads and turns here"
    )
    made.add_argument("--again", type=Path, metavar="FILE.jsonl", help="see above")
    made.add_argument("--virtual", action="store_true", help="no device: see above")
    flag("--seed", int, "seed of arrivals and tokens", 0)
    made.add_argument("--json", action="store_true", help="one JSON line for each way")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.again is not None:
        show_all("agree", again(args.again), args.json)
        return 0
    kv_tokens = 4 * args.context_tokens
    config = random_config(args, args.model_shape, kv_tokens, is_virtual=args.virtual)
    if args.virtual:
        config = _on_an_h200(config)
    else:
        if config.model.dtype is DType.AUTO and not Machine.of(config).has_gpu:
            config = replace(config, model=replace(config.model, dtype=DType.FP32))
        config = with_chunk(config, SHAPES[args.model_shape])
    asked = Asked(
        args.turns, args.rate, args.pace, args.context_tokens, config.cache.page_size, args.seed
    )
    trace = asked.trace(args.trace)
    asked = replace(asked, turns=len(trace.requests))
    serve = _in_virtual_time if args.virtual else partial(_in_engine, log=args.log)
    results = (
        {"way": way} | compare(_as(way, config), trace, partial(serve, seed=args.seed))
        for way in args.way
    )
    about = asdict(asked) | {"virtual": args.virtual, "settings": settings(config)}
    show_all("agree", results, args.json, about)
    return 0


def again(path: Path) -> Iterator[dict[str, object]]:
    """Simulate the ShareGPT lines of a file again, beside what the engine did then."""
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "served" not in line:
            raise ConfigError(f"{path}: a line does not say what the simulator was told (`served`)")
        asked = Asked(**{field.name: line[field.name] for field in fields(Asked)})
        served = Served.from_json(line["served"])
        engine_on = line.get("engine_on") or {name: line[name] for name in fingerprint()}
        found = compared(line["in_engine"], in_simulator(asked.trace(None), served))
        yield line | found | {"engine_on": engine_on}


def _on_an_h200(config: EngineConfig) -> EngineConfig:
    """The settings of a virtual engine."""
    if config.store.host_gb:
        raise ConfigError("--virtual has no lower tiers: leave --host-gb out")
    if config.sched.chunk_tokens is not None:
        return config
    tokens = full_speed_tokens(H200, SHAPES[config.model.model].moved_bytes_per_param)
    return replace(config, sched=replace(config.sched, chunk_tokens=tokens))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked, and when."""

    turns: int
    rate: float
    pace: float
    context_tokens: int
    page_tokens: int
    seed: int

    def trace(self, path: Path | None) -> Trace:
        """Read a trace; None: ShareGPT's lengths."""
        options = ReadOptions(
            page_tokens=self.page_tokens,
            rate=self.rate / self.pace,  # all times are divided by the pace afterwards
            context_tokens=self.context_tokens,
            limit=self.turns,
            seed=self.seed,
        )
        if path is not None:
            return faster(read_trace(path, options), self.pace)
        with shipped("sharegpt_session_lengths.jsonl.gz") as lengths:
            return faster(read_trace(lengths, options), self.pace)


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
    about = {"served": asdict(served), "load_before": load}
    return compared(engine, in_simulator(trace, served)) | about


def compared(engine: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, object]:
    return {
        "hit_rate": engine["hit_rate"],
        "hit_points": round(100 * (simulated["hit_rate"] - engine["hit_rate"]), 2),
        "ttft_s": engine["ttft_s"],
        "ttft_ratio": round(simulated["ttft_s"] / engine["ttft_s"], 4),
        "device_s": engine["device_s"],
        "device_ratio": round(simulated["device_s"] / engine["device_s"], 4),
        "in_engine": engine,
        "in_simulator": simulated,
    }


def _in_engine(
    config: EngineConfig, trace: Trace, seed: int, log: Path | None
) -> tuple[Served, dict[str, float]]:
    if config.store.disk_dir is None:
        return _on_device(config, trace, seed, log)
    with empty_folder(config.store.disk_dir) as folder:
        store = replace(config.store, disk_dir=folder)
        return _on_device(replace(config, store=store), trace, seed, log)


def _on_device(
    config: EngineConfig, trace: Trace, seed: int, log: Path | None
) -> tuple[Served, dict[str, float]]:
    bus = EventBus()
    engine = build_random_engine(SHAPES[config.model.model], config, bus)
    try:
        timed, num_ids = RealTime(engine), num_prompt_ids(config)
        # kernels are compiled before times count
        play(timed, replace(trace, requests=trace.requests[:WARM_UP]), num_ids, seed + 1)
        speeds = Speeds.measured(timed, bus, trace, config)
        host_rate = host_gb_per_s(engine, bus, config, trace)
        engine.clear_cache()
        with bus.guests(), EventLog.to(log) as events:
            counters, prompt_steps = Counters().attach(bus), PromptSteps().attach(bus)
            events.attach(bus)
            played = play(timed, trace, num_ids, seed)
            for request, answer in zip(trace.requests, played.answers, strict=True):
                events.write("turn", turn(request, answer))
            engine.flush()
        engine.check()
        disk_rate = disk_gb_per_s(engine, bus, config, list(played.histories.values()))
    finally:
        engine.close()
    served = Served(Room.of(config, len(trace.requests)), speeds, host_rate, disk_rate)
    return served, _summary(played.answers, counters, config, prompt_steps.seconds)


def turn(request: TraceRequest, answer: TimedAnswer) -> dict[str, object]:
    """A turn, for the log."""
    return {
        "session": request.session,
        "prompt_tokens": request.input_tokens,
        "answer_tokens": request.output_tokens,
        "due_s": answer.due_s,
        "first_s": answer.token_s[0],
        "last_s": answer.token_s[-1],
    }


def _in_virtual_time(
    config: EngineConfig, trace: Trace, seed: int
) -> tuple[Served, dict[str, float]]:
    spec, kv_tokens = SHAPES[config.model.model], config.cache.kv_tokens
    assert kv_tokens is not None

    def an_engine() -> VirtualEngine:
        model = ModelCost.of(spec, ELEMENT_BYTES)
        return VirtualEngine(model, spec.vocab_size, kv_tokens, config.sched)

    engine, rates = an_engine(), ServiceRates()
    probed = an_engine()
    speeds = Speeds.measured(probed, probed.bus, trace, config)
    prompt_steps = PromptSteps().attach(engine.bus)
    played = play(engine, trace, num_prompt_ids(config), seed)
    engine.scheduler.check()
    room = Room.of(config, len(trace.requests))
    served = Served(room, speeds, rates.host_gb_per_s, rates.disk_gb_per_s)
    return served, _summary(played.answers, engine.counters, config, prompt_steps.seconds)


@dataclass(slots=True)
class Played:
    """When tokens came, and what was said, by session: the session of the latest turn last."""

    answers: list[TimedAnswer]
    histories: dict[int, list[int]]


def play(engine: TimedEngine, trace: Trace, num_ids: int, seed: int) -> Played:
    """Ask all turns, each when its user has read the answer before it and has thought. Prompts
    contain the engine's own answers."""
    requests, rng = trace.requests, np.random.default_rng(seed)
    followers = {each.previous: index for index, each in enumerate(requests)}
    coming = [(each.arrival_s, i) for i, each in enumerate(requests) if each.previous is None]
    heapify(coming)
    answers = [TimedAnswer(0.0) for _ in requests]
    histories: dict[int, list[int]] = {}
    began_s = engine.now_s
    while coming or engine.has_work:
        while coming and coming[0][0] <= engine.now_s - began_s:
            due_s, index = heappop(coming)
            answers[index].due_s = due_s
            session = requests[index].session
            history = histories[session] = histories.pop(session, [])  # now the latest
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
    return Played(answers, histories)


class PromptSteps:
    """The device's time for prompts: what steps with prompts take longer than the latest step
    without."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._decode_s = 0.0

    def attach(self, bus: EventBus) -> "PromptSteps":
        bus.subscribe(StepFinished, self._add)
        return self

    def _add(self, step: StepFinished) -> None:
        if not step.num_prompt_tokens:
            self._decode_s = step.device_s
        elif step.num_tokens == step.num_prompt_tokens:
            self.seconds += step.device_s
        else:
            self.seconds += max(0.0, step.device_s - self._decode_s)


def _summary(
    answers: Sequence[TimedAnswer], counters: Counters, config: EngineConfig, prompts_s: float
) -> dict[str, float]:
    page_gb = config.cache.page_size * kv_token_bytes(config) / GB
    page_share = config.cache.page_size / counters.prompt_tokens
    loaded = counters.loaded_pages
    first_s = sorted(answer.first_token_s for answer in answers)
    return {
        "hit_rate": counters.saving_ratio,
        "hit_rate_dram": loaded["host"] * page_share,
        "hit_rate_disk": loaded["disk"] * page_share,
        "ttft_s": sum(first_s) / len(first_s),
        "p95_ttft_s": _quantile(first_s, 0.95),
        "p99_ttft_s": _quantile(first_s, 0.99),
        "prompt_tokens_per_s": counters.prompt_tokens / prompts_s,
        "prefill_tokens": counters.computed_tokens,
        "device_s": counters.device_s,
        "loaded_gb": sum(loaded.values()) * page_gb,
        "disk_read_gb": (loaded["disk"] + counters.prefetched_pages) * page_gb,
        "disk_written_gb": counters.saved_pages["disk"] * page_gb,
        "saved_gb": counters.saved_pages["host"] * page_gb,
        "unsaved_gb": sum(counters.unsaved_pages.values()) * page_gb,
        "preemptions": counters.preemptions,
        "total_s": max(answer.token_s[-1] for answer in answers),
    }


def _quantile(sorted_s: Sequence[float], share: float) -> float:
    return sorted_s[int(share * (len(sorted_s) - 1))]


def in_simulator(trace: Trace, served: Served) -> dict[str, float]:
    """The same trace in virtual time, with tiers of the same sizes."""
    room = served.room
    if not room.is_kept:
        trace = replace(
            trace, requests=[replace(each, keys=(), kept=()) for each in trace.requests]
        )
    report = simulate(
        trace,
        SimulationConfig(
            room.token_bytes,
            host_gb=room.host_gb,
            disk_gb=room.disk_gb,
            device_gb=room.device_gb,
            policy=room.policy,
            queue=Queue.ARRIVALS,
            rates=served.rates,
            batching=served.batching,
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
        "disk_read_gb": report.disk_read_gb,
        "disk_written_gb": report.disk_written_gb,
        "total_s": report.virtual_s,
    }
