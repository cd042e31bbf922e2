"""Lets each layer of a step wait for its part of the loads that the step depends on."""

from typing import Protocol

from mainstem.core.step import Int32s
from mainstem.models.block import Gate

LAYERS_AT_ONCE = 8  # layers that are loaded together, and captured in one CUDA graph


class Loads(Protocol):
    """Knows the loads in progress."""

    def gate(self, load_ids: Int32s) -> Gate:
        """Return a gate that lets each layer run as soon as these loads have loaded that layer."""
