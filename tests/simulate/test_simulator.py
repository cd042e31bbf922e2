"""Hits, times and costs of the simulator, on small synthetic traces and on the shipped samples."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.kv.eviction import POLICIES
from mainstem_simulate import command as cli
from mainstem_simulate import plots
from mainstem_simulate.service import Batching, Prices, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, SimulationReport, simulate
from mainstem_simulate.trace_records import ReadOptions, Trace, TraceFormat, TraceRequest
from mainstem_simulate.traces import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"
MOONCAKE = DATA / "mooncake_sample.jsonl.gz"
SESSIONS = DATA / "sessions_sample.jsonl.gz"
PAGE = 10  # tokens; a page is 10 MB here, so a GB holds 100
KV_BYTES = 1e6


def a_trace(chains: Sequence[Sequence[int]], gap_s: float = 1.0, output: int = 0) -> Trace:
    requests = [
        TraceRequest(gap_s * i, PAGE * len(chain) + 5, output, chain, chain, session=i)
        for i, chain in enumerate(chains)
    ]
    return Trace(TraceFormat.MOONCAKE, PAGE, requests)


def run(trace: Trace, host_pages: int, disk_pages: int = 0, **more: object) -> SimulationReport:
    gb_per_page = PAGE * KV_BYTES / 1e9
    sizes = {"host_gb": host_pages * gb_per_page + 1e-6, "disk_gb": disk_pages * gb_per_page + 1e-6}
    if not disk_pages:
        sizes["disk_gb"] = 0
    return simulate(trace, SimulationConfig(KV_BYTES, **sizes, **more))  # type: ignore[arg-type]


def test_hits_are_whole_pages_of_the_stored_prefix() -> None:
    report = run(a_trace([[0, 1, 2], [0, 1, 3], [9]]), 100)
    assert report.requests == 3
    assert report.prompt_tokens == 35 + 35 + 15
    assert report.prefill_tokens == report.prompt_tokens - 20
    assert report.hit_rate == report.hit_rate_dram == pytest.approx(20 / 85)
    assert report.hit_rate_unbounded == report.hit_rate
    assert report.page_events == 7


def test_saved_pages_are_on_the_disk_as_well_so_the_tiers_do_not_add_up() -> None:
    chains = [[0], [1], [2], [3], [0]]
    assert run(a_trace(chains), 2, 2, policy="lru").hit_rate == 0
    assert run(a_trace(chains), 2, 4, policy="lru").hit_rate_disk > 0


def test_the_last_token_is_always_computed() -> None:
    request = TraceRequest(0, PAGE, 0, [1], [1], 0)
    report = run(Trace(TraceFormat.MOONCAKE, PAGE, [request, request]), 100)
    assert report.prefill_tokens == PAGE + 1


def test_warm_up_fills_the_store_and_is_not_counted() -> None:
    report = run(a_trace([[0, 1], [0, 1]]), 100, warmup=1)
    assert report.requests == 1
    assert report.hit_rate == pytest.approx(20 / 25)
    assert report.page_events == 2


def test_nothing_is_stored_without_storage() -> None:
    report = run(a_trace([[0], [0]]), 0)
    assert report.hit_rate == 0
    assert report.hit_rate_unbounded > 0


def test_lru_loads_from_disk_the_pages_that_look_ahead_has_prefetched() -> None:
    chains = [[i, i + 100] for i in range(20)] * 3
    rates = ServiceRates(prefill_tokens_per_s=100, decode_tokens_per_s=50, disk_gb_per_s=0.2)
    lru = run(a_trace(chains, output=10), 10, 50, policy="lru", rates=rates)
    ahead = run(a_trace(chains, output=10), 10, 50, rates=rates)
    assert lru.hit_rate == ahead.hit_rate == ahead.hit_rate_dram > 0
    assert lru.hit_rate_dram == 0
    assert ahead.mean_ttft_s < lru.mean_ttft_s


def test_pages_on_the_device_need_no_load() -> None:
    """The device holds two pages of the chain of three: the first two; the last is below."""
    rates = ServiceRates(host_gb_per_s=0.01)  # a second per page
    chains = [[0, 1, 2], [0, 1, 2]]
    below = run(a_trace(chains), 100, rates=rates)
    both = run(a_trace(chains), 100, rates=rates, device_gb=2 * PAGE * KV_BYTES / 1e9 + 1e-6)
    alone = run(a_trace(chains), 0, rates=rates, device_gb=2 * PAGE * KV_BYTES / 1e9 + 1e-6)
    assert below.hit_rate == below.hit_rate_dram == both.hit_rate == pytest.approx(30 / 70)
    assert both.hit_rate_device == alone.hit_rate_device == alone.hit_rate == pytest.approx(20 / 70)
    assert both.hit_rate_dram == pytest.approx(10 / 70)
    assert both.mean_ttft_s == pytest.approx(below.mean_ttft_s / 3, rel=0.01)


def test_the_device_keeps_pages_that_the_queue_waits_for() -> None:
    chains = [[0], [1], [2], [3], [4], [0], [1], [2]]
    room = 3 * PAGE * KV_BYTES / 1e9 + 1e-6
    blind = run(a_trace(chains), 0, policy="lru", device_gb=room)
    ahead = run(a_trace(chains), 0, lookahead=8, device_gb=room)
    assert blind.hit_rate_device == 0
    assert ahead.hit_rate_device == pytest.approx(3 * PAGE / (8 * (PAGE + 5)))


def test_requests_read_what_a_slow_disk_did_not_prefetch_in_time() -> None:
    chains = [[i, i + 100] for i in range(20)] * 3
    slow_disk = ServiceRates(prefill_tokens_per_s=1e6, disk_gb_per_s=0.01)
    report = run(a_trace(chains), 10, 50, rates=slow_disk)
    assert report.hit_rate_disk > 0
    assert report.disk_read_gb > 0


def test_a_request_takes_the_longer_of_loading_and_prefill() -> None:
    rates = ServiceRates(
        prefill_tokens_per_s=10, decode_tokens_per_s=2, host_gb_per_s=0.01, disk_gb_per_s=1
    )
    report = run(a_trace([[0], [0]], output=4), 10, rates=rates)
    first = 15 / 10
    second = max(5 / 10, 0.01 / 0.01)
    assert report.mean_ttft_s == pytest.approx((first + second) / 2)
    assert report.device_s == report.virtual_s == pytest.approx(first + second + 2 * 4 / 2)


def test_cost_is_device_time_and_storage() -> None:
    prices = Prices(gpu=3600.0, dram_gb=36.0, disk_gb=3.6, num_gpus=2)
    report = run(a_trace([[0]]), 100, 100, rates=ServiceRates(15), prices=prices)
    assert report.cost_storage == pytest.approx((1 * 36 + 1 * 3.6) / 3600, rel=1e-4)
    assert report.cost == pytest.approx(2 * 1.0 + report.cost_storage)


def test_queueing_time_counts_if_requests_arrive_as_recorded() -> None:
    rates = ServiceRates(prefill_tokens_per_s=15)
    together = run(a_trace([[0], [1], [2]], gap_s=0.0), 0, rates=rates, queue=Queue.ARRIVALS)
    assert together.mean_ttft_s == pytest.approx((1 + 2 + 3) / 3)
    apart = run(a_trace([[0], [1], [2]], gap_s=10.0), 0, rates=rates, queue=Queue.ARRIVALS)
    assert apart.mean_ttft_s == pytest.approx(1)
    assert apart.device_s == pytest.approx(3)
    assert apart.virtual_s == pytest.approx(21)


def test_a_turn_waits_for_the_previous_answer() -> None:
    first = TraceRequest(0, 15, 0, [0], [0], session=0)
    second = TraceRequest(0.1, 25, 0, [0, 1], [0, 1], session=0, previous=0, think_s=2.0)
    trace = Trace(TraceFormat.SESSIONS, PAGE, [first, second])
    rates = ServiceRates(prefill_tokens_per_s=15)
    report = run(trace, 10, rates=rates, queue=Queue.ARRIVALS)
    assert report.virtual_s == pytest.approx(1 + 2 + 1)
    assert report.hit_rate == pytest.approx(10 / 40)


# -- batches ---------------------------------------------------------------------------------------

STEP = 1.0  # seconds of a decode step


def batched(
    trace: Trace, max_running: int, host_pages: int = 0, **more: object
) -> SimulationReport:
    rates = ServiceRates(prefill_tokens_per_s=15, host_gb_per_s=0.01)  # a second per page loaded
    batching = Batching(max_running, weights_s=STEP, token_s=0.0)
    queue = {"rates": rates, "queue": Queue.ARRIVALS, "batching": batching}
    return run(trace, host_pages, 0, **(queue | more))


def test_requests_of_a_batch_share_decode_steps() -> None:
    trace = a_trace([[0], [1]], gap_s=0.0, output=4)
    one_by_one, together = (batched(trace, most) for most in (1, 2))
    assert one_by_one.device_s == one_by_one.virtual_s == pytest.approx(2 * (1 + 4 * STEP))
    assert together.device_s == together.virtual_s == pytest.approx(2 * 1 + 4 * STEP)
    assert one_by_one.mean_wait_s == pytest.approx((0 + 5) / 2)
    assert together.mean_wait_s == 0
    assert together.mean_ttft_s == pytest.approx(2 * 1 + STEP)  # both prompts fit into one step


def test_a_step_computes_so_many_tokens_of_prompts_and_answers() -> None:
    """Two prompts of 15 tokens: 20, then the last 10 beside a token of the first answer."""
    trace = a_trace([[0], [1]], gap_s=0.0, output=4)
    report = batched(trace, 2, batching=Batching(2, STEP, 0.0, chunk_tokens=20))
    first_s = 20 / 15 + STEP
    second_s = first_s + 10 / 15 + STEP
    assert report.mean_ttft_s == pytest.approx((first_s + second_s) / 2)
    assert report.device_s == pytest.approx(2 * 1 + 5 * STEP)


def test_a_step_is_made_while_the_one_before_it_runs() -> None:
    """A request that comes during the first step, of 2 s, waits for the second, which is made."""
    first, second = a_trace([[0], [1]], gap_s=0.5, output=4).requests
    report = batched(Trace(TraceFormat.MOONCAKE, PAGE, [first, second]), 2)
    start_s = (1 + STEP) + STEP
    assert report.mean_ttft_s == pytest.approx(((1 + STEP) + (start_s + 1 + STEP - 0.5)) / 2)


def test_a_decode_step_reads_the_kv_of_all_requests() -> None:
    trace = a_trace([[0]], output=3)
    batching = Batching(1, weights_s=0.0, token_s=0.1)
    report = batched(trace, 1, batching=batching)
    assert report.device_s == pytest.approx(1 + (16 + 17) * 0.1), "the prompt's step has a token"


def test_loads_of_a_batch_use_the_link_one_after_another_while_others_decode() -> None:
    """Two requests come back at 100 s, while a third one decodes; each has a page to load."""
    chains = [[0], [1], [2], [0], [1]]
    starts = (0.0, 10.0, 100.0, 100.5, 100.5)
    outputs = (0, 0, 50, 0, 0)
    requests = [
        TraceRequest(start, PAGE + 5, output, chain, chain, session=index)
        for index, (start, output, chain) in enumerate(zip(starts, outputs, chains, strict=True))
    ]
    report = batched(Trace(TraceFormat.MOONCAKE, PAGE, requests), 3, host_pages=10, warmup=3)
    # loads start when the next step is made, at 102 s, and end at 103 and 104 s; then the step that
    # is already made runs, until 104 s and 105 1/3 s
    first_s = 104 + STEP + 1 / 3 - 100.5
    second_s = first_s + STEP + 1 / 3
    assert report.mean_ttft_s == pytest.approx((first_s + second_s) / 2)
    assert report.loaded_gb == pytest.approx(2 * PAGE * KV_BYTES / 1e9)
    assert report.prefill_s == pytest.approx(2 * (1 + 1 / 3))
    assert report.device_s > 45 * STEP


def test_a_request_that_waits_for_the_disk_does_not_keep_the_link_from_others() -> None:
    """Two requests come back at 100 s. The page of the first is only on disk: 50 s to read."""
    requests = [
        TraceRequest(start, PAGE + 5, 0, [page], [page], session=index)
        for index, (start, page) in enumerate(((0.0, 0), (10.0, 1), (100.0, 0), (100.0, 1)))
    ]
    trace = Trace(TraceFormat.MOONCAKE, PAGE, requests)
    report = run(
        trace, 1, 2, policy="lru", warmup=2, queue=Queue.ARRIVALS,
        rates=ServiceRates(prefill_tokens_per_s=15, host_gb_per_s=0.01, disk_gb_per_s=0.0002),
        batching=Batching(2, weights_s=STEP, token_s=0.0),
    )  # fmt: skip
    assert report.hit_rate_disk == report.hit_rate_dram > 0
    # a second for each page on the link; what is read from disk is loaded as it comes
    first_s, second_s = 50 + STEP + 1 / 3, 2 + STEP + 1 / 3
    assert report.mean_ttft_s == pytest.approx((first_s + second_s) / 2)


def test_a_step_takes_what_was_measured_for_its_prompts_and_answers() -> None:
    """A prompt of 15 tokens takes 3 s beside the step; each of the answers' tokens 0.1 s."""
    batching = Batching(1, STEP, 0.0, answer_s=0.1, prompts=((10, 2.0), (20, 4.0)))
    report = batched(a_trace([[0]], output=3), 1, batching=batching)
    assert report.mean_ttft_s == pytest.approx(STEP + 3)
    assert report.device_s == pytest.approx(STEP + 3 + 2 * (STEP + 0.1))
    rates = ServiceRates(prefill_tokens_per_s=1e-9)
    assert [batching.prompts_s(tokens, rates) for tokens in (0, 5, 10, 40)] == [0, 1, 2, 8]


