"""AttentionPlan: one Step's attention on the CPU, planned once and run by every layer."""

import torch
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels import cpu
from mainstem.models.config import ModelSpec
from mainstem.models.layers import turns_by
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
    ) -> None:
        """`turns` [tokens, 1, rotary_dim / 2] rotate the tokens, `slots` are where K and V go,
        `copies` are slots to copy from and to, `moves` pages to move from and to and the positions
        to move by, before anything is read."""
        self._pages = pages
        self._turns = turns
        self._rotary_dim = spec.rope.rotary_dim
        self._pairs = (len(slots), spec.num_heads + spec.num_kv_heads, spec.rope.rotary_dim // 2, 2)
        self._num_heads = spec.num_heads
        self._num_turned = spec.num_heads + spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._write_rows = pages.write_rows(slots)
        self._copies: tuple[Tensor, Tensor] | None = None
        if copies is not None:
            self._copies = (pages.write_rows(copies[0]), pages.write_rows(copies[1]))
        self._moves: tuple[Tensor, Tensor, Tensor] | None = None
        if moves is not None:
            self._moves = (*moves[:2], turns_by(spec.rope, moves[2])[:, None, None])
        shape = cpu.PageShape(spec.num_heads, spec.num_kv_heads, pages.num_pages, pages.page_size)
        self._spans = cpu.plan(spans, len(slots), shape, spec.softmax_scale)

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """As Attention.run of the decoder."""
        tokens = len(qkv)
        heads = qkv.view(tokens, -1, self._head_dim)
        self._rotate(heads[:, : self._num_turned])
        pages = self._pages
        pages.append(layer, self._write_rows, heads[:, self._num_heads :])
        if self._moves is not None:
            cpu.move_pages(pages.joint(layer), *self._moves)
        if self._copies is not None:
            pages.copy(layer, *self._copies)
        q = heads[:, : self._num_heads]
        return self._spans.run(q, pages.slots(layer)).view(tokens, -1)

    def _rotate(self, x: Tensor) -> None:
        """In place; the two dims of a pair are adjacent, so a pair is a complex number."""
        part = x if self._rotary_dim == self._head_dim else x[..., : self._rotary_dim]
        if x.dtype == torch.float32:
            torch.view_as_complex(part.view(self._pairs)).mul_(self._turns)
            return
        pairs = torch.view_as_complex(part.float().view(self._pairs))
        part.copy_(torch.view_as_real(pairs * self._turns).flatten(-2))
