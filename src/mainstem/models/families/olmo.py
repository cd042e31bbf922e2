"""OLMo 1 to 3 and OLMoE. OLMo 1 has norms without gains. OLMo 2 and 3 have norms after attention
and MLP. All but OLMo 1 have one norm over all query heads, and one over all key heads."""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.spec import (
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
    NormPlace,
    NormSpec,
    QkNorm,
    layers_of,
    same_layers,
)

_PATTERN = 4  # OLMo 3: every fourth layer sees all tokens


def _read_olmo(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.only("clip_qkv")
    attention = common.rotated(config, sizes)
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, common.gated_mlp(config), sizes.layers),
        NormSpec(NormKind.LAYER, 1e-5, has_gain=False),
        has_bias=config.flag("attention_bias"),
    )


def _read_olmo2(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes)
    return _normed_after(
        config, sizes, same_layers(attention, common.gated_mlp(config), sizes.layers)
    )


def _read_olmo3(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    ropes = common.read_two_ropes(config, sizes, theta=500_000.0)
    full, sliding = (
        common.full_attention(sizes.head_dim, ropes[kind])
        for kind in ("full_attention", "sliding_attention")
    )
    sliding = common.with_window(config, sliding, default=4096)
    types = common.layer_types(config, sizes.layers, pattern=_PATTERN)
    kinds = common.by_kind(types, full, sliding)
    return _normed_after(config, sizes, layers_of(kinds, common.gated_mlp(config)))


def _normed_after(config: Config, sizes: Sizes, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    return common.make_spec(
        config,
        sizes,
        layers,
        replace(common.rms_norm(config, 1e-5), is_rounded_once=True),
        norm_place=NormPlace.AFTER,
        qk_norm=QkNorm.ROWS,
        has_bias=config.flag("attention_bias"),
    )


def _read_olmoe(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.only("clip_qkv")
    attention = common.rotated(config, sizes)
    experts = ExpertsSpec(
        num_experts=config.whole("num_experts", 64),
        top_k=config.whole("num_experts_per_tok", 8),
        size=config.whole("intermediate_size"),
        activation=common.read_activation(config),
        is_normalized=config.flag("norm_topk_prob"),
    )
    return common.make_spec(
        config,
        sizes,
        layers_of([attention] * sizes.layers, experts),
        common.rms_norm(config, 1e-5),
        qk_norm=QkNorm.ROWS,
        has_bias=config.flag("attention_bias"),
    )


OLMO = Family("OLMo", ("OlmoForCausalLM",), _read_olmo, notes="without clip_qkv")
OLMO2 = Family("OLMo 2", ("Olmo2ForCausalLM",), _read_olmo2, notes="norms after attention and MLP")
OLMO3 = Family("OLMo 3", ("Olmo3ForCausalLM",), _read_olmo3, notes="windows in 3 of 4 layers")
OLMOE = Family("OLMoE", ("OlmoeForCausalLM",), _read_olmoe, notes="experts; without clip_qkv")