def test_a_turn_that_has_not_come_is_not_known() -> None:
    """With room for one page, look-ahead that knew the second turn would keep the first page."""
    requests = [
        TraceRequest(0.0, PAGE + 5, 0, [0], [0], session=0),
        TraceRequest(0.0, PAGE + 5, 0, [0], [0], session=0, previous=0, think_s=100.0),
        TraceRequest(10.0, PAGE + 5, 0, [1], [1], session=1),
    ]
    trace = Trace(TraceFormat.SESSIONS, PAGE, requests)
    assert batched(trace, 2, host_pages=1).hit_rate == 0
    assert run(trace, 1, lookahead=3).hit_rate > 0


def test_batches_need_arrivals() -> None:
    with pytest.raises(ConfigError, match="arrivals"):
        batched(a_trace([[0]]), 2, queue=Queue.SATURATED)


def test_unused_pages_expire() -> None:
    slow = ServiceRates(prefill_tokens_per_s=1)
    assert run(a_trace([[0], [1], [0]]), 10, rates=slow, ttl_s=100).hit_rate > 0
    gone = run(a_trace([[0], [1], [0]]), 10, rates=slow, ttl_s=10, lookahead=0)
    assert gone.hit_rate == 0


@pytest.mark.parametrize(
    ("path", "page_tokens", "sizes"),
    [(MOONCAKE, None, (40, 80, 160)), (SESSIONS, 512, (30, 60, 120))],
    ids=["mooncake", "sessions"],
)
def test_look_ahead_finds_more_than_lru_and_fifo_and_nearly_as_much_as_belady(
    path: Path, page_tokens: int | None, sizes: tuple[int, ...]
) -> None:
    """On the shipped samples, for three sizes of the store each."""
    trace = read_trace(path, ReadOptions(page_tokens=page_tokens, limit=700))
    page_gb = trace.page_tokens * KV_BYTES / 1e9
    for pages in sizes:
        rates: dict[str, float] = {}
        for kind in POLICIES:
            config = SimulationConfig(
                KV_BYTES, 0.3 * pages * page_gb, 0.7 * pages * page_gb, kind, lookahead=30
            )
            report = simulate(trace, config)
            rates[kind] = report.hit_rate
        assert rates["lookahead"] >= max(rates["lru"], rates["fifo"])
        assert rates["lookahead"] >= 0.97 * rates["belady"]
        if rates["lru"] < 0.9 * report.hit_rate_unbounded:
            assert rates["lookahead"] > max(rates["lru"], rates["fifo"])
        else:
            assert pages == sizes[-1], "the sizes should be tight, or nothing is compared"


