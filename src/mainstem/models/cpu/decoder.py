"""The decoder on a CPU: a recipe compiled into calls of torch.

Every call costs time on a CPU. So gains are folded into the next product's weights if that is exact
enough (fp32), and the two dims of a rotary pair are adjacent, so that a rotation is one complex
product. Packed weights are dequantized: products on a CPU are dense, or int8 (quantize.py). The
decoder keeps no state between passes: tokens, attention and gate are arguments, and the attention
object owns K and V.

With several ranks (models/shard.py), each has some heads and some columns of every MLP. Their
outputs are summed over ranks before they are normed and added.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.models.block import Attention, Gate
from mainstem.models.collectives import ALONE, Collectives
from mainstem.models.cpu.activations import gated, plain
from mainstem.models.cpu.experts import CpuExperts, NormedExperts
from mainstem.models.cpu.layer_inputs import LayerEnd, LayerInputBlock, LayerInputs
from mainstem.models.cpu.layers import (
    DenseLinear,
    HeadNorm,
    Identity,
    LayerNorm,
    Linear,
    Mlp,
    Norm,
    QueryNorm,
    RmsNorm,
    RowNorm,
    SplitRowNorm,
    Summed,
    ValueNorm,
    norm_scale,
)
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.head_layer_norm import HeadLayerNorm
from mainstem.models.recurrent_tensors import RecurrentTensors
from mainstem.models.rope import adjacent_pairs, reordered_heads
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
    QkNorm,
    Residual,
)
from mainstem.models.tensors import (
    LayerTensors,
    MlpTensors,
    ModelInputTensors,
    NormTensors,
    Product,
    TensorReader,
)
from mainstem.models.vocabulary import VocabularyPart
from mainstem.models.weights import Checkpoint, WeightSource

# rows that go through a layer's products together, so that a product's input is in the cache
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a block. `finish` runs the parts after attention. A layer without attention and
    recurrence has no qkv and no out."""

    attention_norm: Norm
    qkv: Linear | None  # rows: query heads, key heads, value heads, gates; those of a recurrence
    head_norm: "AnyHeadNorm | None"
    out: Linear | None
    mlp_norm: Norm
    mlp: "AnyMlp | None"
    finish: "Finish"
    tails: tuple[Norm, Norm] = (Identity(), Identity())  # `_tail` of attention and of the MLP
    end: LayerEnd | None = None  # after the MLP


AnyHeadNorm = HeadNorm | HeadLayerNorm | QueryNorm | SplitRowNorm
AnyMlp = Mlp | CpuExperts | NormedExperts


Finish = Callable[[Layer, Tensor, Tensor], None]  # (layer, x, attention's output): adds to x


def finish_serial(layer: Layer, x: Tensor, mixed: Tensor) -> None:
    """The MLP reads x after attention has added to it."""
    assert layer.out is not None
    assert layer.mlp is not None
    x.add_(layer.out(mixed))
    x.add_(layer.mlp(layer.mlp_norm(x)))


def finish_serial_with_tails(layer: Layer, x: Tensor, mixed: Tensor) -> None:
    """Like `finish_serial`, but outputs are normed or scaled before they are added, and the layer
    may have only one of the two parts."""
    attention_tail, mlp_tail = layer.tails
    if layer.out is not None:
        x.add_(attention_tail(layer.out(mixed)))
    if layer.mlp is not None:
        x.add_(mlp_tail(layer.mlp(layer.mlp_norm(x))))


def finish_parallel(layer: Layer, x: Tensor, mixed: Tensor) -> None:
    """The MLP reads the same x as attention."""
    assert layer.out is not None
    assert layer.mlp is not None
    normed = layer.mlp_norm(x)
    x.add_(layer.out(mixed))
    x.add_(layer.mlp(normed))


def finish_parallel_with_tail(layer: Layer, x: Tensor, mixed: Tensor) -> None:
    """Like `finish_parallel`, but the sum of both outputs is scaled, or summed over ranks in one
    call, before it is added."""
    assert layer.out is not None
    assert layer.mlp is not None
    normed = layer.mlp_norm(x)
    x.add_(layer.tails[0](layer.out(mixed).add_(layer.mlp(normed))))


