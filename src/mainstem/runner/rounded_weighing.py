"""The keys that a step's weighings read (weighing.py), if pages are rounded."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Step
from mainstem.kernels.memory.records import expand_pages
from mainstem.runner.rounded_pages import RoundedPages


class RoundedKeys:
    """The pages of a step's weighings, expanded. A page that the step does not fill is read from
    the open page of its sequence."""

    def __init__(self, pages: RoundedPages, step: Step) -> None:
        self._pages, self._step = pages, step
        self._ids = np.unique(np.concatenate([each.page_ids for each in step.weighings]))
        numbers = [
            np.searchsorted(self._ids, each.page_ids).astype(np.int32) for each in step.weighings
        ]
        weighings = zip(step.weighings, numbers, strict=True)
        # the same weighings, over the pages of `keys`
        self.step = replace(
            step,
            weighings=tuple(replace(each, page_ids=ids) for each, ids in weighings),
            window_parts=None,
        )
        slots = step.write_slots[step.seq_starts[1:] - 1]  # of each sequence's last token
        is_open = (slots + 1) % pages.page_size > 0
        is_open &= np.isin(slots // pages.page_size, self._ids)
        self._open_numbers = np.searchsorted(self._ids, slots[is_open] // pages.page_size)
        self._open_slots = step.seq_slots[is_open]

    def keys(self, layer: int) -> Tensor:
        """[pages of the weighings, kv_heads, page_size, head_dim]"""
        pages = self._pages
        part = pages.parts[pages.part_of[layer]]
        ids = self._ids
        if part.is_windowed and self._step.window_parts is not None:
            ids = self._step.window_parts[ids]
        records = pages.rounded(layer)[0][:, torch.from_numpy(ids).long()]
        heads, dim = part.shape.heads, part.shape.dim
        keys = torch.empty((heads, len(ids), pages.page_size * dim), dtype=pages.dtype)
        expand_pages(records, keys)
        slots = torch.from_numpy(self._open_slots).long()
        keys[:, torch.from_numpy(self._open_numbers)] = pages.opened(layer)[:heads, slots]
        return keys.view(heads, len(ids), pages.page_size, dim).transpose(0, 1)
