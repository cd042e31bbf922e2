"""Arcee (AFM): Llama's block with a plain MLP and a squared ReLU."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    make_spec,
    plain_mlp,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    attention = full_attention(sizes.head_dim, read_rope(config, sizes))
    mlp = plain_mlp(config, "relu2", has_bias=config.flag("mlp_bias"))
    has_bias = config.flag("attention_bias")
    return make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        rms_norm(config, 1e-5),
        names=Names(gate_up=("mlp.up_proj",)),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


FAMILY = Family("Arcee", ("ArceeForCausalLM",), _read)
