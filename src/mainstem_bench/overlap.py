"""Measures how much loading and saving pages delays the running steps (AttentionStore 4.3.2)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from time import perf_counter

import numpy as np
import torch

from mainstem.core.config import Fetch, Saving
from mainstem.core.events import PagesLoaded, StepFinished
from mainstem.core.ids import RequestId
from mainstem.runner.copy_engine import PitchedRows
from mainstem.runner.gates import LAYERS_AT_ONCE
from mainstem_bench.feed import greedy_request
from mainstem_bench.session_engine import SessionEngine
from mainstem_bench.settings import kv_token_bytes, settings
from mainstem_simulate.service import GB

SAVE_STEPS = 200  # decode steps of a batch while pages of other requests are saved
VISIT_EVERY = 8  # steps between two prompts of other requests
# sizes of the read buffer: layers that are loaded before a prompt starts
BUFFERS = ("all", "0", "5", "10", "15", "auto")
BATCH = 16  # as in the paper
HIDING = ("all", "auto")  # of the BUFFERS
JOB_HISTORIES = 4
JOB_TOKENS = 400  # maximum tokens of an answer of the running job
JOB_STEPS = 4  # steps of the job before sessions return
ROUNDS = 4  # rounds of returning sessions; the first does not count
# sessions that return at once, and the new tokens of each in tenths of its history
RETURNS = ((1, 1), (1, 4), (1, 8), (4, 4), (16, 4))
JOBS, REPEATS = 2, 2  # jobs one after the other, whose pages are saved; how often this is timed
SHORT, LONG = 20, 200  # tokens of the jobs' answers; the paper has 20


def measure_preload(bench: SessionEngine, repeats: int = 8) -> Iterator[dict[str, object]]:
    """Measure the time to the first token of a single returning session for each size of the read
    buffer."""
    bench.warm_up()
    work, rng = bench.work, Random(1)
    histories = [bench.random_ids(rng, work.history) for _ in range(repeats)]
    bench.ask(histories, 1)
    for mode in BUFFERS:
        store = replace(bench.config.store, preload=mode, fetch=Fetch.ALWAYS)
        bench.engine.change_store(store)
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
    bench.engine.change_store(bench.config.store)


def measure_saves(bench: SessionEngine) -> Iterator[dict[str, object]]:
    """Measure decode steps of one batch. From time to time another prompt arrives, whose pages are
    saved during the steps."""
    bench.warm_up()
    work, rng = bench.work, Random(2)
    visitor_tokens = 2 * work.history
    count = max(2, (work.device_tokens - visitor_tokens) // (work.history + 200) - 1)
    steps: list[StepFinished] = []
    bench.engine.bus.subscribe(StepFinished, steps.append)
    saved_before = bench.counters.saved_pages["host"]

    def submit(name: str, num_tokens: int, output: int) -> None:
        bench.engine.submit(greedy_request(name, bench.random_ids(rng, num_tokens), output))

    for index in range(count):
        submit(f"decodes-{index}", work.history, SAVE_STEPS)
    saving: list[float] = []  # seconds of steps during which the latest prompt was saved
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


def measure_busy(bench: SessionEngine) -> Iterator[dict[str, object]]:
    """Measure, for each size of the read buffer, the time to the first token of a batch of sessions
    that returns while a job decodes, and how long the job's tokens are delayed."""
    bench.warm_up()
    work, rng = bench.work, Random(4)
    count = min(BATCH, work.at_once)
    length = work.history // 2
    histories = [bench.random_ids(rng, length) for _ in range(count)]
    bench.ask(histories, 1)
    room = work.device_tokens // count - 2 * length - work.new - bench.config.cache.page_size
    for mode in BUFFERS:
        store = replace(bench.config.store, preload=mode, fetch=Fetch.ALWAYS)
        bench.engine.change_store(store)
        job = [bench.random_ids(rng, length) for _ in range(count)]
        with _running(bench, job, min(JOB_TOKENS, room)):
            rounds = [
                _return_behind(bench, histories, rng, f"{mode}-{number}")
                for number in range(ROUNDS)
            ]
        first_s = [each for found, _ in rounds[1:] for each in found]  # the first round compiles
        gaps = [each for _, held_up in rounds[1:] for each in held_up]
        yield {
            "part": "busy",
            "layers": mode,
            "layers_at_once": LAYERS_AT_ONCE,
            "batch": count,
            "mean_ttft_ms": round(1e3 * float(np.mean(first_s)), 2),
            "max_ttft_ms": round(1e3 * max(first_s), 2),
            "job_gap_ms": round(1e3 * float(np.mean(gaps)), 2),
            "job_gap_ms_max": round(1e3 * max(gaps), 2),
            "settings": settings(bench.config),
        }
    bench.engine.change_store(bench.config.store)


