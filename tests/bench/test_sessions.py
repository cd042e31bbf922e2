"""`mainstem bench sessions` on a small model: every part gives its lines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstem.cli.flags import engine_config
from mainstem.core.errors import ConfigError
from mainstem_bench import sessions, settings
from mainstem_bench.session_engine import WORKLOADS, SessionEngine


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    status = sessions.main(["--workload", "tiny", "--device", "cpu", "--json", *argv])
    assert status == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_turn_gets_a_line_and_later_turns_find_their_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "--tier", "host", "--tier", "none", "--store-fetch", "always")
    assert [(line["tier"], line["turn"]) for line in lines] == [
        *(("host", turn) for turn in (1, 2, 3)),
        *(("none", turn) for turn in (1, 2, 3)),
    ]
    # 100 tokens, 4 answered, 10 new: 6 full pages of 16 after the first turn, 7 after the second
    assert [line["cached_tokens"] for line in lines] == [0.0, 96.0, 112.0, 0.0, 0.0, 0.0]
    assert all(line["mean_ttft_ms"] > 0 for line in lines)  # type: ignore[operator]
    assert all(line["p95_ttft_ms"] > 0 for line in lines)  # type: ignore[operator]


def test_a_part_that_fails_is_reported_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: SessionEngine) -> Iterator[dict[str, object]]:
        yield {"part": "preload", "layers": "all"}
        raise RuntimeError("no such layer")

    monkeypatch.setitem(sessions.OVERLAP, "preload", broken)
    argv = ["--workload", "tiny", "--device", "cpu", "--json", "--part", "preload"]
    assert sessions.main([*argv, "--part", "document", "--document-tokens", "100"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == ["preload", "preload", "document"]
    assert lines[1]["error"] == "RuntimeError: no such layer"


def test_tiers_that_would_begin_after_the_time_limit_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "--tier", "none", "--tier", "host", "--limit-s", "0")
    assert [(line["tier"], line["left_out"]) for line in lines] == [
        ("none", "after 0 s"),
        ("host", "after 0 s"),
    ]


@pytest.mark.slow
def test_the_other_parts_give_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["preload", "saves", "document", "busy", "saving", "grain"]
    argv = [word for part in parts for word in ("--part", part)]
    lines = run(capsys, *argv, "--document-tokens", "200")
    found = [line["part"] for line in lines]
    assert found[:8] == [*["preload"] * 6, "saves", "document"]
    assert found[8:] == [*["busy"] * 6, *["saving"] * 9]  # none of grain: it needs a GPU
    assert all(line["saved_pages"] > 0 for line in lines[14:])  # type: ignore[operator]
    assert [line["layers"] for line in lines[:6]] == ["all", "0", "5", "10", "15", "auto"]
    assert lines[6]["steps_saving"] > 0  # type: ignore[operator]


@pytest.mark.slow
def test_real_conversations_come_back_after_a_close_and_after_a_kill(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = ["What is a river?", "And a lake?", "Which is larger?", "Why?"]
    rows = [{"turns": [f"{turn} ({index})" for turn in turns]} for index in range(3)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--conversations", str(chats), "--sessions", "3", "--turns", "4", "--output", "20"]
    engine = ["--kv-tokens", "256", "--host-gb", "0.1", "--disk-gb", "0.2", "--threads", "1"]
    ends = ["--end", "close", "--end", "kill"]
    assert sessions.main([*argv, *engine, *ends, "--at-once", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["turn"], line["where"]) for line in lines] == [
        (1, "running"),
        (2, "running"),
        (3, "after close"),
        (4, "after kill"),
        ("later", "all"),
    ]
    assert all(line["same_answers"] == line["requests"] for line in lines)
    assert all(line["cached_tokens"] > 20 for line in lines[1:])
    assert all(line["loaded_pages"].get("disk", 0) > 0 for line in lines[2:4])


def test_a_missing_file_of_conversations_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        sessions.main(["--conversations", str(tmp_path / "none.jsonl")])


def test_the_error_for_a_shape_that_does_not_fit_names_a_flag_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "available_bytes", lambda: 1_000_000)
    with pytest.raises(ConfigError, match="--workload tiny"):
        sessions.main(["--workload", "anchor", "--device", "cpu"])


def test_a_tier_gets_only_the_settings_that_it_uses() -> None:
    flags = "--store-fetch always --preload 3 --disk-gb 7 --disk-dir d --store-policy lru"
    args = sessions.parser().parse_args(flags.split())
    work = WORKLOADS["tiny"]
    given = {}
    for tier in ("none", "host", "disk"):
        with sessions.in_tier(engine_config(args), work, tier) as config:
            config.check()
            given[tier] = config.store
    assert {store.policy for store in given.values()} == {"lru"}
    assert (given["host"].preload, given["disk"].preload, given["disk"].disk_gb) == ("3", "3", 7.0)
