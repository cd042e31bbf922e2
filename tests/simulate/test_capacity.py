"""How much storage a hit rate needs."""

import json
from pathlib import Path

import pytest

from mainstem.checkpoints.progress import unseen
from mainstem.cli import capacity
from mainstem.core.errors import InvalidRequest
from mainstem.kv.policy import PolicyConfig
from mainstem.simulate.capacity import Replay, most_sessions
from mainstem.simulate.trace_records import ReadOptions, TraceRequest
from mainstem.simulate.traces import read_trace

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
    replay = Replay(trace, PolicyConfig(0, ttl_s=3600), lookahead=20)
    target = 0.8 * replay.hit_rate(replay.all_pages)
    pages = replay.least_pages(target, unseen)
    assert replay.hit_rate(pages) >= target
    assert replay.hit_rate(round(pages / 1.1)) < target


def test_the_three_numbers_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--target-hit-rate", "0.5", "--ttl", "1800", "--context-tokens", "4000", "--json"]
    assert capacity.main([str(SESSIONS), *args, *FLAGS]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["ccps_gb"] == pytest.approx(4.0)
    assert row["ccput_gb"] == pytest.approx(4.0 * row["dsput"])
    assert 0 < row["dsput"] <= row["sessions"]
    assert 0 < row["capacity_gb"] < row["ccput_gb"]
    assert row["capacity_share"] == pytest.approx(row["capacity_gb"] / row["ccput_gb"])
    assert 0.5 <= row["hit_rate"] <= row["hit_rate_unbounded"]


def test_a_target_out_of_reach_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main([str(SESSIONS), "--target-hit-rate", "0.999", "--json", *FLAGS]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["capacity_gb"] is None
    assert row["hit_rate_unbounded"] < 0.999
    capacity.main([str(SESSIONS), "--target-hit-rate", "0.999", *FLAGS])
    assert "not reached" in capsys.readouterr().out


def test_a_hit_rate_above_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--target-hit-rate"):
        capacity.main([str(SESSIONS), "--target-hit-rate", "1.5", *FLAGS])


def test_the_curve_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "capacity.png"
    capacity.main([str(SESSIONS), "--target-hit-rate", "0.5", "--plot", str(path), *FLAGS])
    assert path.read_bytes().startswith(b"\x89PNG")
