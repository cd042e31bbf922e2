"""The recipe of a decoder: its mathematics, independent of how a device computes it.

    x = embedding[tokens] * embedding_scale
    each layer    x += scale * after(attention(before(x)))        before, after: norms, or nothing
                  x += scale * after(mlp(before(x)))              in parallel: both read the same x
    logits = softcap(head(norm(x)) * logit_scale)

A layer may have a recurrence (recurrence.py) instead of attention, or in addition.

Families (models/families) make recipes from config.json. Backends compile them, at load time, into
calls: models/cpu for CPUs, models/gpu for GPUs, runner/single for one token on a CPU. No code at
run time depends on a model's family.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.quantized.packing import QuantizedSpec
from mainstem.models.recurrence import RecurrentSpec, state_bytes


class NormKind(Enum):
    RMS = "rms"  # x / sqrt(mean(x^2) + eps) * gain
    LAYER = "layer"  # (x - mean) / sqrt(variance + eps) * gain + bias


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of a model, all of one kind."""

    kind: NormKind
    eps: float
    has_bias: bool = False
    has_gain: bool = True
    gain_offset: float = 0.0  # added to the gains of the checkpoint (Gemma: 1)
    # in 16-bit models, multiply by the gain before rounding (OLMo 2, gpt-oss)
    is_rounded_once: bool = False


class NormPlace(Enum):
    """Whether a layer's norms are before or after attention and MLP."""

    BEFORE = "before"  # Llama and most others
    AFTER = "after"  # OLMo 2: the outputs of attention and MLP are normed, not their inputs
    BOTH = "both"  # Gemma 2 and 3


class Residual(Enum):
    SERIAL = "serial"  # the MLP reads x after attention has added to it
    PARALLEL = "parallel"  # both read the same norm of the same x (Phi-2, Falcon 7B)
    PARALLEL_TWO_NORMS = "parallel, a norm each"  # the same x, separate norms (Falcon 40B)


class QkNorm(Enum):
    """Norm of queries and keys. It is an RMS norm before they are rotated, unless noted."""

    NONE = "none"
    HEADS = "heads"  # each head separately, with the same gain (Qwen 3, Gemma 3)
    ROWS = "rows"  # all heads of a token together (OLMo 2)
    TURNED_HEADS = "turned heads"  # like HEADS, after they are rotated (Hunyuan)
    LAYER = "layer"  # LayerNorm of each head, with the same gain and bias (Phi)
    LAYER_EACH = "layer each"  # LayerNorm with a gain for each head, without bias (StableLM 2 12B)


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"  # with the error function
    GELU_TANH = "gelu_tanh"  # approximated with tanh
    RELU = "relu"
    RELU_SQUARED = "relu2"
    # gpt-oss: (up + 1) * gate * sigmoid(1.702 gate); gate at most 7, up from -7 to 7
    CLAMPED_SILU = "clamped"


