"""Conversations that come back: time to the first token of returning turns, by where their KV is.

    turns      sessions return in batches; their history comes from host memory, from disk, or is
               computed again (`--tier`)
    preload    one session at a time: layers loaded before its prompt starts (the paper's Fig. 19)
    saves      a decoding batch while pages of others are being saved, and while not
    document   a second question about a long document

Random weights of a known shape. With `--conversations FILE` real ones are asked of a real model
instead, turn by turn, the last turn from disk in a process of its own.
"""

import argparse
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.core.config import EngineConfig, Fetch, StoreConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.core.tables import table
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.shapes import SHAPES
from mainstem.models.spec import ModelSpec
from mainstem_bench.chat_sessions import ChatWork, measure_chats
from mainstem_bench.report import line, load_average
from mainstem_bench.settings import random_config, settings

STAGING = 1 / 4  # of the host memory, where histories are to come from disk: those of a batch fit
DISK_GB = 40.0
SAVE_STEPS = 200  # that a batch decodes while pages of others are saved
VISIT_EVERY = 8  # steps between two prompts of others
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Which sessions come back when, and with how much."""

    model_shape: str = "llama31-8b"
    sessions: int = 72
    history: int = 2000  # tokens of the first turn
    new: int = 100  # that a later turn brings
    output: int = 32
    at_once: int = 24
    turns: int = 3
    device_tokens: int = 64_000
    host_gb: float = 30.0


WORKLOADS = {
    "anchor": Sessions(),
    "tiny": Sessions("tiny", 6, 100, 10, 4, 3, 3, 512, 0.1),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "mainstem bench sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--workload", choices=list(WORKLOADS), default="anchor")
    made.add_argument("--sessions", type=positive_count, metavar="N", help="(the workload's own)")
    made.add_argument("--part", choices=["turns", "preload", "saves", "document"], action="append")
    made.add_argument("--tier", choices=["host", "disk", "none"], action="append")
    made.add_argument("--document-tokens", type=positive_count, default=28_000, metavar="N")
    made.add_argument(
        "--conversations", action="append", metavar="FILE.jsonl", help="real ones; see bench serve"
    )
    made.add_argument(
        "--turns", type=positive_count, default=5, metavar="N", help="of real ones (5)"
    )
    made.add_argument(
        "--output", type=positive_count, default=96, metavar="N", help="of real ones (96)"
    )
    made.add_argument(
        "--at-once", type=positive_count, default=10, metavar="N", help="of real ones (10)"
    )
    made.add_argument(
        "--end", choices=["close", "kill"], action="append",
        help="how the process ends before the last turn of real ones: closed, or kill -9 (close); "
        "given twice: before each of the last two turns",
    )  # fmt: skip
    made.add_argument(
        "--limit-s", type=float, metavar="S", help="leave out parts that would begin later (none)"
    )
    made.add_argument("--json", action="store_true", help="a line a result")
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
    results: list[dict[str, object]] = []
    for result in found:
        results.append(result | {"at_s": round(perf_counter() - began_s, 1)})
        if args.json:
            print(line("sessions", results[-1] | about), flush=True)
    if not args.json:
        names = list(dict.fromkeys(name for result in results for name in result))
        names = [name for name in names if name != "settings"]
        rows = [[str(result.get(name, "")) for name in names] for result in results]
        print(table(names, rows))
    return 1 if any("error" in result for result in results) else 0


def _measure_chats(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    ends = tuple(args.end or ["close"])
    if args.turns <= len(ends):
        raise ConfigError(f"--turns must be more than the {len(ends)} --end, got {args.turns}")
    files = tuple(args.conversations)
    work = ChatWork(files, args.sessions or 100, args.turns, args.output, args.at_once, ends)
    config = engine_config(args)
    for result in measure_chats(work, config):
        yield result | {"settings": settings(config)}


def _measure(
    args: argparse.Namespace, work: Sessions, config: EngineConfig
) -> Iterator[dict[str, object]]:
    """Part by part. A part that fails gives a line with its error, and the next one begins."""
    began_s = perf_counter()
    for tier, parts in _by_tier(args.part or ["turns"], args.tier or ["host"]):
        late = args.limit_s is not None and perf_counter() - began_s > args.limit_s
        if late:
            yield {"tier": tier, "parts": parts, "left_out": f"after {args.limit_s:g} s"}
            continue
        try:
            with InTier(config, work, tier) as tiered, Bench(work, tiered) as bench:
                for part in parts:
                    yield from _safely(part, tier, _start(part, bench, tier, args.document_tokens))
        except Exception as error:
            yield _told(error, "engine", tier)


def _by_tier(parts: Sequence[str], tiers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What is measured with one engine: turns in every tier, other parts with host memory."""
    rest = [part for part in parts if part != "turns"]
    turns = ["turns"] if "turns" in parts else []
    found = {tier: list(turns) for tier in tiers} if turns else {}
    if rest:
        found["host"] = [*found.get("host", []), *rest]
    return list(found.items())


