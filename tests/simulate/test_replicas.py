"""Many simulated replicas behind the router, on synthetic traces and on the shipped sample."""

import json
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mainstem.core.errors import ConfigError
from mainstem.ray.router import RouterKind
from mainstem_simulate import command as cli
from mainstem_simulate import fleet_plots, plots
from mainstem_simulate.device_pages import PagedTrace, ReplicaPages
from mainstem_simulate.replicas import (
    FleetConfig,
    FleetReport,
    Reference,
    find_reference,
    simulate_fleet,
)
from mainstem_simulate.service import ServiceRates
from mainstem_simulate.trace_records import Trace, TraceFormat, TraceRequest
from mainstem_simulate.traces import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"
MOONCAKE = DATA / "mooncake_sample.jsonl.gz"
PAGE = 512
RATES = ServiceRates(prefill_tokens_per_s=PAGE, decode_tokens_per_s=1)  # a page takes a second


def a_trace(*requests: tuple[float, list[int]], page: int = PAGE) -> PagedTrace:
    made = [
        TraceRequest(at_s, page * len(keys) + 1, 1, keys, keys, session=place)
        for place, (at_s, keys) in enumerate(requests)
    ]
    return PagedTrace.of(Trace(TraceFormat.MOONCAKE, page, made))


def run(trace: PagedTrace, num_replicas: int, **more: object) -> FleetReport:
    fields = {"device_tokens": 100 * PAGE, "rates": RATES, **more}
    config = FleetConfig(num_replicas, **fields)  # type: ignore[arg-type]
    return simulate_fleet(trace, config, Reference(1.0, 0.5, 1.0, 0.7))


def test_a_replica_serves_requests_one_after_another() -> None:
    report = run(a_trace((0, [1, 2]), (1, [3]), (100, [1, 2])), 1)
    assert report.hit_rate == pytest.approx(2 * PAGE / (5 * PAGE + 3))
    first = 2 + 1 / PAGE
    waited = first + 1 + (1 + 1 / PAGE) - 1  # the answer of the first takes a second
    assert report.mean_ttft_s == pytest.approx((first + waited + 1 / PAGE) / 3)
    assert report.device_s == pytest.approx(3 + 3 + 3 / PAGE)
    assert report.load_max_over_mean == 1


def test_a_prefix_is_found_on_the_replica_that_it_was_sent_to() -> None:
    trace = a_trace(*((100.0 * n, [n % 4 * 10 + depth for depth in range(5)]) for n in range(40)))
    affine = run(trace, 4)
    assert affine.hit_rate == pytest.approx(36 * 5 * PAGE / (40 * (5 * PAGE + 1)))
    turns = run(trace, 3, router=RouterKind.ROUND_ROBIN)
    assert turns.hit_rate < affine.hit_rate


def test_a_shared_tier_is_read_if_that_is_faster() -> None:
    keys = list(range(5))
    trace = a_trace((0, keys), (100, keys), (200, keys))
    fields = {"router": RouterKind.ROUND_ROBIN, "kv_bytes_per_token": 1e9 / PAGE, "shared_gb": 100}
    fast = run(trace, 3, shared_gb_per_s=10.0, **fields)  # a page takes 0.1 s
    assert fast.hit_rate == fast.hit_rate_shared == pytest.approx(10 * PAGE / (15 * PAGE + 3))
    assert sorted([5, 0.5, 0.5])[1] == pytest.approx(fast.p50_ttft_s, abs=0.01)
    slow = run(trace, 3, shared_gb_per_s=0.5, **fields)
    assert slow.hit_rate == 0


def test_a_turn_waits_for_the_previous_answer() -> None:
    turns = [
        TraceRequest(0.0, 10 * PAGE, 1, list(range(10)), list(range(10)), 0),
        TraceRequest(1.0, 10 * PAGE + 1, 1, list(range(10)), list(range(10)), 0, previous=0),
    ]
    report = run(PagedTrace.of(Trace(TraceFormat.WEKA, PAGE, turns)), 4)
    assert report.hit_rate > 0.49
    assert report.p50_ttft_s == pytest.approx(1 / PAGE)


def test_small_pages_are_joined() -> None:
    trace = a_trace((0, list(range(20))), (1, list(range(9))), page=64)
    assert trace.page_tokens == 512
    assert trace.names == [[0, 1], [0]]
    assert trace.num_pages == 2


def test_the_device_memory_evicts_like_an_lru_of_chains() -> None:
    draw, memory = Random(1), ReplicaPages(30, 400)
    plain: OrderedDict[int, None] = OrderedDict()
    for _ in range(2000):
        start = draw.randrange(10) * 40
        chain = list(range(start, start + draw.randrange(1, 40)))
        leading = next((n for n, key in enumerate(chain) if key not in plain), len(chain))
        assert memory.num_leading(np.array(chain)) == leading
        memory.use(np.array(chain))
        for key in reversed(chain):
            plain[key] = None
            plain.move_to_end(key)
        while len(plain) > 30:
            plain.popitem(last=False)
        memory.check()


def test_on_the_sample_the_affine_router_beats_the_others() -> None:
    trace = PagedTrace.of(read_trace(MOONCAKE))
    config = FleetConfig(4, 200_000)
    reference = find_reference(trace, config)
    assert reference.busy == pytest.approx(0.7, rel=0.01)
    found = {
        kind: simulate_fleet(trace, FleetConfig(4, 200_000, kind), reference) for kind in RouterKind
    }
    affine = found.pop(RouterKind.AFFINE)
    for other in found.values():
        assert affine.hit_rate > other.hit_rate
        assert affine.p99_ttft_s < other.p99_ttft_s
    assert affine.load_max_over_mean < 1.25


def test_the_command_prints_a_line_for_each_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    plot, figures = tmp_path / "fleet.png", []

    def save(figure: Any, path: Path) -> None:
        figures.append(figure)
        plots.save_figure(figure, path)

    monkeypatch.setattr(fleet_plots, "save_figure", save)
    flags = ["--replicas", "1,2", "--router", "affine,random", "--shared-gb", "0,10", "--limit"]
    flags += ["300", "--kv-bytes-per-token", "131072", "--plot", str(plot), "--json"]
    assert cli.main([str(MOONCAKE), *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["replicas"], line["router"], line["shared_gb"]) for line in lines] == [
        (count, router, shared)
        for count in (1, 2)
        for router in ("affine", "random")
        for shared in (0, 10)
    ]
    assert all(line["requests"] == 300 for line in lines)
    assert plot.stat().st_size > 10_000
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert "bound of affine (1.25 times the mean)" in labels
    assert len(labels) == len(set(labels))


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(MOONCAKE), "--replicas", "2", "--kv-bytes-per-token", "1"]
    with pytest.raises(ConfigError, match="busy must be between 0 and 1"):
        cli.main([*common, "--busy", "1.5"])
    with pytest.raises(ConfigError, match="--ttl is not simulated"):
        cli.main([*common, "--ttl", "5"])
    with pytest.raises(ConfigError, match="leaves no request"):
        cli.main([*common, "--limit", "5", "--warmup", "5"])
    with pytest.raises(SystemExit):
        cli.main([*common, "--host-gb", "5"])
    assert "--host-gb" in capsys.readouterr().err
