"""Settings of a GGUF file, read with the type each must have."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mainstem.core.errors import ModelNotFound


class Field(Protocol):
    """One setting, as the GGUF reader has it."""

    def contents(self) -> object: ...


class Fields:
    """All settings by name; ModelNotFound names one that is missing."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def text(self, name: str) -> str:
        return str(self._read(name))

    def whole(self, name: str) -> int:
        return int(str(self._read(name)))

    def real(self, name: str) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.99999974e-06."""
        return float(str(np.float32(str(self._read(name)))))

    def items(self, name: str) -> list[object]:
        value = self._read(name)
        assert isinstance(value, list), f"{name} is not an array"
        return value

    def _read(self, name: str) -> object:
        if name not in self._fields:
            raise ModelNotFound(f"the GGUF file has no field {name}")
        return self._fields[name].contents()
