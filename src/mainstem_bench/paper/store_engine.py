"""AttentionStore on a device: prefill and decode (Fig. 1), turns of a conversation (Fig. 4),
loading against computing (Fig. 18), the read buffer (Fig. 19), saving (Fig. 20), policies in the
engine (Fig. 21), long documents (Fig. 25 and 26).

Random weights. "The store" is host memory; pages are pushed out of the device before each question.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from random import Random
from statistics import median
from time import perf_counter

import numpy as np

from mainstem.core.config import (
    CacheConfig,
    EngineConfig,
    Fetch,
    ModelConfig,
    Saving,
    StoreConfig,
)
from mainstem.engine.build import with_chunk
from mainstem_bench.paper.item import Line, Settings
from mainstem_bench.paper.lengths import sharegpt_turns
from mainstem_bench.policies import (
    ENGINE_POLICIES,
    StoreSessions,
    Turns,
    made_up,
    measure,
    with_room,
)
from mainstem_bench.session_engine import ReturningSessions, SessionEngine
from mainstem_bench.shapes import SHAPES

REPEATS = 3
# read buffers, in layers; all: a sequence starts when all its layers are loaded
LAYERS = ("all", "0", "5", "10", "15", "auto")
TENTHS = (5, 6, 7, 8, 9)  # of 1,000 tokens that are history
TURNS = (1, 2, 4, 8, 12, 16, 24, 32)
MISTRAL = "llama31-8b"  # the layers have the shape of Mistral-7B's, without its sliding window
LLAMA_13B = "llama2-13b"


@contextmanager
def bench_with_store(
    settings: Settings,
    shape: str,
    device_tokens: int,
    host_gb: float,
    history: int,
    save: Saving = Saving.DECODING,
) -> Iterator[SessionEngine]:
    """An engine with host memory below the device, warmed up on histories of `history` tokens."""
    settings.engines.close()  # the device holds one model at a time
    if settings.is_quick:
        shape, device_tokens, host_gb, history = "tiny", 4096, 0.1, 64
    work = ReturningSessions(
        shape, history=history, output=4, at_once=4, device_tokens=device_tokens
    )
    config = with_chunk(
        EngineConfig(
            model=ModelConfig(model=shape),
            cache=CacheConfig(kv_tokens=device_tokens),
            store=StoreConfig(host_gb=host_gb, save=save),
        ),
        SHAPES[shape],
    )
    with SessionEngine(work, config) as bench:
        bench.warm_up()
        yield bench


def _spread(times: Sequence[float]) -> dict[str, object]:
    ms = [round(1e3 * seconds, 3) for seconds in times]
    return {"ms": round(median(ms), 3), "spread": [min(ms), max(ms)], "num_runs": len(ms)}


def _first_token_s(bench: SessionEngine, prompts: Sequence[list[int]], history: int = 0) -> float:
    """Seconds until every prompt of a batch has its first token. Asserts that the whole pages of
    `history` tokens were cached, and no page more."""
    turn = bench.ask(prompts, 1)
    page = bench.config.cache.page_size
    whole = history - history % page
    # random prompts that begin with the same tokens share these, but never a page of them
    assert all(whole <= found < history + page for found in turn.cached), (whole, turn.cached)
    return max(turn.first_s)


def run_phases(settings: Settings) -> Iterator[Line]:
    """Fig. 1: 8 prompts at once, then their decode steps."""
    lengths = (32, 64) if settings.is_quick else (256, 512, 1024, 2048, 4096)
    steps = 4 if settings.is_quick else 16
    with bench_with_store(settings, MISTRAL, 48_000, 0.0, 512) as bench:
        rng = Random(0)
        for tokens in lengths:
            prefills, decodes = [], []
            for _ in range(REPEATS):
                prompts = [bench.random_ids(rng, tokens) for _ in range(8)]
                began_s = perf_counter()
                turn = bench.ask(prompts, 1 + steps)
                prefills.append(max(turn.first_s))
                decodes.append((perf_counter() - began_s - max(turn.first_s)) / steps)
                bench.engine.clear_cache()
            for phase, times in (("prefill", prefills), ("decode step", decodes)):
                yield {"phase": phase, "tokens": tokens, "batch": 8, **_spread(times)}


def turn_lengths(turn: int) -> tuple[float, float, int]:
    """Mean history tokens, mean new tokens and number of conversations at ShareGPT's turn `turn`,
    counted from 1."""
    found = [
        (sum(user + answer for user, answer in turns[: turn - 1]), turns[turn - 1][0])
        for turns in sharegpt_turns()
        if len(turns) >= turn
    ]
    history, new = np.array(found).mean(0)
    return float(history), float(new), len(found)


def run_turns(settings: Settings) -> Iterator[Line]:
    """Fig. 4: times to compute a turn's whole prompt, and only its new tokens; prompts have mean
    lengths."""
    with bench_with_store(settings, MISTRAL, 48_000, 0.0, 512) as bench:
        rng = Random(0)
        for turn in TURNS[:3] if settings.is_quick else TURNS:
            history, new, count = turn_lengths(turn)
            scale = 0.1 if settings.is_quick else 1.0
            sizes = [max(1, round(scale * tokens)) for tokens in (history, new)]
            whole, only_new = [], []
            for _ in range(REPEATS):
                past, fresh = (bench.random_ids(rng, tokens) for tokens in sizes)
                whole.append(_first_token_s(bench, [[*past, *fresh]]))
                bench.engine.clear_cache()
                bench.ask([past], 1)
                only_new.append(_first_token_s(bench, [[*past, *fresh]], len(past)))
                bench.engine.clear_cache()
            yield {
                "turn": turn, "conversations": count, "history": round(history, 1),
                "new": round(new, 1), "all_ms": _spread(whole)["ms"],
                "new_ms": _spread(only_new)["ms"], "all_spread": _spread(whole)["spread"],
                "new_spread": _spread(only_new)["spread"],
            }  # fmt: skip


def run_loading(settings: Settings) -> Iterator[Line]:
    """Fig. 18: 1,000 tokens of each of 16 sequences are computed, or a part of them is loaded."""
    batch, total = (2, 100) if settings.is_quick else (16, 1000)
    with bench_with_store(settings, LLAMA_13B, 24_000, 24.0, 500) as bench:
        rng = Random(0)
        for tenths in TENTHS:
            past = total * tenths // 10
            times: dict[str, list[float]] = {"recompute": [], "load first": [], "by layers": []}
            for _ in range(REPEATS):
                histories = [bench.random_ids(rng, past) for _ in range(batch)]
                prompts = [[*ids, *bench.random_ids(rng, total - past)] for ids in histories]
                times["recompute"].append(_first_token_s(bench, prompts))
                bench.engine.clear_cache()
                bench.ask(histories, 1)
                for way, layers in (("load first", "all"), ("by layers", "auto")):
                    _load_by(bench, layers)
                    bench.push_out()
                    fresh = [[*ids, *bench.random_ids(rng, total - past)] for ids in histories]
                    times[way].append(_first_token_s(bench, fresh, past))
                bench.engine.clear_cache()
            for way, found in times.items():
                about = {"history": past, "new": total - past, "batch": batch, "way": way}
                yield about | _spread(found)


def run_buffers(settings: Settings) -> Iterator[Line]:
    """Fig. 19: 16 sequences load 1,000 tokens each, and have 100 new tokens each."""
    batch, past, new = (2, 64, 8) if settings.is_quick else (16, 1000, 100)
    with bench_with_store(settings, LLAMA_13B, 24_000, 24.0, 500) as bench:
        rng = Random(0)
        histories = [bench.random_ids(rng, past) for _ in range(batch)]
        bench.ask(histories, 1)
        for layers in LAYERS:
            _load_by(bench, layers)
            times = []
            for _ in range(REPEATS + 1):  # the first run is the warm-up
                bench.push_out()
                prompts = [[*ids, *bench.random_ids(rng, new)] for ids in histories]
                times.append(_first_token_s(bench, prompts, past))
            yield {"layers": layers, "history": past, "new": new, "batch": batch} | _spread(
                times[1:]
            )


def run_saving(settings: Settings) -> Iterator[Line]:
    """Fig. 20: time for 16 prompts and 20 decode steps until all pages are saved."""
    batch, steps = (2, 4) if settings.is_quick else (16, 20)
    for save in (Saving.SYNC, Saving.DECODING):
        with bench_with_store(settings, LLAMA_13B, 28_000, 24.0, 500, save) as bench:
            rng = Random(0)
            for tokens in (40, 60) if settings.is_quick else (1000, 1200, 1400, 1600):
                times, saved = [], bench.counters.saved_pages["host"]
                for _ in range(REPEATS):
                    prompts = [bench.random_ids(rng, tokens) for _ in range(batch)]
                    began_s = perf_counter()
                    bench.ask(prompts, steps)
                    bench.engine.flush()
                    times.append(perf_counter() - began_s)
                    bench.engine.clear_cache()
                num_saved = bench.counters.saved_pages["host"] - saved
                yield {
                    "save": save.value, "prompt": tokens, "batch": batch, "steps": steps,
                    "saved_pages": num_saved, "unsaved_pages": dict(bench.counters.unsaved_pages),
                    **_spread(times),
                }  # fmt: skip


def run_policies(settings: Settings) -> Iterator[Line]:
    """Fig. 21 in the engine: the same arrivals with each policy, in a disk folder that is empty at
    first."""
    settings.engines.close()
    shape, work, room = MISTRAL, Turns(32, 3, 2000, 100, 32, rate=40.0), StoreSessions(6, 12, 40)
    if settings.is_quick:
        shape, work, room = "tiny", Turns(6, 2, 64, 16, 4, rate=100.0), StoreSessions(2, 3, 8)
    spec = SHAPES[shape]
    arrivals = made_up(work, spec.vocab_size)
    config = with_chunk(EngineConfig(model=ModelConfig(model=shape)), spec)
    config = with_room(config, spec, arrivals, room)
    for number in range(1 if settings.is_quick else REPEATS):
        for policy in ENGINE_POLICIES:
            found = measure(config, None, policy, arrivals)
            about = {"policy": policy, "run": number, "room": room._asdict()}
            yield about | asdict(work) | found


def _load_by(bench: SessionEngine, layers: str) -> None:
    """Make an engine always load what is stored, with a read buffer of `layers`."""
    bench.engine.change_store(replace(bench.config.store, preload=layers, fetch=Fetch.ALWAYS))


def run_documents(settings: Settings) -> Iterator[Line]:
    """Fig. 25 and 26, measured once for both."""
    yield from settings.once("documents", lambda: _documents(settings))


def _documents(settings: Settings) -> Iterator[Line]:
    """Tasks about one document, one at a time: each has 256 tokens and an answer of 64."""
    new, answer, tasks = (8, 4, 2) if settings.is_quick else (256, 64, 4)
    lengths = (64, 128) if settings.is_quick else (4_000, 12_000, 20_000, 28_000)
    with bench_with_store(settings, MISTRAL, 48_000, 8.0, 2000) as bench:
        rng = Random(0)
        for tokens in lengths:
            document = bench.random_ids(rng, tokens)
            for way in ("recompute", "store"):
                prompt = [*document, *bench.random_ids(rng, new)]
                prompt += bench.ask([prompt], answer).answers[0]
                firsts, totals = [], []
                for _ in range(tasks):
                    if way == "store":
                        bench.push_out()
                    else:
                        bench.engine.clear_cache()
                    prompt += bench.random_ids(rng, new)
                    began_s = perf_counter()
                    turn = bench.ask([prompt], answer)
                    totals.append(perf_counter() - began_s)
                    firsts.append(turn.first_s[0])
                    prompt += turn.answers[0]
                first_s, total_s = median(firsts), median(totals)
                yield {
                    "document": tokens, "way": way, "tasks": tasks,
                    "ttft_ms": round(1e3 * first_s, 2),
                    "spread": [round(1e3 * t, 2) for t in (min(firsts), max(firsts))],
                    "task_ms": round(1e3 * total_s, 2),
                    "prefill_share": round(first_s / total_s, 4),
                    "prefill_tokens_per_s": round((tokens + new) / first_s),
                    "answer_tokens_per_s": round(answer / total_s, 1),
                }  # fmt: skip
                bench.engine.clear_cache()
