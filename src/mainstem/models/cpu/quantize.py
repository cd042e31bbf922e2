"""int8 linears for CPUs: weights are quantized per output channel, activations per token at run
time.

    y = (q(x / peak) @ q(w / scale).T) * scale * peak      peak [tokens, 1], scale [out]

oneDNN's dynamic int8 linear quantizes activations with one scale for the whole tensor. Rows are
divided by their own peak first. So a token with huge activations does not make the others less
exact, and a token's output hardly depends on other tokens. Channel scales are applied to the
output: the kernel is given one weight scale of 1, because with per-channel scales torch 2.13 on
aarch64 takes a path that is 30 times slower and wrong for more than one row.

The library rearranges the weights for each new number of rows and remembers only the last two
arrangements. So rows are padded to a short ladder of sizes: if a batch shrinks by one request, the
weights are usually not rearranged. A batch larger than the ladder's last size is computed in pieces
that fit the cache.

A norm's output has a few loud channels; with one scale, few of the 8 bits would be left for the
others. Loud channels are scaled down in the norm and up in the weights after it (SmoothQuant;
loudness is the root mean square over random tokens). This costs nothing at run time, and the error
of the QKV and gate/up products falls to a third (docs/log/cpu.md). A product without this scaling
stays in fp32 if its error on those tokens is above `_MAX_ERROR`.
"""

import platform
import warnings
from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.errors import ConfigError
from mainstem.models.block import OpenGate
from mainstem.models.cpu.decoder import Decoder, Layer
from mainstem.models.cpu.layers import DenseLinear, Linear, Mlp, Norm, RmsNorm
from mainstem.models.rope import rotary_table
from mainstem.models.spec import ExpertsSpec, ModelSpec

_ENGINE = "onednn"
_MAX = 127.0
_CALIBRATION_TOKENS = 128
_LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# x86 without VNNI adds pairs of products in 16 bits, which overflow with 8-bit numbers: there
# activations get 7 bits, and more products stay in fp32
SATURATES = platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_vnni_supported()
# limit for the mean relative error of a token's product; typical is 0.01 to 0.03
_MAX_ERROR = 0.03 if SATURATES else 0.05


class Int8Linear:
    """Like DenseLinear, in int8; made from fp32 weights [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        _require_engine()
        self._scale = weight.abs().amax(dim=1).clamp_(min=1e-12) / _MAX
        levels = (weight / self._scale[:, None]).round_().clamp_(-_MAX, _MAX).to(torch.int8)
        self._bias = bias
        with warnings.catch_warnings():
            # torch warns that quantized tensors will be removed; the versions that pyproject.toml
            # allows still have them
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch._make_per_tensor_quantized_tensor(levels, 1.0, 0)
        self._packed = torch.ops.quantized.linear_prepack(tensor, None)

    def __call__(self, x: Tensor) -> Tensor:
        longest = _LADDER[-1]
        if len(x) <= longest:
            return self._multiply(x)
        y = x.new_empty(len(x), len(self._scale))
        for start in range(0, len(x), longest):
            rows = slice(start, start + longest)
            y[rows] = self._multiply(x[rows])
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        # amax and amin are vectorised; the infinity norm and aminmax are not (4x slower). * is 2.5x
        # faster than /
        lowest, highest = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        peak = torch.maximum(lowest.neg_(), highest).clamp_(min=1e-30)
        y = self._multiply_levels(x * peak.reciprocal()).mul_(self._scale).mul_(peak)
        return y if self._bias is None else y.add_(self._bias)

    def _multiply_levels(self, x: Tensor) -> Tensor:
        """Multiply rows whose peak is 1, without channel scales. Rows are padded to the ladder's
        next size."""
        count = len(x)
        padded = _LADDER[bisect_left(_LADDER, count)]
        if padded > count:
            x = F.pad(x, (0, 0, 0, padded - count))
        y: Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, SATURATES)
        return y[:count]


def _require_engine() -> None:
    """Select oneDNN's integer kernels; raises ConfigError if this build of torch has none."""
    if _ENGINE not in torch.backends.quantized.supported_engines:
        raise ConfigError("quantize=int8 needs a torch built with oneDNN, and this one is not")
    if torch.backends.quantized.engine != _ENGINE:
        torch.backends.quantized.engine = _ENGINE


def check_quantizable(spec: ModelSpec) -> None:
    """Raise ConfigError for a model that has no int8 form, before its weights are loaded."""
    is_whole = all(layer.attention is not None and layer.mlp is not None for layer in spec.layers)
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
    for is_so, what in (
        (bool(spec.recurrences), "has recurrent layers, whose products"),
        (spec.has_value_norm, "has layers with different heads, which"),
        (not is_whole, "has layers without attention or without an MLP, which"),
        (has_experts, "is a mixture of experts, whose products"),
    ):
        if is_so:
            raise ConfigError(
                f"quantize=int8: {spec.architecture} {what} have no int8 form on CPUs yet; load it "
                "without --quantize"
            )


