"""Stores lines: one file for each item, which its next run replaces."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mainstem.core.errors import InvalidRequest
from mainstem.core.files import replacing
from mainstem_bench.paper.item import Item, Line


def lines_path(folder: Path, item: Item) -> Path:
    return folder / f"{item.name}.jsonl"


def read_lines(folder: Path, item: Item) -> list[Line]:
    """The stored lines of an item; empty if it was never run."""
    path = lines_path(folder, item)
    if not path.is_file():
        return []
    found = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(json.loads(text))
        except ValueError as error:
            raise InvalidRequest(f"{path}:{number}", f"is not a line of results: {error}") from None
    return found


def write_lines(folder: Path, item: Item, lines: Iterable[Line]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    with replacing(lines_path(folder, item)) as file:
        file.write(text.encode())


def only(lines: Sequence[Line], **wanted: object) -> list[Line]:
    """Return the lines that have these values."""
    return [line for line in lines if all(line.get(name) == v for name, v in wanted.items())]


def one(lines: Sequence[Line], **wanted: object) -> Line:
    """Return the last line that has these values; raises KeyError if there is none."""
    found = only(lines, **wanted)
    if not found:
        raise KeyError(f"no line with {wanted}")
    return found[-1]
