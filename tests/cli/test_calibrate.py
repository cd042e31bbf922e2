"""`mainstem calibrate` measures this machine and `card_for` finds what it kept."""

import json
from pathlib import Path

import pytest
import torch

from mainstem.cli import calibrate as command
from mainstem.plan.cost import CARDS, card_for
from mainstem.runner import calibrate

pytestmark = pytest.mark.torch


def test_a_calibrated_device_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "NUM_TIMED", 3)
    assert command.main(["--json", "--dry-run"]) == 0
    assert not CARDS.path.exists()
    assert command.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    card = card_for(calibrate.present_device().name)
    assert told["bytes_per_s"] == card.bytes_per_s
    assert 1e8 < card.bytes_per_s < 1e14
    assert 1e8 < card.flops_per_s < 1e16
    assert 0 < card.launch_s < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a fact about CPUs")
def test_on_a_cpu_the_command_says_that_no_costs_were_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "NUM_TIMED", 1)
    assert command.main([]) == 0
    assert "needs no measured costs" in capsys.readouterr().out
    assert not (tmp_path / "paces.json").exists()
