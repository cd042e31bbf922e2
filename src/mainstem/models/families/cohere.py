"""Command R (Cohere) and Command R7B / A (Cohere 2): LayerNorm without biases, attention and MLP
side by side, rotary pairs of adjacent dims. In Cohere 2, three of four layers have windows, and the
others have no rope."""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.spec import AttentionSpec, ModelSpec, Residual, RopeSpec, layers_of


def _read_cohere(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.only("use_qk_norm", False)  # Command R+: a LayerNorm of each head
    attention = common.full_attention(sizes.head_dim, _read_rope(config, sizes, theta=500_000.0))
    return _spec(config, sizes, [attention] * sizes.layers)


def _read_cohere2(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.only("use_qk_norm", False)
    config.only("use_parallel_block", True)
    config.only("use_gated_activation", True)
    config.only("use_parallel_embedding", False)
    config.only("use_embedding_sharing", True)
    config.only("position_embedding_type", "rope_gptj")
    config.only("rotary_pct", 1.0)
    for field in ("order_of_interleaved_layers", "cache_implementation"):
        config.get(field)  # the pattern of layers, in words
    rotated = common.full_attention(sizes.head_dim, _read_rope(config, sizes, theta=10_000.0))
    full = common.full_attention(sizes.head_dim, None)
    sliding = common.with_window(config, rotated, default=4096)
    pattern = config.whole("sliding_window_pattern", 4)
    if config.has("layer_switch"):
        config.only("layer_switch", pattern)
    types = common.layer_types(config, sizes.layers, pattern=pattern)
    return _spec(config, sizes, common.by_kind(types, full, sliding))


def _read_rope(config: Config, sizes: Sizes, theta: float) -> RopeSpec:
    return replace(common.read_rope(config, sizes, theta=theta), has_adjacent_pairs=True)


def _spec(config: Config, sizes: Sizes, kinds: list[AttentionSpec]) -> ModelSpec:
    return common.make_spec(
        config,
        sizes,
        layers_of(kinds, common.gated_mlp(config)),
        replace(common.layer_norm(config), has_bias=False),
        is_tied=True,
        residual=Residual.PARALLEL,
        logit_scale=config.number("logit_scale", 0.0625),
        has_bias=config.flag("attention_bias"),
    )


COHERE = Family(
    "Command R", ("CohereForCausalLM",), _read_cohere, notes="without norms of heads (Command R+)"
)
COHERE2 = Family(
    "Command R7B, Command A",
    ("Cohere2ForCausalLM",),
    _read_cohere2,
    notes="windows in 3 of 4 layers, the others without positions",
)
