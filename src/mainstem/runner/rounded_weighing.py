"""The keys that a step's weighings read (weighing.py), if pages are rounded."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s, Step
from mainstem.runner.page_parts import PagePart


class KeptKeys(Protocol):
    """Rounded pages of a device."""

    page_size: int
    parts: tuple[PagePart, ...]
    part_of: dict[int, int]  # by a layer's place in a page

    def expanded_keys(self, layer: int, places: Tensor) -> Tensor:
        """K of some places, [places, kv_heads, page_size, head_dim]."""

    def open_keys(self, layer: int, places: Tensor) -> Tensor:
        """K of some open pages."""


class RoundedKeys:
    """The pages of a step's weighings, expanded. A page that the step does not fill is read from
    the open page of its sequence."""

    def __init__(
        self,
        pages: KeptKeys,
        step: Step,
        open_places: Int32s,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
    ) -> None:
        """`open_places` [seqs]: where the page of each sequence's last token is open."""
        self._pages = pages
        ids = np.unique(np.concatenate([each.page_ids for each in step.weighings]))
        numbers = [np.searchsorted(ids, each.page_ids).astype(np.int32) for each in step.weighings]
        weighings = zip(step.weighings, numbers, strict=True)
        # the same weighings, over the pages of `keys`
        self.step = replace(
            step,
            weighings=tuple(replace(each, page_ids=number) for each, number in weighings),
            window_parts=None,
        )
        last = step.write_slots[step.seq_starts[1:] - 1]  # of each sequence
        is_open = (last + 1) % pages.page_size > 0
        is_open &= np.isin(last // pages.page_size, ids)

        def sent(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        self._open_numbers = sent(np.searchsorted(ids, last[is_open] // pages.page_size))
        self._open_places = sent(open_places[is_open])
        self._full = self._windowed = sent(ids)
        if step.window_parts is not None:
            self._windowed = sent(step.window_parts[ids])

    def keys(self, layer: int) -> Tensor:
        """[pages of the weighings, kv_heads, page_size, head_dim]"""
        part = self._pages.parts[self._pages.part_of[layer]]
        places = self._windowed if part.is_windowed else self._full
        keys = self._pages.expanded_keys(layer, places)
        keys[self._open_numbers] = self._pages.open_keys(layer, self._open_places).float()
        return keys
