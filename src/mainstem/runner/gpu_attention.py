"""Attention on a GPU: planned once per Step for each kind of layer, run by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention.ops import AttentionLimits, SpanAttention, partial_bytes
from mainstem.kernels.attention.plan import ALL_LAUNCHES, Launches
from mainstem.kernels.attention.window import clip_spans
from mainstem.kernels.dense.head_norms import HeadNorms
from mainstem.kernels.memory.append import rope_append
from mainstem.kernels.memory.copy import copy_slots
from mainstem.kernels.memory.rotate import rerotate
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.rope import inverse_frequencies
from mainstem.models.spec import ModelSpec
from mainstem.runner.gpu_inputs import GpuInputs
from mainstem.runner.gpu_pages import GpuPages


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """Settings that all SpanAttentions of a model share."""

    page_size: int
    dtype: torch.dtype
    device: torch.device
    limits: AttentionLimits
    deterministic_keys: int | None


class LayerSpans:
    """Span attention of all layers. Layers with the same score settings share a plan, layers with
    the same window share spans, and all share the memory for Partials.
    """

    def __init__(self, spec: ModelSpec, settings: SpanSettings) -> None:
        self._page_size = settings.page_size
        self._align_tokens = settings.deterministic_keys
        scores = [(kind.window, kind.softcap, kind.scale) for kind in spec.attentions]
        heads, limits = spec.num_heads, settings.limits
        partials: Tensor | None = None
        if len(set(scores)) > 1:
            size = partial_bytes(heads, spec.head_dim, limits)
            partials = torch.empty(size, dtype=torch.uint8, device=settings.device)
        self._kinds = {
            (window, softcap, scale): SpanAttention(
                heads=heads,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                page_size=settings.page_size,
                dtype=settings.dtype,
                device=settings.device,
                limits=limits,
                scale=scale,
                has_window=window is not None,
                softcap=softcap,
                deterministic_keys=settings.deterministic_keys,
                partials=partials,
            )
            for window, softcap, scale in dict.fromkeys(scores)
        }
        self._layers = [self._kinds[kind] for kind in scores]
        self._lse: Tensor | None = None  # log-sum-exps, which sinks need
        if any(kind.has_sinks for kind in spec.attentions):
            self._lse = torch.zeros((limits.max_tokens, heads), device=settings.device)

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """See SpanAttention. A kernel that one kind of layer needs in a step is launched for all
        kinds that have it."""
        return max((kind.kinds_of_steps for kind in self._kinds.values()), key=len)

    def plan(self, spans: Spans, positions: Int32s) -> Launches:
        """Describe the next step, with the positions of its tokens; returns the launches that it
        needs.
        """
        clipped: dict[int | None, Spans] = {None: spans}
        has_large = has_merge = False
        for (window, _, _), attention in self._kinds.items():
            if window is not None and window not in clipped:
                clipped[window] = clip_spans(
                    spans, positions, window, self._page_size, self._align_tokens
                )
            needed = attention.plan(clipped[window])
            has_large |= needed.large
            has_merge |= needed.merge
        return Launches(has_large, has_merge)

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
        lse = None if sinks is None or self._lse is None else self._lse[: len(q)]
        self._layers[layer].run(q, *pages, out=out, lse=lse, sinks=sinks, launches=launches)


class GpuAttention:
    """Norms heads, rotates, appends and attends. The decoder calls it for each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: GpuPages,
        spans: LayerSpans,
        space: Workspace,
        head_norms: Sequence[HeadNorms | None],
        sinks: Sequence[Tensor | None],
    ) -> None:
        self._pages = pages
        self._spans = spans
        self._mixed = space.mixed
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._head_dim = spec.head_dim
        device = space.mixed.device
        tables = {rope: inverse_frequencies(rope).to(device) for rope in spec.ropes}
        ropes = [kind.rope for kind in spec.attentions]
        self._frequencies = [None if rope is None else tables[rope] for rope in ropes]
        self._has_gate = [kind.has_gate for kind in spec.attentions]
        self._head_norms = head_norms
        self._sinks = sinks
        self._inputs: GpuInputs | None = None
        self._launches = ALL_LAUNCHES

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """See LayerSpans."""
        return self._spans.kinds_of_steps

    def plan(self, spans: Spans, positions: Int32s) -> Launches:
        """See LayerSpans."""
        return self._spans.plan(spans, positions)

    def bind(self, inputs: GpuInputs, launches: Launches) -> None:
        """Set positions and slots of the next step's tokens, and what to launch for them."""
        self._inputs, self._launches = inputs, launches

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        assert self._inputs is not None
        inputs, tokens, heads = self._inputs, len(qkv), self._num_heads
        parts = qkv.view(tokens, -1, self._head_dim)
        q = parts[:, :heads]
        gates = heads + 2 * self._num_kv_heads  # the first head of the gates, if there are some
        k, v = (
            parts[:, heads : heads + self._num_kv_heads],
            parts[:, gates - self._num_kv_heads : gates],
        )
        k_pages, v_pages = self._pages.keys(layer), self._pages.values(layer)
        frequencies = self._frequencies[layer]
        rope_append(
            q, k, v, k_pages, v_pages, inputs.positions, inputs.write_slots, frequencies,
            self._head_norms[layer],
        )  # fmt: skip
        if inputs.moves is not None:
            rerotate(k_pages, v_pages, *inputs.moves, frequencies)
        if inputs.copies is not None:
            copy_slots(self._pages.joint(layer), *inputs.copies)
        mixed = self._mixed[:tokens]
        out = mixed.view(tokens, heads, self._head_dim)
        sinks, pages = self._sinks[layer], (k_pages, v_pages)
        self._spans.run(layer, q, pages, out, sinks, self._launches)
        if self._has_gate[layer]:
            out.mul_(torch.sigmoid(parts[:, gates:]))
        return mixed
