"""Nemotron (dense; Minitron): LayerNorm with gains stored as gain - 1, a plain MLP with a squared
ReLU, half of each head rotated."""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes, rotary_share=0.5)
    mlp = common.plain_mlp(config, "relu2", has_bias=config.flag("mlp_bias"))
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        replace(common.layer_norm(config, "norm_eps"), gain_offset=1.0),
        names=Names(gate_up=("mlp.up_proj",)),
        has_bias=config.flag("attention_bias"),
    )


FAMILY = Family("Nemotron", ("NemotronForCausalLM",), _read, notes="the dense models")
