"""Loads that a step may depend on: its layers wait for theirs."""

from typing import Protocol

from mainstem.core.step import Int32s
from mainstem.models.block import Gate

LAYERS_AT_ONCE = 8  # layers that are loaded, and captured, together


class Loads(Protocol):
    """Knows the loads under way."""

    def gate(self, load_ids: Int32s) -> Gate:
        """A gate that lets a layer through when that layer of these loads is there."""
        ...
