"""Seed-OSS: Llama's block with biases on queries, keys and values."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=128)
    attention = common.rotated(config, sizes)
    mlp = common.gated_mlp(config, has_bias=config.flag("mlp_bias"))
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.rms_norm(config),
        has_qkv_bias=config.flag("attention_bias", True),
        has_out_bias=config.flag("attention_out_bias"),
    )


FAMILY = Family("Seed-OSS", ("SeedOssForCausalLM",), _read)
