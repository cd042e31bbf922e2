"""Flags: no abbreviations, and an error names the flag that was meant."""

from importlib import import_module
from pathlib import Path

import pytest

from mainstem.cli.main import main
from mainstem.cli.parser import Parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["generate", "Hi", "--temperatur", "2"],
            "unrecognized arguments: --temperatur 2. Did you mean --temperature?",
        ),
        (
            ["generate", "Hi", "--kv-tok=4000"],
            "unrecognized arguments: --kv-tok=4000. Did you mean --kv-tokens?",
        ),
        (
            ["serve", "--max-bod-mib", "smollm2"],
            "unrecognized arguments: --max-bod-mib. Did you mean --max-body-mib?",
        ),
        (
            ["serve", "smollm2", "--max-stor=3"],
            "unrecognized arguments: --max-stor=3. Did you mean --max-stored-gib?",
        ),
        (
            ["batch", "in", "--overwrit", "-o", "out"],
            "unrecognized arguments: --overwrit. Did you mean --overwrite?",
        ),
        (["simulate"], "the following arguments are required:"),
        (
            ["generate", "Hi", "--max-tokens", "x"],
            "argument --max-tokens: invalid int value: 'x'.",
        ),
    ],
)
def test_an_error_is_one_line_and_names_the_nearest_flag(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mainstem {argv[0]}: error: {error}")
    assert line.endswith(f"mainstem {argv[0]} --help lists the flags")


def test_every_command_has_this_parser() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "ArgumentParser(" not in text or path.name == "parser.py", path


def test_parsers_of_commands_refuse_abbreviations() -> None:
    for name in ("serve", "batch", "chat", "demo", "plan"):
        made = import_module(f"mainstem.cli.{name}").parser()
        assert isinstance(made, Parser)
        assert not made.allow_abbrev
