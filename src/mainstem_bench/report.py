"""Fields of every benchmark line: on which machine and with which versions it was measured."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from mainstem import __version__
from mainstem.core.tables import table

QUANTILES = (50, 90, 95, 99)
NESTED = ("settings", "profile", "in_engine", "in_simulator", "served")  # only in JSON


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


def show(name: str, result: Mapping[str, object], is_json: bool) -> None:
    """Print one result: a JSON line, or a table with a row for each value."""
    if is_json:
        print(line(name, result), flush=True)
        return
    rows = [[key, str(value)] for key, value in result.items() if key not in NESTED]
    print(table(["", name], rows))


def show_all(
    name: str,
    results: Iterable[Mapping[str, object]],
    is_json: bool,
    about: Mapping[str, object] | None = None,
) -> list[Mapping[str, object]]:
    """Print results: JSON lines as they come, each also with `about`, or a table at the end with a
    row for each result. Returns the results."""
    shown = []
    for result in results:
        shown.append(result)
        if is_json:
            print(line(name, {**result, **(about or {})}), flush=True)
    if not is_json:
        names = dict.fromkeys(key for result in shown for key in result if key not in NESTED)
        print(table([*names], [[_cell(result.get(key, "")) for key in names] for result in shown]))
    return shown


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


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
