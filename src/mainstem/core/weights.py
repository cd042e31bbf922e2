"""Weights that change while an engine runs (docs/rollouts.md).

The version of the weights is part of every page's name (`kv/keys.py` `root_key`), so K and V of
another version cannot be found, on any tier.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol


class UpdateMode(Enum):
    """What happens to requests that were submitted before an update."""

    FINISH = "finish"  # they are answered first, by the old weights
    ABORT = "abort"  # they end with the tokens they have
    CONTINUE = "continue"  # they go on with the new weights and the K and V of the old ones


class Tag(Enum):
    """What `wake_up` brings back."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


BOTH_TAGS = frozenset(Tag)


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """All tensors of a folder, or of one safetensors file. With a config.json, the folder is a
    whole model: its version is the one of an engine that was started with it."""

    folder: Path


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """Tensors (of torch) by their names in a checkpoint: of all weights, or of some. A tensor must
    keep its values until the update is over."""

    tensors: Iterable[tuple[str, object]]


Update = FolderUpdate | TensorUpdate


def version_name(identity: bytes) -> str:
    """The short name of a version, which answers carry."""
    return identity.hex()[:16]


class ModelWeights(Protocol):
    """The weights of a runner. No step runs while one of these is called."""

    def update(self, update: Update) -> bytes:
        """Bring new weights into force; returns the identity of the model with them.

        If this raises, the old weights are in force, whole; or none are, if it raises WeightsLost.
        """
        ...

    def lose(self) -> None:
        """Other weights were in force in a process that has ended: `update` must bring all."""
        ...

    def resume(self) -> None:
        """Undo `lose`, if nothing has changed since; raises InvalidRequest. Wakes the weights."""
        ...

    def sleep(self, level: int) -> None:
        """Give the memory of pages back, and of the weights: level 1 keeps them in host memory,
        level 2 drops them."""
        ...

    def wake(self, tags: frozenset[Tag]) -> None:
        """Undo `sleep`. Raises WeightsLost if the weights must be updated first."""
        ...