class Decoder:
    """Weights and the forward pass. Query and key dims are in the order of `adjacent_pairs`."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor,
        layers: list[Layer],
        norm: Norm,
        head: Linear,
        sinks: Sequence[Tensor | None] = (),
        ranks: Collectives = ALONE,
        recurrent: Sequence[RecurrentTensors] = (),
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self._vocabulary = None if ranks.shard.is_whole else VocabularyPart(spec, ranks)
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        # of layers with attention: [heads] of each that has them
        self.sinks = tuple(sinks) or (None,) * len(spec.attentions)
        self.recurrent = tuple(recurrent)  # of layers with a recurrence
        self.inputs: LayerInputs | None = None  # if layers have inputs of their own
        # of layers with attention: gains of rotated queries, [dim]
        self.query_gains: Sequence[Tensor | None] = [None] * len(spec.attentions)
        self._page_layers = spec.page_layers
        # the scale is rounded to the same dtype as the numbers it multiplies
        self._embedding_scale = float(torch.tensor(spec.embedding_scale).to(self.dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer, [tokens, hidden]."""
        if self._vocabulary is None:
            x = F.embedding(token_ids, self.embedding)
        else:
            x = self.embedding.new_empty(len(token_ids), self.spec.hidden_size)
            self._vocabulary.embed(token_ids, self.embedding, x)
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def forward(
        self, token_ids: Tensor, rows: Tensor | None, attention: Attention, gate: Gate
    ) -> Tensor:
        """Return hidden states [rows, hidden], normed, of the tokens whose numbers are in `rows`;
        None: all tokens.

        The last layer's output is computed for these rows only.
        """
        x = self.embed(token_ids)
        inputs = None if self.inputs is None else self.inputs.make(token_ids, x)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            mixed = x  # not read by a layer without attention and recurrence
            if layer.qkv is not None:
                qkv = self._before_attention(layer, layer.qkv, x)
                if (number := self._page_layers[index]) is not None:
                    gate.before(number)
                mixed = attention.run(index, qkv)
            if index == last and rows is not None:
                mixed, x = mixed[rows], x[rows]
                if len(rows) == 0:
                    return x
                if inputs is not None:
                    inputs = inputs[rows]
            for start in range(0, len(x), ROWS_AT_ONCE):
                end = start + ROWS_AT_ONCE
                layer.finish(layer, x[start:end], mixed[start:end])
                if layer.end is not None:
                    own = None if inputs is None else inputs[start:end, index]
                    layer.end(x[start:end], own)
        return self.norm(x)

    def _before_attention(self, layer: Layer, first: Linear, x: Tensor) -> Tensor:
        if len(x) <= ROWS_AT_ONCE:
            qkv = first(layer.attention_norm(x))
        else:
            parts = [first(layer.attention_norm(part)) for part in torch.split(x, ROWS_AT_ONCE)]
            qkv = torch.cat(parts)
        if layer.head_norm is not None:
            layer.head_norm(qkv)
        return qkv

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] fp32 from the result of `forward`."""
        spec, logits = self.spec, self.head(hidden).float()
        if self._vocabulary is not None:
            logits = self._vocabulary.join(logits).contiguous()
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits


def load_decoder(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """Read a checkpoint; UnsupportedModel names tensors that are missing or unexpected."""
    checkpoint = Checkpoint(folder, dtype, names=spec.names, quantized=spec.quantized)
    return make_decoder(checkpoint, spec)


def make_decoder(checkpoint: WeightSource, spec: ModelSpec, ranks: Collectives = ALONE) -> Decoder:
    """Make a decoder, or the rank's part of it, from the tensors of `checkpoint`."""
    reader = TensorReader(checkpoint, spec, ranks.shard)
    part = reader.part
    embedding = reader.embedding()
    inputs = _inputs(reader.inputs(), part, checkpoint.dtype)
    layers, sinks, gains, recurrent = [], [], [], []
    for index in range(spec.num_layers):
        tensors = reader.layer(index)
        layers.append(_compile(tensors, part, index, checkpoint.dtype, ranks))
        if (attention := part.layers[index].attention) is not None:
            sinks.append(tensors.sinks)
            gains.append(_query_gain(tensors, part, attention))
        if tensors.recurrent is not None:
            recurrent.append(tensors.recurrent)
    ends = reader.ends(embedding)
    head = _linear(ends.head, checkpoint.dtype)
    norm = _norm(ends.norm, part)
    decoder = Decoder(part, embedding, layers, norm, head, sinks, ranks, recurrent)
    decoder.inputs, decoder.query_gains = inputs, gains
    return decoder


