"""The parser of every command: flags are written in full, and errors are short."""

import argparse
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NoReturn

from mainstem.cli.flag_types import not_negative, not_negative_count, positive, positive_count
from mainstem.core.spelling import did_you_mean

METAVARS: dict[Callable[[str], object], str] = {
    **dict.fromkeys((int, not_negative_count, positive_count), "N"),
    **dict.fromkeys((float, not_negative, positive), "X"),
    Path: "FILE",
}


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags, which would change their meaning when a flag is added. The lines
    of the description are kept."""

    def __init__(
        self, prog: str | None = None, description: str | None = None, usage: str | None = None
    ) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, formatter_class=form, allow_abbrev=False)

    def parse_args(  # type: ignore[override]  # typeshed's overloads say the same
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Like argparse's; the error for unknown flags names those that were probably meant."""
        return self._checked(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(  # type: ignore[override]  # as above
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Like `parse_args`; positional arguments may stand between flags."""
        return self._checked(*self.parse_known_intermixed_args(args, namespace))

    def _checked(self, parsed: argparse.Namespace, unknown: list[str]) -> argparse.Namespace:
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
            hints = "".join(dict.fromkeys(_hint(flag, known) for flag in flags))
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{hints}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line; the usage of a command with many flags would hide it."""
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(2, f"{self.prog}: error: {message}{end} {self.prog} --help lists the flags\n")


def _hint(flag: str, known: Sequence[str]) -> str:
    """Which flags were probably meant: those that `flag` abbreviates, or else the nearest."""
    meant = [each for each in known if flag.startswith("--") and each.startswith(flag)]
    return f" Did you mean {' or '.join(meant)}?" if meant else did_you_mean(flag, known)


def add_flag(
    group: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], object],
    words: str,
    default: object = None,
    *,
    metavar: str | None = None,
) -> None:
    """Add a flag with one value; its default ends its help, unless that is None or empty.

    add_flag(parser, "--port", int, "port to listen on", 8000)
    """
    if shown := _shown(default):
        words = f"{words} ({shown})".lstrip()
    metavar = metavar or METAVARS.get(kind)
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=words)


def _shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, list):
        return ",".join(map(_shown, default))
    if isinstance(default, Enum):
        return str(default.value)
    return f"{default:.12g}" if isinstance(default, float) else str(default)
