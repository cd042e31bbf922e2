"""Runs the same arrivals with every policy of the store: lookahead, lru, fifo (AttentionStore Fig.
21).

Arrivals come from `mainstem serve --record FILE`, or are generated: conversations whose turns come
in a random order, faster than the device answers, so that some always wait. Sizes of the tiers are
given in conversations: with room for all of them, all policies are equal.

The model is a real one (--model), or random weights of a shape (--model-shape). For each policy a
new engine answers all requests, with a disk folder that is empty at first: a new one inside
--disk-dir, removed at the end.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.checkpoints.progress import StageBar
from mainstem.cli.flag_types import comma_list, not_negative, one_of, positive, positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import DType, EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.engine.build import build_engine, build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.families import read_spec
from mainstem.models.spec import ModelSpec
from mainstem_bench.arrivals import Arrival, TimedAnswer, answer_arrivals, arrival_times
from mainstem_bench.machine import Machine
from mainstem_bench.replay import read_parts
from mainstem_bench.report import load_average, show_all, spread
from mainstem_bench.settings import empty_folder, random_config, settings
from mainstem_bench.shapes import SHAPES

MOST_IDS = 30_000  # ids of generated prompts are below this
WHOLE_S = 1e9  # longer than any pause, so that the record is one part
ENGINE_POLICIES = ("lookahead", "lru", "fifo")  # fifo is a baseline, not a setting
WARM_UP = 2  # number of prompts before the clock starts


@dataclass(frozen=True, slots=True)
class Turns:
    """Conversations of random ids. The earlier answers in a prompt are random ids as well."""

    sessions: int
    turns: int
    history: int  # tokens of the first turn
    new: int  # new tokens of a later turn, in addition to the answer before it
    output: int
    rate: float  # turns a second


class StoreSessions(NamedTuple):
    """How many complete conversations each tier holds."""

    device: float
    host: float
    disk: float


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench policies", description=__doc__)
    made.add_argument(
        "record",
        type=Path,
        nargs="?",
        help="file of `mainstem serve --record` (default: made-up requests)",
    )
    made.add_argument("--model-shape", choices=list(SHAPES), help="random weights of this shape")
    made.add_argument(
        "--policy",
        type=comma_list(one_of(ENGINE_POLICIES)),
        default=list(ENGINE_POLICIES),
        metavar="KIND",
        help="lookahead, lru, fifo (all)",
    )
    work = made.add_argument_group("made-up conversations")
    flag = partial(add_flag, work)
    flag("--sessions", positive_count, "conversations", 24)
    flag("--turns", positive_count, "turns of each", 3)
    flag("--history", positive_count, "tokens of the first turn", 300)
    flag("--new", positive_count, "new tokens of a later turn", 40)
    flag("--output", positive_count, "tokens of an answer", 16)
    flag("--rate", positive, "turns a second", 2.0, metavar="R")
    room = made.add_argument_group("room, as a number of complete conversations")
    for name, most in (("device", 3.0), ("host", 6.0), ("disk", 12.0)):
        add_flag(
            room, f"--{name}-sessions", not_negative, f"conversations that the {name} holds", most
        )
    made.add_argument("--json", action="store_true", help="one JSON line for each policy")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.store_policy is not None:
        raise ConfigError("--store-policy: use --policy, which names the policies to compare")
    config, folder, spec = _model(args)
    arrivals, about = _arrivals(args, spec)
    room = StoreSessions(args.device_sessions, args.host_sessions, args.disk_sessions)
    config = _with_flags(args, with_room(config, spec, arrivals, room))
    results = (
        {"policy": policy} | measure(config, folder, policy, arrivals) for policy in args.policy
    )
    show_all("policies", results, args.json, about | {"settings": settings(config)})
    return 0


def _model(args: argparse.Namespace) -> tuple[EngineConfig, Path | None, ModelSpec]:
    """Return the settings, the folder of a real model, and its shape."""
    if args.model_shape is not None:
        return random_config(args, args.model_shape, 4096), None, SHAPES[args.model_shape]
    config = engine_config(args)
    with StageBar() as bar:
        folder = resolve_model(config.model.model, bar)
    return config, folder, read_spec(folder)


def _arrivals(args: argparse.Namespace, spec: ModelSpec) -> tuple[list[Arrival], dict[str, object]]:
    if args.record is not None:
        parts = read_parts(args.record, WHOLE_S)
        if not parts:
            raise ConfigError(f"{args.record} has no requests")
        return parts[0], {"record": args.record.name}
    work = Turns(args.sessions, args.turns, args.history, args.new, args.output, args.rate)
    return made_up(work, min(spec.vocab_size, MOST_IDS)), asdict(work)


def made_up(work: Turns, num_ids: int, seed: int = 0) -> list[Arrival]:
    """Return the turns of all conversations; each round has another order."""
    rng = Random(seed)
    prompts = [_ids(rng, work.history, num_ids) for _ in range(work.sessions)]
    times = iter(arrival_times(work.sessions * work.turns, work.rate, seed))
    arrivals: list[Arrival] = []
    for _ in range(work.turns):
        for session in rng.sample(range(work.sessions), work.sessions):
            prompt = np.array(prompts[session], np.int32)
            arrivals.append(Arrival(next(times), prompt, work.output, work.output))
            prompts[session] += _ids(rng, work.output + work.new, num_ids)
    return arrivals


def _ids(rng: Random, count: int, num_ids: int) -> list[int]:
    return [rng.randrange(10, num_ids) for _ in range(count)]


def with_room(
    config: EngineConfig, spec: ModelSpec, arrivals: Sequence[Arrival], room: StoreSessions
) -> EngineConfig:
    """Return the config with tiers for conversations as long as the longest of `arrivals`."""
    longest, page = (
        max(len(each.prompt_ids) + each.output for each in arrivals),
        config.cache.page_size,
    )
    tokens = -(-longest // page) * page
    is_wide = config.model.dtype is DType.FP32 or not Machine.of(config).has_gpu
    session_gb = tokens * spec.kv_elements_per_token * (4 if is_wide else 2) / 1e9
    host_gb, disk_gb = room.host * session_gb, room.disk * session_gb
    return replace(
        config,
        cache=replace(config.cache, kv_tokens=max(1, int(room.device * tokens))),
        store=replace(config.store, host_gb=host_gb, disk_gb=disk_gb),
    )


def _with_flags(args: argparse.Namespace, config: EngineConfig) -> EngineConfig:
    """Return the config with the sizes of tiers that flags set."""
    cache, store = config.cache, config.store
    if args.kv_tokens is not None:
        cache = replace(cache, kv_tokens=args.kv_tokens)
    if args.host_gb is not None:
        store = replace(store, host_gb=args.host_gb)
    if args.disk_gb is not None:
        store = replace(store, disk_gb=args.disk_gb)
    return replace(config, cache=cache, store=store)


def measure(
    config: EngineConfig, folder: Path | None, policy: str, arrivals: Sequence[Arrival]
) -> dict[str, object]:
    """Return times to the first token, and the tiers in which histories were found."""
    load = load_average()
    with empty_folder(config.store.disk_dir) as disk_dir:
        store = replace(config.store, policy=policy, disk_dir=disk_dir)
        for engine, counters in _engine(replace(config, store=store), folder):
            answers = answer_arrivals(engine, arrivals)
            engine.check()
            result = _result(answers, counters)
    return result | {"load_before": load}


def _engine(config: EngineConfig, folder: Path | None) -> Iterator[tuple[Engine, Counters]]:
    """Return a new engine that has run a few steps, and counters that start after these steps."""
    bus = EventBus()
    if folder is None:
        engine = build_random_engine(SHAPES[config.model.model], config, bus)
    else:
        engine = build_engine(folder, config, bus)
    try:
        warm = np.arange(10, 10 + config.cache.page_size * 2, dtype=np.int32)
        answer_arrivals(engine, [Arrival(0.0, warm, 2)] * WARM_UP)
        engine.clear_cache()
        yield engine, Counters().attach(bus)
    finally:
        engine.close()


def _result(answers: Sequence[TimedAnswer], counters: Counters) -> dict[str, object]:
    loaded = counters.loaded_pages
    num_loaded = sum(loaded.values())
    return {
        "requests": len(answers),
        "seconds": round(max(answer.token_s[-1] for answer in answers), 2),
        **spread("ttft_ms", [answer.first_token_s for answer in answers]),
        "hit_rate": round(counters.saving_ratio, 4),
        "computed_tokens": counters.computed_tokens,
        "dram_share": round(loaded["host"] / num_loaded, 4) if num_loaded else 0.0,
        "loaded_host": loaded["host"],
        "loaded_disk": loaded["disk"],
        "prefetched": counters.prefetched_pages,
        "evicted_device": counters.evicted_pages,
        "dropped": sum(counters.dropped_pages.values()),
    }
