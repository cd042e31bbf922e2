"""Phi 1, 1.5 and 2: LayerNorm, attention and a plain MLP side by side, biases everywhere."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import MlpSpec, ModelSpec, Residual, same_layers

_NAMES = Names(
    final_norm="model.final_layernorm", out="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2"
)


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes, rotary_share=0.5)
    mlp = MlpSpec(
        config.whole("intermediate_size"),
        common.read_activation(config, default="gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.layer_norm(config),
        names=_NAMES,
        residual=Residual.PARALLEL,
        has_bias=True,
        has_head_bias=True,
    )


FAMILY = Family(
    "Phi 1, 1.5, 2", ("PhiForCausalLM",), _read, notes="parallel residual, heads rotated in part"
)
