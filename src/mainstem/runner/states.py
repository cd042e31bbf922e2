"""States of recurrent layers on a device: slots, each with the state of one sequence after one
token.

    slot  | layer 0: inputs of the convolution, matrices | layer 1: ... | padding

    inputs of the convolution  [kernel - 1, channels]  the model's dtype
    matrices                   [heads, keys, values]   fp32

A slot has the size of some pages, so it can be copied in pieces of the size of a page. The last
slot is written by rows that only pad a step. The control plane (kv/states.py) decides what is in
the others. Instead of a state, a slot may hold the rows of some sequences (kv/rows.py):

    slot      | row slot 0                                             | row slot 1 ... | padding
    row slot  | layer 0: inputs of the convolution, keys, values, sums | layer 1: ...   | padding
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.core.config import EngineConfig, Share, Siblings
from mainstem.core.step import Int32s
from mainstem.kernels.recurrent.rows import ROOM_STEP, LayerRows
from mainstem.models.recurrence import DeltaSpec, MambaSpec, RecurrentSpec, ShortConvSpec
from mainstem.models.spec import ModelSpec

ALIGNMENT = 16  # bytes; of each part in a slot
# Rows of a sequence, at most. More would save memory traffic, too, until they take as much as
# reading and writing a state; but each sequence would take the memory of more.
MOST_ROWS = 128
# Likewise of rows in fp32, on CPUs: from 30 to 45 on, a step with them takes longer than one that
# reads and writes a state (docs/log/cpu.md).
MOST_WIDE_ROWS = 32


class LayerState(NamedTuple):
    """One layer's part of all slots."""

    conv: Tensor
    matrix: Tensor


class RowShape(NamedTuple):
    """The rows that have room in the slot of a state."""

    per_state: int  # row slots; 0: there are no rows
    num_rows: int  # of each row slot
    dtype: torch.dtype  # of their keys and values


NO_ROWS = RowShape(0, 0, torch.float32)


def rows_that_fit(
    spec: ModelSpec, dtype: torch.dtype, row_dtype: torch.dtype, page_bytes: int
) -> RowShape:
    """As many rows as fit into a state's slot, up to a limit, for as many sequences as possible.
    None for a model with convolutions that have no matrix."""
    layers = spec.recurrences
    if any(isinstance(layer, ShortConvSpec) for layer in layers):
        return NO_ROWS
    slot_bytes = pages_per_state(spec, dtype.itemsize, page_bytes) * page_bytes
    most = MOST_ROWS if row_dtype.itemsize == 2 else min(MOST_ROWS, MOST_WIDE_ROWS)
    for num_rows in range(most, 0, -ROOM_STEP):
        parts = [_row_bytes(each, num_rows, dtype.itemsize, row_dtype.itemsize) for each in layers]
        for per_state in range(slot_bytes // max(sum(map(sum, parts)), 1), 0, -1):
            if slot_bytes % (per_state * ALIGNMENT) == 0:
                return RowShape(per_state, num_rows, row_dtype)
    return NO_ROWS


def rows_for(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    row_dtype: torch.dtype,
    page_bytes: int,
    *,
    by_default: bool,
) -> RowShape:
    """Likewise, or none if states are not to be read together, or if bits must not depend on
    others that read them. `by_default`: what `siblings=auto` means."""
    siblings = Siblings.OFF if config.sched.share is not Share.READS else config.sched.siblings
    is_on = siblings is Siblings.ON or (siblings is Siblings.AUTO and by_default)
    if config.model.deterministic or not is_on:
        return NO_ROWS
    return rows_that_fit(spec, dtype, row_dtype, page_bytes)


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
        rows: RowShape = NO_ROWS,
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
        self.rows: list[LayerRows] = []  # of each layer, if there are any
        if rows.per_state:
            row_slots = slots.view(len(slots) * rows.per_state, -1)
            self.rows = _layer_rows(spec, row_slots, dtype, rows)


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


def _row_sizes(layer: RecurrentSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and dims of the keys, and of the values."""
    heads, key_dim, value_dim = layer.matrix_shape
    key_heads = heads
    if isinstance(layer, DeltaSpec):
        key_heads = layer.key_heads
    elif isinstance(layer, MambaSpec):
        key_heads = layer.groups
    return (key_heads, key_dim), (heads, value_dim)


def _row_bytes(
    layer: RecurrentSpec, num_rows: int, element_bytes: int, row_element_bytes: int
) -> tuple[int, int, int, int]:
    """Bytes of a layer's inputs of the convolution, keys, values and sums, in a row slot."""
    (key_heads, key_dim), (heads, value_dim) = _row_sizes(layer)
    return (
        _aligned((layer.kernel - 1) * layer.conv_channels * element_bytes),
        _aligned(key_heads * num_rows * key_dim * row_element_bytes),
        _aligned(heads * num_rows * value_dim * row_element_bytes),
        _aligned(heads * num_rows * 4),
    )


def _layer_rows(
    spec: ModelSpec, slots: Tensor, dtype: torch.dtype, shape: RowShape
) -> list[LayerRows]:
    """Each layer's part of the row slots, [slots, bytes]."""
    layers, first, num_rows = list[LayerRows](), 0, shape.num_rows
    for layer in spec.recurrences:
        sizes = _row_bytes(layer, num_rows, dtype.itemsize, shape.dtype.itemsize)
        starts = [first + sum(sizes[:part]) for part in range(len(sizes))]
        (key_heads, key_dim), (heads, value_dim) = _row_sizes(layer)
        conv = (layer.kernel - 1, layer.conv_channels)
        layers.append(
            LayerRows(
                conv=_part(slots, starts[0], conv, dtype),
                keys=_part(slots, starts[1], (key_heads, num_rows, key_dim), shape.dtype),
                values=_part(slots, starts[2], (heads, num_rows, value_dim), shape.dtype),
                sums=_part(slots, starts[3], (heads, num_rows), torch.float32),
            )
        )
        first += sum(sizes)
    return layers


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _part(slots: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[slots, *shape], from byte `first` of each slot on."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return slots[:, first : first + num_bytes].view(dtype).view(len(slots), *shape)
