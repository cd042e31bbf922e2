"""The report of `mainstem bench cuts` about a step; needs no card."""

import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem_bench.cuts import main, random_step, summary

pytestmark = pytest.mark.torch


def test_equal_seeds_give_equal_steps() -> None:
    assert random_step(random.Random(3)) == random_step(random.Random(3))


def test_the_planner_is_compared_with_the_best_cut() -> None:
    line = summary("step", {(8, 264, 8): 20.0, (16, 264, 16): 10.0}, 15.0)
    assert (line["us"], line["best_us"], line["over_best"]) == (15.0, 10.0, 1.5)
    assert line["ways"] == [
        {"large": 8, "small": 264, "sms": 8, "us": 20.0},
        {"large": 16, "small": 264, "sms": 16, "us": 10.0},
    ]


def test_if_no_other_cut_fits_the_planner_counts_as_the_best() -> None:
    line = summary("step", {}, 15.0)
    assert (line["best_us"], line["over_best"], line["ways"]) == (15.0, 1.0, [])


def test_a_count_of_zero_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps" in capsys.readouterr().err