def pack(decoder: Decoder, max_bytes: int) -> bool:
    """Give the dense linears their second copy (DenseLinear.pack) if all copies together take at
    most `max_bytes`; returns whether they have it."""
    linears: list[Linear | None] = [decoder.head]
    for layer in decoder.layers:
        linears += [layer.qkv, layer.out]
        if isinstance(layer.mlp, Mlp):
            linears += [layer.mlp.first, layer.mlp.down]
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    has_room = sum(linear.weight.nbytes for linear in dense) <= max_bytes
    if has_room:
        for linear in dense:
            linear.pack()
    return has_room


def _inputs(
    tensors: ModelInputTensors | None, spec: ModelSpec, dtype: torch.dtype
) -> LayerInputs | None:
    """What makes the layers' own inputs."""
    if tensors is None:
        return None
    product, norm = _linear(tensors.product, dtype), _norm(tensors.norm, spec)
    return LayerInputs(len(tensors.norm.gain), tensors.embedding, product, norm)


def _layer_end(tensors: LayerTensors, spec: ModelSpec, dtype: torch.dtype) -> LayerEnd | None:
    """What follows the MLP; None: nothing."""
    scale = 1.0 if tensors.scale is None else float(tensors.scale)
    found, block = tensors.layer_input, None
    if found is not None and spec.layer_inputs is not None:
        block = LayerInputBlock(
            _linear(found.gate, dtype),
            plain(spec.layer_inputs.activation),
            _linear(found.out, dtype),
            _norm(found.norm, spec),
        )
    return None if block is None and scale == 1.0 else LayerEnd(scale, block)


def _linear(product: Product, dtype: torch.dtype) -> DenseLinear:
    return DenseLinear(product.unpacked(dtype).dense, product.bias)


def _compile(
    tensors: LayerTensors, spec: ModelSpec, index: int, dtype: torch.dtype, ranks: Collectives
) -> Layer:
    attention_norm, qkv = _first(tensors, spec, index, dtype)
    mlp_norm, mlp = _mlp(tensors, spec, index, dtype)
    tails = (
        _tail(tensors.after_attention_norm, spec, ranks),
        _tail(tensors.after_mlp_norm, spec, ranks),
    )
    has_tails = not all(isinstance(tail, Identity) for tail in tails)
    has_tails |= qkv is None or mlp is None
    if spec.residual is Residual.SERIAL:
        finish = finish_serial_with_tails if has_tails else finish_serial
    else:
        finish = finish_parallel_with_tail if has_tails else finish_parallel
    return Layer(
        attention_norm=attention_norm,
        qkv=qkv,
        head_norm=_head_norm(tensors, spec, spec.layers[index], ranks),
        out=None if tensors.out is None else _linear(tensors.out, dtype),
        mlp_norm=attention_norm if spec.residual is Residual.PARALLEL else mlp_norm,
        mlp=mlp,
        finish=finish,
        tails=tails,
        end=_layer_end(tensors, spec, dtype),
    )


def _first(
    tensors: LayerTensors, spec: ModelSpec, index: int, dtype: torch.dtype
) -> tuple[Norm, DenseLinear | None]:
    """The product before attention and recurrence, with the norm that it reads."""
    if tensors.qkv is None:
        return Identity(), None
    qkv, attention = tensors.qkv.unpacked(dtype), spec.layers[index].attention
    if attention is not None:
        shape = spec.new_kv(spec.layers[index])
        pairs = adjacent_pairs(shape.dim, spec.rotary_dim(attention))
        others = shape.heads + (spec.num_heads if attention.has_gate else 0)
        order = reordered_heads(pairs, spec.num_heads + shape.heads, others)
        of_recurrence = torch.arange(len(order), qkv.weight.shape[0])
        qkv = qkv.rows_at(torch.cat((order, of_recurrence)))
    norm, qkv = _folded(tensors.attention_norm, qkv, spec)
    return norm, _linear(qkv, dtype)


def _mlp(
    tensors: LayerTensors, spec: ModelSpec, index: int, dtype: torch.dtype
) -> tuple[Norm, AnyMlp | None]:
    """The MLP, with the norm that it reads."""
    mlp, found = spec.layers[index].mlp, tensors.mlp
    if mlp is None:
        return Identity(), None
    if isinstance(mlp, ExpertsSpec):
        assert isinstance(found, ExpertTensors)
        if tensors.branch_norms is not None:
            return Identity(), _normed_experts(tensors, spec, mlp, dtype)
        norm = Identity() if tensors.mlp_norm is None else _norm(tensors.mlp_norm, spec)
        return norm, CpuExperts(found, mlp)
    assert isinstance(found, MlpTensors)
    norm, first = _folded(tensors.mlp_norm, found.first.unpacked(dtype), spec)
    activate = (gated if mlp.is_gated else plain)(mlp.activation)
    return norm, Mlp(_linear(first, dtype), activate, _linear(found.down, dtype))


