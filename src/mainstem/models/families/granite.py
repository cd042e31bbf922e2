"""Granite 3: Llama's block with factors on embeddings, scores, residuals and logits."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    gated_mlp,
    make_spec,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.spec import AttentionSpec, ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    rope = read_rope(config, sizes)
    scale = config.number("attention_multiplier", 1.0) * rope.score_factor**2
    mlp = gated_mlp(config, has_bias=config.flag("mlp_bias"))
    has_bias = config.flag("attention_bias")
    return make_spec(
        config,
        sizes,
        same_layers(AttentionSpec(rope, scale), mlp, sizes.layers),
        rms_norm(config),
        residual_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


FAMILY = Family("Granite 3", ("GraniteForCausalLM",), _read)
