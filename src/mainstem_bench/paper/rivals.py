"""Numbers of other engines on the same kinds of machines, measured once, with their settings."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from mainstem_bench.workloads import OFFLINE_JOBS


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


def rival_job(name: str) -> dict[str, Any]:
    """Return what rivals ran under this name, with the keys of our lines."""
    job = OFFLINE_JOBS[name]
    return {
        "prompts": rivals()["prompts"].get(name),
        "model_shape": job.model_shape,
        "kv_tokens": job.kv_tokens,
        "requests": job.groups * job.degree,
        "prefix": job.prefix,
        "own": job.distinct,
        "degree": job.degree,
        "system": job.prefix,
        "user": job.distinct,
        "answer": job.output,
    }