# -- the command -----------------------------------------------------------------------------------

FLAGS = ["--kv-bytes-per-token", "1e6"]


def test_json_has_all_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(MOONCAKE), "--host-gb", "20", "--disk-gb", "50", "--json", *FLAGS]) == 0
    row = json.loads(capsys.readouterr().out)
    for name in ("requests", "mean_ttft_s", "prefill_tokens", "device_s", "cost", "seconds"):
        assert row[name] > 0
    assert row["hit_rate"] == pytest.approx(row["hit_rate_dram"] + row["hit_rate_disk"], abs=1e-5)
    assert (row["policy"], row["format"], row["requests"]) == ("lookahead", "mooncake", 400)


def test_lists_of_policies_and_sizes_give_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--host-gb", "20", "--disk-gb", "10,50", "--policy", "lookahead,lru"]
    assert cli.main([str(MOONCAKE), *sizes, "--json", "--lookahead", "9", *FLAGS]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["policy"], r["disk_gb"], r["lookahead"]) for r in rows] == [
        ("lookahead", 10, 9), ("lru", 10, 9), ("lookahead", 50, 9), ("lru", 50, 9),
    ]  # fmt: skip


def test_the_table_names_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([str(MOONCAKE), "--host-gb", "20", "--policy", "belady,fifo", *FLAGS])
    out = capsys.readouterr().out
    assert "belady" in out
    assert "fifo" in out


