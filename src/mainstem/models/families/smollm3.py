"""SmolLM 3: Llama's block; every fourth layer has no rope."""

from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import AttentionSpec, ModelSpec, layers_of


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    rotated = common.rotated(config, sizes, theta=2_000_000.0)
    plain = common.full_attention(sizes.head_dim, None)
    kinds = [rotated if has_rope else plain for has_rope in _rotated_layers(config, sizes.layers)]
    return common.make_spec(
        config,
        sizes,
        layers_of(
            _windowed(config, kinds), common.gated_mlp(config, has_bias=config.flag("mlp_bias"))
        ),
        common.rms_norm(config),
        is_tied=True,
        has_bias=config.flag("attention_bias"),
    )


def _rotated_layers(config: Config, count: int) -> list[bool]:
    """Whether each layer has a rope. Despite its name, `no_rope_layers` has a 1 for layers with a
    rope."""
    interval = config.whole("no_rope_layer_interval", 4)
    said = config.items("no_rope_layers")
    if said is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if len(said) != count or not all(item in (0, 1) for item in said):
        raise UnsupportedModel(f"no_rope_layers must be a list of {count} zeros and ones")
    return [bool(item) for item in said]


def _windowed(config: Config, kinds: list[AttentionSpec]) -> list[AttentionSpec]:
    """Return the layers with their windows. With `use_sliding_window`, layers without a rope have a
    window, unless the file lists the kind of each layer."""
    types = common.read_layer_types(config, len(kinds))
    window = config.get("sliding_window")
    if not config.flag("use_sliding_window") or window is None:
        return kinds
    size = config.whole("sliding_window")
    if types is None:
        types = ["full_attention" if kind.rope else "sliding_attention" for kind in kinds]
    return [
        replace(kind, window=size) if name == "sliding_attention" else kind
        for kind, name in zip(kinds, types, strict=True)
    ]


FAMILY = Family(
    "SmolLM 3", ("SmolLM3ForCausalLM",), _read, notes="every fourth layer without positions"
)
