"""OLMo 2: norms after attention and MLP; one norm over all query heads, and one over all key
heads."""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    gated_mlp,
    make_spec,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.spec import ModelSpec, NormPlace, QkNorm, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    attention = full_attention(sizes.head_dim, read_rope(config, sizes))
    has_bias = config.flag("attention_bias")
    return make_spec(
        config,
        sizes,
        same_layers(attention, gated_mlp(config), sizes.layers),
        replace(rms_norm(config, 1e-5), is_rounded_once=True),
        norm_place=NormPlace.AFTER,
        qk_norm=QkNorm.ROWS,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


FAMILY = Family("OLMo 2", ("Olmo2ForCausalLM",), _read, notes="norms after attention and MLP")
