"""AttentionPlan: one Step's attention on the CPU, planned once and run by every layer."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu
from mainstem.kernels.memory.cpu import move_pages
from mainstem.models.rope import turns_by
from mainstem.models.spec import ModelSpec
from mainstem.runner.pages import DevicePages


class AttentionPlan:
    """Rotates, appends and attends; what the decoder calls per layer."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: DevicePages,
        turns: Tensor,
        slots: Tensor,
        spans: Spans,
        copies: tuple[Tensor, Tensor] | None = None,
        moves: tuple[Tensor, Tensor, Tensor] | None = None,
        hidden_rows: Tensor | None = None,
    ) -> None:
        """`turns` [tokens, 1, rotary_dim / 2] rotate the tokens, `slots` are where K and V go,
        `copies` are slots to copy from and to, `moves` pages to move from and to and the positions
        to move by, before anything is read. Of the last layer only `hidden_rows` are wanted; None:
        all."""
        self._pages = pages
        self._turns = turns
        self._rotary_dim = spec.rotary_dim
        self._pairs = (len(slots), spec.num_heads + spec.num_kv_heads, spec.rotary_dim // 2, 2)
        self._num_heads = spec.num_heads
        self._num_turned = spec.num_heads + spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._write_rows = pages.write_rows(slots)
        self._copies: tuple[Tensor, Tensor] | None = None
        if copies is not None:
            self._copies = (pages.write_rows(copies[0]), pages.write_rows(copies[1]))
        self._moves: tuple[Tensor, Tensor, Tensor] | None = None
        if moves is not None:
            self._moves = (*moves[:2], turns_by(spec.ropes[0], moves[2])[:, None, None])
        shape = cpu.PageShape(spec.num_heads, spec.num_kv_heads, pages.num_pages, pages.page_size)
        self._spans = cpu.plan(spans, len(slots), shape, spec.layers[0].attention.scale)
        self._last_layer = pages.num_layers - 1
        self._wanted = hidden_rows
        self._wanted_spans: cpu.SpanPlan | None = None
        if hidden_rows is not None and len(hidden_rows):
            wanted = narrow_spans(spans, hidden_rows.numpy(), len(slots))
            if wanted is None:
                self._wanted = None
            else:
                plan = cpu.plan(wanted, len(hidden_rows), shape, spec.layers[0].attention.scale)
                self._wanted_spans = plan

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """As Attention.run of the decoder."""
        tokens = len(qkv)
        heads = qkv.view(tokens, -1, self._head_dim)
        self._rotate(heads[:, : self._num_turned])
        pages = self._pages
        pages.append(layer, self._write_rows, heads[:, self._num_heads :])
        if self._moves is not None:
            move_pages(pages.joint(layer), *self._moves)
        if self._copies is not None:
            pages.copy(layer, *self._copies)
        q = heads[:, : self._num_heads]
        if layer == self._last_layer and self._wanted is not None:
            return self._run_wanted(q, pages.slots(layer))
        return self._spans.run(q, pages.slots(layer)).view(tokens, -1)

    def _run_wanted(self, q: Tensor, slots: Tensor) -> Tensor:
        """Answers all rows in form, the wanted ones in content."""
        out = q.new_empty(len(q), self._num_heads * self._head_dim)
        if self._wanted_spans is not None:
            assert self._wanted is not None
            found = self._wanted_spans.run(q.index_select(0, self._wanted), slots)
            out[self._wanted] = found.view(len(found), -1)
        return out

    def _rotate(self, x: Tensor) -> None:
        """In place; the two dims of a pair are adjacent, so a pair is a complex number."""
        part = x if self._rotary_dim == self._head_dim else x[..., : self._rotary_dim]
        if x.dtype == torch.float32:
            torch.view_as_complex(part.view(self._pairs)).mul_(self._turns)
            return
        pairs = torch.view_as_complex(part.float().view(self._pairs))
        part.copy_(torch.view_as_real(pairs * self._turns).flatten(-2))


def narrow_spans(spans: Spans, rows: NDArray[np.int64], num_tokens: int) -> Spans | None:
    """The same spans seen by the tokens `rows` alone, which are then numbered from 0.

    None where they cannot be spans: rows out of order, or a causal span that would keep a query
    and lose a later one.
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
    return replace(spans, query_starts=num_kept[spans.query_starts], query_rows=found[is_kept])
