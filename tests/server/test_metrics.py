"""The server's metrics, read back with Prometheus' own parser."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

from prometheus_client.parser import text_string_to_metric_families

from mainstem.core.events import (
    E,
    EventBus,
    PagesEvicted,
    PagesLoaded,
    PagesLost,
    PagesMoved,
    PagesPrefetched,
    PagesSaved,
    PromptTruncated,
    RequestSubmitted,
    SavesSkipped,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    SequenceResumed,
    StepFinished,
    StoreOpened,
)
from mainstem.core.ids import RequestId
from mainstem.core.request import FinishReason, Overflow
from mainstem.core.snapshot import EngineSnapshot, StemView
from mainstem.server.link.answering import Answering
from mainstem.server.metrics import (
    COMMON_LABELS,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    ServerMetrics,
)
from tests.builders import a_request
from tests.fake_engines import a_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ID = RequestId("a")


def read(metrics: ServerMetrics) -> dict[str, float]:
    """Every sample, by `name`, or by `name{label}` if it has a label besides the two common
    ones."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            assert set(COMMON_LABELS) <= sample.labels.keys()
            own = [v for k, v in sample.labels.items() if k not in COMMON_LABELS]
            values[sample.name + (f"{{{','.join(own)}}}" if own else "")] = sample.value
    return values


def a_step(
    tokens: int = 10, prompt_tokens: int = 6, read_: int = 50, seen: int = 80
) -> StepFinished:
    return StepFinished(tokens, prompt_tokens, 5, 7, read_, seen, 0.25, 0.5)


def test_gauges_counters_and_histograms_begin_at_zero() -> None:
    values = read(ServerMetrics(EventBus()))
    for name in GAUGES:
        assert values[name] == 0
    for name in COUNTERS:
        assert values[f"{name}_total"] == 0
    for name in HISTOGRAMS:
        assert values[f"{name}_count"] == 0


EXPORTED = {
    (): """
        vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
        vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:prompt_tokens_total
        vllm:prompt_tokens_cached_total vllm:generation_tokens_total vllm:num_preemptions_total
        mainstem:pages mainstem:held_pages mainstem:cached_pages mainstem:host_pages
        mainstem:disk_pages mainstem:host_bytes mainstem:disk_bytes mainstem:page_size_tokens
        mainstem:shared_runs mainstem:sessions mainstem:session_tokens mainstem:requests_total
        mainstem:steps_total mainstem:spans_total mainstem:computed_tokens_total
        mainstem:decoded_tokens_total mainstem:recomputed_tokens_total
        mainstem:key_tokens_read_total mainstem:key_tokens_saved_total
        mainstem:damaged_stores_total mainstem:prefetched_pages_total
        mainstem:truncated_prompts_total
        mainstem:dropped_tokens_total mainstem:moved_pages_total mainstem:host_seconds_total
        mainstem:window_parts mainstem:held_window_parts mainstem:lost_window_tokens_total
        mainstem:device_seconds_total mainstem:engine_restarts_total mainstem:step_tokens
        mainstem:states mainstem:held_states mainstem:kept_states
        mainstem:evicted_states_total mainstem:refused_states_total
        mainstem:states_read_total mainstem:states_saved_total mainstem:rows_folded_total
        mainstem:step_seconds mainstem:unfinished_prompts mainstem:unfinished_prompt_tokens
    """,
    ("finished_reason",): "vllm:request_success_total",
    ("reason", "tier"): """
        mainstem:evicted_pages_total mainstem:unsaved_pages_total mainstem:lost_pages_total
    """,
    ("tier",): "mainstem:loaded_pages_total mainstem:load_seconds_total mainstem:saved_pages_total",
    ("code",): "mainstem:http_responses_total",
    ("le",): """
        vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
        vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
        vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
        vllm:iteration_tokens_total_bucket
    """,
}


