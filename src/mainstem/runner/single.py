"""A step of one token, as a lone conversation has it: all buffers and views laid out beforehand.

At batch 1 the weights are read at memory speed and the rest is the cost of calling torch. So the
pass is written in products that do the work of their neighbours (a norm is the factor of the next
product, a residual is what a product is added to) over buffers that never move:

    per layer   dot, addmv, mul_, write, bmm, softmax, bmm, addmv_, dot, addmv, silu_, mul_, addmv_

Dot products and the write of K and V go through numpy views of the same memory, which costs less
than half of torch's call. Neighbouring pages are read where they are, and the views of all layers
are made in one go; other pages are gathered layer by layer. Everything else goes through
Decoder.forward, of which this is the same mathematics.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.step import Step
from mainstem.models.decoder import Decoder, Gate, Layer
from mainstem.models.layers import DenseLinear
from mainstem.runner.pages import DevicePages


@dataclass(frozen=True, slots=True)
class _Weights:
    """The matrices of a layer, [out, in]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor


class SingleTokenPass:
    """Runs steps of one token of one sequence; `make` says whether a model can have it."""

    def __init__(
        self, decoder: Decoder, layers: list[_Weights], pages: DevicePages, turns: Tensor
    ) -> None:
        spec = decoder.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._decoder = decoder
        self._layers = layers
        self._pages = pages
        self._turns = turns
        # queries are turned and scaled in one product, keys only turned
        self._stretch = torch.ones(heads + kv_heads, 1)
        self._stretch[:heads] = spec.softmax_scale
        self._floor = spec.hidden_size * spec.norm_eps
        self._qkv = torch.empty((heads + 2 * kv_heads) * dim)
        turned = self._qkv[: (heads + kv_heads) * dim].view(heads + kv_heads, dim // 2, 2)
        self._turned = torch.view_as_complex(turned)
        self._q = self._qkv[: heads * dim].view(kv_heads, heads // kv_heads, dim)
        self._mixed = torch.empty(kv_heads, heads // kv_heads, dim)
        self._new_kv = self._qkv[heads * dim :].view(2, kv_heads, dim).numpy()
        self._gate_up = torch.empty(2 * spec.intermediate_size)
        self._gate = self._gate_up[: spec.intermediate_size]
        self._up = self._gate_up[spec.intermediate_size :]
        self._x = torch.empty(1, spec.hidden_size)
        self._gathered = torch.empty(0)
        self._written = pages.all_slots.numpy()

    @classmethod
    def make(cls, decoder: Decoder, pages: DevicePages, turns: Tensor) -> "SingleTokenPass | None":
        """None where the model has parts this pass has not: other dtypes, quantized or biased
        products, norms of heads, partial rotation."""
        spec = decoder.spec
        layers = [_weights(layer) for layer in decoder.layers]
        fits = decoder.dtype == torch.float32 and spec.rope.rotary_dim == spec.head_dim
        if not fits or any(layer is None for layer in layers):
            return None
        return cls(decoder, [layer for layer in layers if layer is not None], pages, turns)

    @staticmethod
    def can_run(step: Step) -> bool:
        return (
            step.num_tokens == 1
            and len(step.spans) == 1
            and len(step.sample_rows) == 1
            and len(step.copy_to) == 0
            and len(step.move_to) == 0
            and len(step.prompt_logprob_rows) == 0
        )

    def run(self, step: Step, token_id: Tensor, gate: Gate) -> Tensor:
        """The hidden state [1, hidden], normed, as Decoder.forward answers it."""
        torch.index_select(self._decoder.embedding, 0, token_id, out=self._x)
        x = self._x[0]
        x_array = x.numpy()
        turn = self._stretch * self._turns[int(step.positions[0])]
        targets = list(self._written[:, :, :, int(step.write_slots[0])])
        read = self._reader(step)
        scores = torch.empty(*self._q.shape[:2], int(step.spans.key_tokens[0]))
        mixed = self._mixed.view(-1)
        for index, layer in enumerate(self._layers):
            factor = self._norm_factor(x_array)
            if layer.qkv_bias is None:
                torch.addmv(self._qkv, layer.qkv, x, beta=0, alpha=factor, out=self._qkv)
            else:
                torch.addmv(layer.qkv_bias, layer.qkv, x, alpha=factor, out=self._qkv)
            self._turned.mul_(turn)
            gate.before(index)
            targets[index][:] = self._new_kv
            keys, values = read(index)
            torch.bmm(self._q, keys, out=scores)
            torch.softmax(scores, -1, out=scores)
            torch.bmm(scores, values, out=self._mixed)
            gate.after(index)
            x.addmv_(layer.out, mixed)
            factor = self._norm_factor(x_array)
            torch.addmv(self._gate_up, layer.gate_up, x, beta=0, alpha=factor, out=self._gate_up)
            F.silu(self._gate, inplace=True)
            self._gate.mul_(self._up)
            x.addmv_(layer.down, self._gate)
        return self._decoder.norm(self._x)

    def _norm_factor(self, x: NDArray[np.float32]) -> float:
        """What RMS norm multiplies x with; its gain is part of the next product's weights."""
        return 1.0 / math.sqrt(float(x.dot(x)) + self._floor)

    def _reader(self, step: Step) -> Callable[[int], tuple[Tensor, Tensor]]:
        """What answers a layer's keys [kv_heads, dim, keys] and values [kv_heads, keys, dim]."""
        pages = step.spans.page_ids.astype(np.int64)
        num_keys = int(step.spans.key_tokens[0])
        if (np.diff(pages) != 1).any():
            return self._gatherer(pages, num_keys)
        first = int(pages[0]) * self._pages.page_size
        keys, values = self._pages.all_slots.narrow(3, first, num_keys).unbind(1)
        return list(zip(keys.transpose(2, 3).unbind(), values.unbind(), strict=True)).__getitem__

    def _gatherer(
        self, pages: NDArray[np.int64], num_keys: int
    ) -> Callable[[int], tuple[Tensor, Tensor]]:
        """The same over pages that lie anywhere: all layers are gathered into one buffer."""
        _, both, kv_heads, _, dim = self._pages.all_slots.shape
        width = self._pages.page_size * dim
        runs = np.arange(both * kv_heads)[:, None] * self._pages.num_pages + pages
        if len(self._gathered) < runs.size * width:
            self._gathered = torch.empty(2 * runs.size * width)
        gathered = self._gathered[: runs.size * width].view(-1, width)
        keys, values = gathered.view(2, kv_heads, -1, dim)[:, :, :num_keys]
        keys = keys.transpose(1, 2)
        rows = torch.from_numpy(runs.reshape(-1))

        def read(layer: int) -> tuple[Tensor, Tensor]:
            torch.index_select(self._pages.slots(layer).view(-1, width), 0, rows, out=gathered)
            return keys, values

        return read


def _weights(layer: Layer) -> _Weights | None:
    """None for a layer that SingleTokenPass cannot run."""
    qkv, out, gate_up, down = layer.qkv, layer.out, layer.gate_up, layer.down
    norms = (layer.attention_norm, layer.mlp_norm)
    if layer.q_norm is not None or any(norm.has_scale for norm in norms):
        return None
    dense = [linear for linear in (qkv, out, gate_up, down) if isinstance(linear, DenseLinear)]
    if len(dense) < 4 or any(linear.bias is not None for linear in dense[1:]):
        return None
    matrices = [linear.weight for linear in dense]
    return _Weights(matrices[0], dense[0].bias, *matrices[1:])
