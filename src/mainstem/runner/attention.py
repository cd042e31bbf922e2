"""Attention on the CPU: planned once per Step for each kind of layer, run by every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu
from mainstem.kernels.attention.window import clip_spans
from mainstem.kernels.memory.cpu import move_pages
from mainstem.models.rope import rotary_table, turns_by
from mainstem.models.spec import AttentionSpec, ModelSpec, RopeSpec
from mainstem.runner.inputs import Inputs
from mainstem.runner.pages import DevicePages


class CpuAttention:
    """Holds what attention needs in the layers of a decoder: pages, rotations, sinks."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: DevicePages,
        max_positions: int,
        sinks: Sequence[Tensor | None],
    ) -> None:
        self.spec = spec
        self.pages = pages
        self.tables: Mapping[RopeSpec, Tensor] = {
            rope: rotary_table(rope, max_positions) for rope in spec.ropes
        }
        self.kinds = spec.attentions
        self.sinks = sinks

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
        tokens, num_turned = len(inputs.write_slots), spec.num_heads + spec.num_kv_heads
        self._layers = layers
        self._rotary_dim = spec.rotary_dim
        self._pairs = (tokens, num_turned, spec.rotary_dim // 2, 2)
        self._num_heads = spec.num_heads
        self._num_turned = num_turned
        self._num_kept = num_turned + spec.num_kv_heads  # heads before the gates
        # only the last layer may leave out rows
        self._is_last = spec.layers[-1].attention is not None
        self._head_dim = spec.head_dim
        self._write_rows = pages.write_rows(inputs.write_slots)
        self._copies: tuple[Tensor, Tensor] | None = None
        if inputs.copies is not None:
            source, target = inputs.copies
            self._copies = (pages.write_rows(source), pages.write_rows(target))
        self._moves = inputs.moves
        self._turns = {rope: _turns(layers, rope, inputs) for rope in layers.tables}
        self._shape = cpu.PageShape(
            spec.num_heads, spec.num_kv_heads, pages.num_pages, pages.page_size
        )
        clipped: dict[int | None, Spans] = {None: spans}
        for window in {kind.window for kind in layers.kinds}:
            if window is not None:
                positions = inputs.positions.numpy().astype(np.int32)
                clipped[window] = clip_spans(spans, positions, window, pages.page_size)
        # layers with the same score settings share a plan, whatever their rotation
        plans: dict[tuple[int | None, float, float | None], cpu.SpanPlan] = {}
        self._spans: dict[AttentionSpec, cpu.SpanPlan] = {}
        for kind in layers.kinds:
            scores = (kind.window, kind.scale, kind.softcap)
            if scores not in plans:
                plans[scores] = self._plan(clipped[kind.window], tokens, kind)
            self._spans[kind] = plans[scores]
        self._wanted = inputs.hidden_rows
        self._wanted_spans: cpu.SpanPlan | None = None
        if not self._is_last:
            self._wanted = None
        elif inputs.hidden_rows is not None and len(inputs.hidden_rows):
            last = layers.kinds[-1]
            wanted = narrow_spans(clipped[last.window], inputs.hidden_rows.numpy(), tokens)
            if wanted is None:
                self._wanted = None
            else:
                self._wanted_spans = self._plan(wanted, len(inputs.hidden_rows), last)

    def _plan(self, spans: Spans, tokens: int, kind: AttentionSpec) -> cpu.SpanPlan:
        return cpu.plan(spans, tokens, self._shape, kind.scale, kind.softcap)

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        tokens, kind = len(qkv), self._layers.kinds[layer]
        heads = qkv.view(tokens, -1, self._head_dim)
        turns = None if kind.rope is None else self._turns[kind.rope]
        if turns is not None:
            self._rotate(heads[:, : self._num_turned], turns.tokens)
        pages = self._layers.pages
        pages.append(layer, self._write_rows, heads[:, self._num_heads : self._num_kept])
        if self._moves is not None:
            source, target, _ = self._moves
            move_pages(pages.joint(layer), source, target, None if turns is None else turns.moves)
        if self._copies is not None:
            pages.copy(layer, *self._copies)
        q, sinks = heads[:, : self._num_heads], self._layers.sinks[layer]
        if layer == len(self._layers.kinds) - 1 and self._wanted is not None:
            mixed = self._run_wanted(q, pages.slots(layer), sinks)
        else:
            mixed = self._spans[kind].run(q, pages.slots(layer), sinks).view(tokens, -1)
        if kind.has_gate:
            mixed *= torch.sigmoid(heads[:, self._num_kept :].reshape(tokens, -1))
        return mixed

    def _run_wanted(self, q: Tensor, slots: Tensor, sinks: Tensor | None) -> Tensor:
        """Compute only the wanted rows. The result has all rows; the others are not used."""
        out = q.new_empty(len(q), self._num_heads * self._head_dim)
        if self._wanted_spans is not None:
            assert self._wanted is not None
            found = self._wanted_spans.run(q.index_select(0, self._wanted), slots, sinks)
            out[self._wanted] = found.view(len(found), -1)
        return out

    def _rotate(self, x: Tensor, turns: Tensor) -> None:
        """Rotate in place; the two dims of a pair are adjacent, so a pair is a complex number."""
        part = x if self._rotary_dim == self._head_dim else x[..., : self._rotary_dim]
        if x.dtype == torch.float32:
            torch.view_as_complex(part.view(self._pairs)).mul_(turns)
            return
        pairs = torch.view_as_complex(part.float().view(self._pairs))
        part.copy_(torch.view_as_real(pairs * turns).flatten(-2))


def _turns(layers: CpuAttention, rope: RopeSpec, inputs: Inputs) -> _Turns:
    moves = None
    if inputs.moves is not None:
        moves = turns_by(rope, inputs.moves[2])[:, None, None]
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
