"""Fields of every benchmark line: on which machine and with which versions it was measured."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from mainstem import __version__

QUANTILES = (50, 90, 95, 99)


def fingerprint() -> dict[str, object]:
    """Return machine, versions and commit."""
    return {
        "mainstem": __version__,
        "commit": _commit(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": np.__version__,
    }


def line(name: str, values: Mapping[str, object]) -> str:
    """Return one JSON line."""
    return json.dumps({"bench": name, **values, **fingerprint()})


def load_average() -> float | None:
    """Return the load of this machine in the last minute; it should be near 0 when a benchmark
    starts."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def spread(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Return mean and quantiles in milliseconds, as fields that begin with `name`; None if there
    are no values.
    """
    names = [f"{name}_mean", *(f"{name}_p{q}" for q in QUANTILES)]
    if not seconds:
        return dict.fromkeys(names)
    values = np.asarray(seconds) * 1e3
    found = [values.mean(), *np.percentile(values, QUANTILES)]
    return {name: round(float(value), 2) for name, value in zip(names, found, strict=True)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the archive (`git archive` fills in the file), or of the checkout."""
    exported = Path(__file__).with_name("commit.txt").read_text().strip()
    if not exported.startswith("$"):
        return exported
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