def _start(
    part: str, bench: "Bench", tier: str, document_tokens: int
) -> Iterator[dict[str, object]]:
    if part == "turns":
        return measure_turns(bench, tier)
    if part == "preload":
        return measure_preload(bench)
    if part == "saves":
        return measure_saves(bench)
    return measure_document(bench, document_tokens)


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


class InTier:
    """The config that keeps histories in one tier; a folder made for it is removed afterwards."""

    def __init__(self, config: EngineConfig, work: Sessions, tier: str) -> None:
        self._config, self._work, self._tier = config, work, tier
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> EngineConfig:
        given = self._config.store
        if self._tier == "none":
            store = StoreConfig(host_gb=0.0)
        elif self._tier == "host":
            store = replace(given, host_gb=given.host_gb or self._work.host_gb, disk_dir=None)
        else:
            folder = given.disk_dir
            if folder is None:
                self._folder = TemporaryDirectory(prefix="mainstem-sessions-")
                folder = self._folder.name
            store = replace(
                given,
                host_gb=given.host_gb or STAGING * self._work.host_gb,
                disk_dir=folder,
                disk_gb=DISK_GB,
            )
        return replace(self._config, store=store)

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


@dataclass(slots=True)
class Turn:
    """What a batch of sessions got."""

    first_s: list[float]
    answers: list[Ids]
    cached: list[int]


