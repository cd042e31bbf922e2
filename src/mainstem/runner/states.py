"""States of recurrent layers on a device: slots, each with the state of one sequence after one
token.

    slot  | layer 0: inputs of the convolution, matrices | layer 1: ... | padding

    inputs of the convolution  [kernel - 1, channels]  the model's dtype
    matrices                   [heads, keys, values]   fp32

A slot has the size of some pages, so it can be copied in pieces of the size of a page. The last
slot is written by rows that only pad a step. The control plane (kv/states.py) decides what is in
the others.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s
from mainstem.models.recurrence import RecurrentSpec
from mainstem.models.spec import ModelSpec

ALIGNMENT = 16  # bytes; of each part in a slot


class LayerState(NamedTuple):
    """One layer's part of all slots."""

    conv: Tensor
    matrix: Tensor


def pages_per_state(spec: ModelSpec, element_bytes: int, page_bytes: int) -> int:
    """The size of a slot in pages; 0 if the model has no recurrent layers."""
    num_bytes = sum(sum(_part_bytes(layer, element_bytes)) for layer in spec.recurrences)
    return -(-num_bytes // page_bytes)


class DeviceStates:
    """Owns the memory."""

    def __init__(
        self,
        spec: ModelSpec,
        num_states: int,
        dtype: torch.dtype,
        device: torch.device,
        page_bytes: int,
    ) -> None:
        self.num_states = num_states
        self.pages_per_state = pages_per_state(spec, dtype.itemsize, page_bytes)
        slot_bytes = self.pages_per_state * page_bytes
        slots = torch.zeros((num_states + 1, slot_bytes), dtype=torch.uint8, device=device)
        # [pieces, page_bytes]; those of slot 0 come first
        self.pieces = slots.view(-1, page_bytes)
        self.layers: list[LayerState] = []
        first = 0
        for layer in spec.recurrences:
            conv_bytes, matrix_bytes = _part_bytes(layer, dtype.itemsize)
            conv = _part(slots, first, (layer.kernel - 1, layer.conv_channels), dtype)
            matrix = _part(slots, first + conv_bytes, layer.matrix_shape, torch.float32)
            self.layers.append(LayerState(conv, matrix))
            first += conv_bytes + matrix_bytes


class SplitCopy(NamedTuple):
    """What a copier copies: pages, and pieces of states, with their slots in host memory."""

    pages: Int32s
    slots: Int32s
    parts: Int32s | None  # where the windowed parts of the pages are
    pieces: Int32s  # rows of `StatePieces.rows`
    piece_slots: Int32s


class StatePieces:
    """The pieces of a device's states, which copiers take for more pages: their numbers follow
    those of the pages."""

    def __init__(self, num_pages: int, states: DeviceStates | None) -> None:
        self._num_pages = num_pages
        self.rows = torch.empty(0, 0, dtype=torch.uint8) if states is None else states.pieces

    def split(self, pages: Int32s, slots: Int32s, parts: Int32s | None) -> SplitCopy:
        """Tell pages and pieces apart."""
        is_page = pages < self._num_pages
        if is_page.all():
            return SplitCopy(pages, slots, parts, pages[:0], slots[:0])
        pieces = pages[~is_page] - np.int32(self._num_pages)
        if parts is not None:
            parts = parts[is_page]
        return SplitCopy(pages[is_page], slots[is_page], parts, pieces, slots[~is_page])


def _part_bytes(layer: RecurrentSpec, element_bytes: int) -> tuple[int, int]:
    """Bytes of a layer's inputs of the convolution, and of its matrices, in a slot."""
    conv = (layer.kernel - 1) * layer.conv_channels * element_bytes
    return _aligned(conv), _aligned(4 * math.prod(layer.matrix_shape))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _part(slots: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[slots, *shape], from byte `first` of each slot on."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return slots[:, first : first + num_bytes].view(dtype).view(len(slots), *shape)
