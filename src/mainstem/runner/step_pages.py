"""A step over pages in the compute dtype on a CPU: where it writes and reads K and V."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu
from mainstem.kernels.memory.cpu import move_pages
from mainstem.models.spec import ModelSpec
from mainstem.runner.inputs import Inputs
from mainstem.runner.page_parts import clipped_to_windows
from mainstem.runner.pages import DevicePages


@dataclass(frozen=True, slots=True)
class _Part:
    """What a step does in the layers of one part of a page."""

    write_rows: Tensor
    copies: tuple[Tensor, Tensor] | None
    moves: tuple[Tensor, Tensor] | None  # places to move from and to
    shape: cpu.PageShape


class StepPages:
    """Writes K and V to the places that the step names; attention reads them there."""

    def __init__(self, spec: ModelSpec, pages: DevicePages, inputs: Inputs, spans: Spans) -> None:
        self._pages, self._inputs, self._all_spans = pages, inputs, spans
        self._positions = inputs.positions.numpy().astype(np.int32)
        self._parts = [self._part(spec, number) for number in range(len(pages.parts))]
        self._clipped: dict[int | None, Spans] = {None: spans}

    def _part(self, spec: ModelSpec, number: int) -> _Part:
        pages, inputs = self._pages, self._inputs
        part = pages.parts[number]
        places = inputs.windowed if part.is_windowed else inputs.places
        copies = None
        if places.copies is not None:
            source, target = places.copies
            copies = (pages.write_rows(number, source), pages.write_rows(number, target))
        shape = cpu.PageShape(
            spec.num_heads,
            part.shape.heads,
            part.num_places(pages.num_pages, pages.num_parts),
            pages.page_size,
        )
        moves = None if places.moves is None else places.moves[:2]
        return _Part(pages.write_rows(number, places.write_slots), copies, moves, shape)

    def spans(self, part: int, window: int | None) -> Spans:
        """The spans of layers with this window, over the places of a part of pages."""
        if window not in self._clipped:
            assert window is not None
            self._clipped[window] = clipped_to_windows(
                self._all_spans,
                self._positions,
                window,
                self._pages.page_size,
                self._inputs.window_parts,
            )
        return self._clipped[window]

    def shape(self, part: int, window: int | None) -> cpu.PageShape:
        """The sizes of the memory that these spans name."""
        return self._parts[part].shape

    def write(self, place: int, window: int | None, kv: Tensor, move_turns: Tensor | None) -> None:
        """Write K and V of the step's tokens [tokens, 2 * kv_heads, dim], then move and copy
        pages."""
        pages = self._pages
        part = self._parts[pages.part_of[place]]
        pages.append(place, part.write_rows, kv)
        if part.moves is not None:
            move_pages(pages.joint(place), *part.moves, move_turns)
        if part.copies is not None:
            pages.copy(place, *part.copies)

    def slots(self, place: int, window: int | None) -> Tensor:
        """The K and V that the spans of this layer read: [2, kv_heads, slots, dim]."""
        return self._pages.slots(place)
