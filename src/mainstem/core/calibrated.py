"""What `mainstem calibrate` measured: files in the cache folder, with a record per name.

cards.json    {"NVIDIA L40S": {"name": "NVIDIA L40S", "bytes_per_s": 7.7e11, ...}}
paces.json    {"NVIDIA L40S, head_dim 128": {"large_q": 64, ..., "pace": {"large_us": 11.2, ...}}}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from mainstem.core.environment import cache_dir
from mainstem.core.errors import ConfigError
from mainstem.core.files import replacing

T = TypeVar("T")  # a dataclass
Values = Mapping[str, Any]  # as read from JSON: numbers, strings and nested mappings


class Calibrated(Generic[T]):
    """One of these files. `make` builds a record, and raises if a value is not right."""

    def __init__(self, file_name: str, make: Callable[[Values], T]) -> None:
        self._file_name, self._make = file_name, make

    @property
    def path(self) -> Path:
        return cache_dir() / self._file_name

    def load(self) -> dict[str, T]:
        """All records; none if the file does not exist."""
        try:
            records = json.loads(self.path.read_text())
            return {name: self._make(values) for name, values in records.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{self.path}: not a file of this version's `mainstem calibrate` ({error}); "
                "remove it, then calibrate again"
            ) from error

    def save(self, name: str, record: T) -> Path:
        """Save a record beside those of other names; a broken file is refused, not overwritten."""
        records = {**self.load(), name: record}
        text = json.dumps({name: asdict(each) for name, each in records.items()}, indent=1)  # type: ignore[call-overload]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(text.encode())
        return self.path


def complete(kind: type[T], values: Values) -> T:
    """A record with all its fields. A record of another version that lacks a field is refused,
    since no default would be right.
    """
    missing = {field.name for field in fields(kind)} - values.keys()  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    return kind(**values)
