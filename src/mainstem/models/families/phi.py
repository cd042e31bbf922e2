"""Phi 1, 1.5 and 2: LayerNorm, attention and a plain MLP side by side, biases everywhere."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, QkNorm, Residual, same_layers

_NAMES = Names(
    final_norm="model.final_layernorm",
    out="self_attn.dense",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
)


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes, rotary_share=0.5)
    mlp = common.plain_mlp(config, "gelu_new", has_bias=True)
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.layer_norm(config),
        names=_NAMES,
        residual=Residual.PARALLEL,
        qk_norm=QkNorm.LAYER if config.flag("qk_layernorm") else QkNorm.NONE,
        has_bias=True,
        has_head_bias=True,
    )


FAMILY = Family(
    "Phi 1, 1.5, 2", ("PhiForCausalLM",), _read, notes="parallel residual, heads rotated in part"
)
