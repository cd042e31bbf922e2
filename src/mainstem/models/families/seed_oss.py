"""Seed-OSS: Llama's block with biases on queries, keys and values."""

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
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config, head_dim=128)
    attention = full_attention(sizes.head_dim, read_rope(config, sizes))
    mlp = gated_mlp(config, has_bias=config.flag("mlp_bias"))
    return make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        rms_norm(config),
        has_qkv_bias=config.flag("attention_bias", True),
        has_out_bias=config.flag("attention_out_bias"),
    )


FAMILY = Family("Seed-OSS", ("SeedOssForCausalLM",), _read)
