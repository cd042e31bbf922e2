"""Runs models in Llama's layout over sequences of equal length, in fp32 and differentiably.

The weights of the products are arguments, so they may be the checkpoint's, rounded or trained.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.errors import UnsupportedModel
from mainstem.models.cpu.activations import plain
from mainstem.models.families import read_spec
from mainstem.models.rope import adjacent_pairs, rotary_table
from mainstem.models.spec import (
    AttentionSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormPlace,
    QkNorm,
    Residual,
)
from mainstem.models.tensors import EndTensors, MlpTensors, NormTensors, TensorReader
from mainstem.models.weights import Checkpoint

T = TypeVar("T")
ByKind = dict[str, T]  # something of each product of a layer: "qkv", "out", "first" and "down"

_SEQUENCES_AT_ONCE = 64  # sequences whose attention is computed together, to save memory


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    weights: ByKind[Tensor]  # [out, in]; "first" is gate, then up
    attention_gain: Tensor
    mlp_gain: Tensor


class Llama:
    """A model on a device. Layers are read from the checkpoint when they are asked for."""

    def __init__(self, folder: Path, length: int, device: torch.device) -> None:
        """`length` is the number of tokens of each sequence."""
        self.spec, self.length, self.device = read_spec(folder), length, device
        _check(self.spec)
        self._reader = TensorReader(
            Checkpoint(folder, torch.float32, device, self.spec.names), self.spec
        )
        self._embedding = self._reader.embedding()
        attention, dim = self.spec.attentions[0], self.spec.head_dim
        self._pairs = adjacent_pairs(dim, self.spec.rotary_dim(attention)).to(device)
        rope = attention.rope
        self._turns = None if rope is None else rotary_table(rope, length).to(device)[:, None]

    def layer(self, index: int) -> LlamaLayer:
        tensors = self._reader.layer(index)
        mlp = tensors.mlp
        assert isinstance(mlp, MlpTensors)
        products = {"qkv": tensors.qkv, "out": tensors.out, "first": mlp.first, "down": mlp.down}
        return LlamaLayer(
            {kind: product.dense for kind, product in products.items()},
            _gain(tensors.attention_norm),
            _gain(tensors.mlp_norm),
        )

    def ends(self) -> EndTensors:
        """The last norm and the head. All layers must have been read before."""
        return self._reader.ends(self._embedding)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[sequences, length] -> [tokens, hidden]"""
        return F.embedding(token_ids.reshape(-1), self._embedding)

    def run(self, layer: LlamaLayer, weights: ByKind[Tensor], x: Tensor) -> Tensor:
        """The residual [tokens, hidden] after this layer, with other weights of its products."""
        mixed = self.attend(self.norm(x, layer.attention_gain) @ weights["qkv"].t())
        x = x + mixed @ weights["out"].t()
        inner = self.activate(self.norm(x, layer.mlp_gain) @ weights["first"].t())
        return x + inner @ weights["down"].t()

    def logits(self, ends: EndTensors, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab]"""
        return F.linear(self.norm(x, ends.norm.gain), ends.head.dense, ends.head.bias)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.spec.norm.eps)

    def attend(self, qkv: Tensor) -> Tensor:
        """Causal attention within every sequence: [tokens, ..] -> [tokens, heads * dim]"""
        sequences = torch.split(qkv.view(-1, self.length, qkv.shape[1]), _SEQUENCES_AT_ONCE)
        return torch.cat([self._attend(part) for part in sequences]).view(len(qkv), -1)

    def _attend(self, qkv: Tensor) -> Tensor:
        spec = self.spec
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        heads = qkv.view(len(qkv), self.length, -1, spec.head_dim)
        q, k, v = torch.split(heads, sizes, dim=2)
        if self._turns is not None:
            q, k = (_turned(each[..., self._pairs], self._turns) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scale = spec.attentions[0].scale
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def activate(self, first: Tensor) -> Tensor:
        """[tokens, 2 * size], gate then up -> [tokens, size]"""
        mlp = self.spec.layers[0].mlp
        assert isinstance(mlp, MlpSpec)
        gate, up = first.chunk(2, dim=1)
        return plain(mlp.activation)(gate) * up

    def names(self, index: int) -> ByKind[dict[str, int]]:
        """The checkpoint's names of each product's parts (without ".weight"), and their rows."""
        spec, names = self.spec, self.spec.names
        mlp = spec.layers[index].mlp
        assert isinstance(mlp, MlpSpec)
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        parts = {
            "qkv": (names.qkv, [count * spec.head_dim for count in heads]),
            "out": ((names.out,), [spec.hidden_size]),
            "first": (names.gate_up, [mlp.size, mlp.size]),
            "down": ((names.down,), [spec.hidden_size]),
        }
        prefix = names.layer.format(index)
        found = {}
        for kind, (each, sizes) in parts.items():
            rows = sizes if len(each) == len(sizes) else [sum(sizes)]
            found[kind] = {f"{prefix}.{name}": n for name, n in zip(each, rows, strict=True)}
        return found


def _gain(norm: NormTensors | None) -> Tensor:
    assert norm is not None
    return norm.gain


def _turned(pairs: Tensor, turns: Tensor) -> Tensor:
    """[.., dim] with rotary pairs side by side, rotated; dims beyond them stay."""
    count = 2 * turns.shape[-1]
    found = torch.view_as_complex(pairs[..., :count].reshape(*pairs.shape[:-1], -1, 2)) * turns
    return torch.cat((torch.view_as_real(found).flatten(-2), pairs[..., count:]), dim=-1)


def _check(spec: ModelSpec) -> None:
    attention = spec.attentions[0]
    is_known = (
        spec.norm.kind is NormKind.RMS
        and spec.norm_place is NormPlace.BEFORE
        and spec.residual is Residual.SERIAL
        and spec.qk_norm is QkNorm.NONE
        and spec.residual_scale == spec.embedding_scale == spec.logit_scale == 1.0
        and spec.logit_softcap is None
        and not (spec.has_qkv_bias or spec.has_out_bias)
        and all(layer == spec.layers[0] for layer in spec.layers)
        and isinstance(spec.layers[0].mlp, MlpSpec)
        and spec.layers[0].mlp.is_gated
        and not spec.layers[0].mlp.has_bias
        and attention == AttentionSpec(attention.rope, attention.scale)  # no window, cap or sinks
        and spec.quantized is None
    )
    if not is_known:
        raise UnsupportedModel(
            f"{spec.architecture}: only plain models in Llama's layout can be quantized here"
        )
