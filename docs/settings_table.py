"""Write the table of docs/settings.md: `python docs/settings_table.py [--check]`.

Its rows are the settings of `mainstem.core.config`.
"""

import argparse
import sys
from pathlib import Path

from mainstem.core.config import SETTINGS
from mainstem.core.settings import Setting

PATH = Path(__file__).resolve().parent / "settings.md"
BEGIN, END = "<!-- settings: python docs/settings_table.py -->", "<!-- end of settings -->"
SEE = {"store": "([the store](design/kv.md))"}  # by section
KINDS = {int: "a whole number", float: "a number", str: "text", tuple: "names, commas between"}


def table() -> str:
    lines = [
        "| setting | flag | default | values | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    section = None
    for setting in SETTINGS:
        if setting.section != section:
            section = setting.section
            lines.append(f"| **`[{section}]`** | | | | {SEE.get(section, '')} |".replace("  ", " "))
        flag = "" if setting.flag is None else f"`{setting.flag}`"
        shown = setting.shown_default
        default = shown if setting.default is None else f"`{shown}`"
        cells = [f"`{setting.name}`", flag, default, values(setting), setting.about.help]
        lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines)


def values(setting: Setting) -> str:
    """What may be given, in words."""
    if setting.choices is not None:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.kind is bool:
        return "`true`, `false`"
    kind, limits = KINDS[setting.kind], setting.about.range
    if limits is None:
        return kind
    is_said = setting.kind is str or limits.words.startswith(kind)
    return limits.words if is_said else f"{kind}, {limits.words}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of docs/settings.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    is_check = parser.parse_args().check
    text = PATH.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if is_check:
        return 0 if fresh == text else 1
    PATH.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
