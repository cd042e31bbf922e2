"""Counts what the server does, and renders it as Prometheus text; docs/metrics.md explains each
series.

Events come from the engine, timings and snapshots from the server; `render` may be called on any
thread. If vLLM has a series with the same meaning, its name is used, so that dashboards and routers
for vLLM work; the other names begin with `mainstem:`.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from time import monotonic
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mainstem.core import events
from mainstem.core.metrics import Counters
from mainstem.core.request import FinishReason
from mainstem.core.snapshot import EngineSnapshot
from mainstem.server.link.answering import OpenRequest
from mainstem.server.link.engine_client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMMON_LABELS = ("model_name", "engine")

# Bucket bounds are vLLM's, so that a quantile over both kinds of server is meaningful.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REQUEST_TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_TOKEN_BUCKETS = (1.0, *(float(2**e) for e in range(3, 15)))

COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:prompt_tokens": "Prompt tokens of admitted sequences, including cached ones.",
    "vllm:prompt_tokens_cached": "Prompt tokens that were not computed.",
    "vllm:generation_tokens": "Tokens of finished answers.",
    "vllm:num_preemptions": "Times a running sequence gave its pages back to make room.",
    "mainstem:requests": "Requests submitted to the engine.",
    "mainstem:steps": "Forward passes.",
    "mainstem:spans": "Attention spans of all steps.",
    "mainstem:computed_tokens": "Tokens that went through the model in prefill.",
    "mainstem:decoded_tokens": "Tokens that went through the model one by one.",
    "mainstem:recomputed_tokens": "Tokens computed again after a preemption.",
    "mainstem:key_tokens_read": "Keys read by attention, a shared run once for all its readers.",
    "mainstem:key_tokens_saved": "Keys that were not read again because readers share a span.",
    "mainstem:damaged_stores": "Disk stores that were opened with pages lost.",
    "mainstem:prefetched_pages": "Pages read from disk or a shared server into host memory, for "
    "waiting requests.",
    "mainstem:truncated_prompts": "Prompts that were longer than the context window.",
    "mainstem:dropped_tokens": "Tokens that truncated prompts lost.",
    "mainstem:moved_pages": "Pages kept through a truncation and rotated to new positions.",
    "mainstem:states_read": "States of recurrent layers read, one of siblings once for them all.",
    "mainstem:states_saved": "States that were not read again because siblings read one together.",
    "mainstem:rows_folded": "Tokens that siblings kept beside a state until they wrote their own.",
    "mainstem:evicted_states": "States of recurrent layers that left the device for others.",
    "mainstem:refused_states": "Times that no slot was free for a state of recurrent layers.",
    "mainstem:lost_window_tokens": "Cached tokens computed again: their windows had to make room.",
    "mainstem:engine_restarts": "Times that the engine's process ended and was started again.",
    "mainstem:host_seconds": "Seconds of scheduling and input building.",
    "mainstem:device_seconds": "Seconds from a step's launch to its result.",
}
# the fields of Counters with these totals; the others have the name of their series
FIELDS = {
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:prompt_tokens_cached": "cached_tokens",
    "vllm:generation_tokens": "generated_tokens",
    "vllm:num_preemptions": "preemptions",
    "mainstem:host_seconds": "host_s",
    "mainstem:device_seconds": "device_s",
}
RESTARTS = "mainstem:engine_restarts"
LABELLED_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "vllm:request_success": (("finished_reason",), "Finished answers."),
    "mainstem:evicted_pages": (("reason", "tier"), "Cached pages that were evicted."),
    "mainstem:loaded_pages": (
        ("tier",),
        "Pages that requests waited for, by tier.",
    ),
    "mainstem:load_seconds": (
        ("tier",),
        "Seconds of all loads, by the slowest tier of each; loads overlap.",
    ),
    "mainstem:saved_pages": (("tier",), "Pages copied to a lower tier."),
    "mainstem:unsaved_pages": (("reason", "tier"), "Pages that were not copied to a lower tier."),
    "mainstem:lost_pages": (("reason", "tier"), "Pages that a tier has lost or damaged."),
    "mainstem:http_responses": (("code",), "HTTP answers by status."),
}
GAUGES = {
    "vllm:num_requests_running": "Sequences that hold pages and are being answered.",
    "vllm:num_requests_waiting": "Sequences waiting to start.",
    "vllm:kv_cache_usage_perc": "Share of pages held by running sequences; 1 is all.",
    "mainstem:pages": "Device pages in all.",
    "mainstem:held_pages": "Pages held by running sequences.",
    "mainstem:window_parts": "Windowed parts of pages, if they have a pool of their own; or 0.",
    "mainstem:held_window_parts": "Windowed parts that running sequences and copies need.",
    "mainstem:cached_pages": "Pages in the prefix cache, whether sequences hold them or not.",
    "mainstem:states": "Slots for states of recurrent layers.",
    "mainstem:held_states": "States of recurrent layers that running sequences hold.",
    "mainstem:kept_states": "States of recurrent layers that later requests can start from.",
    "mainstem:host_pages": "Pages in host memory, including those that are also on the device.",
    "mainstem:disk_pages": "Pages on disk.",
    "mainstem:host_bytes": "Bytes of K and V in host memory.",
    "mainstem:disk_bytes": "Bytes of K and V on disk.",
    "mainstem:page_size_tokens": "Token slots of a page.",
    "mainstem:shared_runs": "Runs of tokens that two or more running sequences share.",
    "mainstem:unfinished_prompts": "Prompts that the running step does not complete.",
    "mainstem:unfinished_prompt_tokens": "Computed or cached tokens of unfinished prompts.",
    "mainstem:step_tokens": "Tokens of a step that has been running for a while; 0: there is none.",
    "mainstem:step_seconds": "Seconds that the step of mainstem:step_tokens has been running.",
    "mainstem:sessions": "Sessions that are kept.",
    "mainstem:session_tokens": "Tokens of the sessions that are kept.",
}
COUNTED = (  # gauges that are counts in a snapshot
    "pages", "held_pages", "window_parts", "held_window_parts", "cached_pages", "host_pages",
    "disk_pages", "states", "held_states", "kept_states",
)  # fmt: skip
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (TTFT_BUCKETS_S, "Arrival to first token."),
    "vllm:inter_token_latency_seconds": (INTER_TOKEN_BUCKETS_S, "Token to next token."),
    "vllm:e2e_request_latency_seconds": (REQUEST_BUCKETS_S, "Arrival to last token."),
    "vllm:request_queue_time_seconds": (REQUEST_BUCKETS_S, "Arrival to admission."),
    "vllm:request_prompt_tokens": (REQUEST_TOKEN_BUCKETS, "Prompt length of a sequence."),
    "vllm:request_generation_tokens": (REQUEST_TOKEN_BUCKETS, "Length of an answer."),
    "vllm:iteration_tokens_total": (STEP_TOKEN_BUCKETS, "Tokens of a step."),
}


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    # one count for each bound, and one for values above the last bound
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """The observations up to each bound, and their sum."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True)), self.total