def _normed_experts(
    tensors: LayerTensors, spec: ModelSpec, experts: ExpertsSpec, dtype: torch.dtype
) -> NormedExperts:
    """Experts and a shared MLP with norms of their own; gains are not folded into products."""
    norms, found = tensors.branch_norms, tensors.mlp
    assert norms is not None
    assert isinstance(found, ExpertTensors)
    assert found.shared_gate_up is not None
    assert found.shared_down is not None
    first, down = Product(found.shared_gate_up).unpacked(dtype), Product(found.shared_down)
    return NormedExperts(
        Mlp(_linear(first, dtype), gated(experts.activation), _linear(down, dtype)),
        CpuExperts(replace(found, shared_gate_up=None, shared_down=None), experts),
        shared_norm=_norm(norms.shared, spec),
        expert_norm=_norm(norms.experts, spec),
        router_norm=_norm(norms.router, spec),
        after_shared=_norm(norms.after_shared, spec),
        after_experts=_norm(norms.after_experts, spec),
    )


def _folded(tensors: NormTensors | None, product: Product, spec: ModelSpec) -> tuple[Norm, Product]:
    """Return the norm and the only product that reads it, with the norm's gain folded into the
    product's weights. Only in fp32: weights of 16 bits would be rounded."""
    if tensors is None:
        return Identity(), product
    is_rms = spec.norm.kind is NormKind.RMS and tensors.bias is None
    if not is_rms or spec.residual is not Residual.SERIAL or product.dense.dtype != torch.float32:
        return _norm(tensors, spec), product
    norm = RmsNorm(None, spec.hidden_size, spec.norm.eps)
    return norm, Product(product.dense * norm_scale(tensors.gain), product.bias)


def _norm(tensors: NormTensors, spec: ModelSpec) -> Norm:
    if spec.norm.kind is NormKind.LAYER:
        return LayerNorm(tensors.gain, tensors.bias, spec.norm.eps)
    return RmsNorm(norm_scale(tensors.gain), len(tensors.gain), spec.norm.eps)


def _tail(tensors: NormTensors | None, spec: ModelSpec, ranks: Collectives) -> Norm:
    """The function that is applied to an output before it is added to x."""
    scale = spec.residual_scale
    tail: Norm
    if tensors is None:
        tail = Identity() if scale == 1.0 else lambda y: y.mul_(scale)
    else:
        norm = _norm(tensors, spec)
        tail = norm if scale == 1.0 else lambda y: norm(y).mul_(scale)
    return tail if ranks.shard.is_whole else Summed(ranks, tail)


def _query_gain(tensors: LayerTensors, spec: ModelSpec, attention: AttentionSpec) -> Tensor | None:
    if tensors.query_gain is None:
        return None
    return tensors.query_gain[adjacent_pairs(spec.head_dim, spec.rotary_dim(attention))]


def _head_norm(
    tensors: LayerTensors, spec: ModelSpec, layer: LayerSpec, ranks: Collectives
) -> AnyHeadNorm | None:
    if layer.attention is None:
        return None
    shape, eps = spec.kv_shape(layer.attention), spec.norm.eps
    dim, pairs = shape.dim, adjacent_pairs(shape.dim, spec.rotary_dim(layer.attention))
    if (found := tensors.head_norm) is not None:
        bias = None if found.bias is None else found.bias[:, pairs]
        return HeadLayerNorm(found.gain[:, pairs], bias, eps)
    if tensors.q_norm is None:
        return None
    q_gain = tensors.q_norm.view(-1, dim)[:, pairs].reshape(-1)
    if tensors.k_norm is None:
        return QueryNorm(RmsNorm(norm_scale(q_gain), dim, eps), dim)
    k_gain = tensors.k_norm.view(-1, dim)[:, pairs].reshape(-1)
    if spec.qk_norm is QkNorm.ROWS and not ranks.shard.is_whole:
        widths = (ranks.shard.of * len(q_gain), ranks.shard.of * len(k_gain))
        return SplitRowNorm(q_gain, k_gain, widths, eps, ranks)
    q_norm = RmsNorm(norm_scale(q_gain), len(q_gain), eps)
    k_norm = RmsNorm(norm_scale(k_gain), len(k_gain), eps)
    kind = RowNorm if spec.qk_norm is QkNorm.ROWS else HeadNorm
    if spec.has_value_norm:
        kind = ValueNorm
    return kind(q_norm, k_norm, spec.num_heads, shape.heads, dim)
