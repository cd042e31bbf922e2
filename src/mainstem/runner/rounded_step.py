"""A step over rounded pages on a CPU: where it writes and reads K and V.

In each layer the pages that the step reads are put side by side, in the compute dtype, and
attention runs over these *local* pages:

    local pages   | rounded pages that the step reads | open pages that it writes |
                  expanded from records                 as computed

    open pages begun in earlier steps are copied here, new K and V are written, pages that are now
    full are rounded to records, the others are kept for the next step; then records are expanded
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention import cpu
from mainstem.kernels.attention.window import clip_spans
from mainstem.kernels.memory.cpu import turn_keys
from mainstem.kernels.memory.records import expand_pages, round_pages
from mainstem.models.spec import ModelSpec
from mainstem.runner.inputs import Inputs
from mainstem.runner.rounded_pages import RoundedPages
from mainstem.runner.rounded_spans import OpenPages, open_pages, split_spans


@dataclass(frozen=True, slots=True)
class _Local:
    """The local pages of layers with the same heads and window."""

    spans: Spans  # over local pages
    shape: cpu.PageShape
    num_rounded: int
    records: Tensor  # rows of the rounded pages of all heads, viewed as [-1, record]
    token_rows: Tensor  # rows of new K and V in `scratch`, viewed as [-1, dim]
    scratch: Tensor  # [2, kv_heads, local pages * page_size, dim]


class _Kept(NamedTuple):
    """Some of the open pages of a step, and where they are between steps."""

    numbers: Tensor
    slots: Tensor

    @classmethod
    def of(cls, opened: OpenPages, chosen: NDArray[np.bool_]) -> "_Kept":
        numbers = np.flatnonzero(chosen)
        return cls(torch.from_numpy(numbers), torch.from_numpy(opened.seq_slots[numbers]).long())


class RoundedStep:
    """Like StepPages."""

    def __init__(self, spec: ModelSpec, pages: RoundedPages, inputs: Inputs, spans: Spans) -> None:
        self._spec, self._pages, self._inputs = spec, pages, inputs
        size = pages.page_size
        self._positions = inputs.positions.numpy().astype(np.int32)
        self._opened = opened = open_pages(
            inputs.places.write_slots.numpy(), inputs.seq_slots, inputs.seq_starts, size
        )
        assert opened.seq_slots.max(initial=0) < pages.num_open, "a slot has no open page"
        self._split = split_spans(spans, self._positions, opened, size, pages.num_pages)
        is_full = opened.end_offsets == size
        self._full = np.flatnonzero(is_full)
        self._begun = _Kept.of(opened, opened.first_offsets > 0)
        self._unfinished = _Kept.of(opened, ~is_full)
        self._locals: dict[tuple[int, int | None], _Local] = {}
        self._shared = _shared_places(spec)
        self._kept: dict[int, Tensor] = {}  # local pages that a later layer reads, too

    def spans(self, part: int, window: int | None) -> Spans:
        return self._local(part, window).spans

    def shape(self, part: int, window: int | None) -> cpu.PageShape:
        return self._local(part, window).shape

    def write(self, place: int, window: int | None, kv: Tensor, move_turns: Tensor | None) -> None:
        """Shift K in place, write K and V of the step's tokens, round full pages, move pages, and
        expand those that the step reads."""
        pages, opened, part = self._pages, self._opened, self._pages.part_of[place]
        local = self._local(part, window)
        scratch = local.scratch
        heads, dim = kv.shape[1], kv.shape[2]
        if (shift := pages.shifts.get(place)) is not None:
            kv[:, : heads // 2] -= shift
        if place in self._shared:
            scratch = self._kept[place] = torch.empty_like(local.scratch)
        by_page = scratch.view(heads, -1, pages.page_size * dim)
        in_progress = pages.opened(place)
        begun, unfinished = self._begun, self._unfinished
        first = local.num_rounded
        if len(begun.slots):
            by_page[:, first + begun.numbers] = in_progress[:, begun.slots]
        scratch.view(-1, dim).index_copy_(0, local.token_rows, kv.reshape(-1, dim))
        if len(self._full):
            values = by_page[:, first + torch.from_numpy(self._full)]
            self._round(place, values, opened.pages[self._full])
        if len(unfinished.slots):
            in_progress[:, unfinished.slots] = by_page[:, first + unfinished.numbers]
        self._move(place, dim, move_turns)
        if not first:
            return
        rounded = pages.rounded(place)
        records = rounded.view(-1, rounded.shape[-1]).index_select(0, local.records)
        expand_pages(records.view(heads, first, -1), by_page[:, :first])

    def slots(self, place: int, window: int | None) -> Tensor:
        """The K and V that the spans of this layer read."""
        kept = self._kept.get(place)
        return self._local(self._pages.part_of[place], window).scratch if kept is None else kept

    def _round(self, place: int, values: Tensor, page_ids: Int32s) -> None:
        """Round pages, [2 * kv_heads, pages, page_size * dim]."""
        both = values.view(2, -1, *values.shape[1:])
        targets = self._places(self._pages.part_of[place], page_ids)
        k_scale, v_scale = (self._pages.scales or {}).get(place, (None, None))
        for half, scale, pool in zip(
            both, (k_scale, v_scale), self._pages.rounded(place), strict=True
        ):
            pool[:, targets] = round_pages(half, scale)

    def _move(self, place: int, dim: int, turns: Tensor | None) -> None:
        """Move pages: rotate their keys in the compute dtype and round them again."""
        pages, part = self._pages, self._pages.parts[self._pages.part_of[place]]
        places = self._inputs.windowed if part.is_windowed else self._inputs.places
        if places.moves is None:
            return
        source, target, _ = places.moves
        records = pages.rounded(place)[:, :, source]
        if turns is not None:
            heads, count = records.shape[1:3]
            keys = torch.empty((heads, count, pages.page_size * dim))
            expand_pages(records[0], keys)
            by_token = keys.view(heads, count, pages.page_size, dim)
            if (shift := pages.shifts.get(place)) is not None:
                by_token += shift[:, None, None]
            turn_keys(by_token, turns[:, 0])
            if shift is not None:
                by_token -= shift[:, None, None]
            records[0] = round_pages(keys, (pages.scales or {}).get(place, (None, None))[0])
        pages.rounded(place)[:, :, target] = records

    def _places(self, part: int, page_ids: Int32s) -> Tensor:
        """Where this part of pages is."""
        parts = self._inputs.window_parts
        has_own = self._pages.parts[part].is_windowed and parts is not None
        places = parts[page_ids] if has_own and parts is not None else page_ids
        return torch.from_numpy(places).long()

    def _local(self, part: int, window: int | None) -> _Local:
        key = (part, window)
        if key not in self._locals:
            self._locals[key] = self._lay_out(part, window)
        return self._locals[key]

    def _lay_out(self, part: int, window: int | None) -> _Local:
        pages, size, shape = self._pages, self._pages.page_size, self._pages.parts[part].shape
        spans = self._split
        if window is not None:
            spans = clip_spans(spans, self._positions, window, size)
        ids, numbers = np.unique(spans.page_ids, return_inverse=True)
        ids = ids[ids < pages.num_pages]
        is_open = spans.page_ids >= pages.num_pages
        numbers[is_open] = spans.page_ids[is_open] - pages.num_pages + len(ids)
        num_local, num_places = len(ids) + len(self._opened.pages), pages.tensors[part].shape[3]
        heads = torch.arange(2 * shape.heads)
        offsets = self._inputs.places.write_slots % size
        rows = (len(ids) + torch.from_numpy(self._opened.of_token)) * size + offsets
        return _Local(
            spans=replace(spans, page_ids=numbers.astype(np.int32)),
            shape=cpu.PageShape(self._spec.num_heads, shape.heads, num_local, size),
            num_rounded=len(ids),
            records=(heads[:, None] * num_places + self._places(part, ids)).reshape(-1),
            token_rows=(rows[:, None] + heads * (num_local * size)).reshape(-1),
            scratch=torch.empty((2, shape.heads, num_local * size, shape.dim), dtype=pages.dtype),
        )


def _shared_places(spec: ModelSpec) -> frozenset[int]:
    """The places in a page that several layers read."""
    places = spec.kv_places
    return frozenset(place for place in places if places.count(place) > 1)
