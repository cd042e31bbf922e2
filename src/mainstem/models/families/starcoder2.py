"""StarCoder 2: LayerNorm, a plain MLP, biases everywhere, a window in every layer."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.with_window(config, common.rotated(config, sizes))
    config.only("norm_type", "layer_norm")
    config.only("mlp_type", "default")
    has_bias = config.flag("use_bias", True)
    return common.make_spec(
        config,
        sizes,
        same_layers(
            attention,
            common.plain_mlp(config, "gelu_pytorch_tanh", has_bias=has_bias),
            sizes.layers,
        ),
        common.layer_norm(config, "norm_epsilon"),
        is_tied=True,
        names=Names(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        has_bias=has_bias,
    )


FAMILY = Family("StarCoder 2", ("Starcoder2ForCausalLM",), _read)
