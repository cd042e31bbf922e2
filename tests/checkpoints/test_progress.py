"""Bars of stages end where their work ends."""

from contextlib import suppress

import pytest

from mainstem.checkpoints.progress import StageBar


def test_every_stage_that_is_done_ends_at_100_percent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StageBar() as bar:
        for stage in ("round", "score"):
            bar(stage, 0.0)
            bar(stage, 0.5)
    shown = capsys.readouterr().err
    assert "round: 100%" in shown
    assert "score: 100%" in shown


def test_a_stage_that_fails_does_not_end_at_100_percent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with suppress(OSError), StageBar() as bar:
        bar("convert", 0.4)
        raise OSError("full")
    assert "100%" not in capsys.readouterr().err
