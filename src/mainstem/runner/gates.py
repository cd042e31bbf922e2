"""Loads that a step may depend on: each layer waits for its part of them."""

from typing import Protocol

from mainstem.core.step import Int32s
from mainstem.models.block import Gate

LAYERS_AT_ONCE = 8  # layers that are loaded, and captured, together


class Loads(Protocol):
    """Knows the loads in progress."""

    def gate(self, load_ids: Int32s) -> Gate:
        """A gate that lets each layer run as soon as these loads have loaded that layer."""
        ...
