"""The report of `mainstem demo`."""

import pytest

from mainstem.cli.demo import DemoPass, Question, report
from mainstem.core.config import Share
from mainstem.core.metrics import Counters
from mainstem.text.results import CompletionOutput, RequestOutput


@pytest.mark.parametrize(
    ("shared_s", "said"), [(10.0, "3.0x faster with sharing"), (60.0, "2.0x slower with sharing")]
)
def test_the_report_says_which_way_was_faster(shared_s: float, said: str) -> None:
    answers = [RequestOutput("1", "", [1], [CompletionOutput(0, "Paris", [2])])]
    runs = [
        DemoPass(Share.READS, shared_s, answers, Counters()),
        DemoPass(Share.NONE, 30.0, answers, Counters()),
    ]
    last = report([Question(0, "", "Which city?")], runs).splitlines()[-1]
    assert last.startswith(said)
    assert last.endswith("1 of 1 answers are the same token for token.")
