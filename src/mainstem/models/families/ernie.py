"""ERNIE 4.5, dense: Llama's block with rotary pairs of adjacent dims."""

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
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config, head_dim=128)
    rope = replace(read_rope(config, sizes, theta=500_000.0), has_adjacent_pairs=True)
    has_bias = config.flag("use_bias")
    mlp = gated_mlp(config, has_bias=has_bias)
    return make_spec(
        config,
        sizes,
        same_layers(full_attention(sizes.head_dim, rope), mlp, sizes.layers),
        rms_norm(config, 1e-5),
        is_tied=True,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


FAMILY = Family("ERNIE 4.5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _read, notes="dense")