class Bench:
    """An engine on random weights, and its clock."""

    def __init__(self, work: Sessions, config: EngineConfig) -> None:
        self.work, self.config = work, config
        self.shape: ModelSpec = SHAPES[work.model_shape]
        bus = EventBus()
        self.counters = Counters().attach(bus)
        self.engine: Engine = build_random_engine(self.shape, config, bus)
        self._num_asked = 0

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def random_ids(self, rng: Random, count: int) -> Ids:
        return [rng.randrange(10, min(self.shape.vocab_size, 30_000)) for _ in range(count)]

    def ask(self, prompts: Sequence[Ids], output: int) -> Turn:
        """All at once; first tokens are timed from before the first is submitted."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        turn = Turn([0.0] * len(prompts), [[] for _ in prompts], [0] * len(prompts))
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        began_s = perf_counter()
        for index, prompt in enumerate(prompts):
            name = RequestId(str(first + index))
            ids = np.array(prompt, np.int32)
            self.engine.submit(Request(name, ids, sampling, expected_tokens=output))
        while self.engine.has_work:
            for news in self.engine.step():
                index = int(news.request_id) - first
                if not turn.answers[index]:
                    turn.first_s[index] = perf_counter() - began_s
                    turn.cached[index] = news.num_cached_tokens
                turn.answers[index] += news.token_ids
        return turn

    def warm_up(self) -> None:
        """Run steps like the measured ones on other prompts; then forget everything."""
        rng, work = Random(99), self.work
        prompts = [self.random_ids(rng, work.history) for _ in range(min(4, work.at_once))]
        for _ in range(2):
            turn = self.ask(prompts, work.output)
            self.push_out()
            prompts = [
                [*prompt, *answer, *self.random_ids(rng, work.new)]
                for prompt, answer in zip(prompts, turn.answers, strict=True)
            ]
        self.engine.clear_cache()

    def push_out(self) -> None:
        """Evict everything from the device, as other requests would: only lower tiers have it."""
        self.engine.flush()
        self.engine.clear_device()


def measure_turns(bench: Bench, tier: str) -> Iterator[dict[str, object]]:
    """A line a turn."""
    work = bench.work
    bench.warm_up()
    rng = Random(0)
    histories = [bench.random_ids(rng, work.history) for _ in range(work.sessions)]
    for number in range(1, work.turns + 1):
        before = dict(bench.counters.loaded_pages)
        turn = Turn([], [], [])
        began_s = perf_counter()
        for first in range(0, work.sessions, work.at_once):
            batch = bench.ask(histories[first : first + work.at_once], work.output)
            turn.first_s += batch.first_s
            turn.answers += batch.answers
            turn.cached += batch.cached
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


def _turn_result(turn: Turn, tier: str, number: int, seconds: float) -> dict[str, object]:
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


def measure_preload(bench: Bench, repeats: int = 8) -> Iterator[dict[str, object]]:
    """First token of a single returning session for each size of the read buffer."""
    bench.warm_up()
    work, rng = bench.work, Random(1)
    histories = [bench.random_ids(rng, work.history) for _ in range(repeats)]
    bench.ask(histories, 1)
    modes = ["all", "0", "5", "10", "15", "auto"]
    for mode in modes:
        store = replace(bench.config.store, preload=mode, fetch=Fetch.ALWAYS)
        bench.engine.fetch_as(store)
        times = []
        for history in histories:
            bench.push_out()
            new = bench.random_ids(rng, work.new)
            times.append(bench.ask([[*history, *new]], 1).first_s[0])
        yield {
            "part": "preload",
            "layers": mode,
            "median_ttft_ms": round(1e3 * float(np.median(times)), 3),
            "min_ttft_ms": round(1e3 * min(times), 3),
            "settings": settings(bench.config),
        }
    bench.engine.fetch_as(bench.config.store)


def measure_saves(bench: Bench) -> Iterator[dict[str, object]]:
    """Decode steps of one batch; now and then a prompt comes by whose pages are saved meanwhile."""
    bench.warm_up()
    work, rng = bench.work, Random(2)
    visitor_tokens = 2 * work.history
    count = max(2, (work.device_tokens - visitor_tokens) // (work.history + 200) - 1)
    steps: list[StepFinished] = []
    bench.engine.bus.subscribe(StepFinished, steps.append)
    saved_before = bench.counters.saved_pages["host"]

    def submit(name: str, num_tokens: int, output: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        ids = np.array(bench.random_ids(rng, num_tokens), np.int32)
        bench.engine.submit(Request(RequestId(name), ids, sampling, expected_tokens=output))

    for index in range(count):
        submit(f"decodes-{index}", work.history, SAVE_STEPS)
    saving: list[float] = []  # seconds of steps that ran while the prompt before them was saved
    others: list[float] = []
    while bench.engine.has_work:
        num_seen = len(steps)
        bench.engine.step()
        for before, step in pairwise(steps[max(0, num_seen - 1) :]):
            if step.num_prompt_tokens or step.num_seqs != count:
                continue
            (saving if before.num_prompt_tokens else others).append(step.device_s)
            if not before.num_prompt_tokens and len(others) % VISIT_EVERY == 0:
                submit(f"visits-{len(others)}", visitor_tokens, 1)
    saving_s, others_s = (float(np.mean(found)) if found else 0.0 for found in (saving, others))
    yield {
        "part": "saves",
        "batch": count,
        "saved_pages": bench.counters.saved_pages["host"] - saved_before,
        "pages_a_save": visitor_tokens // bench.config.cache.page_size,
        "steps_saving": len(saving),
        "step_ms_saving": round(1e3 * saving_s, 3),
        "steps_not_saving": len(others),
        "step_ms_not_saving": round(1e3 * others_s, 3),
        "throughput_cost": round(1 - others_s / saving_s, 4) if saving and others else None,
        "settings": settings(bench.config),
    }


def measure_document(bench: Bench, num_tokens: int) -> Iterator[dict[str, object]]:
    """A document is asked about, pushed out of the device, and asked about again."""
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
