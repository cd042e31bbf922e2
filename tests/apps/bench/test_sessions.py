"""`mainstem bench sessions` on a small model: every part gives its lines."""

import json

import pytest

from mainstem.apps.bench import sessions


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    status = sessions.main(["--workload", "tiny", "--device", "cpu", "--json", *argv])
    assert status == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_a_turn_and_later_turns_find_their_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "--tier", "host", "--tier", "none", "--store-fetch", "always")
    assert [(line["tier"], line["turn"]) for line in lines] == [
        *(("host", turn) for turn in (1, 2, 3)),
        *(("none", turn) for turn in (1, 2, 3)),
    ]
    # 100 tokens, 4 out, 10 new: 6 full pages of 16 after the first turn, 7 after the second
    assert [line["cached_tokens"] for line in lines] == [0.0, 96.0, 112.0, 0.0, 0.0, 0.0]
    assert all(line["mean_ttft_ms"] > 0 for line in lines)  # type: ignore[operator]
    assert all(line["p95_ttft_ms"] > 0 for line in lines)  # type: ignore[operator]


@pytest.mark.slow
def test_the_other_parts_give_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--part", "preload", "--part", "saves", "--part", "document"]
    lines = run(capsys, *argv, "--document-tokens", "200")
    assert [line["part"] for line in lines] == [*["preload"] * 6, "saves", "document"]
    assert [line["layers"] for line in lines[:6]] == ["all", "0", "5", "10", "15", "auto"]
