"""Numbers of other engines on the same kinds of machines, measured once, with their settings."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def rivals() -> dict[str, Any]:
    text = (files("mainstem_bench") / "paper" / "data" / "rivals.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def rival(*names: str) -> float:
    """Return one number, for example `rival("offline", "relay-2048", "cascade")`."""
    found: Any = rivals()
    for name in names:
        found = found[name]
    return float(found)
