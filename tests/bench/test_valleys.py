"""Whole jobs in virtual time: how near the scheduler comes to the card's limit."""

import json

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench.step_trace import StepTrace
from mainstem_bench.valleys import main


def results(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, float]]:
    assert main(list(flags)) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_a_planned_job_comes_near_the_limit_of_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    """A sixth of the workload in steps of 2,048 tokens. Time is lost at the start, at the end and
    by reading weights."""
    flags = ["--workload", "b2000-sd16", "--groups", "16", "--chunk-tokens", "2048"]
    off, on = results(
        capsys, *flags, "--spread", "0", "--kv-tokens", "100000", "--ways", "as given", "planned"
    )
    assert on["share_of_limit"] > 0.8
    assert on["saving_ratio"] == pytest.approx(15 / 16 * 2000 / 2200, abs=1e-3)
    assert off["share_of_limit"] < on["share_of_limit"]
    assert on["preemptions"] == 0


def test_answers_of_unequal_length_are_not_compared_with_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    off, on = results(capsys, "--groups", "12", "--output", "20", "--ways", "as given", "planned")
    assert "share_of_limit" not in off
    assert on["saving_ratio"] >= off["saving_ratio"]


def test_a_spread_as_large_as_the_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="--spread"):
        main(["--spread", "1"])


def test_small_steps_are_valleys_while_prompts_wait_and_the_tail_afterwards() -> None:
    trace = StepTrace()
    now_s = 0.0
    for num_tokens, num_decodes, seconds in (
        (100, 0, 2.0),
        (100, 40, 2.0),
        (20, 20, 1.0),  # a valley
        (30, 20, 1.0),  # not a valley: more than a quarter of 100
        (100, 60, 2.0),
        (20, 20, 1.0),  # the tail
        (10, 10, 1.0),
    ):
        now_s += seconds
        trace.add(now_s, num_tokens, num_decodes)
    found = trace.summary()
    assert found["valley_share"] == 0.1
    assert found["tail_share"] == 0.2
    assert found["mixed_share"] == 0.5
    assert (found["steps"], found["extra_steps"]) == (7, 7 - 4)
    thin = trace.thinned(4)
    assert thin["at_s"][-1] == 10.0
    assert thin["tokens"] == [100.0, 25.0, 60.0, 10.0]


def test_fewer_sequences_at_once_need_more_steps(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--groups", "30", "--output", "20", "--max-seqs", "8", "--kv-tokens", "40000"]
    capped, given = results(capsys, *flags, "--ways", "capped", "as given")
    assert capped["steps"] > given["steps"]
    assert capped["requests_per_s"] < given["requests_per_s"]
