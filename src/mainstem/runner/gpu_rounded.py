"""Device pages on a GPU whose full pages are kept in fp8, for each part of a page (page_parts.py):

    rounded   [layer][K or V][places] | numbers [kv_heads, page_size, head_dim] e4m3 | scales
    open      [layer][K or V][open places, kv_heads, page_size, head_dim], the compute dtype

Scales are fp32, one for each KV head, 16 bytes apart from the next head's in size but not in place:
they lie side by side at the start of the last kv_heads * 16 bytes. In both tensors, K is less by
the layer's key shift (models/key_shifts.py).

New K and V are written to open places (gpu_pages.py); a page is rounded in the step that fills it.
Which page has which open place is known to the host only (`OpenPlaces`).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import Int32s, Int64s, Spans, Step
from mainstem.kernels.memory.record_size import SCALE_BYTES
from mainstem.kernels.memory.records import MOST
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.spec import ModelSpec
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.page_parts import page_parts
from mainstem.runner.rounded_spans import OpenPages, open_pages

Pair = tuple[Tensor, Tensor]  # of K and of V


class RoundedGpuPages:
    """Owns the tensors; the control plane decides which sequence uses which page."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_parts: int = 0,
        *,
        num_open: int,
        shifts: KeyShifts | None = None,
    ) -> None:
        """`num_parts`: RunnerFacts.num_parts; `num_open`: open places."""
        self.num_pages = num_pages
        self.num_parts = num_parts
        self.page_size = page_size
        self.opened = GpuPages(spec, num_open, page_size, dtype, device)
        self.parts = page_parts(spec)
        self.part_of = {place: n for n, part in enumerate(self.parts) for place in part.layers}
        self.tensors: list[Tensor] = []
        found: dict[int, tuple[Pair, Pair]] = {}
        for part in self.parts:
            heads, dim = part.shape.heads, part.shape.dim
            places = part.num_places(num_pages, num_parts)
            half_bytes = heads * (page_size * dim + SCALE_BYTES)
            shape = (len(part.layers), 2, places, 1, 1, half_bytes)
            tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
            self.tensors.append(tensor)
            numbers = tensor.view(torch.float8_e4m3fn)[..., 0, 0, : heads * page_size * dim]
            numbers = numbers.unflatten(-1, (heads, page_size, dim))  # type: ignore[no-untyped-call]
            first = heads * page_size * dim // 4
            scales = tensor.view(torch.float32)[..., 0, 0, first : first + heads]
            for index, place in enumerate(part.layers):
                k, v = numbers[index].unbind()
                k_scales, v_scales = scales[index].unbind()
                found[place] = ((k, v), (k_scales, v_scales))
        self._layers = [found[place] for place in range(len(found))]
        of_place = {} if shifts is None else shifts.of_place
        self._shifts = {place: shift.to(device) for place, shift in of_place.items()}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of a rounded page with all its parts."""
        return sum(tensor.nbytes // tensor.shape[2] for tensor in self.tensors)

    def numbers(self, layer: int) -> Pair:
        """[places, kv_heads, page_size, head_dim] of K and of V, e4m3."""
        return self._layers[layer][0]

    def scales(self, layer: int) -> Pair:
        """[places, kv_heads] of K and of V."""
        return self._layers[layer][1]

    def shift(self, layer: int) -> Tensor | None:
        """The layer's key shift, [kv_heads, head_dim] fp32."""
        return self._shifts.get(layer)

    def expanded_keys(self, layer: int, places: Tensor) -> Tensor:
        """K of some places, [places, kv_heads, page_size, head_dim] fp32."""
        codes = self.numbers(layer)[0].view(torch.uint8).index_select(0, places)
        scales = self.scales(layer)[0].index_select(0, places)
        return codes.view(torch.float8_e4m3fn).float() * scales[:, :, None, None]

    def open_keys(self, layer: int, places: Tensor) -> Tensor:
        """K of some open places, [places, kv_heads, page_size, head_dim]."""
        return self.opened.keys(layer).index_select(0, places)

    def move(
        self, layer: int, moves: tuple[Tensor, Tensor, Tensor], inv_freq: Tensor | None
    ) -> None:
        """Write pages to other places: their keys rotated in fp32 and rounded again, V as it is."""
        source, target, distance = moves[0].long(), moves[1].long(), moves[2]
        codes, scales = self.numbers(layer), self.scales(layer)
        moved = [each.view(torch.uint8).index_select(0, source) for each in codes]
        moved_scales = [each.index_select(0, source) for each in scales]
        if inv_freq is not None:
            keys, shift = self.expanded_keys(layer, source), self.shift(layer)
            if shift is not None:
                keys += shift[:, None]
            half = len(inv_freq)
            angles = (distance.float()[:, None] * inv_freq)[:, None, None]
            cos, sin = angles.cos(), angles.sin()
            first, second = keys[..., :half].clone(), keys[..., half : 2 * half].clone()
            keys[..., :half] = first * cos - second * sin
            keys[..., half : 2 * half] = second * cos + first * sin
            if shift is not None:
                keys -= shift[:, None]
            moved_scales[0] = keys.abs().amax((2, 3)) / MOST
            wide = moved_scales[0][:, :, None, None]
            keys = torch.where(wide > 0, keys / wide, 0.0).clamp_(-MOST, MOST)
            moved[0] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        for half_of, found, found_scales in zip((0, 1), moved, moved_scales, strict=True):
            codes[half_of].view(torch.uint8).index_copy_(0, target, found)
            scales[half_of].index_copy_(0, target, found_scales)