def test_for_a_trace_of_lengths_the_report_says_that_nothing_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("timestamp_ms,input_length,output_length\n0,500,10\n5,500,10\n")
    cli.main([str(path), "--host-gb", "20", "--json", *FLAGS])
    captured = capsys.readouterr()
    assert "nothing in it can be shared" in captured.err
    assert json.loads(captured.out)["hit_rate"] == 0


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "hits.png"
    cli.main([str(MOONCAKE), "--host-gb", "20", "--plot", str(path), *FLAGS])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequest, match="--plot"):
        cli.main([str(MOONCAKE), "--host-gb", "20", "--plot", str(tmp_path / "no/x.png"), *FLAGS])


def test_a_missing_matplotlib_is_reported_before_the_simulation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"mainstem\[plot\]"):
        cli.main([str(tmp_path / "none"), "--host-gb", "1", "--plot", "x.png", *FLAGS])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--host-gb", "-1"],
        ["--host-gb", "nan"],
        ["--host-gb", "1", "--policy", "mru"],
        ["--host-gb", "1", "--lookahead", "-3"],
        ["--host-gb", "1", "--disk-bandwidth", "0"],
        ["--host-gb", "1", "--ttl", "0"],
        [],
    ],
)
def test_impossible_flags_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([str(MOONCAKE), *wrong, *FLAGS])


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--host-gb", "1,much", "'much' is not a number"),
        ("--policy", "mru", "must be one of"),
    ],
)
def test_the_error_names_a_bad_item_of_a_list(
    flag: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([str(MOONCAKE), flag, value, *FLAGS])
    assert f"argument {flag}: {complaint}" in capsys.readouterr().err


def test_a_warmup_of_the_whole_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no request to count: there are 400"):
        cli.main([str(MOONCAKE), "--host-gb", "1", "--warmup", "400", *FLAGS])


def test_host_and_disk_sizes_must_be_equal_in_number() -> None:
    with pytest.raises(ConfigError, match="2 of --host-gb, 3 of --disk-gb"):
        cli.main([str(MOONCAKE), "--host-gb", "1,2", "--disk-gb", "1,2,3", *FLAGS])


def test_a_trace_read_with_the_wrong_page_size_gives_no_hit_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All requests share the first of their four ids of 256 tokens. Read as two ids of 512 tokens,
    half of the tokens would be hits."""
    lines = []
    for index in range(400):
        ids = [0, *range(3 * index + 1, 3 * index + 4)]
        row = {"timestamp": index, "input_length": 1024, "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(row) + "\n")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    flags = [str(path), "--host-gb", "2000", "--json", *FLAGS]
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl:1: .*--page-tokens 256"):
        cli.main(flags)
    assert cli.main([*flags, "--page-tokens", "256"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] == pytest.approx(0.25, abs=0.001)


def test_the_example_of_the_readme_uses_every_tier_and_tells_the_policies_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^mainstem simulate \$trace (.*) \$kv", text, re.MULTILINE)
    kv = ["--kv-bytes-per-token", "131072"]
    assert cli.main([str(MOONCAKE), *example.split(), *kv, "--json"]) == 0
    ahead, lru = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert min(ahead["hit_rate_dram"], ahead["hit_rate_disk"]) > 0.05
    assert ahead["hit_rate"] > 1.5 * lru["hit_rate"]
