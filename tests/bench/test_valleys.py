"""Whole jobs in virtual time: what the scheduler makes of a card."""

import json

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench.valleys import main


def results(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, float]]:
    assert main(list(flags)) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_a_planned_job_reaches_the_limit_of_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 2,048 tokens over a sixth of the workload: only its ramp, its tail and
    reading weights are lost."""
    flags = ["--workload", "b2000-sd16", "--groups", "16", "--chunk-tokens", "2048"]
    off, on = results(capsys, *flags, "--spread", "0", "--kv-tokens", "100000")
    assert on["share_of_limit"] > 0.8
    assert on["saving_ratio"] == pytest.approx(15 / 16 * 2000 / 2200, abs=1e-3)
    assert off["share_of_limit"] < on["share_of_limit"]
    assert on["preemptions"] == 0


def test_answers_of_unequal_length_are_not_compared_with_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    off, on = results(capsys, "--groups", "12", "--output", "20")
    assert "share_of_limit" not in off
    assert on["saving_ratio"] >= off["saving_ratio"]


def test_a_spread_beyond_the_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="--spread"):
        main(["--spread", "1"])
