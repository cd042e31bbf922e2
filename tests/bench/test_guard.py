"""`mainstem bench guard`: what became slower is found, also what could not be measured."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench import guard
from mainstem_bench.guard import Figures, Guarded, best, main, read_lines, report, write_lines

TINY = Guarded("decode --model-shape tiny --own 20 --steps 5 --seqs 1,4", ("device_ms_per_step",))
NAN = float("nan")


@pytest.mark.parametrize(
    ("now", "num_slower"), [(1.0, 0), (1.029, 0), (1.031, 1), (0.5, 0), (NAN, 1)]
)
def test_more_than_the_bar_is_slower(now: float, num_slower: int) -> None:
    assert report({"a": now}, {"a": 1.0}, 1.03) == num_slower


def test_a_figure_without_a_stored_line_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    assert report({"a": 2.0}, {}, 1.03) == 0
    assert "new" in capsys.readouterr().out


def test_lines_of_one_command_are_told_apart() -> None:
    lines: list[Mapping[str, object]] = [
        {"seqs": 1, "us": 2, "other": 3}, {"seqs": 4, "us": 5}, {"summary": True}
    ]  # fmt: skip
    found = Guarded("decode", ("us",)).figures(lines)
    assert found == {"decode | 1 | us": 2.0, "decode | 4 | us": 5.0}


def test_the_best_of_several_runs_counts() -> None:
    assert best([{"a": 2.0, "b": 1.0}, {"a": 1.5, "b": 3.0}]) == {"a": 1.5, "b": 1.0}


def test_figures_are_stored_except_those_that_were_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == {}
    write_lines(path, {"a": 1.5, "b": NAN})
    assert read_lines(path) == {"a": 1.5}


def test_each_command_is_one_that_exists() -> None:
    from mainstem_bench.cli import BENCHES  # noqa: PLC0415

    commands = [guarded.command for guarded in (*guard.DEVICE, *guard.HOST)]
    assert len(set(commands)) == len(commands)
    assert {command.split()[0] for command in commands} <= set(BENCHES)


def test_host_figures_are_compared_with_another_tree_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "src" / "mainstem").mkdir(parents=True)
    asked: list[Path] = []

    def pretend(guarded: Guarded, tree: Path) -> Figures:
        asked.append(tree)
        return {"a": 1.0 if tree == tmp_path else 1.2}

    monkeypatch.setattr(guard, "run", pretend)
    monkeypatch.setattr(guard, "DEVICE", ())
    monkeypatch.setattr(guard, "HOST", (TINY,))
    assert main(["--against", str(tmp_path)]) == 1
    assert asked == [tmp_path, guard.ROOT] * guard.ROUNDS
    monkeypatch.setattr(guard, "HOST_BAR", 1.3)
    assert main(["--against", str(tmp_path)]) == 0


@pytest.mark.torch
def test_a_run_is_compared_with_the_stored_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "DEVICE", (TINY,))
    monkeypatch.setattr(guard, "DEVICE_BAR", 1e6)
    lines = ["--lines", str(tmp_path / "lines.jsonl")]
    assert main([*lines, "--record", "--only", "tiny"]) == 0
    stored = read_lines(tmp_path / "lines.jsonl")
    assert [name.split(" | ")[1] for name in stored] == ["1", "4"]
    write_lines(tmp_path / "lines.jsonl", dict.fromkeys(stored, 1e-9))
    monkeypatch.setattr(guard, "run", lambda *_: stored)
    assert main([*lines, "--only", "tiny"]) == 1


def test_a_command_that_measures_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "DEVICE", (Guarded("no-such-benchmark", ("us",)),))
    monkeypatch.setattr(guard, "HOST", ())
    assert main(["--lines", str(tmp_path / "lines.jsonl")]) == 1


def test_a_wrong_folder_or_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkout"):
        main(["--against", str(tmp_path)])
    with pytest.raises(ConfigError, match="no command contains"):
        main(["--only", "nothing like this"])