def test_names_and_labels_are_those_that_dashboards_use() -> None:
    """They are written out here, since renaming a series breaks dashboards."""
    bus = EventBus()
    metrics = ServerMetrics(bus)
    for event in (
        PagesEvicted(1, "room"),
        PagesLoaded(1, "disk", 0.5),
        PagesSaved(1, "host"),
        SavesSkipped(1, "host", "busy"),
        PagesLost(1, "disk", "checksum"),
    ):
        bus.publish(event)
    metrics.observe_response(200)
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, labels in re.findall(r"^([\w:]+)\{(.*)\} ", metrics.render(), re.MULTILINE):
        own = re.findall(r'(\w+)="', labels)
        assert set(COMMON_LABELS) <= set(own)
        further = tuple(label for label in own if label not in COMMON_LABELS)
        found.setdefault(name, set()).add(further)
    wanted = {name: {labels} for labels, names in EXPORTED.items() for name in names.split()}
    for name in HISTOGRAMS:
        wanted |= {f"{name}_sum": {()}, f"{name}_count": {()}}
    assert found == wanted


def test_pages_that_were_lost_before_metrics_subscribed_are_counted() -> None:
    bus = EventBus()
    bus.publish(StoreOpened("/bad", 7, "index damaged", {"index": 5, "missing": 2}))
    values = read(ServerMetrics(bus))
    assert values["mainstem:damaged_stores_total"] == 1
    assert values["mainstem:lost_pages_total{index,disk}"] == 5
    assert values["mainstem:lost_pages_total{missing,disk}"] == 2
    assert read(ServerMetrics(EventBus()))["mainstem:damaged_stores_total"] == 0


def test_the_metrics_and_the_page_share_one_count_of_each_event() -> None:
    class CountingBus(EventBus):
        def __init__(self) -> None:
            super().__init__()
            self.kinds: list[type] = []

        def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
            self.kinds.append(kind)
            super().subscribe(kind, listener)

    bus = CountingBus()
    metrics = ServerMetrics(bus)
    assert len(set(bus.kinds)) == len(bus.kinds)
    bus.publish(SequenceAdmitted(ID, 0, 100, 64))
    bus.publish(a_step())
    assert (metrics.counters.prompt_tokens, metrics.counters.cached_tokens) == (100, 64)
    assert (metrics.counters.steps, metrics.counters.spans) == (1, 7)
    assert metrics.counters.key_tokens_saved == 30


def test_events_become_vllm_counters() -> None:
    bus = EventBus()
    metrics = ServerMetrics(bus)
    bus.publish(RequestSubmitted(ID, 100))
    bus.publish(SequenceAdmitted(ID, 0, 100, 64))
    bus.publish(SequenceAdmitted(ID, 1, 100, 96))
    bus.publish(SequencePreempted(ID, 1, 3))
    bus.publish(SequenceResumed(ID, 1, 40))
    bus.publish(SequenceFinished(ID, 0, FinishReason.STOP, 12))
    bus.publish(SequenceFinished(ID, 1, FinishReason.LENGTH, 30))
    values = read(metrics)
    assert values["vllm:prefix_cache_queries_total"] == 200
    assert values["vllm:prefix_cache_hits_total"] == 160
    assert values["vllm:prompt_tokens_total"] == 200
    assert values["vllm:prompt_tokens_cached_total"] == 160
    assert values["vllm:generation_tokens_total"] == 42
    assert values["vllm:num_preemptions_total"] == 1
    assert values["vllm:request_success_total{stop}"] == 1
    assert values["vllm:request_success_total{length}"] == 1
    assert values["vllm:request_success_total{abort}"] == 0
    assert values["vllm:request_prompt_tokens_sum"] == 200
    assert values["mainstem:requests_total"] == 1
    assert values["mainstem:recomputed_tokens_total"] == 40


