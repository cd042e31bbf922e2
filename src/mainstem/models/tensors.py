"""A checkpoint's tensors in the form in which backends take them, read layer by layer.

Whatever a family calls them and however it fuses them, a layer has here: queries, keys and values
in one product, gate and up in one, gains as they are multiplied. Quantized products stay packed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.models.expert_tensors import ExpertTensors, read_experts
from mainstem.models.names import QkvOrder
from mainstem.models.packed import PackedWeight, Weight, as_tensor, on_top
from mainstem.models.spec import (
    ExpertsSpec,
    MlpSpec,
    ModelSpec,
    NormPlace,
    QkNorm,
    Residual,
    RopeSpec,
)
from mainstem.models.weights import WeightSource, take_weight

log = logging.getLogger("mainstem.models")


@dataclass(frozen=True, slots=True)
class Product:
    """weight [out, in], bias [out]."""

    weight: Weight
    bias: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        """The weight of a product that is not packed."""
        return as_tensor(self.weight)

    def unpacked(self, dtype: torch.dtype) -> "Product":
        """The same with its weight as a tensor."""
        if isinstance(self.weight, Tensor):
            return self
        return Product(self.weight.dense(dtype), self.bias)

    def rows_at(self, index: Tensor) -> "Product":
        """The rows of these numbers, in this order."""
        weight, bias, index = self.weight, self.bias, index.to(self.weight.device)
        return Product(
            weight[index] if isinstance(weight, Tensor) else weight.rows_at(index),
            None if bias is None else bias[index],
        )


@dataclass(frozen=True, slots=True)
class NormTensors:
    gain: Tensor  # fp32 where it is multiplied before rounding
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpTensors:
    first: Product  # rows: gate, then up; or up alone
    down: Product


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What stands before or after attention and MLP is None where the family has none there."""

    attention_norm: NormTensors | None
    qkv: Product  # rows: query heads, key heads, value heads
    q_norm: Tensor | None  # gains
    k_norm: Tensor | None
    out: Product
    sinks: Tensor | None  # [heads] fp32
    after_attention_norm: NormTensors | None
    mlp_norm: NormTensors | None
    mlp: MlpTensors | ExpertTensors
    after_mlp_norm: NormTensors | None


@dataclass(frozen=True, slots=True)
class EndTensors:
    """Behind the layers."""

    norm: NormTensors
    head: Product  # its weight is the embedding where they are tied


