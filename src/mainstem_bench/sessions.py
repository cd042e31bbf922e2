"""Measures returning conversations: the time to the first token, by the tier of their KV.

    turns      sessions return in batches; their history comes from host memory, from disk, or is
               computed again (`--tier`)
    preload    one session at a time, by the number of layers that are loaded before its prompt
               starts (AttentionStore's Fig. 19)
    busy       the same for a batch of sessions that returns while a job decodes
    hidden     how much of the loads of sessions that return at once is hidden, alone and behind a
               long step
    saves      decode steps with and without saves of other requests' pages
    saving     jobs by when their pages are saved: while decoding, at the end, in sync (Fig. 20)
    grain      pages saved whole, by layer, or by token and layer (GPU)
    document   a second question about a long document

Weights are random, of a known shape. With `--conversations FILE` a real model answers real
conversations instead, turn by turn; the last turn's history is loaded from disk in a new process.
"""

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from random import Random
from time import perf_counter

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig, StoreConfig
from mainstem.core.errors import ConfigError
from mainstem_bench.chat_sessions import ChatWork, measure_chats
from mainstem_bench.overlap import (
    measure_busy,
    measure_grain,
    measure_hidden,
    measure_preload,
    measure_saves,
    measure_saving,
)
from mainstem_bench.report import load_average, show_all
from mainstem_bench.session_engine import WORKLOADS, ReturningSessions, SessionEngine, TurnTimes
from mainstem_bench.settings import empty_folder, random_config, settings

STAGING = 1 / 4  # share of the host memory if histories come from disk: enough for one batch
DISK_GB = 40.0
OVERLAP: dict[str, Callable[[SessionEngine], Iterator[dict[str, object]]]] = {
    "preload": measure_preload,
    "busy": measure_busy,
    "hidden": measure_hidden,
    "saves": measure_saves,
    "saving": measure_saving,
    "grain": measure_grain,
}
PARTS = ("turns", *OVERLAP, "document")


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench sessions", description=__doc__)
    made.add_argument("--workload", choices=list(WORKLOADS), default="anchor")
    made.add_argument("--sessions", type=positive_count, metavar="N", help="(the workload's own)")
    made.add_argument("--part", choices=list(PARTS), action="append")
    made.add_argument("--tier", choices=["host", "disk", "none"], action="append")
    made.add_argument("--document-tokens", type=positive_count, default=28_000, metavar="N")
    made.add_argument(
        "--conversations",
        action="append",
        metavar="FILE.jsonl",
        help="real conversations; see bench serve",
    )
    flag = partial(add_flag, made)
    flag("--turns", positive_count, "turns, with --conversations", 5)
    flag("--output", positive_count, "tokens of an answer, with --conversations", 96)
    flag("--at-once", positive_count, "conversations at once, with --conversations", 10)
    made.add_argument(
        "--end", choices=["close", "kill"], action="append",
        help="with --conversations, how the process ends before the last turn: closed, or kill -9 "
        "(close); given twice: before each of the last two turns",
    )  # fmt: skip
    made.add_argument("--limit-s", type=float, metavar="S", help="start no tier after S s")
    made.add_argument("--json", action="store_true", help="one JSON line for each result")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    about: dict[str, object] = {"load_before": load_average()}
    if args.conversations:
        found = _measure_chats(args)
    else:
        work = WORKLOADS[args.workload]
        work = replace(work, sessions=args.sessions or work.sessions)
        about["workload"] = asdict(work)
        found = _measure(args, work, random_config(args, work.model_shape, work.device_tokens))
    began_s = perf_counter()
    timed = (result | {"at_s": round(perf_counter() - began_s, 1)} for result in found)
    results = show_all("sessions", timed, args.json, about)
    return 1 if any("error" in result for result in results) else 0