def test_steps_become_our_counters() -> None:
    bus = EventBus()
    metrics = ServerMetrics(bus)
    bus.publish(a_step())
    bus.publish(a_step(tokens=4, prompt_tokens=0, read_=90, seen=80))
    bus.publish(replace(a_step(0, 0, 0, 0), states_read=3, states_saved=21, rows_folded=64))
    bus.publish(PagesEvicted(3, "room"))
    bus.publish(PagesEvicted(2, "clear"))
    bus.publish(PagesEvicted(1, "room"))
    values = read(metrics)
    assert values["mainstem:states_read_total"] == 3
    assert values["mainstem:states_saved_total"] == 21
    assert values["mainstem:rows_folded_total"] == 64
    assert values["mainstem:steps_total"] == 3
    assert values["mainstem:spans_total"] == 21
    assert values["mainstem:computed_tokens_total"] == 6
    assert values["mainstem:decoded_tokens_total"] == 8
    assert values["mainstem:key_tokens_read_total"] == 140
    assert values["mainstem:key_tokens_saved_total"] == 30  # the second step saves 0, not -10
    assert values["mainstem:host_seconds_total"] == 0.75
    assert values["mainstem:device_seconds_total"] == 1.5
    assert values["mainstem:evicted_pages_total{room,device}"] == 4
    assert values["mainstem:evicted_pages_total{clear,device}"] == 2
    assert values["vllm:iteration_tokens_total_sum"] == 14


def test_tiers_and_truncations_are_counted() -> None:
    bus = EventBus()
    metrics = ServerMetrics(bus)
    bus.publish(PagesEvicted(3, "room", "host"))
    bus.publish(PagesLoaded(4, "disk", 0.5))
    bus.publish(PagesLoaded(2, "disk", 0.25))
    bus.publish(PagesSaved(7, "host"))
    bus.publish(SavesSkipped(5, "host", "busy"))
    bus.publish(PagesLost(1, "disk", "checksum"))
    bus.publish(PagesPrefetched(6))
    bus.publish(PromptTruncated(ID, Overflow.KV, 100, 50))
    bus.publish(PagesMoved(ID, 9))
    metrics.observe_sessions(2, 30)
    metrics.observe_snapshot(EngineSnapshot(0, 0, 8, 16, 0, 0, (), 11, 12, 100))
    values = read(metrics)
    assert values["mainstem:evicted_pages_total{room,host}"] == 3
    assert values["mainstem:loaded_pages_total{disk}"] == 6
    assert values["mainstem:load_seconds_total{disk}"] == 0.75
    assert values["mainstem:saved_pages_total{host}"] == 7
    assert values["mainstem:unsaved_pages_total{busy,host}"] == 5
    assert values["mainstem:lost_pages_total{checksum,disk}"] == 1
    assert values["mainstem:prefetched_pages_total"] == 6
    assert values["mainstem:truncated_prompts_total"] == 1
    assert values["mainstem:dropped_tokens_total"] == 100
    assert values["mainstem:moved_pages_total"] == 9
    assert (values["mainstem:host_pages"], values["mainstem:disk_pages"]) == (11, 12)
    assert (values["mainstem:host_bytes"], values["mainstem:disk_bytes"]) == (1100, 1200)
    assert (values["mainstem:sessions"], values["mainstem:session_tokens"]) == (2, 30)


def test_timings_become_histograms() -> None:
    metrics = ServerMetrics(EventBus())
    requests = [a_request([1], name=name) for name in "ab"]
    answered, refused = Answering([0, 1], requests, a_tokenizer()).requests
    answered.began_s, answered.admitted_s, answered.ended_s = -0.25, -0.05, 2.75
    answered.token_s = [0.0, 0.01, 0.021]
    refused.began_s, refused.ended_s = 0.0, 9999.0
    metrics.observe_ended(answered)
    metrics.observe_ended(refused)
    values = read(metrics)
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    # a value at a bound belongs to its bucket
    assert values["vllm:time_to_first_token_seconds_bucket{0.25}"] == 1
    assert values["vllm:time_to_first_token_seconds_bucket{0.1}"] == 0
    assert values["vllm:inter_token_latency_seconds_bucket{0.01}"] == 1
    assert values["vllm:inter_token_latency_seconds_bucket{0.025}"] == 2
    assert math.isclose(values["vllm:inter_token_latency_seconds_sum"], 0.021)
    assert values["vllm:request_queue_time_seconds_bucket{0.3}"] == 1
    assert values["vllm:e2e_request_latency_seconds_bucket{7680.0}"] == 1
    assert values["vllm:e2e_request_latency_seconds_bucket{+Inf}"] == 2
    assert values["vllm:e2e_request_latency_seconds_count"] == 2


