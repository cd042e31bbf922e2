"""Reads the parts of a config.json that most families have in common."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config, read_dtype
from mainstem.models.names import Names
from mainstem.models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormPlace,
    NormSpec,
    QkNorm,
    Residual,
    RopeScaling,
    RopeSpec,
)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures whose config.json one function reads."""

    name: str  # to show to users
    architectures: tuple[str, ...]  # in config.json
    read: Callable[[Config], ModelSpec]
    notes: str = ""  # one line about what is special in this family
    is_part: bool = False  # whether it is the text part of a multimodal model (multimodal.py)


def part_of(family: Family, name: str, architecture: str) -> Family:
    """The same for the text part of a multimodal model."""
    return replace(family, name=name, architectures=(architecture,), is_part=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int


def read_sizes(
    config: Config, positions: str = "max_position_embeddings", head_dim: int | None = None
) -> Sizes:
    """Read a model's sizes. `positions` is the name of the field with the number of positions.
    `head_dim` is the default; None: the hidden size divided by the number of heads."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return Sizes(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", head_dim or hidden // heads),
        positions=config.whole(positions),
    )


class Features(TypedDict, total=False):
    """Fields of ModelSpec that a family may set."""

    names: Names
    norm_place: NormPlace
    residual: Residual
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    qk_norm: QkNorm
    has_qkv_bias: bool
    has_out_bias: bool
    has_head_bias: bool
    dropped: tuple[str, ...]


def make_spec(
    config: Config,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    norm: NormSpec,
    *,
    is_tied: bool = False,
    has_bias: bool = False,
    **features: Unpack[Features],
) -> ModelSpec:
    """The recipe, without the name of the architecture. `is_tied` is the default if the file does
    not say whether head and embedding are tied. `has_bias`: all products of attention have one."""
    if has_bias:
        features["has_qkv_bias"] = features["has_out_bias"] = True
    bos_ids = config.token_ids("bos_token_id")
    return ModelSpec(
        architecture="",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_positions=_lengthened(config, sizes.positions, layers),
        layers=tuple(layers),
        norm=norm,
        dtype=read_dtype(config),
        has_tied_embeddings=config.flag("tie_word_embeddings", is_tied),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=config.token_ids("eos_token_id"),
        **features,
    )


def _lengthened(config: Config, positions: int, layers: Sequence[LayerSpec]) -> int:
    """Return the number of positions of a model whose rope may be stretched.

    Users add YaRN to a config.json and leave `max_position_embeddings` as it was: Qwen 3 has 40960,
    and with a factor of 4 over 32768, 131072. Vicuna's 16k models, with a linear factor, have the
    stretched length in `max_sequence_length`. Without the original length in the file, it is not
    known whether `max_position_embeddings` is stretched already.
    """
    tables = (config.table("rope_scaling"), config.table("rope_parameters"))
    has_original = any(table.has("original_max_position_embeddings") for table in tables)
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    for rope in {attention.rope for attention in attentions}:
        if rope is not None and rope.scaling is RopeScaling.DYNAMIC:
            positions = min(positions, rope.original_positions)
        elif rope is not None and rope.scaling is RopeScaling.YARN and has_original:
            positions = max(positions, int(rope.original_positions * rope.factor))
        elif rope is not None and rope.scaling is RopeScaling.LINEAR:
            positions = max(positions, config.whole("max_sequence_length", positions))
    return positions


def rms_norm(config: Config, default_eps: float = 1e-6, gain_offset: float = 0.0) -> NormSpec:
    eps = config.number("rms_norm_eps", default_eps)
    return NormSpec(NormKind.RMS, eps, gain_offset=gain_offset)


def layer_norm(config: Config, field: str = "layer_norm_eps", eps: float = 1e-5) -> NormSpec:
    """LayerNorm with biases; `eps` is the default."""
    return NormSpec(NormKind.LAYER, config.number(field, eps), has_bias=True)


def read_activation(config: Config, field: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.text(field, default)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModel(f"config field {field}={name!r} is not supported; known: {known}")
    return _ACTIVATIONS[name]


def gated_mlp(config: Config, *, has_bias: bool = False) -> MlpSpec:
    """A gated MLP of `intermediate_size`, with silu unless the file says otherwise."""
    size = config.whole("intermediate_size")
    return MlpSpec(size, read_activation(config), has_bias=has_bias)


def plain_mlp(config: Config, activation: str, *, has_bias: bool) -> MlpSpec:
    """An MLP without a gate, of `intermediate_size`; `activation` is the default."""
    size = config.whole("intermediate_size")
    return MlpSpec(
        size, read_activation(config, default=activation), is_gated=False, has_bias=has_bias
    )


def full_attention(head_dim: int, rope: RopeSpec | None) -> AttentionSpec:
    """Every token sees all tokens before it."""
    return AttentionSpec(rope, default_scale(head_dim, rope))


def rotated(
    config: Config, sizes: Sizes, *, theta: float = 10000.0, rotary_share: float | None = None
) -> AttentionSpec:
    """Every token sees all tokens before it, by the rope of the file; see `read_rope`."""
    rope = read_rope(config, sizes, theta=theta, rotary_share=rotary_share)
    return full_attention(sizes.head_dim, rope)


def default_scale(head_dim: int, rope: RopeSpec | None) -> float:
    """Return 1 / sqrt(head_dim), times the square of the rope's score factor: the factor applies to
    queries and to keys."""
    return float(head_dim**-0.5 * (1.0 if rope is None else rope.score_factor**2))


def with_window(
    config: Config, attention: AttentionSpec, default: int | None = None
) -> AttentionSpec:
    """Return the attention with a window of `sliding_window` tokens. If the file has no such field,
    the window is `default`, or there is none."""
    if config.is_null("sliding_window"):
        default = None
    if config.get("sliding_window") is None and default is None:
        return attention
    return replace(attention, window=config.whole("sliding_window", default))


def read_layer_types(config: Config, count: int) -> list[str] | None:
    """`full_attention` or `sliding_attention` for each layer; None if the file does not say."""
    types = config.items("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    for kind in types:
        if kind not in known:
            raise UnsupportedModel(
                f"layer_types: {kind} layers are not supported in this family; known: "
                f"{', '.join(known)}"
            )
    if len(types) != count:
        raise UnsupportedModel(f"layer_types has {len(types)} entries for {count} layers")
    return [str(kind) for kind in types]


def checked_kinds(
    types: Sequence[object], count: int, known: Collection[str], older: Collection[str] = ()
) -> list[str]:
    """The kinds of all layers, each one of `known` or of `older`, which errors do not name."""
    for kind in types:
        if kind not in (*known, *older):
            raise UnsupportedModel(
                f"layer_types: {kind} layers are not supported; known: {', '.join(known)}"
            )
    if len(types) != count:
        raise UnsupportedModel(f"layer_types has {len(types)} entries for {count} layers")
    return [str(kind) for kind in types]


def layer_types(
    config: Config, count: int, pattern: int, first_full: int | None = None
) -> list[str]:
    """Like `read_layer_types`. If the file does not say, one of `pattern` layers is a
    `full_attention` layer: the last one of each group, or number `first_full`."""
    types = read_layer_types(config, count)
    if types is not None:
        return types
    full = pattern - 1 if first_full is None else first_full
    return [
        "full_attention" if index % pattern == full else "sliding_attention"
        for index in range(count)
    ]


def by_kind(
    types: Sequence[str], full: AttentionSpec, sliding: AttentionSpec
) -> list[AttentionSpec]:
    """The attention of layers of these kinds."""
    return [full if kind == "full_attention" else sliding for kind in types]


# ---- rotary embeddings

_ROPE_SETTINGS: dict[RopeScaling, frozenset[str]] = {
    RopeScaling.NONE: frozenset(),
    RopeScaling.LINEAR: frozenset({"factor"}),
    RopeScaling.DYNAMIC: frozenset({"factor", "original_max_position_embeddings"}),
    RopeScaling.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeScaling.YARN: frozenset(
        {
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "attn_factor",
            "finetuned",  # says how the model was trained
            "mscale",
            "mscale_all_dim",
            "truncate",
            "original_max_position_embeddings",
        }
    ),
    RopeScaling.LONGROPE: frozenset(
        {
            "short_factor",
            "long_factor",
            "factor",
            "attention_factor",
            "original_max_position_embeddings",
        }
    ),
    RopeScaling.PROPORTIONAL: frozenset({"factor"}),
}


def read_rope(
    config: Config, sizes: Sizes, *, theta: float = 10000.0, rotary_share: float | None = None
) -> RopeSpec:
    """Read the rope. transformers 5 writes `rope_parameters`; older versions write `rope_theta` and
    `rope_scaling`.

    `theta` and `rotary_share` (the part of each head that is rotated) are defaults. If
    `rotary_share` is None, a file that asks for partial rotation is refused.
    """
    table = config.table("rope_scaling").merged(config.table("rope_parameters"))
    return make_rope(
        table, config, sizes, theta=config.number("rope_theta", theta), rotary_share=rotary_share
    )


def read_two_ropes(
    config: Config, sizes: Sizes, *, theta: float, local_theta: float | None = None
) -> dict[str, RopeSpec]:
    """Read the ropes of a model with windows, by the kind of layer. In older files only layers
    without a window have a scaled rope; newer files have a table for each kind of layer.
    `local_theta` is the default for layers with a window; None: the same as for the others."""
    tables = config.table("rope_parameters")
    full, sliding = tables.table("full_attention"), tables.table("sliding_attention")
    if unknown := tables.unread():
        raise UnsupportedModel(
            f"rope_parameters has {', '.join(unknown)}; known: full_attention, sliding_attention"
        )
    full = config.table("rope_scaling").merged(full)
    theta = config.number("rope_theta", theta)
    local_theta = config.number("rope_local_base_freq", local_theta or theta)
    return {
        "full_attention": make_rope(full, config, sizes, theta=theta),
        "sliding_attention": make_rope(sliding, config, sizes, theta=local_theta),
    }


def make_rope(
    table: Config, config: Config, sizes: Sizes, *, theta: float, rotary_share: float | None = None
) -> RopeSpec:
    """The rope described by one table of parameters."""
    theta = table.number("rope_theta", theta)
    older = table.get("type")
    kind = table.get("rope_type") or older or "default"
    rotary_dim = sizes.head_dim
    if kind == RopeScaling.PROPORTIONAL.value:
        share = table.number("partial_rotary_factor", 1.0)
    elif rotary_share is None:
        table.only("partial_rotary_factor", 1.0)
    else:
        share = config.number("partial_rotary_factor", rotary_share)
        rotary_dim = int(sizes.head_dim * table.number("partial_rotary_factor", share))
    try:
        scaling = RopeScaling("longrope" if kind == "su" else kind)
    except ValueError:
        known = ", ".join(member.value for member in RopeScaling)
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known: {known}") from None
    found = {name for name, value in table.unread().items() if value is not None}
    if unknown := found - _ROPE_SETTINGS[scaling]:
        raise UnsupportedModel(f"rope_type {kind!r} has unknown settings {sorted(unknown)}")
    if scaling is RopeScaling.NONE:
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    if scaling is RopeScaling.PROPORTIONAL:
        factor, turned = table.number("factor", 1.0), int(share * rotary_dim // 2)
        return RopeSpec(theta, rotary_dim, scaling, factor=factor, turned_pairs=turned)
    if scaling is RopeScaling.DYNAMIC:
        original = table.whole("original_max_position_embeddings", sizes.positions)
        return RopeSpec(theta, rotary_dim, scaling, original_positions=original)
    if scaling is RopeScaling.LINEAR:
        return RopeSpec(theta, rotary_dim, scaling, factor=table.number("factor"))
    if scaling is RopeScaling.YARN:
        return _yarn(table, theta, rotary_dim, sizes.positions)
    if scaling is RopeScaling.LONGROPE:
        return _longrope(table, config, theta, rotary_dim, sizes.positions)
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=scaling,
        factor=table.number("factor"),
        low_freq_factor=table.number("low_freq_factor"),
        high_freq_factor=table.number("high_freq_factor"),
        original_positions=table.whole("original_max_position_embeddings", sizes.positions),
    )


def _yarn(table: Config, theta: float, rotary_dim: int, max_positions: int) -> RopeSpec:
    """`attention_factor` replaces the default score factor; `attn_factor` multiplies it.

    transformers ignores `attn_factor`. We follow the authors of DeepSeek-R1-0528-Qwen3-8B: their
    attn_factor of 0.878, times YaRN's default of 1.139 for a factor of 4, is 1.
    """
    if table.has("attention_factor"):
        table.only("attn_factor")
    original = table.whole("original_max_position_embeddings", max_positions)
    factor = table.number("factor", max_positions / original)

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    score_factor = growth(1.0)
    if table.get("mscale") and table.get("mscale_all_dim"):
        score_factor = growth(table.number("mscale")) / growth(table.number("mscale_all_dim"))
    score_factor *= table.number("attn_factor", 1.0)
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_positions=original,
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        has_whole_bounds=table.flag("truncate", True),
        score_factor=table.number("attention_factor", score_factor),
    )


def _longrope(
    table: Config, config: Config, theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    """Return a rope with two sets of divisors: for contexts up to the original length, and for
    longer contexts."""
    outside = config.get("original_max_position_embeddings")
    if outside is not None:  # a field outside of the table
        original = config.whole("original_max_position_embeddings")
    else:
        original = table.whole("original_max_position_embeddings", max_positions)
    factor = table.number("factor", max_positions / original)
    growth = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = table.numbers("short_factor"), table.numbers("long_factor")
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if len(divisors) != rotary_dim // 2:
            raise UnsupportedModel(
                f"rope {name} has {len(divisors)} entries, {rotary_dim // 2} pairs are rotated"
            )
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=RopeScaling.LONGROPE,
        original_positions=original,
        score_factor=table.number("attention_factor", growth),
        divisors=short,
        long_divisors=long,
    )
