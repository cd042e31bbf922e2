"""The parts of a page: layers whose K and V are kept in one tensor, because they have the same
heads and are kept for the same tokens.

    full part       layers without a window               at the page's number
    windowed part   layers with a window, if there are    at the page's number, or at a place of its
                    layers without one, too               own (Step.window_parts)

A slot of a slab holds the parts of a page one after the other, in this order.
"""

from dataclasses import dataclass, replace

import numpy as np

from mainstem.core.step import Int32s, Int64s, Spans, Step
from mainstem.kernels.attention.window import clip_spans
from mainstem.models.spec import KvShape, ModelSpec


@dataclass(frozen=True, slots=True)
class PagePart:
    """Layers of equal heads, all with a window or all without."""

    shape: KvShape
    is_windowed: bool
    layers: tuple[int, ...]  # their places in a page, ascending

    def num_places(self, num_pages: int, num_parts: int) -> int:
        """The length of the part's tensor: windowed parts have a pool of their own if `num_parts`
        is not 0, with one place more that holds nothing of use."""
        return num_parts + 1 if self.is_windowed and num_parts else num_pages


def page_parts(spec: ModelSpec) -> tuple[PagePart, ...]:
    """The parts of a model's pages, full ones first. A model whose layers are alike has one."""
    is_divided = bool(spec.windowed)
    found: dict[tuple[bool, KvShape], list[int]] = {}
    for place, attention in enumerate(spec.kept):
        is_windowed = is_divided and attention.window is not None
        found.setdefault((is_windowed, spec.kv_shape(attention)), []).append(place)
    return tuple(
        PagePart(shape, is_windowed, tuple(found[is_windowed, shape]))
        for is_windowed, shape in sorted(found, key=lambda key: key[0])
    )


def layout_of(spec: ModelSpec) -> bytes:
    """What a slot's layout adds to the model's identity: nothing if pages have one part."""
    parts = page_parts(spec)
    if len(parts) < 2:
        return b""
    return b":parts " + ";".join(str(part.layers) for part in parts).encode()


def in_windowed_parts(step: Step, page_size: int) -> Step:
    """The step with the places of windowed parts instead of pages, where K and V are written,
    copied and moved."""
    parts = step.window_parts
    if parts is None:
        return step

    def place_of(slots: Int64s) -> Int64s:
        return parts[slots // page_size].astype(np.int64) * page_size + slots % page_size

    return replace(
        step,
        write_slots=place_of(step.write_slots),
        copy_from=place_of(step.copy_from),
        copy_to=place_of(step.copy_to),
        move_from=parts[step.move_from],
        move_to=parts[step.move_to],
    )


def clipped_to_windows(
    spans: Spans,
    positions: Int32s,
    window: int,
    page_size: int,
    parts: Int32s | None,
    align_tokens: int | None = None,
) -> Spans:
    """`clip_spans`, with the places of windowed parts."""
    clipped = clip_spans(spans, positions, window, page_size, align_tokens)
    return clipped if parts is None else replace(clipped, page_ids=parts[clipped.page_ids])