class Writes(NamedTuple):
    """Where a step's tokens are written, and the pages that it rounds."""

    slots: Int64s  # [tokens] open place * page_size + offset
    targets: Int64s  # [tokens] the page to round after this token; -1: none
    windowed_targets: Int64s  # the same in windowed parts
    places: Int32s  # the open place of each page of `opened`
    opened: OpenPages

    def places_of(self, step: Step) -> Int32s:
        """[seqs] the open place of the last token of each sequence of the step."""
        return self.places[self.opened.of_token[step.seq_starts[1:] - 1]]


class OpenPlaces:
    """Which open place the page of each running sequence has.

    A page keeps its place until the step that fills it has been launched. Steps run in the order of
    their launches, so the next step may use the place for another page.
    """

    def __init__(self, num_seqs: int, max_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self.num_places = num_open_places(num_seqs, max_tokens, page_size)
        self._of_slot = np.full(num_seqs, -1, np.int32)
        self._free = list(range(self.num_places))

    def assign(self, step: Step) -> Writes:
        """Give the pages that a step writes to their places."""
        size = self._page_size
        opened = open_pages(step.write_slots, step.seq_slots, step.seq_starts, size)
        slots, is_begun = opened.seq_slots, opened.first_offsets > 0
        is_first = np.ones(len(slots), np.bool_)
        is_first[1:] = slots[1:] != slots[:-1]
        self._forget(slots[is_first & ~is_begun])  # of sequences that have ended
        places = np.empty(len(slots), np.int32)
        places[is_begun] = self._of_slot[slots[is_begun]]
        assert (places[is_begun] >= 0).all(), "a page was begun and has no open place"
        for number in np.flatnonzero(~is_begun).tolist():
            places[number] = self._free.pop()
        is_full = opened.end_offsets == size
        self._of_slot[slots[is_full]] = -1
        self._of_slot[slots[~is_full]] = places[~is_full]
        self._free += places[is_full].tolist()
        of_token = opened.of_token
        offsets = step.write_slots % size
        is_last = offsets == size - 1
        targets = np.where(is_last, step.write_slots // size, -1)
        windowed = targets
        if step.window_parts is not None:
            windowed = np.where(is_last, step.window_parts[opened.pages[of_token]], -1)
        new_slots = places[of_token].astype(np.int64) * size + offsets
        return Writes(new_slots, targets, windowed.astype(np.int64), places, opened)

    def _forget(self, slots: Int32s) -> None:
        old = self._of_slot[slots]
        self._free += old[old >= 0].tolist()
        self._of_slot[slots] = -1


def num_open_places(num_seqs: int, max_tokens: int, page_size: int) -> int:
    """Enough for any step: a page of each sequence, those that a step fills, and a second page of
    each sequence that passes the end of one."""
    return 2 * num_seqs + max_tokens // page_size + 1


def before_own_pages(spans: Spans, positions: Int32s, page_size: int) -> Spans:
    """The spans, each lone token's without its own page; kernels leave out those of other tokens.
    Spans without keys are dropped."""
    counts = spans.query_starts[1:] - spans.query_starts[:-1]
    first_rows = spans.query_rows[spans.query_starts[:-1]]
    own = positions[first_rows] // page_size * page_size - spans.key_positions
    is_lone = counts == 1
    key_tokens = np.where(is_lone, np.minimum(spans.key_tokens, own), spans.key_tokens)
    is_kept = key_tokens > 0
    num_rows = counts * is_kept
    num_pages = -(-key_tokens // page_size) * is_kept
    rows = ragged_arange(num_rows) + spans.query_starts[:-1].repeat(num_rows)
    pages = ragged_arange(num_pages) + spans.page_starts[:-1].repeat(num_pages)
    return Spans(
        query_starts=starts_of(num_rows[is_kept]),
        query_rows=spans.query_rows[rows],
        page_starts=starts_of(num_pages[is_kept]),
        page_ids=spans.page_ids[pages],
        key_tokens=key_tokens[is_kept],
        is_causal=(spans.is_causal & ~is_lone)[is_kept],
        key_positions=spans.key_positions[is_kept],
    )
