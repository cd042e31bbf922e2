"""Interpreted tests that are left out today run on another day, and all run after a change."""

from pathlib import Path

import pytest

from tests.kernels import drawn


def test_each_test_runs_on_one_of_the_days() -> None:
    for name in (f"tests/kernels/test_span.py::test_{number}" for number in range(100)):
        assert sum(drawn.is_drawn(name, day) for day in range(20, 20 + drawn.DRAWN_OF)) == 1


def test_a_change_of_a_source_makes_all_tests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "ROOT", tmp_path)
    monkeypatch.setattr(drawn, "RECORD", tmp_path / "record.txt")
    source = tmp_path / drawn.KERNELS[0] / "span.py"
    source.parent.mkdir(parents=True)
    source.write_text("A = 1\n")
    assert not drawn.is_recorded("kernels")
    drawn.RECORD.write_text(drawn.state_of("kernels") + "\n")
    assert drawn.is_recorded("kernels")
    source.write_text("A = 2\n")
    assert not drawn.is_recorded("kernels")