def _measure_chats(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    ends = tuple(args.end or ["close"])
    if args.turns <= len(ends):
        raise ConfigError(f"--turns must exceed the number of --end, {len(ends)}; got {args.turns}")
    files = tuple(args.conversations)
    work = ChatWork(files, args.sessions or 100, args.turns, args.output, args.at_once, ends)
    config = engine_config(args)
    for result in measure_chats(work, config):
        yield result | {"settings": settings(config)}


def _measure(
    args: argparse.Namespace, work: ReturningSessions, config: EngineConfig
) -> Iterator[dict[str, object]]:
    """Measure part by part. A part that fails gives a line with its error, and the next one
    begins."""
    began_s = perf_counter()
    for tier, parts in _by_tier(args.part or ["turns"], args.tier or ["host"]):
        late = args.limit_s is not None and perf_counter() - began_s > args.limit_s
        if late:
            yield {"tier": tier, "parts": parts, "left_out": f"after {args.limit_s:g} s"}
            continue
        try:
            with in_tier(config, work, tier) as tiered, SessionEngine(work, tiered) as bench:
                for part in parts:
                    yield from _safely(part, tier, _start(part, bench, tier, args.document_tokens))
        except Exception as error:
            yield _told(error, "engine", tier)


def _by_tier(parts: Sequence[str], tiers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group the parts by tier, since each tier needs its own engine: turns run in every tier, other
    parts with host memory."""
    rest = [part for part in parts if part != "turns"]
    turns = ["turns"] if "turns" in parts else []
    found = {tier: list(turns) for tier in tiers} if turns else {}
    if rest:
        found["host"] = [*found.get("host", []), *rest]
    return list(found.items())


def _start(
    part: str, bench: "SessionEngine", tier: str, document_tokens: int
) -> Iterator[dict[str, object]]:
    if part == "turns":
        return measure_turns(bench, tier)
    if part == "document":
        return measure_document(bench, document_tokens)
    return OVERLAP[part](bench)


def _safely(
    part: str, tier: str, found: Iterator[dict[str, object]]
) -> Iterator[dict[str, object]]:
    try:
        yield from found
    except Exception as error:
        yield _told(error, part, tier)


def _told(error: Exception, part: str, tier: str) -> dict[str, object]:
    traceback.print_exception(error)
    return {"part": part, "tier": tier, "error": f"{type(error).__name__}: {error}"}


@contextmanager
def in_tier(config: EngineConfig, work: ReturningSessions, tier: str) -> Iterator[EngineConfig]:
    """The config that keeps histories in one tier; a folder made for it is removed afterwards."""
    given, disk_gb = config.store, StoreConfig().disk_gb
    if tier == "none":
        yield replace(config, store=StoreConfig(host_gb=0.0, policy=given.policy))
    elif tier == "host":
        host_gb = given.host_gb or work.host_gb
        store = replace(given, host_gb=host_gb, disk_dir=None, disk_gb=disk_gb)
        yield replace(config, store=store)
    else:
        with empty_folder(given.disk_dir) as folder:
            store = replace(
                given,
                host_gb=given.host_gb or STAGING * work.host_gb,
                disk_dir=folder,
                disk_gb=DISK_GB if given.disk_gb == disk_gb else given.disk_gb,
            )
            yield replace(config, store=store)


def measure_turns(bench: SessionEngine, tier: str) -> Iterator[dict[str, object]]:
    """Yield one line per turn."""
    work = bench.work
    bench.warm_up()
    rng = Random(0)
    histories = [bench.random_ids(rng, work.history) for _ in range(work.sessions)]
    for number in range(1, work.turns + 1):
        before = dict(bench.counters.loaded_pages)
        turn = TurnTimes([], [], [])
        began_s = perf_counter()
        for first in range(0, work.sessions, work.at_once):
            batch = bench.ask(histories[first : first + work.at_once], work.output)
            turn.first_s += batch.first_s
            turn.answers += batch.answers
            turn.cached += batch.cached
            if tier == "none":
                bench.push_out()  # also evicts the pages that the device still has
        seconds = perf_counter() - began_s
        bench.engine.flush()
        loaded = {
            name: count - before.get(name, 0) for name, count in bench.counters.loaded_pages.items()
        }
        yield _turn_result(turn, tier, number, seconds) | {
            "loaded_pages": loaded,
            "lost_pages": sum(bench.counters.lost_pages.values()),
            "unsaved_pages": dict(bench.counters.unsaved_pages),
            "settings": settings(bench.config),
        }
        for index, answer in enumerate(turn.answers):
            histories[index] += [*answer, *bench.random_ids(rng, work.new)]


def _turn_result(turn: TurnTimes, tier: str, number: int, seconds: float) -> dict[str, object]:
    first_ms = 1e3 * np.array(turn.first_s)
    return {
        "part": "turns",
        "tier": tier,
        "turn": number,
        "mean_ttft_ms": round(float(first_ms.mean()), 2),
        "p95_ttft_ms": round(float(np.percentile(first_ms, 95)), 2),
        "cached_tokens": round(float(np.mean(turn.cached)), 1),
        "seconds": round(seconds, 3),
    }


def measure_document(bench: SessionEngine, num_tokens: int) -> Iterator[dict[str, object]]:
    """Ask about a document, evict it from the device, and ask about it again."""
    bench.warm_up()
    rng = Random(3)
    num_tokens = min(num_tokens, bench.work.device_tokens - 256)
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(3):
        document = bench.random_ids(rng, num_tokens)
        cold.append(bench.ask([[*document, *bench.random_ids(rng, 32)]], 8).first_s[0])
        bench.push_out()
        warm.append(bench.ask([[*document, *bench.random_ids(rng, 32)]], 8).first_s[0])
    cold_s, warm_s = float(np.median(cold)), float(np.median(warm))
    yield {
        "part": "document",
        "document_tokens": num_tokens,
        "first_question_ttft_ms": round(1e3 * cold_s, 2),
        "second_question_ttft_ms": round(1e3 * warm_s, 2),
        "ratio": round(warm_s / cold_s, 4),
        "settings": settings(bench.config),
    }
