"""EXAONE 4: norms after attention and MLP, norms of heads. In the 32B, three of four layers have
windows, and the others have no rope."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import ModelSpec, NormPlace, QkNorm, layers_of


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    rotated = common.rotated(config, sizes)
    windowed = common.with_window(config, rotated, default=4096)
    config.only("sliding_window_pattern", 0, 4, "LLLG")  # local, local, local, global
    types = common.layer_types(config, sizes.layers, pattern=4)
    if windowed.window is None:
        kinds = [rotated] * sizes.layers
    else:
        plain = common.full_attention(sizes.head_dim, None)
        kinds = common.by_kind(types, plain, windowed)
    return common.make_spec(
        config,
        sizes,
        layers_of(kinds, common.gated_mlp(config)),
        common.rms_norm(config, 1e-5),
        norm_place=NormPlace.AFTER,
        qk_norm=QkNorm.HEADS,
    )


FAMILY = Family(
    "EXAONE 4", ("Exaone4ForCausalLM",), _read, notes="norms after attention and MLP, windows"
)