class ServerMetrics(Collector):
    """Counts what happened since it was attached to a bus. Every method may be called on any
    thread.

    Totals are in `counters`; values by label and distributions, which `counters` does not have, are
    counted here. One lock guards all values, so a rendered page shows one moment. Listeners only
    add numbers and never wait for text to be rendered.
    """

    def __init__(self, bus: events.EventBus, model_name: str = "mainstem") -> None:
        self._common = (model_name, "0")
        self._lock = Lock()
        self._num_restarts = 0
        self.counters = Counters()
        self._labelled: dict[str, dict[tuple[str, ...], float]] = {
            name: defaultdict(int) for name in LABELLED_COUNTERS
        }
        self._labelled["vllm:request_success"].update(((r.value,), 0) for r in FinishReason)
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._listen(bus)
        self._registry = CollectorRegistry()  # not the global one: a process may have two servers
        self._registry.register(self)

    def _listen(self, bus: events.EventBus) -> None:
        """Count events atomically, so that a rendered page never shows a part of one."""
        within = events.EventBus()
        self.counters.attach(within)
        within.subscribe(events.SequenceAdmitted, self._admitted)
        within.subscribe(events.SequenceFinished, self._finished)
        within.subscribe(events.PagesEvicted, partial(self._count_pages, "evicted"))
        within.subscribe(events.PagesLoaded, self._loaded)
        within.subscribe(events.SavesSkipped, partial(self._count_pages, "unsaved"))
        within.subscribe(events.PagesLost, partial(self._count_pages, "lost"))
        within.subscribe(events.StoreOpened, self._opened)
        within.subscribe(events.StepFinished, self._stepped)

        def take(event: events.Event) -> None:
            with self._lock:
                within.publish(event)

        for kind in get_args(events.Event):
            if within.has_listeners(kind):
                bus.subscribe(kind, take)

    def observe_ended(self, opened: OpenRequest) -> None:
        """Count a prompt that has ended, whether it was answered or not: its times as its client
        saw them."""
        began_s, token_s = opened.began_s, opened.token_s
        with self._lock:
            histograms = self._histograms
            if opened.admitted_s is not None:
                histograms["vllm:request_queue_time_seconds"].observe(opened.admitted_s - began_s)
            if token_s:
                histograms["vllm:time_to_first_token_seconds"].observe(token_s[0] - began_s)
            for before_s, after_s in pairwise(token_s):
                histograms["vllm:inter_token_latency_seconds"].observe(after_s - before_s)
            total_s = (opened.ended_s or monotonic()) - began_s
            histograms["vllm:e2e_request_latency_seconds"].observe(total_s)

    def observe_engine(self, engine: EngineClient) -> None:
        """Set the gauges to what runs now, including the step during which the snapshot was
        taken."""
        self.observe_snapshot(engine.snapshot)
        step = engine.step
        with self._lock:
            self._num_restarts = engine.num_restarts
            self._gauges["vllm:num_requests_waiting"] += engine.num_unheard
            self._gauges |= {
                "mainstem:step_tokens": 0 if step is None else step.num_tokens,
                "mainstem:step_seconds": 0.0 if step is None else monotonic() - step.began_s,
            }

    def observe_snapshot(self, snapshot: EngineSnapshot) -> None:
        """Set the gauges to the state in the snapshot."""
        num_read = sum(prompt.num_computed for prompt in snapshot.prompts)
        with self._lock:
            self._gauges |= {
                "vllm:num_requests_running": snapshot.num_running,
                "vllm:num_requests_waiting": snapshot.num_waiting,
                "mainstem:unfinished_prompts": len(snapshot.prompts),
                "mainstem:unfinished_prompt_tokens": num_read,
                "vllm:kv_cache_usage_perc": snapshot.num_held_pages / max(1, snapshot.num_pages),
                **{f"mainstem:{each}": getattr(snapshot, f"num_{each}") for each in COUNTED},
                "mainstem:host_bytes": snapshot.num_host_pages * snapshot.stored_page_bytes,
                "mainstem:disk_bytes": snapshot.num_disk_pages * snapshot.stored_page_bytes,
                "mainstem:page_size_tokens": snapshot.page_size,
                "mainstem:shared_runs": len(snapshot.stems),
            }

    def observe_sessions(self, num_sessions: int, num_tokens: int) -> None:
        """Set the gauges of sessions."""
        with self._lock:
            self._gauges |= {
                "mainstem:sessions": num_sessions,
                "mainstem:session_tokens": num_tokens,
            }

    def observe_response(self, status: int) -> None:
        """Count an HTTP answer by its status code."""
        with self._lock:
            self._labelled["mainstem:http_responses"][str(status),] += 1

    def render(self) -> str:
        """Return everything in Prometheus' text format; serve it as CONTENT_TYPE."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield every series at one moment; `self._registry` calls this."""
        with self._lock:
            totals = self._totals()
            labelled = {name: dict(values) for name, values in self._labelled.items()}
            labelled["mainstem:loaded_pages"] = _by_tier(self.counters.loaded_pages)
            labelled["mainstem:saved_pages"] = _by_tier(self.counters.saved_pages)
            gauges = dict(self._gauges)
            histograms = {name: found.cumulative() for name, found in self._histograms.items()}
        for name, help_text in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=COMMON_LABELS)
            gauge.add_metric(self._common, gauges[name])
            yield gauge
        for name, help_text in COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=COMMON_LABELS)
            counter.add_metric(self._common, totals[name])
            yield counter
        for name, (labels, help_text) in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=(*COMMON_LABELS, *labels))
            for values, total in labelled[name].items():
                counter.add_metric((*self._common, *values), total)
            yield counter
        for name, (_, help_text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, help_text, labels=COMMON_LABELS)
            histogram.add_metric(self._common, *histograms[name])
            yield histogram

    def _totals(self) -> dict[str, float]:
        fields = {name: FIELDS.get(name, name.partition(":")[2]) for name in COUNTERS}
        del fields[RESTARTS]
        totals = {name: getattr(self.counters, field) for name, field in fields.items()}
        return totals | {RESTARTS: self._num_restarts}

    # --- listeners, under the lock ---------------------------------------------------------------

    def _admitted(self, event: events.SequenceAdmitted) -> None:
        self._histograms["vllm:request_prompt_tokens"].observe(event.prompt_tokens)

    def _finished(self, event: events.SequenceFinished) -> None:
        self._labelled["vllm:request_success"][event.reason.value,] += 1
        self._histograms["vllm:request_generation_tokens"].observe(event.output_tokens)

    def _count_pages(
        self, fate: str, event: events.PagesEvicted | events.SavesSkipped | events.PagesLost
    ) -> None:
        self._labelled[f"mainstem:{fate}_pages"][event.reason, event.tier] += event.num_pages

    def _loaded(self, event: events.PagesLoaded) -> None:
        self._labelled["mainstem:load_seconds"][event.tier,] += event.seconds

    def _opened(self, event: events.StoreOpened) -> None:
        for reason, count in event.lost.items():
            self._labelled["mainstem:lost_pages"][reason, "disk"] += count

    def _stepped(self, event: events.StepFinished) -> None:
        self._histograms["vllm:iteration_tokens_total"].observe(event.num_tokens)


def _by_tier(totals: dict[str, int]) -> dict[tuple[str, ...], float]:
    return {(tier,): number for tier, number in totals.items()}
