"""Mistral: Llama's block; version 0.1 of the 7B has a window in every layer."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    gated_mlp,
    make_spec,
    read_rope,
    read_sizes,
    rms_norm,
    with_window,
)
from mainstem.models.spec import ModelSpec, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    plain = full_attention(sizes.head_dim, read_rope(config, sizes))
    attention = with_window(config, plain, default=4096)  # as in transformers
    layers = same_layers(attention, gated_mlp(config), sizes.layers)
    return make_spec(config, sizes, layers, rms_norm(config))


def _read_part(config: Config) -> ModelSpec:
    """Like `_read`, but later models, which have the same architecture name and other decoders, are
    refused."""
    config.table("text_config").only("model_type", "mistral")
    return _read(config)


FAMILY = Family("Mistral", ("MistralForCausalLM",), _read, notes="windows in version 0.1")
WITH_VISION = Family(
    "Mistral Small 3 with vision",
    ("Mistral3ForConditionalGeneration",),
    _read_part,
    notes="its text part",
    is_part=True,
)