def measure_hidden(bench: SessionEngine) -> Iterator[dict[str, object]]:
    """Measure how much of a load is hidden. Sessions return at once, and the last of them has its
    first token after `ms`: while their histories are on the device, or are loaded in each way.
    `max_ms` is the longer of the load and of computing alone, `sum_ms` is both. `behind`: the same
    while a step with a prompt as long as JOB_HISTORIES histories runs."""
    bench.warm_up()
    work, rng = bench.work, Random(6)
    page = bench.config.cache.page_size
    histories = [bench.random_ids(rng, work.history) for _ in range(min(BATCH, work.at_once))]
    bench.ask(histories, 1)
    bench.engine.flush()
    load_gb_per_s = _link_gb_per_s(bench, histories)
    history_gb = work.history // page * page * kv_token_bytes(bench.config) / GB
    for count, tenths in RETURNS:
        if count > len(histories):
            continue
        new = max(1, tenths * work.history // 10)
        load_ms = 1e3 * count * history_gb / load_gb_per_s
        for is_behind in (False, True):
            found = {
                mode: _median_ms(bench, histories[:count], new, mode, rng, is_behind)
                for mode in (None, *HIDING)
            }
            compute_ms = found.pop(None)
            longer_ms = max(load_ms, compute_ms)
            for mode, ms in found.items():
                yield {
                    "part": "hidden",
                    "behind": is_behind,
                    "sessions": count,
                    "history": work.history,
                    "new": new,
                    "layers": mode,
                    "layers_at_once": LAYERS_AT_ONCE,
                    "ms": round(ms, 2),
                    "compute_ms": round(compute_ms, 2),
                    "load_ms": round(load_ms, 2),
                    "of_longer": round(ms / longer_ms, 3),
                    "of_sum": round(ms / (load_ms + compute_ms), 3),
                    "settings": settings(bench.config),
                }
    bench.engine.change_store(bench.config.store)


def _link_gb_per_s(bench: SessionEngine, histories: list[list[int]]) -> float:
    """The speed of loads of single histories."""
    rates: list[float] = []
    page_gb = bench.config.cache.page_size * kv_token_bytes(bench.config) / GB

    def note(event: PagesLoaded) -> None:
        if event.seconds:
            rates.append(event.num_pages * page_gb / event.seconds)

    store = replace(bench.config.store, preload="all", fetch=Fetch.ALWAYS)
    bench.engine.change_store(store)
    with bench.engine.bus.guests():
        bench.engine.bus.subscribe(PagesLoaded, note)
        for history in histories[:ROUNDS]:
            bench.push_out()
            bench.ask([history], 1)
    return float(np.median(rates))


def _median_ms(
    bench: SessionEngine,
    histories: list[list[int]],
    new: int,
    layers: str | None,
    rng: Random,
    is_behind: bool,
) -> float:
    """The time until all sessions have a first token. None: their histories are on the device."""
    engine, page = bench.engine, bench.config.cache.page_size
    if layers is not None:
        store = replace(bench.config.store, preload=layers, fetch=Fetch.ALWAYS)
        engine.change_store(store)
    times = []
    for number in range(ROUNDS):
        bench.ask(histories, 1)
        engine.flush()
        if layers is not None:
            engine.clear_device()
        if is_behind:
            job = bench.random_ids(rng, JOB_HISTORIES * bench.work.history)
            engine.submit(greedy_request(f"job-{layers}-{number}", job, 1))
            engine.step()
        prompts = [[*history, *bench.random_ids(rng, new)] for history in histories]
        times.append(_all_first_s(bench, prompts, len(histories[0]) // page * page))
        while engine.has_work:
            engine.step()
    return 1e3 * float(np.median(times[1:]))  # the first round compiles


def _all_first_s(bench: SessionEngine, prompts: list[list[int]], least_cached: int) -> float:
    """Submit prompts together; return the seconds until all have a first token, beside the engine's
    other work."""
    engine, waiting = bench.engine, set[str]()
    began_s = perf_counter()
    for index, prompt in enumerate(prompts):
        waiting.add(f"returns-{index}")
        engine.submit(greedy_request(f"returns-{index}", prompt, 1))
    while waiting:
        for output in engine.step():
            if output.request_id in waiting:
                assert output.num_cached_tokens >= least_cached, output.num_cached_tokens
                waiting.discard(output.request_id)
    return perf_counter() - began_s


@contextmanager
def _running(bench: SessionEngine, prompts: list[list[int]], output: int) -> Iterator[None]:
    """Start a job that decodes in the background."""
    names = [f"job-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        bench.engine.submit(greedy_request(name, prompt, output))
    while bench.engine.num_waiting or bench.engine.snapshot().prompts:
        bench.engine.step()
    yield
    for name in names:
        bench.engine.abort(RequestId(name))
    while bench.engine.has_work:
        bench.engine.step()


def _return_behind(
    bench: SessionEngine, histories: list[list[int]], rng: Random, name: str
) -> tuple[list[float], list[float]]:
    """Return the seconds to the first token of each session, and between the job's tokens in that
    time."""
    engine = bench.engine
    engine.flush()
    engine.clear_device()
    for _ in range(JOB_STEPS):
        engine.step()
    prompts = [[*history, *bench.random_ids(rng, bench.work.new)] for history in histories]
    began_s = last_s = perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(greedy_request(f"{name}-{index}", prompt, 1))
    first_s: list[float] = []
    gaps: list[float] = []
    while len(first_s) < len(prompts):
        outputs = engine.step()
        now_s = perf_counter()
        is_job = [output.request_id.startswith("job") for output in outputs]
        first_s += [now_s - began_s] * is_job.count(False)
        if any(is_job):
            gaps.append(now_s - last_s)
            last_s = now_s
    return first_s, gaps


def measure_saving(bench: SessionEngine) -> Iterator[dict[str, object]]:
    """Measure jobs of a batch, one after the other, for each way of saving (the paper's
    Fig. 20)."""
    bench.warm_up()
    work, rng = bench.work, Random(5)
    count = min(BATCH, work.at_once)
    for share, output in ((0.5, SHORT), (0.8, SHORT), (0.5, min(LONG, 10 * work.output))):
        length = int(share * work.history)
        for saving in Saving:
            bench.engine.change_store(replace(bench.config.store, save=saving))
            seconds = []
            for _ in range(REPEATS):
                jobs = [[bench.random_ids(rng, length) for _ in range(count)] for _ in range(JOBS)]
                bench.push_out()
                before = bench.counters.saved_pages["host"]
                began_s = perf_counter()
                for job in jobs:
                    bench.ask(job, output)
                seconds.append(perf_counter() - began_s)
                bench.engine.flush()
            yield {
                "part": "saving",
                "save": saving.value,
                "batch": count,
                "prompt_tokens": length,
                "output": output,
                "jobs": JOBS,
                "min_s": round(min(seconds), 4),
                "max_s": round(max(seconds), 4),
                "saved_pages": bench.counters.saved_pages["host"] - before,
                "settings": settings(bench.config),
            }
    bench.engine.change_store(bench.config.store)


def measure_grain(bench: SessionEngine) -> Iterator[dict[str, object]]:
    """Compare ways to save a page to host memory: all layers in one copy, one copy per layer, or
    one copy per token and layer as an answer grows. Only with a GPU, whose copy engines do this."""
    if not torch.cuda.is_available():
        return
    shape, page_size = bench.shape, bench.config.cache.page_size
    num_pages, width = 64, shape.num_kv_heads * page_size * shape.head_dim * 2  # bytes of K in bf16
    halves = 2 * shape.num_layers
    device = torch.empty((halves, num_pages, width), dtype=torch.uint8, device="cuda")
    host = torch.empty((num_pages, halves, width), dtype=torch.uint8, pin_memory=True)
    head, row = page_size * shape.head_dim * 2, shape.head_dim * 2
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    handle = stream.cuda_stream
    ways = {
        "page": (PitchedRows(width, width, num_pages * width), halves, 1, halves),
        "layer": (PitchedRows(width, width, num_pages * width), 2, 1, halves),
        "token": (PitchedRows(row, head, head), shape.num_kv_heads, page_size, 1),
    }
    for name, (rows, height, num_tokens, at_once) in ways.items():
        step = height if at_once > 1 else 1
        for _ in range(2):  # the first time warms up
            torch.cuda.synchronize()
            began_s = perf_counter()
            for page in range(num_pages):
                for half in range(0, halves, step):
                    for token in range(num_tokens):
                        source = device.data_ptr() + (half * num_pages + page) * width + token * row
                        target = host.data_ptr() + (page * halves + half) * width + token * row
                        rows.to_host(source, target, height, handle)
            launched_s = perf_counter() - began_s
            torch.cuda.synchronize()
            seconds = perf_counter() - began_s
        yield {
            "part": "grain",
            "way": name,
            "copies_a_page": halves // step * num_tokens,
            "host_us_a_page": round(1e6 * launched_s / num_pages, 1),
            "us_a_page": round(1e6 * seconds / num_pages, 1),
            "gb_per_s": round(host.nbytes / seconds / 1e9, 2),
        }
