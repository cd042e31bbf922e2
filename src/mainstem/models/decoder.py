"""The one decoder: embedding, layers of attention and MLP, final norm, LM head.

Architectures are settings (ModelSpec). The pass has no hidden state: tokens, attention and gate
come as arguments, K and V live wherever the attention object keeps them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.models.config import ModelSpec
from mainstem.models.layers import (
    DenseLinear,
    Linear,
    RmsNorm,
    adjacent_pairs,
    norm_scale,
    silu_mul,
)
from mainstem.models.weights import Checkpoint, WeightSource

ROWS_AT_ONCE = 512  # through the products of a layer: what one puts out, the next finds in cache


class Attention(Protocol):
    """A step's attention, planned; owns the K and V pages."""

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """Rotate, append K and V, attend. May overwrite qkv [tokens, heads + 2 kv_heads, dim]
        (flattened); answers [tokens, heads * dim]."""
        ...


class Gate(Protocol):
    """Lets a layer wait for its pages, one layer at a time."""

    def before(self, layer: int) -> None:
        """Return when the pages this step reads in `layer` are there."""
        ...


class OpenGate:
    """Never waits."""

    def before(self, layer: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: RmsNorm
    qkv: Linear  # rows: query heads, key heads, value heads
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and the forward pass. Query and key dims are in the order of `adjacent_pairs`."""

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, layers: list[Layer], norm: RmsNorm, head: Linear
    ) -> None:
        self.spec = spec
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    def forward(
        self, token_ids: Tensor, rows: Tensor | None, attention: Attention, gate: Gate
    ) -> Tensor:
        """Hidden states [rows, hidden], normed, of the packed tokens listed in `rows`; None: all.

        The last layer's output is computed for these rows only.
        """
        x = F.embedding(token_ids, self.embedding)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            qkv = self._before_attention(layer, x)
            gate.before(index)
            mixed = attention.run(index, qkv)
            if index == last and rows is not None:
                mixed, x = mixed[rows], x[rows]
                if len(rows) == 0:
                    return x
            for start in range(0, len(x), ROWS_AT_ONCE):
                part = x[start : start + ROWS_AT_ONCE]
                part.add_(layer.out(mixed[start : start + ROWS_AT_ONCE]))
                part.add_(layer.down(silu_mul(layer.gate_up(layer.mlp_norm(part)))))
        return self.norm(x)

    def _before_attention(self, layer: Layer, x: Tensor) -> Tensor:
        if len(x) <= ROWS_AT_ONCE:
            qkv = layer.qkv(layer.attention_norm(x))
        else:
            spec = self.spec
            width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            qkv = x.new_empty(len(x), width)
            for start in range(0, len(x), ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                qkv[rows] = layer.qkv(layer.attention_norm(x[rows]))
        if layer.q_norm is not None:
            self._norm_heads(layer, qkv)
        return qkv

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] fp32 from what forward returned."""
        return self.head(hidden).float()

    def _norm_heads(self, layer: Layer, qkv: Tensor) -> None:
        """Qwen3: RMS norm of each query and key head, in place."""
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        spec = self.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q = heads[:, : spec.num_heads]
        k = heads[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]
        q.copy_(layer.q_norm(q))
        k.copy_(layer.k_norm(k))


def load_decoder(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """Read a checkpoint; UnsupportedModel names tensors that are missing or out of place."""
    return make_decoder(Checkpoint(folder, dtype), spec)


def make_decoder(checkpoint: WeightSource, spec: ModelSpec) -> Decoder:
    """A decoder from the tensors of `checkpoint`."""
    embedding = checkpoint.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    layers = [_load_layer(checkpoint, spec, f"model.layers.{i}") for i in range(spec.num_layers)]
    gain = checkpoint.take("model.norm.weight", (spec.hidden_size,))
    if spec.has_tied_embeddings:
        checkpoint.drop("lm_head.weight")
        head_weight = embedding
    else:
        head_weight = checkpoint.take("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    checkpoint.finish()
    norm = RmsNorm(norm_scale(gain), spec.hidden_size, spec.norm_eps)
    return Decoder(spec, embedding, layers, norm, DenseLinear(head_weight))


def pack(decoder: Decoder, max_bytes: int) -> None:
    """Give the dense linears their second copy (DenseLinear.pack) if all together it is at most
    `max_bytes`."""
    linears = [decoder.head]
    for layer in decoder.layers:
        linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    if sum(linear.weight.nbytes for linear in dense) <= max_bytes:
        for linear in dense:
            linear.pack()


def _load_layer(checkpoint: WeightSource, spec: ModelSpec, prefix: str) -> Layer:
    hidden, size, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim

    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.take(f"{prefix}.{name}", shape)

    def norm_gain(name: str) -> tuple[RmsNorm, Tensor | None]:
        """A norm, and the gain to fold into the next linear: fp32 only, 16 bits would round."""
        gain = take(f"{name}.weight", hidden)
        if gain.dtype != torch.float32:
            return RmsNorm(norm_scale(gain), hidden, spec.norm_eps), None
        return RmsNorm(None, hidden, spec.norm_eps), norm_scale(gain)

    def fuse(names: tuple[str, ...], rows: tuple[int, ...], has_bias: bool) -> list[Tensor | None]:
        weights = [take(f"{n}.weight", r, hidden) for n, r in zip(names, rows, strict=True)]
        biases = [take(f"{n}.bias", r) for n, r in zip(names, rows, strict=True) if has_bias]
        return [torch.cat(weights), torch.cat(biases) if has_bias else None]

    order = _qkv_order(spec)
    attention_norm, gain = norm_gain("input_layernorm")
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    weight, bias = fuse(names, (q_rows, kv_rows, kv_rows), spec.has_qkv_bias)
    assert weight is not None
    weight = weight[order]
    qkv = DenseLinear(
        weight if gain is None else weight * gain, None if bias is None else bias[order]
    )
    q_norm = k_norm = None
    if spec.has_qk_norm:
        pairs = adjacent_pairs(dim, spec.rope.rotary_dim)
        q_gain, k_gain = (take(f"self_attn.{x}_norm.weight", dim)[pairs] for x in "qk")
        q_norm = RmsNorm(norm_scale(q_gain), dim, spec.norm_eps)
        k_norm = RmsNorm(norm_scale(k_gain), dim, spec.norm_eps)
    out_bias = take("self_attn.o_proj.bias", hidden) if spec.has_out_bias else None
    out = DenseLinear(take("self_attn.o_proj.weight", hidden, q_rows), out_bias)

    mlp_norm, gain = norm_gain("post_attention_layernorm")
    weight, bias = fuse(("mlp.gate_proj", "mlp.up_proj"), (size, size), spec.has_mlp_bias)
    assert weight is not None
    gate_up = DenseLinear(weight if gain is None else weight * gain, bias)
    down_bias = take("mlp.down_proj.bias", hidden) if spec.has_mlp_bias else None
    down = DenseLinear(take("mlp.down_proj.weight", hidden, size), down_bias)
    return Layer(attention_norm, qkv, q_norm, k_norm, out, mlp_norm, gate_up, down)


def _qkv_order(spec: ModelSpec) -> Tensor:
    """Row order of the fused QKV weight: rotary pairs adjacent in query and key heads."""
    pairs = adjacent_pairs(spec.head_dim, spec.rope.rotary_dim)
    turned = spec.num_heads + spec.num_kv_heads
    starts = torch.arange(turned)[:, None] * spec.head_dim
    values = torch.arange(turned * spec.head_dim, (turned + spec.num_kv_heads) * spec.head_dim)
    return torch.cat(((starts + pairs).reshape(-1), values))
