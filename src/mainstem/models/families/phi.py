"""Phi 1, 1.5 and 2: LayerNorm, attention and a plain MLP side by side, biases everywhere."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    layer_norm,
    make_spec,
    read_activation,
    read_rope,
    read_sizes,
)
from mainstem.models.names import Names
from mainstem.models.spec import MlpSpec, ModelSpec, Residual, same_layers

_NAMES = Names(
    final_norm="model.final_layernorm",
    out="self_attn.dense",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    attention = full_attention(sizes.head_dim, read_rope(config, sizes, rotary_share=0.5))
    mlp = MlpSpec(
        config.whole("intermediate_size"),
        read_activation(config, default="gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    return make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        layer_norm(config),
        names=_NAMES,
        residual=Residual.PARALLEL,
        has_qkv_bias=True,
        has_out_bias=True,
        has_head_bias=True,
    )


FAMILY = Family(
    "Phi 1, 1.5, 2", ("PhiForCausalLM",), _read, notes="parallel residual, heads rotated in part"
)
