"""The `mainstem` command as a shell sees it: sentences and exit statuses, never a traceback."""

import io
import sys
from pathlib import Path

import pytest

import mainstem
from mainstem.cli import generate, models
from mainstem.cli import main as cli
from mainstem.cli import plan as planning
from mainstem.core.environment import SWITCH_S
from mainstem.core.errors import (
    AnswerFailed,
    EngineLost,
    InvalidRequest,
    MainstemError,
    ModelNotFound,
)
from mainstem_bench import plan


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mainstem doctor` meets a disk that is full."""

    class Module:
        @staticmethod
        def main(argv: list[str]) -> int:
            raise OSError(28, "No space left on device", "out.jsonl")

    monkeypatch.setattr(cli, "import_module", lambda name: Module)


@pytest.mark.usefixtures("failing")
def test_an_os_error_is_reported_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said == "mainstem doctor: [Errno 28] No space left on device: 'out.jsonl'\n"


def test_only_programs_set_the_thread_switch_interval() -> None:
    before = sys.getswitchinterval()
    try:
        cli.main(["--version"])
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before)
    package = Path(mainstem.__file__).parent
    found = [path for path in package.rglob("*.py") if "setswitchinterval(" in path.read_text()]
    programs = ("cli/main.py", "runner/ranks/rank.py", "server/link/engine_process.py")
    assert sorted(found) == [package / program for program in programs]


def test_a_character_that_the_terminal_lacks_is_shown_as_a_question_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    cli.main(["--version"])
    print("\u00e9", flush=True)
    assert terminal.buffer.getvalue().endswith(b"?\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sreve"], "mainstem: no command 'sreve'. Did you mean serve?\n"),
        (["Generate"], "mainstem: no command 'Generate'. Did you mean generate?\n"),
        (["zzzz"], "mainstem: no command 'zzzz'.\n"),
        (["bench", "kernels"], "mainstem bench: no benchmark 'kernels'. Did you mean kernel?\n"),
        (["bench", "zzzz"], "mainstem bench: no benchmark 'zzzz'.\n"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_likely_one(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr().err
    assert captured.startswith(said)
    assert "usage: " in captured


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineLost("gone"), 1), (AnswerFailed("it failed"), 1), (InvalidRequest("x", "bad"), 2)],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_status_says_whether_the_call_was_wrong(
    error: MainstemError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(generate, "main", fail)
    assert cli.main(["generate", "hi"]) == status


def test_a_model_is_fetched_or_verified_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        models.main(["--fetch", "x", "--verify", "smollm2"])
    assert "not allowed with" in capsys.readouterr().err


def test_generate_accepts_a_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # Python sets None if standard input is closed
    with pytest.raises(ModelNotFound, match="no such folder"):
        generate.main(["-", "--model", "./nowhere"])


def test_plan_names_a_line_that_is_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xe9\n")
    assert planning.main([str(path)]) == 0
    assert "line 1 cannot be answered: not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["owner/model", "./folder", "SmolLM2"])
def test_only_models_with_checksums_can_be_verified(name: str) -> None:
    with pytest.raises(InvalidRequest, match="--verify"):
        models.main(["--verify", name])


def test_a_plan_benchmark_of_few_prompts_prints_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "measure", lambda *_, **__: (1.0, 1.0))
    assert plan.main(["--most", "100"]) == 0
    assert capsys.readouterr().out == ""
    assert plan.main(["--most", "100000"]) == 0
    assert '"prompts_ratio": 10' in capsys.readouterr().out
