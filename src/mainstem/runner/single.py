"""A step with one token of one sequence: all buffers and views are prepared beforehand.

At batch 1 the weights are read at memory speed, and the rest of the time is overhead of torch
calls. So the pass makes few calls over fixed buffers: a norm is a factor of the next product, and a
product is added to the residual in place:

    per layer   dot, addmv, mul_, write, attend, addmv_, dot, addmv, silu_, mul_, addmv_

Dot products, the write of K and V and attention over few keys use numpy views of the same memory: a
numpy call costs half of a torch call. Attention over many keys uses torch's fused kernel, which
runs on all cores. Neighbouring pages are read in place, and the views of all layers are made in one
call; other pages are gathered layer by layer. With several ranks (models/shard.py) a product is
summed over all ranks before it is added to x. All other steps use Decoder.forward, which computes
the same.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.step import Step
from mainstem.models.block import Gate
from mainstem.models.collectives import Collectives
from mainstem.models.cpu.decoder import Decoder, Layer, finish_serial, finish_serial_with_tails
from mainstem.models.cpu.layers import DenseLinear, Identity, Mlp, Norm, RmsNorm, Summed
from mainstem.models.spec import Activation, MlpSpec, RopeSpec
from mainstem.runner.pages import DevicePages

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_MIN_FUSED_KEYS = 160  # with fewer, three small calls are faster than one fused (docs/log/cpu.md)
_THREADED_ELEMENTS = 460_800  # OpenBLAS runs a smaller matrix times a vector on one core

AddProduct = Callable[[Tensor, Tensor, Tensor], Tensor]  # x += matrix @ vector, summed over ranks
ReadLayer = Callable[[int], Tensor]  # a layer's K and V, [2, kv_heads, keys, dim]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The matrices of a layer, [out, in]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor


class SingleTokenPass:
    """Runs steps of one token of one sequence, for the models that `make` accepts."""

    def __init__(
        self, decoder: Decoder, layers: list[_Weights], pages: DevicePages, turns: Tensor
    ) -> None:
        spec = decoder.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._decoder = decoder
        self._layers = layers
        self._pages = pages
        self._turns = turns
        # queries are rotated and scaled in one product, keys only rotated
        self._stretch = torch.ones(heads + kv_heads, 1)
        self._stretch[:heads] = spec.attentions[0].scale
        self._floor = spec.hidden_size * spec.norm.eps
        self._qkv = torch.empty((heads + 2 * kv_heads) * dim)
        turned = self._qkv[: (heads + kv_heads) * dim].view(heads + kv_heads, dim // 2, 2)
        self._turned = torch.view_as_complex(turned)
        self._q = self._qkv[: heads * dim].view(1, heads, 1, dim)
        self._q_groups = self._qkv[: heads * dim].view(kv_heads, -1, dim).numpy()
        self._mixed = torch.empty(heads * dim)
        self._new_kv = self._qkv[heads * dim :].view(2, kv_heads, dim).numpy()
        self._gate_up = torch.empty(len(layers[0].gate_up))
        self._gate, self._up = self._gate_up.chunk(2)
        # `_threaded` may add rows of zeros to a matrix, which write zeros after the end of x
        self._padded_x = torch.zeros(max(max(len(w.out), len(w.down)) for w in layers))
        self._x = self._padded_x[: spec.hidden_size].view(1, -1)
        ranks = decoder.ranks
        self._add: AddProduct = (
            Tensor.addmv_ if ranks.shard.is_whole else _adder(ranks, spec.hidden_size)
        )
        self._gathered = torch.empty(0)
        self._written = pages.all_slots.numpy()

    @classmethod
    def make(
        cls, decoder: Decoder, pages: DevicePages, tables: Mapping[RopeSpec, Tensor]
    ) -> "SingleTokenPass | None":
        """Make a pass. None if it cannot run the model, for example because of another dtype,
        quantized products, norms of heads, partial rotation or none, windows or experts. `tables`
        are those of `rotary_table`."""
        spec = decoder.spec
        layers = [_weights(layer) for layer in decoder.layers]
        is_plain = decoder.dtype == torch.float32
        # only one rank has the bias, but all ranks must make the same calls
        is_plain &= not spec.has_out_bias
        if not is_plain or len(set(spec.layers)) > 1 or any(layer is None for layer in layers):
            return None
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        if attention is None or attention.has_gate:
            return None
        if attention.rope is None or attention.rope.rotary_dim != spec.head_dim:
            return None
        if (attention.window, attention.softcap, attention.has_sinks) != (None, None, False):
            return None
        if not isinstance(mlp, MlpSpec) or not mlp.is_gated or mlp.activation != Activation.SILU:
            return None
        found = [layer for layer in layers if layer is not None]
        return cls(decoder, found, pages, tables[attention.rope])

    @staticmethod
    def can_run(step: Step) -> bool:
        return (
            step.num_tokens == 1
            and len(step.spans) == 1
            and len(step.sample_rows) == 1
            and len(step.copy_to) == 0
            and len(step.move_to) == 0
            and len(step.prompt_logprob_rows) == 0
            and not step.weighings
        )

    def run(self, step: Step, token_id: Tensor, gate: Gate) -> Tensor:
        """The hidden state [1, hidden], normed, as Decoder.forward returns it."""
        self._x.copy_(self._decoder.embed(token_id))
        x = self._x[0]
        x_array = x.numpy()
        x_of_out = self._padded_x[: len(self._layers[0].out)]
        x_of_down = self._padded_x[: len(self._layers[0].down)]
        turn = self._stretch * self._turns[int(step.positions[0])]
        targets = list(self._written[:, :, :, int(step.write_slots[0])])
        attend = self._attention(step)
        for index, layer in enumerate(self._layers):
            factor = self._norm_factor(x_array)
            if layer.qkv_bias is None:
                torch.addmv(self._qkv, layer.qkv, x, beta=0, alpha=factor, out=self._qkv)
            else:
                torch.addmv(layer.qkv_bias, layer.qkv, x, alpha=factor, out=self._qkv)
            self._turned.mul_(turn)
            gate.before(index)
            targets[index][:] = self._new_kv
            mixed = attend(index)
            self._add(x_of_out, layer.out, mixed)
            factor = self._norm_factor(x_array)
            torch.addmv(self._gate_up, layer.gate_up, x, beta=0, alpha=factor, out=self._gate_up)
            F.silu(self._gate, inplace=True)
            self._gate.mul_(self._up)
            self._add(x_of_down, layer.down, self._gate)
        return self._decoder.norm(self._x)

    def _norm_factor(self, x: NDArray[np.float32]) -> float:
        """Return the factor by which RmsNorm multiplies x. The norm's scale is part of the next
        product's weights."""
        return 1.0 / math.sqrt(float(x.dot(x)) + self._floor)

    def _attention(self, step: Step) -> Callable[[int], Tensor]:
        """Return the function that computes a layer's attention, [heads * dim]."""
        num_keys = int(step.spans.key_tokens[0])
        read = self._reader(step.spans.page_ids.astype(np.int64), num_keys)
        if num_keys < _MIN_FUSED_KEYS:
            return self._attend_few(read, num_keys)
        return self._attend_many(read)

    def _attend_few(self, read: ReadLayer, num_keys: int) -> Callable[[int], Tensor]:
        scores = torch.empty(*self._q_groups.shape[:2], num_keys)
        score_array = scores.numpy()
        mixed_array = self._mixed.numpy().reshape(self._q_groups.shape)

        def attend(layer: int) -> Tensor:
            keys, values = read(layer).numpy()
            np.matmul(self._q_groups, keys.swapaxes(1, 2), out=score_array)
            torch.softmax(scores, -1, out=scores)
            np.matmul(score_array, values, out=mixed_array)
            return self._mixed

        return attend

    def _attend_many(self, read: ReadLayer) -> Callable[[int], Tensor]:
        def attend(layer: int) -> Tensor:
            keys, values = read(layer)[:, None].unbind()
            mixed: Tensor = _fused_attention(self._q, keys, values, scale=1.0)[0]
            return mixed.view(-1)

        return attend

    def _reader(self, pages: NDArray[np.int64], num_keys: int) -> ReadLayer:
        if (np.diff(pages) != 1).any():
            return self._gatherer(pages, num_keys)
        first = int(pages[0]) * self._pages.page_size
        return self._pages.all_slots.narrow(3, first, num_keys).unbind().__getitem__

    def _gatherer(self, pages: NDArray[np.int64], num_keys: int) -> ReadLayer:
        """Return a function for scattered pages, which gathers every layer into one buffer."""
        _, both, kv_heads, _, dim = self._pages.all_slots.shape
        width = self._pages.page_size * dim
        runs = np.arange(both * kv_heads)[:, None] * self._pages.num_pages + pages
        if len(self._gathered) < runs.size * width:
            self._gathered = torch.empty(2 * runs.size * width)
        gathered = self._gathered[: runs.size * width].view(-1, width)
        keys_and_values = gathered.view(2, kv_heads, -1, dim)[:, :, :num_keys]
        rows = torch.from_numpy(runs.reshape(-1))

        def read(layer: int) -> Tensor:
            torch.index_select(self._pages.slots(layer).view(-1, width), 0, rows, out=gathered)
            return keys_and_values

        return read


