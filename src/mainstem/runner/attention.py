"""Attention on the CPU: planned once per Step for each kind of layer, run by every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu
from mainstem.models.rope import rotary_table, turns_by
from mainstem.models.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from mainstem.runner.inputs import Inputs
from mainstem.runner.pages import DevicePages
from mainstem.runner.rounded_pages import RoundedPages
from mainstem.runner.rounded_step import RoundedStep
from mainstem.runner.step_pages import StepPages


@dataclass(frozen=True, slots=True)
class _Heads:
    """The heads of a layer's first product; equal ones share a record."""

    num: int  # query heads
    num_turned: int  # and key heads
    num_kept: int  # and value heads; gates follow
    dim: int
    rotary_dim: int
    part: int  # of a page: where K and V are


class CpuAttention:
    """Holds what attention needs in the layers of a decoder: pages, rotations, sinks."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: DevicePages | RoundedPages,
        max_positions: int,
        sinks: Sequence[Tensor | None],
        query_gains: Sequence[Tensor | None],
    ) -> None:
        self.spec = spec
        self.pages = pages
        self.tables: Mapping[RopeSpec, Tensor] = {
            rope: rotary_table(rope, max_positions) for rope in spec.ropes
        }
        self.kinds = spec.attentions
        self.places = spec.kv_places  # of each layer's K and V in a page
        self.sinks = sinks
        self.query_gains = query_gains
        self.heads = [
            self._heads(layer, place)
            for layer, place in zip(spec.attention_layers, self.places, strict=True)
        ]

    def _heads(self, layer: LayerSpec, place: int) -> _Heads:
        new, num = self.spec.new_kv(layer), self.spec.num_heads
        assert layer.attention is not None, "recurrent layers have no heads"
        rotary_dim, part = self.spec.rotary_dim(layer.attention), self.pages.part_of[place]
        return _Heads(num, num + new.heads, num + 2 * new.heads, new.dim, rotary_dim, part)

    def plan(self, inputs: Inputs, spans: Spans) -> "AttentionPlan":
        """Prepare a step."""
        return AttentionPlan(self, inputs, spans)


@dataclass(frozen=True, slots=True)
class _Turns:
    """The rotations of a step's tokens, and of pages that move."""

    tokens: Tensor  # [tokens, 1, rotary_dim / 2]
    moves: Tensor | None  # [moves, 1, 1, rotary_dim / 2]


