"""Qwen 2, 2.5 and 3, dense: biases in Qwen 2, norms of queries and keys in Qwen 3."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import AttentionSpec, ModelSpec, QkNorm, layers_of


def _read_qwen2(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes)
    kinds = windowed_above(config, attention, sizes.layers)
    layers = layers_of(kinds, common.gated_mlp(config))
    return common.make_spec(config, sizes, layers, common.rms_norm(config), has_qkv_bias=True)


def _read_qwen3(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes)
    kinds = windowed_above(config, attention, sizes.layers)
    return common.make_spec(
        config,
        sizes,
        layers_of(kinds, common.gated_mlp(config)),
        common.rms_norm(config),
        qk_norm=QkNorm.HEADS,
        has_bias=config.flag("attention_bias"),
    )


def windowed_above(config: Config, attention: AttentionSpec, count: int) -> list[AttentionSpec]:
    """Return the attention of each layer: with `use_sliding_window`, layers from number
    `max_window_layers` on have a window. Newer files list the kind of each layer."""
    types = common.read_layer_types(config, count)
    first = config.get("max_window_layers")
    windowed = common.with_window(config, attention, default=4096)  # as transformers has it
    if not config.flag("use_sliding_window") or windowed.window is None:
        return [attention] * count
    if types is None:
        above = first if isinstance(first, int) else 28  # as transformers has it
        types = ["sliding_attention" if i >= above else "full_attention" for i in range(count)]
    return common.by_kind(types, attention, windowed)


QWEN2 = Family("Qwen 2, 2.5", ("Qwen2ForCausalLM",), _read_qwen2)
QWEN3 = Family(
    "Qwen 3",
    ("Qwen3ForCausalLM",),
    _read_qwen3,
    notes="YaRN's attn_factor (DeepSeek-R1-0528) counts; transformers ignores it",
)
