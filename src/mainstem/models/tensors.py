"""A checkpoint's tensors in the form that backends use, read layer by layer.

Families differ in how they name and fuse tensors. Here every layer has one product for queries,
keys and values, and one for gate and up. Gains of norms include the family's offset. Quantized
products stay packed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.models.expert_tensors import ExpertTensors, read_experts
from mainstem.models.packed import PackedWeight, Weight, as_tensor, on_top
from mainstem.models.recurrence import (
    DeltaSpec,
    GateOrder,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from mainstem.models.recurrent_tensors import RecurrentTensors, recurrent_order, row_factors
from mainstem.models.rope import reordered_heads, split_pairs
from mainstem.models.rows import Rows, first_rows, gates_last, qkv_rows, times
from mainstem.models.shard import WHOLE, RankCut, Shard, length, part_of
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
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
    """A product: weight [out, in], bias [out]."""

    weight: Weight
    bias: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        """The weight of a product that is not packed."""
        return as_tensor(self.weight)

    def unpacked(self, dtype: torch.dtype) -> "Product":
        """The same product, with its weight dequantized."""
        if isinstance(self.weight, Tensor):
            return self
        return Product(self.weight.dense(dtype), self.bias)

    def rows_at(self, index: Tensor) -> "Product":
        """The rows with these numbers, in this order."""
        weight, bias, index = self.weight, self.bias, index.to(self.weight.device)
        return Product(
            weight[index] if isinstance(weight, Tensor) else weight.rows_at(index),
            None if bias is None else bias[index],
        )


@dataclass(frozen=True, slots=True)
class NormTensors:
    gain: Tensor  # in fp32 if the norm multiplies by it before rounding
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpTensors:
    first: Product  # rows: gate, then up; or up alone
    down: Product


@dataclass(frozen=True, slots=True)
class BranchTensors:
    """The norms of a layer whose shared MLP, experts and router have norms of their own."""

    shared: NormTensors
    experts: NormTensors
    router: NormTensors
    after_shared: NormTensors
    after_experts: NormTensors


@dataclass(frozen=True, slots=True)
class LayerInputTensors:
    """What turns a layer's own input into something that is added to x."""

    gate: Product  # [size, hidden]
    out: Product  # [hidden, size]
    norm: NormTensors


