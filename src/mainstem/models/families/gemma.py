"""Gemma 2 and 3: norms before and after attention and MLP, gains stored as gain - 1, windows in
half or most of the layers. Gemma 2 has softcaps; Gemma 3 has norms of queries and keys, and two
ropes."""

import math
from collections.abc import Mapping

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    make_rope,
    make_spec,
    read_activation,
    read_layer_types,
    read_rope,
    rms_norm,
)
from mainstem.models.names import Names
from mainstem.models.spec import (
    AttentionSpec,
    MlpSpec,
    ModelSpec,
    NormPlace,
    QkNorm,
    RopeSpec,
    layers_of,
)

_NAMES = Names(mlp_norm="pre_feedforward_layernorm")


def _read_gemma2(config: Config) -> ModelSpec:
    sizes = _read_sizes(config, vocab=256_000, positions=8192)
    rope = read_rope(config, sizes)
    kinds = _attention(config, sizes.layers, {"full": rope, "sliding": rope}, pattern=2, cap=50.0)
    return _spec(config, sizes, kinds, QkNorm.NONE, cap=30.0)


def _read_gemma3(config: Config) -> ModelSpec:
    sizes = _read_sizes(config, vocab=262_208, positions=131_072)
    pattern = config.whole("sliding_window_pattern", 6)
    kinds = _attention(config, sizes.layers, _read_two_ropes(config, sizes), pattern, cap=None)
    return _spec(config, sizes, kinds, QkNorm.HEADS, cap=None)


def _read_sizes(config: Config, vocab: int, positions: int) -> Sizes:
    """Read sizes. Files leave out fields with transformers' defaults, which are the values of Gemma
    2 2B."""
    return Sizes(
        vocab=config.whole("vocab_size", vocab),
        hidden=config.whole("hidden_size", 2304),
        layers=config.whole("num_hidden_layers", 26),
        heads=config.whole("num_attention_heads", 8),
        kv_heads=config.whole("num_key_value_heads", 4),
        head_dim=config.whole("head_dim", 256),
        positions=config.whole("max_position_embeddings", positions),
    )


def _read_two_ropes(config: Config, sizes: Sizes) -> dict[str, RopeSpec]:
    """Read both ropes. In older files only layers without a window have a scaled rope; newer files
    have a table for each kind of layer."""
    tables = config.table("rope_parameters")
    full, sliding = tables.table("full_attention"), tables.table("sliding_attention")
    if unknown := tables.unread():
        raise UnsupportedModel(
            f"rope_parameters has {', '.join(unknown)}; known: full_attention, sliding_attention"
        )
    full = config.table("rope_scaling").merged(full)
    theta, local_theta = (
        config.number("rope_theta", 1e6),
        config.number("rope_local_base_freq", 1e4),
    )
    return {
        "full": make_rope(full, config, sizes, theta=theta),
        "sliding": make_rope(sliding, config, sizes, theta=local_theta),
    }


def _attention(
    config: Config, count: int, ropes: Mapping[str, RopeSpec], pattern: int, cap: float | None
) -> list[AttentionSpec]:
    """Return the attention of each layer. Unless the file lists the kinds, every `pattern`-th layer
    sees all tokens, and the others have windows."""
    types = read_layer_types(config, count)
    if types is None:
        types = [
            "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
            for index in range(count)
        ]
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    softcap = _softcap(config, "attn_logit_softcapping", cap)
    window = None
    if not config.is_null("sliding_window"):
        window = config.whole("sliding_window", 4096)
        config.only("sliding_window_size", window)
    kinds = {
        "full_attention": AttentionSpec(
            ropes["full"], scale * ropes["full"].score_factor ** 2, softcap=softcap
        ),
        "sliding_attention": AttentionSpec(
            ropes["sliding"], scale * ropes["sliding"].score_factor ** 2, window, softcap
        ),
    }
    return [kinds[kind] for kind in types]


def _softcap(config: Config, field: str, default: float | None) -> float | None:
    if config.is_null(field) or (default is None and not config.has(field)):
        config.get(field)
        return None
    return config.number(field, default)


def _spec(
    config: Config, sizes: Sizes, kinds: list[AttentionSpec], qk_norm: QkNorm, cap: float | None
) -> ModelSpec:
    config.get("hidden_act")  # in early files; hidden_activation is used instead
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    has_bias = config.flag("attention_bias")
    return make_spec(
        config,
        sizes,
        layers_of(kinds, MlpSpec(config.whole("intermediate_size", 9216), activation)),
        rms_norm(config, gain_offset=1.0),
        is_tied=True,
        names=_NAMES,
        norm_place=NormPlace.BOTH,
        embedding_scale=math.sqrt(sizes.hidden),
        logit_softcap=_softcap(config, "final_logit_softcapping", cap),
        qk_norm=qk_norm,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


GEMMA2 = Family(
    "Gemma 2", ("Gemma2ForCausalLM",), _read_gemma2, notes="softcaps, windows in every other layer"
)
GEMMA3 = Family(
    "Gemma 3", ("Gemma3ForCausalLM",), _read_gemma3, notes="windows in 5 of 6 layers, two ropes"
)
GEMMA3_WITH_VISION = Family(
    "Gemma 3 with vision",
    ("Gemma3ForConditionalGeneration",),
    _read_gemma3,
    notes="its text part",
    is_part=True,
)
