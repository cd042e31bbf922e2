"""Attention for a step that weighs pages: runs the planned attention, then sums the attention
weights of a few rows."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mainstem.core.step import Step
from mainstem.kernels.attention.mass import page_masses
from mainstem.models.block import Attention
from mainstem.models.collectives import Collectives
from mainstem.models.spec import ModelSpec


class KeyPages(Protocol):
    """The pages of a device."""

    def keys(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]"""


class WeighingAttention:
    """Runs a step's attention. For `Step.weighings`, it also sums attention weights over all
    layers."""

    def __init__(
        self,
        attention: Attention,
        spec: ModelSpec,
        pages: KeyPages,
        sinks: Sequence[Tensor | None],
        step: Step,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._pages = pages
        self._sinks = sinks
        self._kinds = spec.attentions
        self._places = spec.kv_places
        self._dims = [spec.kv_shape(kind).dim for kind in spec.attentions]
        self._num_heads = spec.num_heads
        self._weighings = step.weighings
        self._positions = [int(step.positions[each.first_row]) for each in step.weighings]
        ids = [each.page_ids for each in step.weighings]
        self._page_ids = [torch.from_numpy(each).long().to(device) for each in ids]
        self._windowed_ids = self._page_ids
        if step.window_parts is not None:
            ids = [step.window_parts[each] for each in ids]
            self._windowed_ids = [torch.from_numpy(each).long().to(device) for each in ids]
        self._has_parts = bool(spec.windowed)
        # for each weighing, [pages] masses
        self._masses = [torch.zeros(len(ids), device=device) for ids in self._page_ids]

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        mixed = self._attention.run(layer, qkv)
        # rotated in place by now
        queries = qkv.view(len(qkv), -1, self._dims[layer])[:, : self._num_heads]
        kind, keys = self._kinds[layer], self._pages.keys(self._places[layer])
        is_windowed = self._has_parts and kind.window is not None
        page_ids = self._windowed_ids if is_windowed else self._page_ids
        for number, weighing in enumerate(self._weighings):
            self._masses[number] += page_masses(
                queries[weighing.first_row : weighing.first_row + weighing.num_rows],
                keys,
                page_ids[number],
                self._positions[number],
                scale=kind.scale,
                window=kind.window,
                softcap=kind.softcap,
                sinks=self._sinks[layer],
            )
        return mixed

    def masses(self, ranks: Collectives) -> list[Tensor]:
        """Return [pages] masses for each weighing, summed over the heads of all ranks. Call it
        once, after all layers."""
        return [ranks.sum_(mass) for mass in self._masses]
