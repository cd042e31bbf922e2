"""A step of one token, as a lone conversation has it: all buffers and views laid out beforehand.

At batch 1 the weights are read at memory speed and the rest is the cost of calling torch. So the
pass is written in products that do the work of their neighbours (a norm is the factor of the next
product, a residual is what a product is added to) over buffers that never move:

    per layer   dot, addmv, mul_, index_copy_, index_select, baddbmm, softmax, bmm, addmv_,
                dot, addmv, silu, mul_, addmv_

Everything else goes through Decoder.forward, of which this is the same mathematics.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
        self._scale = dim**-0.5
        self._floor = spec.hidden_size * spec.norm_eps
        self._qkv = torch.empty((heads + 2 * kv_heads) * dim)
        turned = self._qkv[: (heads + kv_heads) * dim].view(heads + kv_heads, dim // 2, 2)
        self._turned = torch.view_as_complex(turned)
        self._q = self._qkv[: heads * dim].view(kv_heads, heads // kv_heads, dim)
        self._mixed = torch.empty(kv_heads, heads // kv_heads, dim)
        self._kv = self._qkv[heads * dim :].view(2 * kv_heads, dim)
        self._gate_up = torch.empty(2 * spec.intermediate_size)
        self._gate = self._gate_up[: spec.intermediate_size]
        self._up = self._gate_up[spec.intermediate_size :]
        self._act = torch.empty(spec.intermediate_size)
        self._square = torch.empty(())
        self._gathered = torch.empty(0)
        self._slots = [pages.joint(i).view(-1, dim) for i in range(len(layers))]
        self._runs = [pages.joint(i).view(-1, pages.page_size * dim) for i in range(len(layers))]

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
            and len(step.prompt_logprob_rows) == 0
        )

    def run(self, step: Step, token_id: Tensor, gate: Gate) -> Tensor:
        """The hidden state [1, hidden], normed, as Decoder.forward answers it."""
        x = self._decoder.embedding[token_id[0]].clone()
        turn = self._turns[int(step.positions[0])]
        write_rows = self._pages.write_rows(torch.from_numpy(step.write_slots))
        rows, keys, values = self._room(step)
        keys_t = keys.transpose(1, 2)
        scores = torch.empty(*self._q.shape[:2], keys.shape[1])
        mixed = self._mixed.view(-1)
        gathered = self._gathered[: len(rows) * self._runs[0].shape[1]].view(len(rows), -1)
        for index, layer in enumerate(self._layers):
            factor = self._norm_factor(x)
            if layer.qkv_bias is None:
                torch.addmv(self._qkv, layer.qkv, x, beta=0, alpha=factor, out=self._qkv)
            else:
                torch.addmv(layer.qkv_bias, layer.qkv, x, alpha=factor, out=self._qkv)
            self._turned.mul_(turn)
            gate.before(index)
            self._slots[index].index_copy_(0, write_rows, self._kv)
            torch.index_select(self._runs[index], 0, rows, out=gathered)
            torch.baddbmm(scores, self._q, keys_t, beta=0, alpha=self._scale, out=scores)
            torch.softmax(scores, -1, out=scores)
            torch.bmm(scores, values, out=self._mixed)
            gate.after(index)
            x.addmv_(layer.out, mixed)
            factor = self._norm_factor(x)
            torch.addmv(self._gate_up, layer.gate_up, x, beta=0, alpha=factor, out=self._gate_up)
            torch.ops.aten.silu.out(self._gate, out=self._act)
            self._act.mul_(self._up)
            x.addmv_(layer.down, self._act)
        return self._decoder.norm(x[None])

    def _norm_factor(self, x: Tensor) -> float:
        """What RMS norm multiplies x with; its gain is part of the next product's weights."""
        torch.dot(x, x, out=self._square)
        return 1.0 / math.sqrt(float(self._square) + self._floor)

    def _room(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of pages to gather, and where their K and V will be: [kv_heads, keys, dim]."""
        spec, pages = self._decoder.spec, self._pages
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        ids = step.spans.page_ids.astype(np.int64)
        of_keys = ids * kv_heads + np.arange(kv_heads)[:, None]  # [kv_heads, pages]
        both = np.stack((of_keys, of_keys + pages.num_pages * kv_heads))
        size = both.size * pages.page_size * dim
        if len(self._gathered) < size:
            self._gathered = torch.empty(2 * size)
        num_keys = int(step.spans.key_tokens[0])
        kv = self._gathered[:size].view(2, kv_heads, -1, dim)[:, :, :num_keys]
        return torch.from_numpy(both.reshape(-1)), kv[0], kv[1]


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