@dataclass(frozen=True, slots=True)
class ModelInputTensors:
    """What makes the layers' own inputs."""

    embedding: Tensor  # [vocab, layers * size]
    product: Product  # [layers * size, hidden]
    norm: NormTensors  # [size]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Norms before or after attention and MLP are None if the family has none there. What a layer
    does not have is None."""

    attention_norm: NormTensors | None
    # rows: query heads, key heads, value heads, gates; then those of a recurrence (recurrence.py)
    qkv: Product | None
    q_norm: Tensor | None  # gains
    k_norm: Tensor | None
    out: Product | None  # columns: heads, then those of a recurrence
    sinks: Tensor | None  # [heads] fp32
    after_attention_norm: NormTensors | None
    mlp_norm: NormTensors | None
    mlp: MlpTensors | ExpertTensors | None
    after_mlp_norm: NormTensors | None
    recurrent: RecurrentTensors | None = None
    branch_norms: BranchTensors | None = None
    layer_input: LayerInputTensors | None = None
    scale: Tensor | None = None  # [1] fp32, of x at the end of the layer
    # LayerNorm of heads: [query heads + key heads, dim] in fp32
    head_norm: NormTensors | None = None
    query_gain: Tensor | None = None  # [dim] fp32, of queries after they are rotated


@dataclass(frozen=True, slots=True)
class EndTensors:
    """The tensors after the last layer."""

    norm: NormTensors
    head: Product  # with tied embeddings, its weight is the embedding


class TensorReader:
    """Reads a model from `source`: `embedding`, then `layer` for each index, then `ends`.

    With a shard, reads only the rank's part; only small tensors that all ranks have are read whole.
    `part` is the recipe of the rank's part.
    """

    def __init__(self, source: WeightSource, spec: ModelSpec, shard: Shard = WHOLE) -> None:
        self._source = source
        self._spec = spec
        self._cut = RankCut.of(spec, shard)
        self._names = spec.names
        self._unpacked: list[str] = []  # products that could not stay packed
        self.part = part_of(spec, shard)

    def embedding(self) -> Tensor:
        """[vocab, hidden]. A rank has only the rows of its own tokens, padded with zeros to
        `vocab_rows`. If head and embedding are tied, the files may hold only the head."""
        name, head = f"{self._names.embedding}.weight", f"{self._names.head}.weight"
        has_only_head = not self._source.has(name) and self._source.has(head)
        if self._spec.has_tied_embeddings and has_only_head:
            name = head
        return self._vocabulary(name, self._spec.hidden_size)

    def inputs(self) -> ModelInputTensors | None:
        """What makes the layers' own inputs; None if they have none."""
        spec, names = self._spec, self._names
        if spec.layer_inputs is None:
            return None
        size = spec.layer_inputs.size
        width = spec.num_layers * size
        table = self._take(f"{names.layer_input_embedding}.weight", spec.vocab_size, width)
        rows = [Rows(names.layer_input_product, width, slice(0, width))]
        product = self._product(rows, spec.hidden_size, has_bias=False)
        gain = self._gain(f"{names.layer_input_norm}.weight", size)
        return ModelInputTensors(table, product, NormTensors(gain))

    def layer(self, index: int) -> LayerTensors:
        spec, names = self._spec, self._names
        prefix = names.layer.format(index) + "."
        place, layer = spec.norm_place, spec.layers[index]
        has_before = place is not NormPlace.AFTER
        has_after = place is not NormPlace.BEFORE
        # in a parallel block, attention and MLP read the same norm
        has_mlp_norm = has_before and spec.residual is not Residual.PARALLEL
        mlp = layer.mlp
        has_own_norms = isinstance(mlp, ExpertsSpec) and mlp.has_own_norms
        qkv, out, q_norm, k_norm, sinks = None, None, None, None, None
        head_norm, query_gain = None, None
        if layer.attention is not None:
            q_norm, k_norm = self._qk_norms(prefix, layer)
            if spec.qk_norm is QkNorm.TURNED_HEADS:
                query_gain, q_norm, k_norm = _before_rotation(q_norm, k_norm)
            head_norm = self._head_norm(prefix, layer)
            qkv = self._qkv(prefix, layer)
            out = self._attention_out(prefix, layer.attention)
            if layer.attention.has_sinks:
                heads = self._cut.heads(spec.num_heads)
                sinks = self._take(prefix + names.sinks, spec.num_heads, at=(heads,)).float()
        if layer.recurrent is not None:
            first, last = self._recurrence(prefix, layer.recurrent)
            qkv = first if qkv is None else self._stacked(qkv, first, prefix)
            out = last if out is None else self._side_by_side(out, last, prefix)
        has_norm = has_before and layer.has_mixer
        return LayerTensors(
            attention_norm=self._norm(prefix + names.attention_norm) if has_norm else None,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            out=out,
            sinks=sinks,
            after_attention_norm=self._norm(prefix + names.after_attention_norm)
            if has_after
            else None,
            mlp_norm=self._norm(prefix + names.mlp_norm)
            if has_mlp_norm and not has_own_norms and mlp
            else None,
            mlp=self._mlp(prefix, mlp),
            after_mlp_norm=self._norm(prefix + names.after_mlp_norm) if has_after else None,
            recurrent=None if layer.recurrent is None else self._kept(prefix, layer.recurrent),
            branch_norms=self._branch_norms(prefix) if has_own_norms else None,
            layer_input=self._layer_input(prefix),
            scale=self._source.take_wide(prefix + names.layer_scale, (1,))
            if spec.has_layer_scale
            else None,
            head_norm=head_norm,
            query_gain=query_gain,
        )

    def _branch_norms(self, prefix: str) -> BranchTensors:
        names, size = self._names, self._spec.hidden_size
        # its input is also divided by the root of the hidden size
        router = self._source.take_wide(prefix + names.router_gain, (size,)) * size**-0.5
        return BranchTensors(
            shared=self._norm(prefix + names.mlp_norm),
            experts=self._norm(prefix + names.expert_norm),
            router=NormTensors(router),
            after_shared=self._norm(prefix + names.after_shared_norm),
            after_experts=self._norm(prefix + names.after_expert_norm),
        )

    def _layer_input(self, prefix: str) -> LayerInputTensors | None:
        spec, names = self._spec, self._names
        if spec.layer_inputs is None:
            return None
        size, hidden = spec.layer_inputs.size, spec.hidden_size
        rows = [Rows(prefix + names.layer_input_gate, size, slice(0, size))]
        out = [Rows(prefix + names.layer_input_out, hidden, slice(0, hidden))]
        return LayerInputTensors(
            self._product(rows, hidden, has_bias=False),
            self._product(out, size, has_bias=False),
            self._norm(prefix + names.after_layer_input_norm),
        )

    def ends(self, embedding: Tensor) -> EndTensors:
        """Return the last norm and the head. Raises UnsupportedModel if tensors of the checkpoint,
        in any layer, are missing or not expected; the error names them."""
        spec, names, source = self._spec, self._names, self._source
        norm = self._norm(names.final_norm)
        weight: Weight = embedding
        # Every rank compares all rows, so that all come to the same result.
        if not spec.has_tied_embeddings or self._has_own_head():
            weight = self._head()
        else:
            source.drop(f"{names.head}.weight")
        bias = self._vocabulary(f"{names.head}.bias") if spec.has_head_bias else None
        source.finish()
        if self._unpacked:
            log.warning(
                "%d quantized products are dequantized, which takes more memory. Their tensors "
                "(such as q, k and v) have different groups or column orders, or a rank needs "
                "only some columns of a tensor in act-order, or pads its rows of the head (%s)",
                len(self._unpacked),
                ", ".join(self._unpacked[:3]) + (" ..." if len(self._unpacked) > 3 else ""),
            )
        return EndTensors(norm, Product(weight, bias))

    def _take(self, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Tensor:
        return self._source.take(name, shape, at)

    def _vocabulary(self, name: str, *width: int) -> Tensor:
        """The rank's rows of embedding or head; zeros past the last token."""
        size = self._spec.vocab_size
        tokens = self._cut.vocabulary(size)
        return self._padded(self._take(name, size, *width, at=(tokens,)))

    def _has_own_head(self) -> bool:
        """Whether the files hold a head that differs from the embedding, although config.json says
        that they are tied. The files decide: transformers writes such configs for multimodal
        models, and fine-tuning may have changed only one of the two."""
        names = self._names
        if not self._source.has_other(names.head, names.embedding):
            return False
        log.warning(
            "config.json says that embedding and head are tied, but the checkpoint holds a "
            "different %s: this head is used",
            names.head,
        )
        return True

    def _head(self) -> Weight:
        size, name = self._spec.vocab_size, self._names.head
        tokens = self._cut.vocabulary(size)
        found = take_weight(self._source, name, size, self._spec.hidden_size, at=(tokens,))
        if isinstance(found, Tensor):
            return self._padded(found)
        if len(found.values) == (self.part.vocab_rows or size):
            return found
        self._unpacked.append(name)
        return self._padded(found.dense(self._source.dtype))

    def _padded(self, rows: Tensor) -> Tensor:
        missing = (self.part.vocab_rows or self._spec.vocab_size) - len(rows)
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows

    def _norm(self, name: str) -> NormTensors:
        norm, size = self._spec.norm, self._spec.hidden_size
        if not norm.has_gain:
            source = self._source
            return NormTensors(torch.ones(size, dtype=source.dtype, device=source.device))
        gain = self._gain(f"{name}.weight", size)
        return NormTensors(gain, self._take(f"{name}.bias", size) if norm.has_bias else None)

    def _gain(self, name: str, size: int, part: slice | None = None) -> Tensor:
        gain = self._take(name, size, at=() if part is None else (part,))
        norm = self._spec.norm
        if norm.gain_offset or norm.is_rounded_once:
            return gain.float() + norm.gain_offset
        return gain

    def _qk_norms(self, prefix: str, layer: LayerSpec) -> tuple[Tensor | None, Tensor | None]:
        """The gains of queries and keys; a layer that reads another one's K has none of keys."""
        spec, names, shape = self._spec, self._names, self._spec.new_kv(layer)
        if spec.qk_norm in (QkNorm.NONE, QkNorm.LAYER, QkNorm.LAYER_EACH):
            return None, None
        gains: list[Tensor | None] = []
        for name, count in ((names.q_norm, spec.num_heads), (names.k_norm, shape.heads)):
            if count == 0:
                gains.append(None)
            elif spec.qk_norm is QkNorm.ROWS:
                part = times(self._cut.heads(count), shape.dim)
                gains.append(self._gain(f"{prefix}{name}.weight", count * shape.dim, part))
            else:
                gains.append(self._gain(f"{prefix}{name}.weight", shape.dim))
        return gains[0], gains[1]

    def _head_norm(self, prefix: str, layer: LayerSpec) -> NormTensors | None:
        """The LayerNorms of heads, with a gain for each head even if they have the same."""
        spec, names, shape = self._spec, self._names, self._spec.new_kv(layer)
        gains: list[Tensor] = []
        biases: list[Tensor] = []
        for name, count in ((names.q_norm, spec.num_heads), (names.k_norm, shape.heads)):
            heads = range(count)[self._cut.heads(count)]
            if spec.qk_norm is QkNorm.LAYER:
                gain, bias = (
                    self._take(f"{prefix}{name}.{part}", shape.dim) for part in ("weight", "bias")
                )
                gains.append(gain.float().expand(len(heads), -1))
                biases.append(bias.float().expand(len(heads), -1))
            elif spec.qk_norm is QkNorm.LAYER_EACH:
                every = [f"{prefix}{name}.norms.{head}.weight" for head in range(count)]
                gains += [self._take(every[head], shape.dim).float()[None] for head in heads]
                for other in set(range(count)) - set(heads):
                    self._source.drop(every[other])
        if not gains:
            return None
        return NormTensors(torch.cat(gains), torch.cat(biases) if biases else None)

    def _product(self, rows: Sequence[Rows], width: int, has_bias: bool) -> Product:
        """A product made by stacking these rows."""
        weights = [take_weight(self._source, r.name, r.whole, width, at=(r.part,)) for r in rows]
        weight = on_top(weights, self._source.dtype)
        if isinstance(weight, Tensor) and not all(isinstance(part, Tensor) for part in weights):
            self._unpacked.append(" + ".join(r.name for r in rows))
        bias = None
        if has_bias:
            bias = self._bias(rows)
        return Product(weight, bias)

    def _bias(self, rows: Sequence[Rows]) -> Tensor:
        biases = [self._take(f"{r.name}.bias", r.whole, at=(r.part,)) for r in rows]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def key_bias(self, index: int) -> Tensor:
        """Return the bias of a layer's keys, [kv_heads, dim] in fp32 on the CPU, in the order of
        `layer`. The layer must have one."""
        spec, layer = self._spec, self._spec.layers[index]
        attention, part = layer.attention, self.part.layers[index].attention
        assert attention is not None, "a recurrent layer has no keys"
        assert part is not None
        prefix, rope = self._names.layer.format(index) + ".", attention.rope
        names = [prefix + name for name in self._names.qkv]
        heads, dim = self.part.kv_shape(part).heads, spec.kv_shape(attention).dim
        # queries, with their gates, come first, values last
        bias = self._bias(qkv_rows(spec, layer, self._cut, names))[-2 * heads * dim : -heads * dim]
        bias = bias.view(heads, dim).float().cpu()
        if rope is not None and rope.has_adjacent_pairs:
            bias = bias[:, split_pairs(dim, rope.rotary_dim)]
        return bias

    def _summed(self, name: str, width: int, columns: slice, has_bias: bool) -> Product:
        """Return some columns of a product whose output is summed over ranks. Only rank 0 has the
        bias."""
        hidden, quantized = self._spec.hidden_size, self._spec.quantized
        at = (slice(0, hidden), columns) if columns != slice(0, width) else ()
        weight, bias = take_weight(self._source, name, hidden, width, at=at), None
        packing = (
            None if quantized is None or not quantized.has_order else quantized.packing_of(name)
        )
        if at and packing is not None and isinstance(weight, Tensor):  # columns in act-order
            self._unpacked.append(name)
        if has_bias and self._cut.shard.rank == 0:
            bias = self._take(f"{name}.bias", hidden)
        elif has_bias:
            self._source.drop(f"{name}.bias")
        return Product(weight, bias)

    def _attention_out(self, prefix: str, attention: AttentionSpec) -> Product:
        spec = self._spec
        dim = spec.kv_shape(attention).dim
        width = spec.num_heads * dim
        columns = times(self._cut.heads(spec.num_heads), dim)
        out = self._summed(prefix + self._names.out, width, columns, spec.has_out_bias)
        return _times(out, attention.out_scale)

    def _stacked(self, top: Product, bottom: Product, prefix: str) -> Product:
        """Both products of the same input, one on top of the other. Neither has a bias."""
        assert top.bias is None
        assert bottom.bias is None
        weights = (top.weight, bottom.weight)
        weight = on_top(weights, self._source.dtype)
        if isinstance(weight, Tensor) and not all(isinstance(part, Tensor) for part in weights):
            self._unpacked.append(f"products of {prefix[:-1]}")
        return Product(weight)

    def _side_by_side(self, left: Product, right: Product, prefix: str) -> Product:
        """The product whose output is the sum of both. Neither has a bias."""
        assert left.bias is None
        assert right.bias is None
        dtype = self._source.dtype
        if not (isinstance(left.weight, Tensor) and isinstance(right.weight, Tensor)):
            self._unpacked.append(f"products of {prefix[:-1]}")
        both = (left.unpacked(dtype).dense, right.unpacked(dtype).dense)
        return Product(torch.cat(both, dim=1))

    def _recurrence(self, prefix: str, spec: RecurrentSpec) -> tuple[Product, Product]:
        """The products before and after a recurrence."""
        names, hidden = self._names, self._spec.hidden_size
        has_bias = not isinstance(spec, DeltaSpec) and spec.has_bias
        order, counts = recurrent_order(spec, names.recurrent_order, len(names.recurrent))
        rows = [
            Rows(prefix + name, count, slice(0, count))
            for name, count in zip(names.recurrent, counts, strict=True)
        ]
        first = self._product(rows, hidden, has_bias)
        if order is not None:
            first = first.rows_at(order)
        width = spec.out_width
        out = self._summed(prefix + names.recurrent_out, width, slice(0, width), has_bias)
        if isinstance(spec, MambaSpec):
            out = _times(out, spec.out_scale)
        if isinstance(spec, MambaSpec) and spec.row_scales:
            first = _scaled(first, row_factors(spec).to(first.weight.device))
        return first, out

    def _kept(self, prefix: str, spec: RecurrentSpec) -> RecurrentTensors:
        names, channels = self._names, spec.conv_channels
        conv = self._take(f"{prefix}{names.conv}.weight", channels, 1, spec.kernel)[:, 0]
        has_bias = isinstance(spec, MambaSpec) and spec.has_conv_bias
        has_bias |= isinstance(spec, ShortConvSpec) and spec.has_bias
        bias = self._take(f"{prefix}{names.conv}.bias", channels) if has_bias else None
        if isinstance(spec, ShortConvSpec):
            return RecurrentTensors(conv, bias)

        def wide(name: str, size: int) -> Tensor:
            return self._source.take_wide(prefix + name, (size,))

        heads, gain = spec.matrix_shape[0], None
        if isinstance(spec, DeltaSpec):
            gain = wide(f"{names.recurrent_norm}.weight", spec.value_dim)
        elif spec.gate_order is not GateOrder.NO_NORM:
            gain = wide(f"{names.recurrent_norm}.weight", spec.out_width)
        return RecurrentTensors(
            conv,
            bias,
            decay=wide(names.decay, heads),
            dt_bias=wide(names.dt_bias, heads),
            skip=wide(names.skip, heads) if isinstance(spec, MambaSpec) else None,
            gain=gain,
        )

    def _qkv(self, prefix: str, layer: LayerSpec) -> Product:
        spec, attention = self._spec, layer.attention
        assert attention is not None, "a recurrent layer has no queries"
        rope, dim = attention.rope, spec.kv_shape(attention).dim
        names = [prefix + name for name in self._names.qkv]
        rows = qkv_rows(spec, layer, self._cut, names)
        product = self._product(rows, spec.hidden_size, spec.has_qkv_bias)
        if attention.has_gate:
            product = product.rows_at(gates_last(self.part))
        if rope is not None and rope.has_adjacent_pairs:
            pairs, part = split_pairs(dim, rope.rotary_dim), self.part
            turned = part.num_heads + part.num_kv_heads
            product = product.rows_at(reordered_heads(pairs, turned, part.num_kv_heads))
        if rope is None or rope.score_factor == 1.0 or rope.rotary_dim == dim:
            return product
        return _scaled(product, _unrotated_factors(self.part, rope).to(product.weight.device))

    def _mlp(
        self, prefix: str, mlp: MlpSpec | ExpertsSpec | None
    ) -> MlpTensors | ExpertTensors | None:
        if mlp is None:
            return None
        if isinstance(mlp, ExpertsSpec):
            return self._experts(prefix, mlp)
        columns = self._cut.columns(mlp.size)
        rows = first_rows(mlp, columns, [prefix + name for name in self._names.gate_up])
        first = self._product(rows, self._spec.hidden_size, mlp.has_bias)
        down = self._summed(prefix + self._names.down, mlp.size, columns, mlp.has_bias)
        if mlp.gate_scale != 1.0:
            size = length(columns)
            factors = torch.tensor([mlp.gate_scale, 1.0]).repeat_interleave(size)
            first = _scaled(first, factors.to(first.weight.device))
        return MlpTensors(first, _times(down, mlp.out_scale))

    def _experts(self, prefix: str, spec: ExpertsSpec) -> ExpertTensors:
        hidden = self._spec.hidden_size
        experts = read_experts(self._source, spec, hidden, prefix, self._names, self._cut)
        if experts.is_unpacked:
            self._unpacked.append(f"the experts of {prefix[:-1]}")
        return experts


def _before_rotation(q_gain: Tensor | None, k_gain: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gain of rotated queries, and gains of norms before rotation, for norms after it with
    these gains. A rotation keeps the norm of a head, and only the products of queries and keys
    count: so keys are normed without a gain before they are rotated, and can be moved later."""
    assert q_gain is not None
    assert k_gain is not None
    ones = torch.ones_like(q_gain)
    return q_gain.float() * k_gain.float(), ones, ones


def _times(product: Product, factor: float) -> Product:
    """Multiply the output of a product."""
    if factor == 1.0:
        return product
    weight = product.weight
    return _scaled(product, torch.full((weight.shape[-2],), factor, device=weight.device))


def _scaled(product: Product, factors: Tensor) -> Product:
    """Multiply rows by these factors, and round once."""
    weight, bias = product.weight, product.bias
    if isinstance(weight, PackedWeight):
        weight = weight.scaled_rows(factors)
    else:
        weight = (weight * factors[:, None]).to(weight.dtype)
    return Product(weight, None if bias is None else (bias * factors).to(bias.dtype))


def _unrotated_factors(spec: ModelSpec, rope: RopeSpec) -> Tensor:
    """Return factors for each row of queries, keys and values. A rope multiplies queries and keys
    by its score factor, but only in the dims that it rotates. The attention's scale includes the
    factor's square for all dims. So the other dims of the queries are divided by the square."""
    heads = torch.ones(spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    heads[: spec.num_heads, rope.rotary_dim :] = rope.score_factor**-2
    return heads.reshape(-1)
