"""Gemma 1 to 3: gains stored as gain - 1. Gemma 2 and 3 have norms before and after attention and
MLP, and windows in half or most of the layers. Gemma 2 has softcaps; Gemma 3 has norms of queries
and keys, and two ropes."""

import math
from collections.abc import Mapping

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.names import Names
from mainstem.models.spec import (
    Activation,
    AttentionSpec,
    MlpSpec,
    ModelSpec,
    NormPlace,
    QkNorm,
    RopeSpec,
    layers_of,
    same_layers,
)

_NAMES = Names(mlp_norm="pre_feedforward_layernorm")


def _read_gemma1(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=256)
    attention = common.rotated(config, sizes)
    # the first files say "gelu" and mean its approximation; others have it in hidden_activation
    config.only("hidden_act", "gelu", "gelu_pytorch_tanh")
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", False)
    mlp = MlpSpec(config.whole("intermediate_size"), Activation.GELU_TANH)
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.rms_norm(config, gain_offset=1.0),
        is_tied=True,
        embedding_scale=math.sqrt(sizes.hidden),
        has_bias=config.flag("attention_bias"),
    )


def _read_gemma2(config: Config) -> ModelSpec:
    sizes = read_gemma_sizes(config, vocab=256_000, positions=8192)
    rope = common.read_rope(config, sizes)
    ropes = {"full_attention": rope, "sliding_attention": rope}
    kinds = _attention(config, sizes.layers, ropes, pattern=2, cap=50.0)
    return _spec(config, sizes, kinds, QkNorm.NONE, cap=30.0)


def _read_gemma3(config: Config) -> ModelSpec:
    sizes = read_gemma_sizes(config, vocab=262_208, positions=131_072)
    pattern = config.whole("sliding_window_pattern", 6)
    ropes = common.read_two_ropes(config, sizes, theta=1e6, local_theta=1e4)
    kinds = _attention(config, sizes.layers, ropes, pattern, cap=None)
    return _spec(config, sizes, kinds, QkNorm.HEADS, cap=None)


def read_gemma_sizes(config: Config, vocab: int, positions: int, layers: int = 26) -> Sizes:
    """Read sizes. Files leave out fields with transformers' defaults. Those that are no arguments
    are the values of Gemma 2 2B."""
    return Sizes(
        vocab=config.whole("vocab_size", vocab),
        hidden=config.whole("hidden_size", 2304),
        layers=config.whole("num_hidden_layers", layers),
        heads=config.whole("num_attention_heads", 8),
        kv_heads=config.whole("num_key_value_heads", 4),
        head_dim=config.whole("head_dim", 256),
        positions=config.whole("max_position_embeddings", positions),
    )


def _attention(
    config: Config, count: int, ropes: Mapping[str, RopeSpec], pattern: int, cap: float | None
) -> list[AttentionSpec]:
    """Return the attention of each layer. Unless the file lists the kinds, every `pattern`-th layer
    sees all tokens, and the others have windows."""
    types = common.layer_types(config, count, pattern)
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    softcap = read_softcap(config, "attn_logit_softcapping", cap)
    window = None
    if not config.is_null("sliding_window"):
        window = config.whole("sliding_window", 4096)
        config.only("sliding_window_size", window)
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = {
        kind: AttentionSpec(rope, scale * rope.score_factor**2, windows[kind], softcap)
        for kind, rope in ropes.items()
    }
    return [kinds[kind] for kind in types]


def read_softcap(config: Config, field: str, default: float | None = None) -> float | None:
    if config.is_null(field) or (default is None and not config.has(field)):
        config.get(field)
        return None
    return config.number(field, default)


def _spec(
    config: Config, sizes: Sizes, kinds: list[AttentionSpec], qk_norm: QkNorm, cap: float | None
) -> ModelSpec:
    config.get("hidden_act")  # in early files; hidden_activation is used instead
    activation = common.read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return common.make_spec(
        config,
        sizes,
        layers_of(kinds, MlpSpec(config.whole("intermediate_size", 9216), activation)),
        common.rms_norm(config, gain_offset=1.0),
        is_tied=True,
        names=_NAMES,
        norm_place=NormPlace.BOTH,
        embedding_scale=math.sqrt(sizes.hidden),
        logit_softcap=read_softcap(config, "final_logit_softcapping", cap),
        qk_norm=qk_norm,
        has_bias=config.flag("attention_bias"),
    )


GEMMA1 = Family("Gemma 1", ("GemmaForCausalLM",), _read_gemma1)
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