def _weights(layer: Layer) -> _Weights | None:
    """Return a layer's matrices; None if SingleTokenPass cannot run the layer."""
    norms = (layer.attention_norm, layer.mlp_norm)
    if layer.finish not in (finish_serial, finish_serial_with_tails) or layer.head_norm is not None:
        return None
    if layer.end is not None or not all(_only_sums(tail) for tail in layer.tails):
        return None
    if not all(isinstance(norm, RmsNorm) and not norm.has_scale for norm in norms):
        return None
    if not isinstance(layer.mlp, Mlp):
        return None
    linears = (layer.qkv, layer.out, layer.mlp.first, layer.mlp.down)
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    if len(dense) < 4 or any(linear.bias is not None for linear in dense[1:]):
        return None
    return _Weights(
        qkv=dense[0].weight,
        qkv_bias=dense[0].bias,
        out=_threaded(dense[1].weight),
        gate_up=dense[2].weight,
        down=_threaded(dense[3].weight),
    )


def _only_sums(tail: Norm) -> bool:
    """Whether a layer's output is only added, perhaps after a sum over ranks."""
    return isinstance(tail.then if isinstance(tail, Summed) else tail, Identity)


def _adder(ranks: Collectives, hidden_size: int) -> AddProduct:
    def add(x: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
        answer = torch.mv(weight, vector)[:hidden_size]  # the rows after these differ between ranks
        return x[:hidden_size].add_(ranks.sum_(answer))

    return add


def _threaded(weight: Tensor) -> Tensor:
    """Return the matrix, with rows of zeros added if all cores then work on it and that is faster.

    One core reads at a little more than half of the memory's speed. So all cores are faster even if
    they must read up to three quarters more.
    """
    num_rows = -(-_THREADED_ELEMENTS // weight.shape[1])
    is_near = weight.numel() < _THREADED_ELEMENTS < 1.75 * weight.numel()
    is_openblas = "BLAS_INFO=open" in torch.__config__.show()
    if not is_near or not is_openblas or torch.get_num_threads() == 1:
        return weight
    return F.pad(weight, (0, 0, 0, num_rows - len(weight)))
