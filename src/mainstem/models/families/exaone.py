"""EXAONE 4: norms after attention and MLP, norms of heads. In the 32B, three of four layers have
windows, and the others have no rope."""

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
from mainstem.models.spec import ModelSpec, NormPlace, QkNorm, layers_of


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    rotated = full_attention(sizes.head_dim, read_rope(config, sizes))
    windowed = with_window(config, rotated, default=4096)
    config.only("sliding_window_pattern", 0, 4, "LLLG")  # local, local, local, global
    types = layer_types(config, sizes.layers, pattern=4)
    if windowed.window is None:
        kinds = [rotated] * sizes.layers
    else:
        plain = full_attention(sizes.head_dim, None)
        kinds = [windowed if kind == "sliding_attention" else plain for kind in types]
    return make_spec(
        config,
        sizes,
        layers_of(kinds, gated_mlp(config)),
        rms_norm(config, 1e-5),
        norm_place=NormPlace.AFTER,
        qk_norm=QkNorm.HEADS,
    )


FAMILY = Family(
    "EXAONE 4", ("Exaone4ForCausalLM",), _read, notes="norms after attention and MLP, windows"
)
