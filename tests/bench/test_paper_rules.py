"""Rules for verdicts: each alone, and all of them over the stored verdict of every item."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mainstem_bench.arrivals import TimedAnswer
from mainstem_bench.paper import rules
from mainstem_bench.paper.command import judged
from mainstem_bench.paper.item import (
    Gain,
    Item,
    Line,
    Number,
    Outcome,
    Runs,
    Sustained,
    Verdict,
    Where,
)
from mainstem_bench.paper.jobs import Job
from mainstem_bench.paper.registry import ITEMS
from mainstem_bench.paper.relay_serving import is_growing, judge_rates
from mainstem_bench.paper.results import read_lines
from mainstem_bench.paper.rivals import rival_job
from mainstem_bench.workloads import OFFLINE_JOBS

STORED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "paper"
LINES: list[Line] = [{"command": "mainstem bench paper some-fig1"}]
SUSTAINED = Sustained(80.0, 100.0, 40.0, 2.0, is_queue_growing=False)


def an_item(**changed: Any) -> Item:
    made = Item(
        name="some-fig1",
        title="Some Fig. 1",
        claim="it holds",
        differs="nothing",
        where=Where.GPU,
        full_s=1,
        quick_s=1,
        run=lambda _: iter(()),
        verdict=lambda _: Verdict(Outcome.REPRODUCED, "it holds"),
        point="8B, 2,000 tokens",
        is_papers_point=True,
        num_lines=1,
    )
    return replace(made, **changed)


def a_gain(ours: Runs, baseline: Runs, **changed: Any) -> Gain:
    line = {"requests": 400, "prompts": "ab12", "system": 2048}
    return Gain(line, line | changed, ours, baseline)


def why(item: Item, verdict: Verdict, lines: list[Line] = LINES) -> str:
    """The single reason why a verdict does not count fully."""
    held = rules.held(item, lines, verdict)
    assert held.outcome is Outcome.PARTLY
    (reason,) = rules.broken(item, lines, verdict)
    assert held.reason == f"{verdict.reason}. It counts only in part, because {reason}"
    return reason


# --- the stored verdicts --------------------------------------------------------------------------


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_the_rules_hold_for_every_stored_verdict(item: Item) -> None:
    lines = read_lines(STORED, item)
    verdict = judged(item, lines)
    assert verdict.outcome is not Outcome.OPEN
    assert item.point
    reasons = rules.broken(item, lines, verdict)
    if verdict.outcome is Outcome.PARTLY:
        assert all(reason in verdict.reason for reason in reasons)
    else:
        assert reasons == []
    if item.is_simulated:
        assert verdict.outcome is not Outcome.EXCEEDED
        assert item.agreement or verdict.outcome in (Outcome.PARTLY, Outcome.NOT)


@pytest.mark.parametrize("name", sorted({i.agreement for i in ITEMS.values() if i.agreement}))
def test_the_engine_agrees_with_the_simulation_that_items_rely_on(name: str) -> None:
    text = (STORED.parent / f"{name}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["way"] for line in lines} == {"store", "recompute"}
    for line in lines:
        assert not line["virtual"]
        assert rules.agrees(line)


@pytest.mark.parametrize(
    "changed",
    [{"hit_points": -2.1}, {"ttft_ratio": 0.84}, {"ttft_ratio": 1.16}, {"device_ratio": 1.11}],
)
def test_a_simulation_that_is_too_far_off_does_not_agree(changed: dict[str, float]) -> None:
    line = {"hit_points": -1.9, "ttft_ratio": 1.14, "device_ratio": 0.91}
    assert rules.agrees(line)
    assert not rules.agrees(line | changed)


def test_there_are_47_items_and_each_has_stored_lines() -> None:
    assert len(ITEMS) == 47
    assert all(read_lines(STORED, item) for item in ITEMS.values())


# --- one rule at a time ---------------------------------------------------------------------------


def test_a_verdict_that_breaks_no_rule_stays_as_it_is() -> None:
    gain = a_gain(Runs(3, 90.0, 92.0), Runs(3, 50.0, 52.0))
    verdict = Verdict(
        Outcome.REPRODUCED, "it holds", (Number(1.8, 1.7),), (gain,), sustained=(SUSTAINED,)
    )
    assert rules.held(an_item(), LINES, verdict) == verdict


@pytest.mark.parametrize("outcome", [Outcome.NOT, Outcome.CANNOT, Outcome.OPEN])
def test_a_verdict_that_claims_nothing_is_not_changed(outcome: Outcome) -> None:
    verdict = Verdict(outcome, "it does not hold")
    assert rules.held(an_item(num_lines=7, is_simulated=True), LINES, verdict) == verdict


def test_a_verdict_names_its_point() -> None:
    assert "at which point" in why(an_item(point=""), Verdict(Outcome.REPRODUCED, "it holds"))


def test_nothing_is_exceeded_at_another_point() -> None:
    elsewhere = an_item(is_papers_point=False)
    assert "another point" in why(elsewhere, Verdict(Outcome.EXCEEDED, "more"))
    assert rules.broken(elsewhere, LINES, Verdict(Outcome.REPRODUCED, "it holds")) == []


@pytest.mark.parametrize("ours", [0.92, 0.2])
def test_a_number_that_is_better_than_the_papers_agrees_as_little_as_one_that_is_worse(
    ours: float,
) -> None:
    verdict = Verdict(Outcome.REPRODUCED, "it holds", (Number(ours, 0.51, 0.1),))
    assert "1 of 1 numbers differ" in why(an_item(), verdict)


@pytest.mark.parametrize(
    ("ours", "weighed", "agreed"),
    [
        ((1.0, 1.1), Outcome.REPRODUCED, Outcome.REPRODUCED),
        ((1.0, 2.0), Outcome.EXCEEDED, Outcome.PARTLY),
        ((2.0, 2.0), Outcome.EXCEEDED, Outcome.NOT),
        ((0.5, 2.0), Outcome.PARTLY, Outcome.NOT),
        ((0.5, 1.0), Outcome.PARTLY, Outcome.PARTLY),
        ((0.5, 0.5, 1.0), Outcome.NOT, Outcome.NOT),
        ((0.5, 0.5), Outcome.NOT, Outcome.NOT),
    ],
)
def test_numbers_are_weighed(ours: tuple[float, ...], weighed: Outcome, agreed: Outcome) -> None:
    numbers = [Number(each, 1.0) for each in ours]
    assert rules.weighed(numbers) is weighed
    assert rules.agreed(numbers) is agreed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"requests": 133}, "requests 400 against 133"),
        ({"prompts": "cd34"}, "prompts ab12 against cd34"),
        ({"system": 64}, "system 2,048 against 64"),
    ],
)
def test_a_baseline_runs_the_same_job(changed: Line, words: str) -> None:
    gain = a_gain(Runs(3, 90.0, 92.0), Runs(3, 50.0, 52.0), **changed)
    assert words in why(an_item(), Verdict(Outcome.REPRODUCED, "faster", gains=(gain,)))


def test_a_simulation_never_counts_fully() -> None:
    for outcome in (Outcome.EXCEEDED, Outcome.REPRODUCED):
        assert "simulated" in why(an_item(is_simulated=True), Verdict(outcome, "it holds"))


@pytest.mark.parametrize(
    "line",
    [
        {"requests_per_s": 121.0, "limit_requests_per_s": 99.8},
        {"us": 300.0, "floor_us": 318.0},
        {"reads_us": 20.0, "floor_us": 26.0},
    ],
)
def test_no_rate_is_above_the_limit_beside_it(line: Line) -> None:
    verdict = Verdict(Outcome.REPRODUCED, "it holds")
    assert "above the limit" in why(an_item(), verdict, [line])


@pytest.mark.parametrize(
    "changed",
    [
        {"sent_s": 5.0},
        {"sent_s": 31.0, "latency_s": 8.0},
        {"is_queue_growing": True},
        {"is_queue_growing": None},
        {"latency_s": None},
    ],
)
def test_a_rate_is_sustained_for_long_and_without_a_growing_queue(changed: dict[str, Any]) -> None:
    assert rules.can_be_sustained(SUSTAINED)
    rate = replace(SUSTAINED, **changed)
    verdict = Verdict(Outcome.REPRODUCED, "it holds", sustained=(rate,))
    assert "not shown to be sustained" in why(an_item(), verdict)


def test_all_lines_of_a_run_are_stored() -> None:
    verdict = Verdict(Outcome.REPRODUCED, "it holds")
    assert why(an_item(num_lines=15), verdict) == "1 of the 15 lines of a run are stored"


@pytest.mark.parametrize(
    ("ours", "baseline", "words"),
    [
        (Runs(1, 90.0, 90.0), Runs(3, 50.0, 52.0), "1 run, not in 3"),
        (Runs(3, 90.0, 92.0), Runs(2, 50.0, 52.0), "2 runs, not in 3"),
        (Runs(3, 51.0, 56.0), Runs(3, 50.0, 52.0), "not larger than the spread"),
    ],
)
def test_a_gain_is_larger_than_the_spread_of_three_runs(
    ours: Runs, baseline: Runs, words: str
) -> None:
    verdict = Verdict(Outcome.REPRODUCED, "faster", gains=(a_gain(ours, baseline),))
    assert words in why(an_item(), verdict)


def test_a_rival_was_measured_once_but_we_were_not() -> None:
    once = Runs(1, 53.0, 53.0)
    gain = replace(a_gain(Runs(3, 84.0, 86.0), once), is_rival=True)
    assert not rules.broken(an_item(), LINES, Verdict(Outcome.REPRODUCED, "", gains=(gain,)))
    gain = replace(a_gain(once, once), is_rival=True)
    assert "1 run" in why(an_item(), Verdict(Outcome.REPRODUCED, "faster", gains=(gain,)))


def test_runs_are_read_from_lines() -> None:
    line: Line = {"requests_per_s": 5.0, "spread": [4.0, 6.0], "num_runs": 3}
    assert rules.runs_of(line) == Runs(3, 4.0, 6.0)
    assert rules.runs_of({"requests_per_s": 5.0, "spread": None}) == Runs(1, 5.0, 5.0)
    assert rules.runs_of({"ms": 5.0, "spread": [4.0, 6.0]}, "ms", 4) == Runs(4, 4.0, 6.0)


def test_the_rivals_job_has_the_keys_of_our_lines() -> None:
    job = rival_job("b2000-sd16")
    assert rules.differing({"requests": 640, "prefix": 2000, "own": 200, "degree": 16}, job) == [
        "requests 640 against 1,600"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "relay-64",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                "b2000-sd16",
                "b2000-1000-sd4",
                "b16000-sd4",
                "relay-512",
                "relay-1024",
                "relay-2048",
            )
        ),
    ],
)
def test_we_ask_the_prompts_that_rivals_were_asked(name: str) -> None:
    ours = {"prompts": Job.of_rivals(OFFLINE_JOBS[name]).digest}
    assert rules.differing(ours, rival_job(name)) == []
    assert rules.differing({"prompts": "ab12"}, rival_job(name)) == [
        f"prompts ab12 against {ours['prompts']}"
    ]


# --- rates ----------------------------------------------------------------------------------------


def rate_lines(**changed: Any) -> list[Line]:
    return [
        {
            "system": 2048, "share": share, "rate": rate, "requests": 40 * rate,
            "requests_per_s": rate, "norm_ms_mean": ms, "sent_s": 40.0, "latency_s": 2.0,
            "is_queue_growing": False, "limit_requests_per_s": 100.0, **changed,
        }
        for share, rate, ms in (
            ("reads", 32, 6.0), ("reads", 64, 9.0), ("reads", 96, 16.0),
            ("storage", 16, 7.0), ("storage", 32, 11.0), ("none", 4, 7.0),
        )
    ]  # fmt: skip


def test_the_highest_rate_that_was_sustained_and_fast_enough_counts() -> None:
    verdict = judge_rates(rate_lines())
    assert "sustains 64 requests/s, storing once 32, and sharing nothing 4" in verdict.reason
    assert verdict.outcome is Outcome.REPRODUCED


def test_bursts_are_no_rates() -> None:
    verdict = judge_rates(rate_lines(sent_s=5.0))
    assert verdict.outcome is Outcome.NOT
    assert "no rate was shown to be sustained" in verdict.reason


@pytest.mark.parametrize(("slower", "grows"), [(0.0, False), (0.5, True)])
def test_a_queue_grows_if_later_requests_take_longer(slower: float, grows: bool) -> None:
    answers = [TimedAnswer(float(at), [at + 2.5 + slower * at]) for at in range(40)]
    assert is_growing(answers) is grows
