"""Arcee (AFM): Llama's block with a plain MLP and a squared ReLU."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes)
    mlp = common.plain_mlp(config, "relu2", has_bias=config.flag("mlp_bias"))
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.rms_norm(config, 1e-5),
        names=Names(gate_up=("mlp.up_proj",)),
        has_bias=config.flag("attention_bias"),
    )


FAMILY = Family("Arcee", ("ArceeForCausalLM",), _read)