class TensorReader:
    """Reads a model from `source`: `embedding`, then `layer` for each index, then `ends`."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        self._spec = spec
        self._names = spec.names
        self._unpacked: list[str] = []  # products whose parts could not be joined as they are

    def embedding(self) -> Tensor:
        """[vocab, hidden]"""
        spec = self._spec
        return self._take(f"{self._names.embedding}.weight", spec.vocab_size, spec.hidden_size)

    def layer(self, index: int) -> LayerTensors:
        spec, names = self._spec, self._names
        prefix = names.layer.format(index) + "."
        place, mlp = spec.norm_place, spec.layers[index].mlp
        has_before = place is not NormPlace.AFTER
        has_after = place is not NormPlace.BEFORE
        # in parallel both read one norm
        has_mlp_norm = has_before and spec.residual is not Residual.PARALLEL
        q_norm, k_norm = self._qk_norms(prefix)
        sinks = None
        if spec.layers[index].attention.has_sinks:
            sinks = self._take(prefix + names.sinks, spec.num_heads).float()
        return LayerTensors(
            attention_norm=self._norm(prefix + names.attention_norm) if has_before else None,
            qkv=self._qkv(prefix, spec.layers[index].attention.rope),
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._product(
                [prefix + names.out],
                [spec.hidden_size],
                spec.num_heads * spec.head_dim,
                spec.has_out_bias,
            ),
            sinks=sinks,
            after_attention_norm=self._norm(prefix + names.after_attention_norm)
            if has_after
            else None,
            mlp_norm=self._norm(prefix + names.mlp_norm) if has_mlp_norm else None,
            mlp=self._mlp(prefix, mlp) if isinstance(mlp, MlpSpec) else self._experts(prefix, mlp),
            after_mlp_norm=self._norm(prefix + names.after_mlp_norm) if has_after else None,
        )

    def ends(self, embedding: Tensor) -> EndTensors:
        """Last norm and head. Raises UnsupportedModel naming what was missing or not expected in
        the whole checkpoint."""
        spec, names, source = self._spec, self._names, self._source
        norm = self._norm(names.final_norm)
        if spec.has_tied_embeddings:
            source.drop(f"{names.head}.weight")
            bias = self._take(f"{names.head}.bias", spec.vocab_size) if spec.has_head_bias else None
            head = Product(embedding, bias)
        else:
            rows = [spec.vocab_size]
            head = self._product([names.head], rows, spec.hidden_size, spec.has_head_bias)
        source.finish()
        if self._unpacked:
            log.warning(
                "%d quantized products are dequantized, for the parts of each differ in their "
                "groups or the order of their columns, which takes memory: %s",
                len(self._unpacked),
                ", ".join(self._unpacked[:3]) + (" ..." if len(self._unpacked) > 3 else ""),
            )
        return EndTensors(norm, head)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._source.take(name, shape)

    def _norm(self, name: str) -> NormTensors:
        norm, size = self._spec.norm, self._spec.hidden_size
        gain = self._gain(f"{name}.weight", size)
        return NormTensors(gain, self._take(f"{name}.bias", size) if norm.has_bias else None)

    def _gain(self, name: str, size: int) -> Tensor:
        gain, norm = self._take(name, size), self._spec.norm
        if norm.gain_offset or norm.is_rounded_once:
            return gain.float() + norm.gain_offset
        return gain

    def _qk_norms(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        spec, names = self._spec, self._names
        if spec.qk_norm is QkNorm.NONE:
            return None, None
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        if spec.qk_norm is QkNorm.HEADS:
            heads = kv_heads = 1
        return (
            self._gain(f"{prefix}{names.q_norm}.weight", heads * spec.head_dim),
            self._gain(f"{prefix}{names.k_norm}.weight", kv_heads * spec.head_dim),
        )

    def _product(
        self, names: Sequence[str], rows: Sequence[int], width: int, has_bias: bool
    ) -> Product:
        """The tensors of these names on top of each other."""
        weights = [take_weight(self._source, n, r, width) for n, r in zip(names, rows, strict=True)]
        bias = None
        if has_bias:
            biases = [self._take(f"{n}.bias", r) for n, r in zip(names, rows, strict=True)]
            bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        return Product(self._joined(names, weights), bias)

    def _joined(self, names: Sequence[str], weights: list[Weight]) -> Weight:
        whole = on_top(weights, self._source.dtype)
        if isinstance(whole, Tensor) and not all(isinstance(part, Tensor) for part in weights):
            self._unpacked.append(" + ".join(names))
        return whole

    def _qkv(self, prefix: str, rope: RopeSpec | None) -> Product:
        spec, names = self._spec, self._names
        dim, kv_rows = spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = [spec.num_heads * dim, kv_rows, kv_rows]
        if len(names.qkv) == 1:
            rows = [sum(rows)]
        found = [prefix + name for name in names.qkv]
        product = self._product(found, rows, spec.hidden_size, spec.has_qkv_bias)
        if names.qkv_order is QkvOrder.GROUPS:
            product = product.rows_at(_parts_of_groups(spec))
        if rope is None or rope.score_factor == 1.0 or rope.rotary_dim == dim:
            return product
        return _scaled(product, _unrotated_factors(spec, rope).to(product.weight.device))

    def _mlp(self, prefix: str, mlp: MlpSpec) -> MlpTensors:
        names, hidden = self._names, self._spec.hidden_size
        rows = [mlp.size, mlp.size] if mlp.is_gated else [mlp.size]
        if len(names.gate_up) == 1:
            rows = [sum(rows)]
        found = [prefix + name for name in names.gate_up]
        return MlpTensors(
            self._product(found, rows, hidden, mlp.has_bias),
            self._product([prefix + names.down], [hidden], mlp.size, mlp.has_bias),
        )

    def _experts(self, prefix: str, spec: ExpertsSpec) -> ExpertTensors:
        experts = read_experts(self._source, spec, self._spec.hidden_size, prefix, self._names)
        if experts.is_unpacked:
            self._unpacked.append(f"the experts of {prefix[:-1]}")
        return experts


def _scaled(product: Product, factors: Tensor) -> Product:
    """Rows times these factors, rounded once."""
    weight, bias = product.weight, product.bias
    if isinstance(weight, PackedWeight):
        weight = weight.scaled_rows(factors)
    else:
        weight = (weight * factors[:, None]).to(weight.dtype)
    return Product(weight, None if bias is None else (bias * factors).to(bias.dtype))


def _unrotated_factors(spec: ModelSpec, rope: RopeSpec) -> Tensor:
    """For each row of queries, keys and values. A rope's score factor is of the dims it rotates,
    but a part of the scale of all: the other dims of the queries are divided by it."""
    heads = torch.ones(spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    heads[: spec.num_heads, rope.rotary_dim :] = rope.score_factor**-2
    return heads.reshape(-1)


def _parts_of_groups(spec: ModelSpec) -> Tensor:
    """Where the rows of all queries, keys and values lie if each KV head's are together."""
    group = spec.num_heads // spec.num_kv_heads
    heads = torch.arange(spec.num_heads + 2 * spec.num_kv_heads).view(spec.num_kv_heads, group + 2)
    order = torch.cat((heads[:, :group].reshape(-1), heads[:, group], heads[:, group + 1]))
    return (order[:, None] * spec.head_dim + torch.arange(spec.head_dim)).reshape(-1)