class RopeScaling(Enum):
    NONE = "default"
    LINEAR = "linear"  # all frequencies divided by `factor`
    # as transformers has it, this one stretches only contexts longer than the original. Keys are
    # kept and shared here, so longer contexts are not supported (families/common.py).
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, smooth in between
    YARN = "yarn"  # like llama3, but linear in the number of the dim; all scores are scaled
    LONGROPE = "longrope"  # each frequency is divided by its own number (`divisors`)
    # only the first `turned_pairs` are rotated; pairs are (i, i + half) of the whole head (Gemma 4)
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: frequencies theta^(-2i/rotary_dim), then scaled."""

    theta: float
    rotary_dim: int  # leading dims of a head that are rotated
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    # yarn: frequencies with more than beta_fast turns in the original context are kept, those with
    # fewer than beta_slow turns are divided by `factor`
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    has_whole_bounds: bool = True  # yarn: the dims of these two bounds are whole numbers
    score_factor: float = 1.0  # yarn, longrope: both query and key are multiplied by it
    divisors: tuple[float, ...] = ()  # longrope: one for each pair of dims, for short contexts
    long_divisors: tuple[float, ...] = ()  # longrope: if contexts exceed original_positions
    turned_pairs: int = 0  # proportional: the others have a frequency of 0
    # the checkpoint has pairs of adjacent dims (GLM, Cohere), not (i, i + half). Rows of queries
    # and keys are reordered when they are read (tensors.py): no kernel knows the difference.
    has_adjacent_pairs: bool = False

    def at_context(self, num_tokens: int) -> "RopeSpec":
        """The frequencies of an engine whose contexts have up to `num_tokens`.

        LongRoPE has two sets. Keys are kept and shared, so all requests of an engine, short and
        long, use one set.
        """
        if self.scaling is not RopeScaling.LONGROPE or num_tokens <= self.original_positions:
            return self
        return replace(self, divisors=self.long_divisors)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The K and V of one token in one layer."""

    heads: int
    dim: int  # of each head, and of each query

    @property
    def elements(self) -> int:
        return 2 * self.heads * self.dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How the tokens of a layer attend to each other; equal layers share one of these."""

    rope: RopeSpec | None  # None: this layer does not see positions
    scale: float  # factor of the scores, including the rope's score factor
    window: int | None = None  # number of keys that a token sees, including its own; None: all
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # each head has a learned score in the softmax, with a value of 0
    has_gate: bool = False  # the output is multiplied by sigmoid(gate(x)) (Qwen3-Next)
    kv_shape: KvShape | None = None  # None: the model's num_kv_heads and head_dim
    # values are the output of the key product, without the norm of keys and without rotation
    # (Gemma 4); the model norms values
    has_keys_as_values: bool = False
    out_scale: float = 1.0  # factor of what it adds to x (Falcon-H1)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    size: int
    activation: Activation
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: float = 1.0  # factor of gate(x) (Falcon-H1)
    out_scale: float = 1.0  # factor of what it adds to x (Falcon-H1)


class RouterScores(Enum):
    """What a router's logits become: the weights of experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """`top_k` of many MLPs for each token, weighted by a router's scores."""

    num_experts: int
    top_k: int
    size: int  # columns of each expert
    activation: Activation
    is_normalized: bool = True  # the weights of the chosen experts are scaled to a sum of 1
    has_bias: bool = False  # whether router and experts have biases
    shared_size: int | None = None  # columns of a gated MLP that every token also goes through
    has_shared_gate: bool = False  # the shared MLP's output is multiplied by sigmoid(gate(x))
    # Gemma 4: shared MLP, experts and router read x through a norm each; the outputs of the first
    # two are normed, too, before they are added. Weights are multiplied by a number of the expert
    has_own_norms: bool = False
    is_gated: bool = True  # act(gate(x)) * up(x), or act(up(x)); also of the shared MLP
    scores: RouterScores = RouterScores.SOFTMAX
    has_choice_bias: bool = False  # added to the scores to choose experts, not to weights
    weight_floor: float = 0.0  # added to the sum by which weights are normalized
    weight_scale: float = 1.0  # factor of the weights, after they are normalized

    @property
    def num_products(self) -> int:
        """Of an expert: gate, up and down, or up and down."""
        return 3 if self.is_gated else 2


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """An embedding of its own for each token and layer (Gemma 4 E2B and E4B):

    inputs = (norm(product(x) / sqrt(hidden_size)) + embedding[token] * sqrt(size)) / sqrt(2)
    each layer, at its end    x += norm(product(act(product(x)) * inputs[layer]))
    """

    size: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: attention, which keeps pages of keys and values, or a recurrence, which keeps a
    state, or both side by side (Falcon-H1); then an MLP. Nemotron-H has one of them in a layer."""

    attention: AttentionSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    recurrent: RecurrentSpec | None = None
    # the number of an earlier layer whose K and V this one reads; None: it has its own
    kv_layer: int | None = None

    @property
    def has_mixer(self) -> bool:
        """Whether it has attention or a recurrence."""
        return self.attention is not None or self.recurrent is not None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: sizes, layers, and settings common to all layers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    dtype: DType  # of the checkpoint
    names: Names = field(default_factory=Names)  # of the checkpoint's tensors
    norm_place: NormPlace = NormPlace.BEFORE
    residual: Residual = Residual.SERIAL
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    qk_norm: QkNorm = QkNorm.NONE
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_head_bias: bool = False
    has_value_norm: bool = False  # each head of V is normed, without a gain (Gemma 4)
    has_layer_scale: bool = False  # at the end of each layer, x is multiplied by its number
    layer_inputs: LayerInputSpec | None = None
    has_tied_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    quantized: QuantizedSpec | None = None  # how the checkpoint's weights are quantized
    ignored_fields: tuple[str, ...] = ()  # unknown fields of the file that the user chose to ignore
    dropped: tuple[str, ...] = ()  # parts of the checkpoint that are left out, in words
    vocab_rows: int | None = None  # rows of embedding and head that a rank has; None: all

    def __post_init__(self) -> None:
        for kind in self.attention_kinds:
            shape = self.kv_shape(kind)
            if self.num_heads % shape.heads:
                raise UnsupportedModel(
                    f"num_attention_heads={self.num_heads} is not a multiple of "
                    f"num_key_value_heads={shape.heads}"
                )
            if kind.rope is not None:
                self._check_rope(kind.rope, shape.dim)
        self._check_shared_kv()
        if self.residual is not Residual.SERIAL and self.norm_place is not NormPlace.BEFORE:
            raise UnsupportedModel(
                "norms of the outputs of attention and MLP are not supported where both run in "
                "parallel"
            )
        is_usual = self.residual is Residual.SERIAL and self.norm_place is NormPlace.BEFORE
        if not is_usual and not all(layer.has_mixer and layer.mlp for layer in self.layers):
            raise UnsupportedModel("layers of one part are supported with a norm before it only")
        if not self.attentions:
            raise UnsupportedModel("models without any attention layer are not supported")
        names, quantized = self.names, self.quantized
        if quantized is not None and names.expert_layout is ExpertLayout.STACKED:
            expert = f"{names.layer.format(0)}.{names.expert_gate}".removesuffix(".weight")
            if quantized.packing_of(expert) is not None:
                raise UnsupportedModel("quantized experts in stacked tensors are not supported")

    def _check_rope(self, rope: RopeSpec, head_dim: int) -> None:
        if rope.rotary_dim % 2 or rope.rotary_dim > head_dim:
            raise UnsupportedModel(f"{rope.rotary_dim} rotary dims do not fit a head of {head_dim}")
        if rope.has_adjacent_pairs and self.qk_norm is not QkNorm.NONE:
            raise UnsupportedModel(
                "rotary pairs of adjacent dims are not supported where queries and keys are normed"
            )
        is_partial = rope.rotary_dim < head_dim
        if is_partial and rope.score_factor != 1.0 and self.qk_norm is not QkNorm.NONE:
            raise UnsupportedModel(
                f"rope_type {rope.scaling.value} on a part of each head is not supported where "
                "queries and keys are normed"
            )

    def _check_shared_kv(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.kv_layer is not None:
                source = self.layers[layer.kv_layer]
                assert layer.kv_layer < index, "K and V are those of an earlier layer"
                assert source.kv_layer is None, "that layer has its own"
                assert source.attention == layer.attention, "that layer is like this one"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that have attention, in order."""
        return tuple(layer for layer in self.layers if layer.attention is not None)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one, in order."""
        found = (layer.attention for layer in self.layers)
        return tuple(attention for attention in found if attention is not None)

    @property
    def recurrences(self) -> tuple[RecurrentSpec, ...]:
        """The recurrence of each layer that has one, in order. States hold these layers only."""
        found = (layer.recurrent for layer in self.layers)
        return tuple(recurrent for recurrent in found if recurrent is not None)

    @property
    def page_layers(self) -> tuple[int | None, ...]:
        """For each layer its place in a page, which is its number among the layers that keep K and
        V; None: it keeps none."""
        numbers = count()
        return tuple(next(numbers) if _keeps_kv(layer) else None for layer in self.layers)

    @property
    def kv_places(self) -> tuple[int, ...]:
        """For each layer with attention, the place in a page of the K and V that it reads."""
        places = self.page_layers
        found = (
            places[index if layer.kv_layer is None else layer.kv_layer]
            for index, layer in enumerate(self.layers)
            if layer.attention is not None
        )
        return tuple(place for place in found if place is not None)

    @property
    def kept(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that keeps K and V. Pages hold these layers only."""
        found = (layer.attention for layer in self.layers if _keeps_kv(layer))
        return tuple(attention for attention in found if attention is not None)

    @property
    def windowed(self) -> tuple[AttentionSpec, ...]:
        """The layers of a page's windowed part: those that keep K and V and have a window. Empty if
        all layers have one, since a page has two parts only where layers differ."""
        windowed = tuple(each for each in self.kept if each.window is not None)
        return windowed if len(windowed) < len(self.kept) else ()

    @property
    def part_window(self) -> int | None:
        """How many of a sequence's last tokens need the windowed parts of their pages, a token that
        is being computed included; None: pages have one part."""
        return max((each.window or 0 for each in self.windowed), default=None)

    @property
    def has_fp8_kv(self) -> bool:
        """Whether the checkpoint declares K and V in fp8, and has their scales."""
        return self.quantized is not None and self.quantized.has_fp8_kv

    @property
    def num_full_layers(self) -> int:
        """Layers in the full part of a page."""
        return len(self.kept) - len(self.windowed)

    @property
    def windowed_kv_elements(self) -> int:
        """Numbers of K and V that one token keeps in the windowed parts of pages."""
        return sum(self.kv_shape(attention).elements for attention in self.windowed)

    def kv_shape(self, attention: AttentionSpec) -> KvShape:
        """K and V of a layer with this attention."""
        return attention.kv_shape or KvShape(self.num_kv_heads, self.head_dim)

    def new_kv(self, layer: LayerSpec) -> KvShape:
        """K and V that a layer with attention computes: no heads if it reads those of an earlier
        layer."""
        assert layer.attention is not None, "a recurrent layer has no K and V"
        shape = self.kv_shape(layer.attention)
        return shape if layer.kv_layer is None else replace(shape, heads=0)

    @property
    def state_layers(self) -> tuple[int | None, ...]:
        """For each layer its number among the layers with a recurrence; None: it has none."""
        numbers = count()
        return tuple(None if layer.recurrent is None else next(numbers) for layer in self.layers)

    @property
    def attention_kinds(self) -> tuple[AttentionSpec, ...]:
        """The different kinds of attention, in the order of the first layer of each."""
        return tuple(dict.fromkeys(self.attentions))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotations of the layers that have one."""
        ropes = (attention.rope for attention in self.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def rotary_dim(self, attention: AttentionSpec) -> int:
        """Leading dims of a head whose order depends on the rotation. A layer that rotates nothing
        has the order of the others."""
        rope = attention.rope or (self.ropes[0] if self.ropes else None)
        return 0 if rope is None else rope.rotary_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers of K and V that one token keeps over all layers."""
        return sum(self.kv_shape(attention).elements for attention in self.kept)

    def state_bytes(self, element_bytes: int) -> int:
        """The states of all recurrent layers after one token; 0 if there are none."""
        return sum(state_bytes(recurrent, element_bytes) for recurrent in self.recurrences)

    def unread_kv_elements(self, context: int) -> int:
        """How many of a token's K and V elements, on average, are no longer in their layer's window
        at the end of a context of `context` tokens. They stay in memory, since a page holds all
        layers."""
        unread = sum(
            max(0, context - kind.window) * self.kv_shape(kind).elements
            for kind in self.kept
            if kind.window is not None
        )
        return unread // max(context, 1)

    @property
    def num_layer_params(self) -> int:
        """The number of weights in the products that one token goes through, in all layers."""
        inputs = 0 if self.layer_inputs is None else 3 * self.hidden_size * self.layer_inputs.size
        return sum(
            self._num_mixer_params(layer) + _num_mlp_params(layer.mlp, self.hidden_size) + inputs
            for layer in self.layers
        )

    def _num_mixer_params(self, layer: LayerSpec) -> int:
        """The weights before and after a layer's attention and recurrence."""
        return self.hidden_size * (self.first_width(layer) + self.mixed_width(layer))

    def mixed_width(self, layer: LayerSpec) -> int:
        """Columns of the output of a layer's attention and recurrence."""
        width = 0 if layer.recurrent is None else layer.recurrent.out_width
        if layer.attention is not None:
            width += self.num_heads * self.kv_shape(layer.attention).dim
        return width

    def first_width(self, layer: LayerSpec) -> int:
        """Rows of the product before a layer's attention, then of that before its recurrence."""
        width, attention = 0, layer.attention
        if attention is not None:
            shape = self.new_kv(layer)
            heads = self.num_heads * (2 if attention.has_gate else 1)
            width += (heads + 2 * shape.heads) * shape.dim
        return width + (0 if layer.recurrent is None else layer.recurrent.first_width)

    @property
    def num_head_params(self) -> int:
        """Weights of the product after the layers."""
        return self.hidden_size * (self.vocab_rows or self.vocab_size)

    @property
    def num_expert_params(self) -> int:
        """The part of `num_layer_params` in the experts that a token uses."""
        mlps = (layer.mlp for layer in self.layers)
        return sum(
            mlp.num_products * self.hidden_size * mlp.top_k * mlp.size
            for mlp in mlps
            if isinstance(mlp, ExpertsSpec)
        )

    @property
    def num_idle_params(self) -> int:
        """Weights of the experts that a token does not use."""
        mlps = (layer.mlp for layer in self.layers)
        return sum(
            mlp.num_products * self.hidden_size * (mlp.num_experts - mlp.top_k) * mlp.size
            for mlp in mlps
            if isinstance(mlp, ExpertsSpec)
        )

    def bytes_per_param(self, element_bytes: int) -> float:
        """Mean bytes per weight of the layers' products, including experts; plain weights have
        `element_bytes`."""
        if self.quantized is None:
            return float(element_bytes)
        names, prefix = self.names, self.names.layer.format(0) + "."
        experts = self.num_expert_params + self.num_idle_params
        others = self.num_layer_params - self.num_expert_params
        expert = self.quantized.packing_of(prefix + names.expert_gate.format(0))
        other = self.quantized.packing_of(prefix + names.out)
        moved = experts * (element_bytes if expert is None else expert.bytes_per_param)
        moved += others * (element_bytes if other is None else other.bytes_per_param)
        return moved / (experts + others)

    @property
    def moved_bytes_per_param(self) -> float:
        """Bytes per weight that a large step moves. 4-bit weights are read, written in 16 bits and
        read again (those of experts are only read, but count the same). All other weights count 2
        bytes; for fp8, see `full_speed_tokens`."""
        packing = None if self.quantized is None else self.quantized.packing
        if packing is None or packing.kind.columns_per_value == 1:
            return 2.0
        return packing.bytes_per_param + 4.0

    @property
    def num_weights(self) -> int:
        """All weights in memory, with every expert and the embedding, without norms and biases."""
        ends = (1 if self.has_tied_embeddings else 2) * self.num_head_params
        if self.layer_inputs is not None:
            ends += self.vocab_size * self.num_layers * self.layer_inputs.size
        return self.num_layer_params + self.num_idle_params + ends

    def at_context(self, num_tokens: int) -> "ModelSpec":
        """The recipe for contexts of up to `num_tokens`: frequencies that depend on the length are
        fixed, and windows that are never exceeded are dropped."""
        kinds = {
            kind: replace(
                kind,
                rope=None if kind.rope is None else kind.rope.at_context(num_tokens),
                window=None if kind.window is None or kind.window >= num_tokens else kind.window,
            )
            for kind in self.attention_kinds
        }
        layers = (
            layer if layer.attention is None else replace(layer, attention=kinds[layer.attention])
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))


def _keeps_kv(layer: LayerSpec) -> bool:
    return layer.attention is not None and layer.kv_layer is None


def _num_mlp_params(mlp: MlpSpec | ExpertsSpec | None, hidden_size: int) -> int:
    if mlp is None:
        return 0
    if isinstance(mlp, MlpSpec):
        return (3 if mlp.is_gated else 2) * hidden_size * mlp.size
    chosen = mlp.top_k * mlp.size + (mlp.shared_size or 0)
    return hidden_size * (mlp.num_products * chosen + mlp.num_experts)


def same_layers(
    attention: AttentionSpec, mlp: MlpSpec | ExpertsSpec, count: int
) -> tuple[LayerSpec, ...]:
    """Return layers that are all the same."""
    return (LayerSpec(attention, mlp),) * count


def layers_of(kinds: Sequence[AttentionSpec], mlp: MlpSpec | ExpertsSpec) -> tuple[LayerSpec, ...]:
    """Return layers that differ only in their attention."""
    return tuple(LayerSpec(kind, mlp) for kind in kinds)