class AttentionPlan:
    """Rotates, appends and attends. The decoder calls it for each layer."""

    def __init__(self, layers: CpuAttention, inputs: Inputs, spans: Spans) -> None:
        """The last layer computes only `inputs.hidden_rows`."""
        spec, pages = layers.spec, layers.pages
        tokens = len(inputs.token_ids)
        self._layers = layers
        # only the last layer may leave out rows
        self._is_last = spec.layers[-1].attention is not None
        self._step: RoundedStep | StepPages
        if isinstance(pages, RoundedPages):
            self._step = RoundedStep(spec, pages, inputs, spans)
        else:
            self._step = StepPages(spec, pages, inputs, spans)
        self._turns = {rope: _turns(layers, rope, inputs) for rope in layers.tables}
        # layers with the same score settings share a plan, whatever their rotation
        plans: dict[tuple[int, int | None, float, float | None], cpu.SpanPlan] = {}
        self._spans: list[cpu.SpanPlan] = []
        for kind, heads in zip(layers.kinds, layers.heads, strict=True):
            scores = (heads.part, kind.window, kind.scale, kind.softcap)
            if scores not in plans:
                spans = self._step.spans(heads.part, kind.window)
                plans[scores] = self._plan(spans, tokens, kind, heads)
            self._spans.append(plans[scores])
        self._wanted = inputs.hidden_rows
        self._wanted_spans: cpu.SpanPlan | None = None
        if not self._is_last:
            self._wanted = None
        elif inputs.hidden_rows is not None and len(inputs.hidden_rows):
            last, heads = layers.kinds[-1], layers.heads[-1]
            spans = self._step.spans(heads.part, last.window)
            wanted = narrow_spans(spans, inputs.hidden_rows.numpy(), tokens)
            if wanted is None:
                self._wanted = None
            else:
                count = len(inputs.hidden_rows)
                self._wanted_spans = self._plan(wanted, count, last, heads)

    def _plan(self, spans: Spans, tokens: int, kind: AttentionSpec, heads: _Heads) -> cpu.SpanPlan:
        shape = self._step.shape(heads.part, kind.window)
        return cpu.plan(spans, tokens, shape, kind.scale, kind.softcap)

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        tokens, kind, sizes = len(qkv), self._layers.kinds[layer], self._layers.heads[layer]
        heads = qkv.view(tokens, -1, sizes.dim)
        turns = None if kind.rope is None else self._turns[kind.rope]
        if turns is not None:
            _rotate(heads[:, : sizes.num_turned], turns.tokens, sizes.rotary_dim)
        place = self._layers.places[layer]
        if sizes.num_kept > sizes.num:  # otherwise an earlier layer has written K and V
            move_turns = None if turns is None else turns.moves
            kv = heads[:, sizes.num : sizes.num_kept]
            self._step.write(place, kind.window, kv, move_turns)
        slots = self._step.slots(place, kind.window)
        q, sinks = heads[:, : sizes.num], self._layers.sinks[layer]
        if (gain := self._layers.query_gains[layer]) is not None:
            q.mul_(gain)
        if layer == len(self._layers.kinds) - 1 and self._wanted is not None:
            mixed = self._run_wanted(q, slots, sinks)
        else:
            mixed = self._spans[layer].run(q, slots, sinks).view(tokens, -1)
        if kind.has_gate:
            mixed *= torch.sigmoid(heads[:, sizes.num_kept :].reshape(tokens, -1))
        return mixed

    def _run_wanted(self, q: Tensor, slots: Tensor, sinks: Tensor | None) -> Tensor:
        """Compute only the wanted rows. The result has all rows; the others are not used."""
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        if self._wanted_spans is not None:
            assert self._wanted is not None
            found = self._wanted_spans.run(q.index_select(0, self._wanted), slots, sinks)
            out[self._wanted] = found.view(len(found), -1)
        return out


def _rotate(x: Tensor, turns: Tensor, rotary_dim: int) -> None:
    """Rotate [tokens, heads, dim] in place; the two dims of a pair are adjacent, so a pair is a
    complex number."""
    tokens, heads, dim = x.shape
    part = x if rotary_dim == dim else x[..., :rotary_dim]
    pairs = (tokens, heads, rotary_dim // 2, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(part.view(pairs)).mul_(turns)
        return
    wide = torch.view_as_complex(part.float().view(pairs))
    part.copy_(torch.view_as_real(wide * turns).flatten(-2))


def _turns(layers: CpuAttention, rope: RopeSpec, inputs: Inputs) -> _Turns:
    moves = None
    if inputs.places.moves is not None:
        moves = turns_by(rope, inputs.places.moves[2])[:, None, None]
    return _Turns(layers.tables[rope].index_select(0, inputs.positions)[:, None], moves)


def narrow_spans(spans: Spans, rows: NDArray[np.int64], num_tokens: int) -> Spans | None:
    """Return the same spans with only the tokens `rows` as queries, numbered from 0. None if the
    result would not be valid: rows are out of order, or a causal span would keep a query and lose a
    later one.
    """
    if (np.diff(rows) <= 0).any():
        return None
    number = np.full(num_tokens, -1, np.int32)
    number[rows] = np.arange(len(rows))
    found = number[spans.query_rows]
    is_kept = found >= 0
    is_causal = np.repeat(spans.is_causal, np.diff(spans.query_starts))
    is_first = np.zeros(len(found) + 1, np.bool_)
    is_first[spans.query_starts] = True
    if (is_kept[:-1] & ~is_kept[1:] & is_causal[1:] & ~is_first[1:-1]).any():
        return None
    num_kept = np.zeros(len(found) + 1, np.int32)
    np.cumsum(is_kept, out=num_kept[1:])
    return replace(
        spans,
        query_starts=num_kept[spans.query_starts],
        query_rows=found[is_kept],
        first_keys=None if spans.first_keys is None else spans.first_keys[is_kept],
    )
