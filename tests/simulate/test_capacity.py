"""How much storage is needed for a hit rate."""

import json
from pathlib import Path

import pytest

from mainstem.checkpoints.progress import unseen
from mainstem.core.errors import InvalidRequest
from mainstem.kv.policy import PolicyConfig
from mainstem_simulate import capacity_command as capacity
from mainstem_simulate import command as simulate
from mainstem_simulate.capacity import Replay, most_sessions, most_tokens
from mainstem_simulate.trace_records import ReadOptions, TraceRequest
from mainstem_simulate.traces import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"
SESSIONS = DATA / "sessions_sample.jsonl.gz"
FLAGS = ["--kv-bytes-per-token", "1e6", "--page-tokens", "512", "--limit", "500"]


def at(arrival_s: float, session: int) -> TraceRequest:
    return TraceRequest(arrival_s, 1, 1, [], [], session)


def test_distinct_sessions_are_counted_within_the_ttl() -> None:
    requests = [at(0, 1), at(1, 1), at(2, 2), at(3, 3), at(12, 4), at(12.5, 3)]
    assert most_sessions(requests, 10) == 3
    assert most_sessions(requests, 100) == 4
    assert most_sessions(requests, 0.5) == 1


def test_the_capacity_found_reaches_the_target_and_less_does_not() -> None:
    trace = read_trace(SESSIONS, ReadOptions(page_tokens=512, limit=500))
    replay = Replay(trace, PolicyConfig((0,), ttl_s=3600), lookahead=20)
    target = 0.8 * replay.hit_rate(replay.all_pages)
    pages = replay.least_pages(target, unseen)
    assert replay.hit_rate(pages) >= target
    assert replay.hit_rate(round(pages / 1.1)) < target


def test_the_papers_ccps_dsput_and_ccput_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--target-hit-rate", "0.5", "--ttl", "1800", "--context-tokens", "4000", "--json"]
    assert capacity.main([str(SESSIONS), *args, *FLAGS]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["ccps_gb"] == pytest.approx(4.0)
    assert row["ccput_gb"] == pytest.approx(4.0 * row["dsput"])
    assert 0 < row["dsput"] <= row["sessions"]
    assert 0 < row["capacity_gb"] < row["ccput_gb"]
    assert row["capacity_share"] == pytest.approx(row["capacity_gb"] / row["ccput_gb"])
    assert 0.5 <= row["hit_rate"] <= row["hit_rate_unbounded"]


def test_a_target_that_cannot_be_reached_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main([str(SESSIONS), "--target-hit-rate", "0.999", "--json", *FLAGS]) == 1
    shown = capsys.readouterr()
    row = json.loads(shown.out)
    assert row["capacity_gb"] is None
    assert row["hit_rate_unbounded"] < 0.999
    assert "no capacity reaches a hit rate of 0.999: an unbounded store reaches" in shown.err
    assert capacity.main([str(SESSIONS), "--target-hit-rate", "0.999", *FLAGS]) == 1
    assert "not reached" in capsys.readouterr().out


# --- sizes of sessions --------------------------------------------------------------------------


def of_length(arrival_s: float, session: int, tokens: int) -> TraceRequest:
    return TraceRequest(arrival_s, tokens - 1, 1, [], [], session)


def test_sessions_within_the_ttl_count_with_their_longest_turn_of_the_trace() -> None:
    requests = [
        of_length(0, 1, 10),
        of_length(1, 1, 30),
        of_length(2, 2, 5),
        of_length(20, 3, 7),
        of_length(21, 1, 20),
    ]
    assert most_tokens(requests, 10) == 37  # sessions 1 and 3: 30 + 7
    assert most_tokens(requests, 100) == 42
    assert most_tokens(requests, 0.5) == 30


def test_one_long_request_does_not_make_every_session_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the longest request counted for all, CCpUT (room for all) would be 50 times too large."""
    path = tmp_path / "sessions.jsonl"
    turns = [[[500, 500]]] * 99 + [[[100_000, 1000]]]
    path.write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))
    flags = ["--target-hit-rate", "0.001", "--json", "--kv-bytes-per-token", "1e6"]
    assert capacity.main([str(path), *flags]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["dsput"] == 100
    assert row["ccput_gb"] == pytest.approx(99 * 1.0 + 101.0)
    assert row["ccps_gb"] == pytest.approx(2.0)
    assert row["context_tokens"] is None
    assert capacity.main([str(path), *flags, "--context-tokens", "131072"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["ccps_gb"] == pytest.approx(131.072)


def test_a_trace_that_is_shorter_than_the_ttl_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--target-hit-rate", "0.5", "--ttl", "1e9", *FLAGS]
    assert capacity.main([str(SESSIONS), *flags]) == 0
    assert "all of the trace (the TTL is 1e+09 s)" in capsys.readouterr().out


def test_costs_have_their_unit(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target-hit-rate", "0.5", "--dram-price", "2", "--disk-price", "0.1", *FLAGS]
    assert capacity.main([str(SESSIONS), *flags, "--json"]) == 0
    gb = json.loads(capsys.readouterr().out)["capacity_gb"]
    assert capacity.main([str(SESSIONS), *flags]) == 0
    shown = capsys.readouterr().out
    assert f"{2 * gb:,.4g} $ an hour in host memory, {0.1 * gb:,.4g} $ an hour on disk" in shown


# --- the model's own size ------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(("dtype", "kv_bytes"), [("auto", 131072), ("float32", 262144)])
def test_the_size_of_kv_is_read_from_the_models_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, kv_bytes: int
) -> None:
    """The model's weights are not needed."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    trace = [str(SESSIONS), "--limit", "100", "--json"]
    model = ["--model", str(tmp_path), "--dtype", dtype]
    assert capacity.main([*trace, "--target-hit-rate", "0.3", *model]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["kv_bytes_per_token"] == kv_bytes
    assert f"take {kv_bytes:,} bytes a token" in shown.err
    sizes = []
    for size in (model, ["--kv-bytes-per-token", str(kv_bytes)]):
        assert simulate.main([*trace, "--host-gb", "1", *size]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["host_pages"])
    assert sizes[0] == sizes[1]


def test_exactly_one_flag_must_give_the_size_of_kv() -> None:
    for flags in ([], ["--model", "smollm2", "--kv-bytes-per-token", "5"]):
        with pytest.raises(SystemExit):
            capacity.main([str(SESSIONS), *flags])


def test_a_hit_rate_above_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--target-hit-rate"):
        capacity.main([str(SESSIONS), "--target-hit-rate", "1.5", *FLAGS])


def test_the_curve_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "capacity.png"
    capacity.main([str(SESSIONS), "--target-hit-rate", "0.5", "--plot", str(path), *FLAGS])
    assert path.read_bytes().startswith(b"\x89PNG")
