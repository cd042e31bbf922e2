"""Llama 1 to 3, and the many models in its layout (SmolLM2, TinyLlama, Yi, ...)."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config, _positions(config))
    attention = common.rotated(config, sizes)
    mlp = common.gated_mlp(config, has_bias=config.flag("mlp_bias"))
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, mlp, sizes.layers),
        common.rms_norm(config),
        has_bias=config.flag("attention_bias"),
    )


def _positions(config: Config) -> str:
    """Return the name of the field for the context length. LLaMA-1 has a different field, sometimes
    in addition to the usual one."""
    usual, older = "max_position_embeddings", "max_sequence_length"
    return older if config.has(older) and not config.has(usual) else usual


FAMILY = Family(
    "Llama 1-3, SmolLM2 and others in its layout",
    ("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second is in the oldest files
    _read,
)
