"""Write the README's results table: `python benchmarks/table.py [--check]`.

Each row of the table names a file of results and picks its latest matching line.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: python benchmarks/table.py -->", "<!-- end of results -->"

Line = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One measurement: what, where it is kept, and how to show ours and the rival's."""

    what: str
    file: str
    ours: Callable[[Line], bool]
    value: str  # format string over the line
    rival: Callable[[Line], bool] | None = None
    rival_name: str = ""
    hardware: str = "2 Neoverse-N1 cores"
    command: str = ""


def _is(**wanted: object) -> Callable[[Line], bool]:
    return lambda line: all(line.get(name) == value for name, value in wanted.items())


ROWS: list[Row] = []


def latest(file: str, matches: Callable[[Line], bool]) -> Line | None:
    path = RESULTS / file
    if not path.is_file():
        return None
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    found = [line for line in lines if matches(line)]
    return found[-1] if found else None


def table() -> str:
    lines = [
        "| what | mainstem | rival | machine | command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        ours = latest(row.file, row.ours)
        if ours is None:
            continue
        rival = latest(row.file, row.rival) if row.rival else None
        shown = f"{row.value.format(**rival)} ({row.rival_name})" if rival else "-"
        ours_shown = row.value.format(**ours)
        lines.append(
            f"| {row.what} | **{ours_shown}** | {shown} | {row.hardware} | `{row.command}` |"
        )
    return "\n".join(lines)


def main() -> int:
    path = ROOT / "README.md"
    text = path.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv:
        return 0 if fresh == text else 1
    path.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
