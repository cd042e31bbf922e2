"""The decoder on a GPU: the same layers as models.decoder, in fused kernels over buffers that stay.

    per layer   QKV product | rope + append, span attention | out product | add + norm |
                gate/up product | silu * up | down product | add + norm of the next layer

Weights keep the checkpoint's order (rotary pairs are i and i + half), and gains stay in the norms:
on a GPU the norm is a pass over memory that the gain does not lengthen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.kernels.dense.fp8 import Fp8Linear
from mainstem.kernels.dense.fused import (
    add_rms_norm,
    add_rms_norm_fp8,
    head_norm_,
    rms_norm,
    rms_norm_fp8,
    silu_mul,
    silu_mul_fp8,
)
from mainstem.kernels.dense.invariant import matmul
from mainstem.models.config import ModelSpec
from mainstem.models.decoder import Attention, Gate
from mainstem.models.weights import WeightSource

Fp8 = tuple[Tensor, Tensor]  # values and a scale per token
DeviceLinear = Callable[[Tensor, Tensor], Tensor]  # (x [tokens, in], room for the answer) -> answer


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations of a step, made once: what a forward pass needs is known before it runs."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor
    mixed: Tensor
    delta: Tensor
    gate_up: Tensor
    act: Tensor

    @classmethod
    def make(
        cls, spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "Workspace":
        def rows(width: int) -> Tensor:
            return torch.zeros((max_tokens, width), dtype=dtype, device=device)

        heads = spec.num_heads * spec.head_dim
        return cls(
            residual=rows(spec.hidden_size),
            normed=rows(spec.hidden_size),
            qkv=rows(heads + 2 * spec.num_kv_heads * spec.head_dim),
            mixed=rows(heads),
            delta=rows(spec.hidden_size),
            gate_up=rows(2 * spec.intermediate_size),
            act=rows(spec.intermediate_size),
        )


class PlainLinear:
    """x @ weight.T + bias through the vendor's library."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._columns = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._columns, out=out)
        return torch.addmm(self._bias, x, self._columns, out=out)


class InvariantLinear:
    """The same, each row to the bit as if it were alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return matmul(x, self._weight, self._bias, out=out)


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    attention_gain: Tensor
    qkv: DeviceLinear | Fp8Linear
    q_gain: Tensor | None
    k_gain: Tensor | None
    out: DeviceLinear | Fp8Linear
    mlp_gain: Tensor
    gate_up: DeviceLinear | Fp8Linear
    down: DeviceLinear | Fp8Linear


class DeviceDecoder:
    """Weights and the forward pass; a pass allocates nothing but the rows it hands out."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor,
        layers: list[DeviceLayer],
        norm_gain: Tensor,
        head: DeviceLinear,
        space: Workspace,
    ) -> None:
        self.spec = spec
        self.dtype = embedding.dtype
        self._embedding = embedding
        self._layers = layers
        # a norm stands before each layer's attention and after the last layer
        self._gains = [layer.attention_gain for layer in layers] + [norm_gain]
        self._head = head
        self._space = space

    def forward(
        self, token_ids: Tensor, rows: Tensor | None, attention: Attention, gate: Gate
    ) -> Tensor:
        """As Decoder.forward; the answer lies in the workspace until the next pass."""
        normed = self.begin(token_ids)
        end = len(self._layers)
        normed = self.run_layers(normed, len(token_ids), rows, (0, end), attention, gate)
        assert isinstance(normed, Tensor)
        return normed

    def begin(self, token_ids: Tensor) -> Tensor | Fp8:
        """What the first layer takes; the residual lies in the workspace from here on."""
        out = self._space.residual[: len(token_ids)]
        return self._first_norm(torch.index_select(self._embedding, 0, token_ids, out=out))

    def run_layers(
        self,
        normed: Tensor | Fp8,
        tokens: int,
        rows: Tensor | None,
        layers: tuple[int, int],
        attention: Attention,
        gate: Gate,
    ) -> Tensor | Fp8:
        """Layers [first, end): from what the first takes to what the one behind them does."""
        space = self._space
        x = space.residual[:tokens]
        last = len(self._layers) - 1
        for index in range(*layers):
            layer = self._layers[index]
            qkv = _product(layer.qkv, normed, space.qkv[:tokens])
            if layer.q_gain is not None and layer.k_gain is not None:
                self._norm_heads(qkv, layer.q_gain, layer.k_gain)
            gate.before(index)
            mixed = attention.run(index, qkv)
            if index == last and rows is not None:
                mixed, x, tokens = mixed[rows], x[rows], len(rows)
                if tokens == 0:
                    return x
            delta = _product(layer.out, mixed, space.delta[:tokens])
            normed = self._add_norm(delta, x, layer.mlp_gain, isinstance(layer.gate_up, Fp8Linear))
            gate_up = _product(layer.gate_up, normed, space.gate_up[:tokens])
            act = self._activate(gate_up, isinstance(layer.down, Fp8Linear))
            delta = _product(layer.down, act, space.delta[:tokens])
            is_fp8 = index < last and isinstance(self._layers[index + 1].qkv, Fp8Linear)
            normed = self._add_norm(delta, x, self._gains[index + 1], is_fp8)
        return normed

    def hidden(self, tokens: int) -> Tensor:
        """Where the last layer has left its rows, all of them in order."""
        return self._space.normed[:tokens]

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[rows, vocab] in the model's dtype, into `out`."""
        return self._head(hidden, out)

    def touch(self, tokens: int) -> None:
        """Run a layer's products over so many rows: the vendor's library loads the kernel it
        chooses for a shape when it is first asked for, and the device stands still meanwhile."""
        space, layer = self._space, self._layers[0]
        normed = self._add_norm(
            space.delta[:tokens],
            space.residual[:tokens],
            layer.mlp_gain,
            isinstance(layer.qkv, Fp8Linear),
        )
        _product(layer.qkv, normed, space.qkv[:tokens])
        _product(layer.out, space.mixed[:tokens], space.delta[:tokens])
        gate_up = _product(layer.gate_up, normed, space.gate_up[:tokens])
        act = self._activate(gate_up, isinstance(layer.down, Fp8Linear))
        _product(layer.down, act, space.delta[:tokens])

    def _first_norm(self, x: Tensor) -> Tensor | Fp8:
        eps = self.spec.norm_eps
        if isinstance(self._layers[0].qkv, Fp8Linear):
            return rms_norm_fp8(x, self._gains[0], eps)
        return rms_norm(x, self._gains[0], eps, out=self._space.normed[: len(x)])

    def _add_norm(self, delta: Tensor, x: Tensor, gain: Tensor, is_fp8: bool) -> Tensor | Fp8:
        """x += delta, then its norm."""
        if is_fp8:
            return add_rms_norm_fp8(delta, x, gain, self.spec.norm_eps)
        return add_rms_norm(delta, x, gain, self.spec.norm_eps, out=self._space.normed[: len(x)])

    def _activate(self, gate_up: Tensor, is_fp8: bool) -> Tensor | Fp8:
        if is_fp8:
            return silu_mul_fp8(gate_up)
        return silu_mul(gate_up, out=self._space.act[: len(gate_up)])

    def _norm_heads(self, qkv: Tensor, q_gain: Tensor, k_gain: Tensor) -> None:
        spec = self.spec
        head_norm_(
            qkv, q_gain, k_gain, spec.norm_eps, spec.num_heads, spec.num_kv_heads, spec.head_dim
        )


