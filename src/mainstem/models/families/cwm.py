"""Code World Model: Llama's block with windows in three of four layers."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    gated_mlp,
    layer_types,
    make_spec,
    read_rope,
    read_sizes,
    rms_norm,
    with_window,
)
from mainstem.models.spec import ModelSpec, layers_of

_PATTERN = 4  # layers 0, 4, 8, ... see all tokens


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config, head_dim=128)
    full = full_attention(sizes.head_dim, read_rope(config, sizes, theta=1e6))
    kinds = {
        "full_attention": full,
        "sliding_attention": with_window(config, full, default=8192),
    }
    types = layer_types(config, sizes.layers, pattern=_PATTERN, first_full=0)
    mlp = gated_mlp(config, has_bias=config.flag("mlp_bias"))
    layers = layers_of([kinds[kind] for kind in types], mlp)
    return make_spec(config, sizes, layers, rms_norm(config, 1e-5))


FAMILY = Family("CWM", ("CwmForCausalLM",), _read, notes="windows in 3 of 4 layers")
