"""Attention on a GPU: planned once per Step for each kind of layer, run by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention.expanded import EXPANDED_BYTES, NEVER, ExpandingAttention
from mainstem.kernels.attention.ops import AttentionLimits, SpanAttention, partial_bytes
from mainstem.kernels.attention.plan import ALL_LAUNCHES, Launches
from mainstem.kernels.attention.triton.open_pages import attend_open_pages
from mainstem.kernels.attention.tuning import expands_rounded
from mainstem.kernels.dense.head_norms import HeadNorms
from mainstem.kernels.memory.append import rope_append
from mainstem.kernels.memory.copy import copy_slots
from mainstem.kernels.memory.rotate import rerotate
from mainstem.kernels.memory.round import round_open_pages
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.rope import inverse_frequencies
from mainstem.models.spec import KvShape, ModelSpec
from mainstem.runner.gpu_inputs import GpuInputs
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.gpu_rounded import Pair, RoundedGpuPages, before_own_pages
from mainstem.runner.page_parts import clipped_to_windows


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """Settings that all SpanAttentions of a model share."""

    page_size: int
    dtype: torch.dtype
    device: torch.device
    limits: AttentionLimits
    deterministic_keys: int | None
    is_rounded: bool = False  # full pages are in fp8


class _Kind(NamedTuple):
    """Layers that share a plan."""

    window: int | None
    softcap: float | None
    scale: float
    shape: KvShape


class LayerSpans:
    """Span attention of all layers. Layers with the same score settings share a plan, layers with
    the same window share spans, and all share the memory for Partials, and that for expanded pages.
    """

    def __init__(self, spec: ModelSpec, settings: SpanSettings) -> None:
        self._page_size = settings.page_size
        self._align_tokens = settings.deterministic_keys
        kinds = [
            _Kind(kind.window, kind.softcap, kind.scale, spec.kv_shape(kind))
            for kind in spec.attentions
        ]
        heads, limits, device = spec.num_heads, settings.limits, settings.device
        expanding = {
            kind
            for kind in kinds
            if settings.is_rounded and expands_rounded(device, settings.dtype, kind.shape.dim)
        }
        partials = memory = None
        if len(set(kinds)) > 1 or expanding:
            size = max(partial_bytes(heads, kind.shape.dim, limits) for kind in kinds)
            partials = torch.empty(size, dtype=torch.uint8, device=device)
        if expanding:
            memory = torch.zeros(EXPANDED_BYTES, dtype=torch.uint8, device=device)
        self._kinds: dict[_Kind, SpanAttention | ExpandingAttention] = {}
        for kind in dict.fromkeys(kinds):
            make = partial(
                SpanAttention,
                heads=heads,
                kv_heads=kind.shape.heads,
                head_dim=kind.shape.dim,
                page_size=settings.page_size,
                dtype=settings.dtype,
                device=device,
                limits=limits,
                scale=kind.scale,
                has_window=kind.window is not None,
                softcap=kind.softcap,
                deterministic_keys=settings.deterministic_keys,
                partials=partials,
            )
            attention = make(is_rounded=settings.is_rounded)
            self._kinds[kind] = attention
            if memory is not None and kind in expanding:
                expanded = make(before_own_page=True)
                self._kinds[kind] = ExpandingAttention(attention, expanded, memory)
        self.expands = memory is not None
        self._layers = [self._kinds[kind] for kind in kinds]
        self._lse: Tensor | None = None  # log-sum-exps, which sinks need
        self._is_rounded = settings.is_rounded
        if settings.is_rounded or any(kind.has_sinks for kind in spec.attentions):
            self._lse = torch.zeros((limits.max_tokens, heads), device=settings.device)

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """See SpanAttention. A kernel that one kind of layer needs in a step is launched for all
        kinds that have it."""
        return max((kind.kinds_of_steps for kind in self._kinds.values()), key=len)

    def plan(
        self,
        spans: Spans,
        positions: Int32s,
        window_parts: Int32s | None,
        expand_rows: float = NEVER,
    ) -> Launches:
        """Describe the next step, with the positions of its tokens, and Step.window_parts; returns
        the launches that it needs. `expand_rows`: see ExpandingAttention; steps that run in graphs
        expand no pages.
        """
        if self._is_rounded:
            spans = before_own_pages(spans, positions, self._page_size)
        clipped: dict[int | None, Spans] = {None: spans}
        has_large = has_merge = False
        for kind, attention in self._kinds.items():
            window = kind.window
            if window is not None and window not in clipped:
                clipped[window] = clipped_to_windows(
                    spans, positions, window, self._page_size, window_parts, self._align_tokens
                )
            seen = clipped[window]
            if isinstance(attention, ExpandingAttention):
                needed = attention.plan(seen, expand_rows)
            else:
                needed = attention.plan(seen)
            has_large |= needed.large
            has_merge |= needed.merge
        return Launches(has_large, has_merge)

    def forget_addresses(self) -> None:
        """Pages are about to have other addresses."""
        for attention in self._kinds.values():
            attention.forget_addresses()

    def run_rounded(
        self, layer: int, q: Tensor, numbers: Pair, scales: Pair, out: Tensor, launches: Launches
    ) -> Tensor:
        """SpanAttention.run for this layer over rounded pages. Returns the log-sum-exps."""
        assert self._lse is not None
        lse = self._lse[: len(q)]
        self._layers[layer].run(q, *numbers, out=out, lse=lse, scales=scales, launches=launches)
        return lse

    def run(
        self,
        layer: int,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        sinks: Tensor | None,
        launches: Launches,
    ) -> None:
        """SpanAttention.run for this layer."""
        attention = self._layers[layer]
        assert isinstance(attention, SpanAttention)
        lse = None if sinks is None or self._lse is None else self._lse[: len(q)]
        attention.run(q, *pages, out=out, lse=lse, sinks=sinks, launches=launches)


class GpuAttention:
    """Norms heads, rotates, appends and attends. The decoder calls it for each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: GpuPages | RoundedGpuPages,
        spans: LayerSpans,
        space: Workspace,
        head_norms: Sequence[HeadNorms | None],
        sinks: Sequence[Tensor | None],
        query_gains: Sequence[Tensor | None],
    ) -> None:
        self._rounded = pages if isinstance(pages, RoundedGpuPages) else None
        # where new K and V are written
        self._pages = pages.opened if isinstance(pages, RoundedGpuPages) else pages
        self._spans = spans
        self._space = space
        self._num_heads = spec.num_heads
        self._places = spec.kv_places  # of each layer's K and V in a page
        self._new_kv = [spec.new_kv(layer) for layer in spec.attention_layers]
        windowed = {place for part in pages.parts if part.is_windowed for place in part.layers}
        self._is_windowed = [place in windowed for place in self._places]
        device = space.mixed.device
        max_tokens = len(space.mixed)
        self._no_slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        tables = {rope: inverse_frequencies(rope).to(device) for rope in spec.ropes}
        ropes = [kind.rope for kind in spec.attentions]
        self._frequencies = [None if rope is None else tables[rope] for rope in ropes]
        self._scores = [(kind.scale, kind.window, kind.softcap) for kind in spec.attentions]
        self._has_gate = [kind.has_gate for kind in spec.attentions]
        self._head_norms = head_norms
        self._sinks = sinks
        self._query_gains = query_gains
        self._inputs: GpuInputs | None = None
        self._launches = ALL_LAUNCHES

    def forget_addresses(self) -> None:
        """See LayerSpans."""
        self._spans.forget_addresses()

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """See LayerSpans."""
        return self._spans.kinds_of_steps

    @property
    def expands(self) -> bool:
        """Whether some steps expand rounded pages."""
        return self._spans.expands

    def plan(
        self,
        spans: Spans,
        positions: Int32s,
        window_parts: Int32s | None = None,
        expand_rows: float = NEVER,
    ) -> Launches:
        """See LayerSpans."""
        return self._spans.plan(spans, positions, window_parts, expand_rows)

    def bind(self, inputs: GpuInputs, launches: Launches) -> None:
        """Set positions and slots of the next step's tokens, and what to launch for them."""
        self._inputs, self._launches = inputs, launches

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        assert self._inputs is not None
        tokens, heads, new = len(qkv), self._num_heads, self._new_kv[layer]
        parts = qkv.view(tokens, -1, new.dim)
        q = parts[:, :heads]
        place = self._places[layer]
        pages = self._pages.keys(place), self._pages.values(place)
        if new.heads:
            self._append(layer, parts, pages)
        else:  # an earlier layer has written K and V: only queries are rotated
            rope_append(
                q, q[:, : pages[0].shape[1]], q[:, : pages[0].shape[1]], *pages,
                self._inputs.positions, self._no_slots[:tokens], self._frequencies[layer],
            )  # fmt: skip
        if (gain := self._query_gains[layer]) is not None:
            q.mul_(gain)
        mixed = self._space.mixed_rows(tokens, heads * new.dim)
        out = mixed.view(tokens, heads, new.dim)
        if self._rounded is None:
            self._spans.run(layer, q, pages, out, self._sinks[layer], self._launches)
        else:
            self._run_rounded(self._rounded, layer, q, pages, out)
        if self._has_gate[layer]:
            out.mul_(torch.sigmoid(parts[:, heads + 2 * new.heads :]))
        return mixed

    def _run_rounded(
        self, rounded: RoundedGpuPages, layer: int, q: Tensor, opened: Pair, out: Tensor
    ) -> None:
        """Attend to rounded pages, then to each token's own page."""
        inputs, place = self._inputs, self._places[layer]
        assert inputs is not None
        numbers, scales = rounded.numbers(place), rounded.scales(place)
        lse = self._spans.run_rounded(layer, q, numbers, scales, out, self._launches)
        scale, window, softcap = self._scores[layer]
        attend_open_pages(
            q, *opened, out, lse, inputs.positions, inputs.places.write_slots,
            scale=scale, window=window, softcap=softcap, sinks=self._sinks[layer],
        )  # fmt: skip

    def _append(self, layer: int, parts: Tensor, pages: tuple[Tensor, Tensor]) -> None:
        """Norm and rotate heads, and write K and V."""
        inputs, frequencies = self._inputs, self._frequencies[layer]
        keys = self._num_heads
        values = keys + self._new_kv[layer].heads
        end = 2 * values - keys
        assert inputs is not None
        places = inputs.windowed if self._is_windowed[layer] else inputs.places
        rope_append(
            parts[:, :keys], parts[:, keys:values], parts[:, values:end], *pages,
            inputs.positions, places.write_slots, frequencies, self._head_norms[layer],
            None if self._rounded is None else self._rounded.shift(self._places[layer]),
        )  # fmt: skip
        if self._rounded is not None:
            place = self._places[layer]
            assert places.round_to is not None
            round_open_pages(
                *pages, self._rounded.numbers(place), self._rounded.scales(place),
                places.write_slots, places.round_to,
            )  # fmt: skip
            if places.moves is not None:
                self._rounded.move(place, places.moves, frequencies)
            return
        if places.moves is not None:
            rerotate(*pages, *places.moves, frequencies)
        if places.copies is not None:
            copy_slots(self._pages.joint(self._places[layer]), *places.copies)
