"""The record of a card by which attention is planned. `tuning.py` has those that were measured by
hand; `mainstem calibrate` fits others and keeps them in the cache folder, by device and head_dim:

    paces.json    {"NVIDIA L40S": {"128": {"large_us": 11.2, "large_key_us": 0.04, ...}}}
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mainstem.core.config import cache_dir
from mainstem.core.errors import ConfigError
from mainstem.core.files import replacing

MAY_BE_ZERO = {"yields", "late_us", "apart", "merge_us", "launch_us"}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long units take, in microseconds where they were measured; only ratios matter."""

    large_us: float = 500.0  # of a large unit besides its keys
    large_key_us: float = 0.9
    small_us: float = 90.0
    small_key_us: float = 1.0  # of a key of one KV head
    reads: float = math.inf  # keys of one KV head that memory delivers in a microsecond
    yields: float = 0.0  # share of the delay by lack of bandwidth that large units bear
    late_us: float = 0.0  # delay of small units that follow large ones
    beside: float = 1.0  # speed of small units while large ones run elsewhere, for the assignment
    least_speed: float = 0.15  # share of their fair speed that small units keep beside large ones
    apart: float = 0.35  # programs end this share of the longest small unit apart
    merge_us: float = 0.0  # of a Partial
    launch_us: float = 0.0  # of the kernel for large units, if they have their own

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_right = isinstance(value, int | float) and value >= 0.0
            if not is_right or (value == 0.0 and name not in MAY_BE_ZERO):
                raise ValueError(f"{name} is {value}")
            if value == math.inf and name != "reads":
                raise ValueError(f"{name} is {value}")


UNTUNED = Pace()
Paces = dict[int, Pace]  # by head_dim


def paces_path() -> Path:
    return cache_dir() / "paces.json"


def saved_paces(device_name: str) -> Paces:
    """What was fitted for a device; empty if it was never calibrated."""
    path = paces_path()
    try:
        fitted = json.loads(path.read_text()).get(device_name, {})
        return {int(head_dim): _pace_of(numbers) for head_dim, numbers in fitted.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a file of `mainstem calibrate` ({error}); remove it, then calibrate again"
        ) from error


def _pace_of(numbers: dict[str, float]) -> Pace:
    """A record of another version, which lacks a number, is refused: no default would fit it."""
    missing = {field.name for field in fields(Pace)} - numbers.keys()
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    return Pace(**numbers)


def save_paces(device_name: str, paces: Paces) -> Path:
    """Save a device's paces together with those of other devices; returns the file."""
    path = paces_path()
    saved_paces(device_name)  # a broken file is refused, not overwritten
    others = json.loads(path.read_text()) if path.exists() else {}
    fitted = {str(head_dim): asdict(pace) for head_dim, pace in paces.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps({**others, device_name: fitted}, indent=1).encode())
    return path