@torch.inference_mode()
def quantize_decoder(decoder: Decoder) -> Decoder:
    """Return a copy with int8 linears, including the LM head; embedding and norms are unchanged.
    Not for mixtures of experts: see `check_quantizable`."""
    heard, hidden = _listen(decoder)
    layers = [
        _quantize_layer(layer, inputs) for layer, inputs in zip(decoder.layers, heard, strict=True)
    ]
    head = _quantize(decoder.head, hidden)
    quantized = Decoder(
        decoder.spec,
        decoder.embedding,
        layers,
        decoder.norm,
        head,
        decoder.sinks,
        decoder.ranks,
    )
    quantized.query_gains = decoder.query_gains
    return quantized


def _quantize_layer(layer: Layer, inputs: "_Heard") -> Layer:
    attention_norm, qkv = _smooth(layer.attention_norm, layer.qkv, inputs.qkv)
    mlp = _dense_mlp(layer)
    mlp_norm, first = _smooth(layer.mlp_norm, mlp.first, inputs.first)
    mlp = replace(mlp, first=first, down=_quantize(mlp.down, inputs.down))
    out = _quantize(layer.out, inputs.out)
    return replace(
        layer, attention_norm=attention_norm, qkv=qkv, out=out, mlp_norm=mlp_norm, mlp=mlp
    )


def _dense_mlp(layer: Layer) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


def _quantize(linear: Linear | None, x: Tensor) -> Linear:
    """Return the linear in int8, or unchanged if its error on these inputs would be too large."""
    assert isinstance(linear, DenseLinear)
    quantized = Int8Linear(linear.weight, linear.bias)
    exact = linear(x)
    error = (quantized(x) - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)
    if float(error.mean()) <= _MAX_ERROR:
        return quantized
    linear.pack()
    return linear


def _smooth(norm: Norm, linear: Linear | None, x: Tensor) -> tuple[Norm, Linear]:
    """Divide the norm's channels by sqrt(loudness / largest weight), and multiply the columns of
    the weights by it.

    If the norm's gain was not folded, other products may read the norm, too. Then the norm is left
    unchanged, and the product is only quantized."""
    assert isinstance(linear, DenseLinear)
    if not isinstance(norm, RmsNorm) or norm.has_scale:
        return norm, _quantize(linear, x)
    loudness = x.square().mean(dim=0).sqrt_().clamp_(min=1e-6)
    largest = linear.weight.abs().amax(dim=0).clamp_(min=1e-5)
    factor = (loudness / largest).sqrt_()
    return norm.scaled(1.0 / factor), Int8Linear(linear.weight * factor, linear.bias)


class _InputKeeper:
    """A linear that keeps its inputs."""

    def __init__(self, linear: Linear | None) -> None:
        assert linear is not None
        self._linear = linear
        self.heard = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        self.heard = x.clone()
        return self._linear(x)


class _Heard(NamedTuple):
    """The inputs of a layer's linears."""

    qkv: Tensor
    out: Tensor
    first: Tensor
    down: Tensor


def _listening(layer: Layer) -> tuple[Layer, list[_InputKeeper]]:
    """The layer with linears that keep their inputs, and these linears, in the order of _Heard."""
    mlp = _dense_mlp(layer)
    linears = [_InputKeeper(linear) for linear in (layer.qkv, layer.out, mlp.first, mlp.down)]
    qkv, out, first, down = linears
    return replace(layer, qkv=qkv, out=out, mlp=Mlp(first, mlp.activate, down)), linears


class _OneSequence:
    """Causal attention over the tokens of the pass, without pages. Windows, softcaps, sinks and
    gains of queries are left out, since loudness need not be exact."""

    def __init__(self, spec: ModelSpec, num_tokens: int) -> None:
        self._spec = spec
        self._turns = {rope: rotary_table(rope, num_tokens)[:, None] for rope in spec.ropes}

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        spec, attention = self._spec, self._spec.attentions[layer]
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        if attention.rope is not None:
            turned = heads[:, : spec.num_heads + spec.num_kv_heads, : attention.rope.rotary_dim]
            pairs = torch.view_as_complex(turned.reshape(*turned.shape[:2], -1, 2))
            turned.copy_(torch.view_as_real(pairs * self._turns[attention.rope]).flatten(-2))
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = (part.transpose(0, 1)[None] for part in torch.split(heads, sizes, dim=1))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(qkv), -1)


@torch.inference_mode()
def _listen(decoder: Decoder) -> tuple[list[_Heard], Tensor]:
    """Run the decoder on random tokens; returns the inputs of each layer's linears, and the hidden
    states before the head."""
    spec = decoder.spec
    ears = [_listening(layer) for layer in decoder.layers]
    count = min(_CALIBRATION_TOKENS, spec.max_positions)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(spec.vocab_size, (count,), generator=generator)
    layers = [layer for layer, _ in ears]
    listening = Decoder(
        spec, decoder.embedding, layers, decoder.norm, decoder.head, ranks=decoder.ranks
    )
    hidden = listening.forward(token_ids, None, _OneSequence(spec, count), OpenGate())
    return [_Heard(*(linear.heard for linear in linears)) for _, linears in ears], hidden