def test_a_snapshot_sets_the_gauges() -> None:
    metrics = ServerMetrics(EventBus())
    stems = (StemView(1, None, 512, 8),)
    metrics.observe_snapshot(
        EngineSnapshot(
            8, 3, 100, 16, 40, 75, stems, num_states=20, num_held_states=8, num_kept_states=11
        )
    )
    values = read(metrics)
    assert values["vllm:num_requests_running"] == 8
    assert values["vllm:num_requests_waiting"] == 3
    assert values["vllm:kv_cache_usage_perc"] == 0.4
    assert values["mainstem:shared_runs"] == 1
    assert values["mainstem:pages"] == 100
    assert values["mainstem:held_pages"] == 40
    assert values["mainstem:cached_pages"] == 75
    assert values["mainstem:states"] == 20
    assert values["mainstem:held_states"] == 8
    assert values["mainstem:kept_states"] == 11
    assert values["mainstem:page_size_tokens"] == 16


def test_names_in_labels_are_escaped() -> None:
    name = 'a "quoted" \\ name\nof two lines'
    text = ServerMetrics(EventBus(), model_name=name).render()
    family = next(iter(text_string_to_metric_families(text)))
    assert family.samples[0].labels["model_name"] == name


def test_responses_are_counted_by_status() -> None:
    metrics = ServerMetrics(EventBus())
    for status in (200, 429, 200):
        metrics.observe_response(status)
    values = read(metrics)
    assert values["mainstem:http_responses_total{200}"] == 2
    assert values["mainstem:http_responses_total{429}"] == 1


def test_counters_never_fall_while_another_thread_publishes() -> None:
    """Every render sees complete events: all counts of a step change together."""
    bus = EventBus()
    metrics = ServerMetrics(bus)

    def publish() -> None:
        for _ in range(2000):
            bus.publish(a_step())

    engine = Thread(target=publish)
    engine.start()
    seen: list[dict[str, float]] = []
    for _ in range(20):
        seen.append(read(metrics))
    engine.join()
    seen.append(read(metrics))
    steps = [values["mainstem:steps_total"] for values in seen]
    assert steps == sorted(steps)
    assert steps[-1] == 2000
    for values in seen:
        assert values["mainstem:key_tokens_saved_total"] == 30 * values["mainstem:steps_total"]
        assert values["vllm:iteration_tokens_total_count"] == values["mainstem:steps_total"]


def test_every_series_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    counters = [f"{name}_total" for name in (*COUNTERS, *LABELLED_COUNTERS)]
    for name in (*GAUGES, *counters, *HISTOGRAMS):
        assert f"`{name}`" in text, f"docs/metrics.md does not say what {name} means"


def test_the_docs_and_the_dashboard_name_only_series_that_exist() -> None:
    text = ServerMetrics(EventBus()).render()
    exposed = set(re.findall(r"# TYPE (\S+)", text))
    for path in ("docs/metrics.md", "deploy/grafana-dashboard.json"):
        named = set(re.findall(r"(?:vllm|mainstem):\w+", (ROOT / path).read_text()))
        bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
        assert bare <= exposed, f"{path} names {sorted(bare - exposed)}"


NOT_IN_THE_DASHBOARD = {"mainstem:page_size_tokens"}  # a constant, for queries


def test_the_dashboard_shows_every_series() -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    queries = " ".join(
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    )
    named = set(re.findall(r"(?:vllm|mainstem):\w+", queries))
    counters = [f"{name}_total" for name in (*COUNTERS, *LABELLED_COUNTERS)]
    wanted = {*GAUGES, *counters, *(f"{name}_bucket" for name in HISTOGRAMS)}
    assert named == wanted - NOT_IN_THE_DASHBOARD