def _product(linear: DeviceLinear | Fp8Linear, x: Tensor | Fp8, out: Tensor) -> Tensor:
    if isinstance(linear, Fp8Linear):
        return linear(x)
    assert isinstance(x, Tensor)
    return linear(x, out)


def load_device_decoder(
    source: WeightSource,
    spec: ModelSpec,
    space: Workspace,
    *,
    quantize: Quantize,
    is_deterministic: bool,
) -> DeviceDecoder:
    """Take the weights of `source`, which puts them on the device.

    With fp8 the products of the layers are quantized; the LM head stays, for what it would gain is
    small and what it would lose is not.
    """
    dense = InvariantLinear if is_deterministic else PlainLinear
    size = (spec.vocab_size, spec.hidden_size)
    embedding = source.take("model.embed_tokens.weight", size)
    layers = [
        _load_layer(source, spec, f"model.layers.{index}", dense, quantize is Quantize.FP8)
        for index in range(spec.num_layers)
    ]
    norm_gain = source.take("model.norm.weight", (spec.hidden_size,))
    if spec.has_tied_embeddings:
        source.drop("lm_head.weight")
        head = embedding
    else:
        head = source.take("lm_head.weight", size)
    source.finish()
    return DeviceDecoder(spec, embedding, layers, norm_gain, dense(head, None), space)


def _load_layer(
    source: WeightSource,
    spec: ModelSpec,
    prefix: str,
    dense: type[PlainLinear] | type[InvariantLinear],
    is_fp8: bool,
) -> DeviceLayer:
    hidden, size, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim

    def take(name: str, *shape: int) -> Tensor:
        return source.take(f"{prefix}.{name}", shape)

    def fused(
        names: tuple[str, ...], rows: tuple[int, ...], has_bias: bool
    ) -> DeviceLinear | Fp8Linear:
        weights = [take(f"{n}.weight", r, hidden) for n, r in zip(names, rows, strict=True)]
        bias = None
        if has_bias:
            bias = torch.cat([take(f"{n}.bias", r) for n, r in zip(names, rows, strict=True)])
        return linear(torch.cat(weights), bias)

    def linear(weight: Tensor, bias: Tensor | None) -> DeviceLinear | Fp8Linear:
        return Fp8Linear(weight, bias, weight.dtype) if is_fp8 else dense(weight, bias)

    attention_gain = take("input_layernorm.weight", hidden)
    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv = fused(qkv_names, (q_rows, kv_rows, kv_rows), spec.has_qkv_bias)
    q_gain = k_gain = None
    if spec.has_qk_norm:
        q_gain, k_gain = (take(f"self_attn.{x}_norm.weight", dim) for x in "qk")
    out_bias = take("self_attn.o_proj.bias", hidden) if spec.has_out_bias else None
    out = linear(take("self_attn.o_proj.weight", hidden, q_rows), out_bias)
    mlp_gain = take("post_attention_layernorm.weight", hidden)
    gate_up = fused(("mlp.gate_proj", "mlp.up_proj"), (size, size), spec.has_mlp_bias)
    down_bias = take("mlp.down_proj.bias", hidden) if spec.has_mlp_bias else None
    down = linear(take("mlp.down_proj.weight", hidden, size), down_bias)
    return DeviceLayer(attention_gain, qkv, q_gain, k_gain, out, mlp_gain, gate_up, down)
