"""Mistral: Llama's block; version 0.1 of the 7B has a window in every layer, Ministral in some.
Ministral 3 has YaRN, and beyond its original context it scales queries by their positions."""

from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.spec import ModelSpec, RopeScaling, RopeSpec, layers_of, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    plain = common.rotated(config, sizes)
    attention = common.with_window(config, plain, default=4096)  # as in transformers
    layers = same_layers(attention, common.gated_mlp(config), sizes.layers)
    return common.make_spec(config, sizes, layers, common.rms_norm(config))


def _read_ministral(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    full = common.rotated(config, sizes)
    sliding = common.with_window(config, full, default=4096)
    # unless the file lists the kinds, all layers have the window
    types = common.layer_types(config, sizes.layers, pattern=sizes.layers, first_full=sizes.layers)
    layers = layers_of(common.by_kind(types, full, sliding), common.gated_mlp(config))
    return common.make_spec(config, sizes, layers, common.rms_norm(config))


def _read_ministral3(config: Config) -> ModelSpec:
    """Contexts end at the original length: beyond it, queries are scaled by their positions."""
    sizes = common.read_sizes(config, head_dim=128)
    rope = _read_yarn(config, sizes)
    attention = common.with_window(config, common.full_attention(sizes.head_dim, rope))
    layers = same_layers(attention, common.gated_mlp(config), sizes.layers)
    spec = common.make_spec(config, sizes, layers, common.rms_norm(config, 1e-5))
    positions = min(sizes.positions, rope.original_positions)
    part = (f"contexts of more than {positions} tokens: its queries depend on positions there",)
    return replace(spec, max_positions=positions, dropped=part)


def _read_yarn(config: Config, sizes: Sizes) -> RopeSpec:
    table = config.table("rope_scaling").merged(config.table("rope_parameters"))
    table.number("llama_4_scaling_beta", 0.1)
    table.only("max_position_embeddings", sizes.positions)
    rope = common.make_rope(table, config, sizes, theta=config.number("rope_theta", 1e6))
    if rope.scaling is not RopeScaling.YARN:
        raise UnsupportedModel(f"Ministral 3 is supported with YaRN, not {rope.scaling.value!r}")
    return rope


def _read_part(config: Config) -> ModelSpec:
    """The decoder of a multimodal model: Mistral Small 3, or Ministral 3."""
    kind = config.table("text_config").get("model_type")
    if kind == "ministral3":
        return _read_ministral3(config)
    config.table("text_config").only("model_type", "mistral")
    return _read(config)


FAMILY = Family("Mistral", ("MistralForCausalLM",), _read, notes="windows in version 0.1")
MINISTRAL = Family(
    "Ministral", ("MinistralForCausalLM",), _read_ministral, notes="windows in some layers"
)
MINISTRAL3 = Family(
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    _read_ministral3,
    notes="contexts up to its original 16384 tokens",
)
WITH_VISION = Family(
    "Mistral Small 3 and Ministral 3 with vision",
    ("Mistral3ForConditionalGeneration",),
    _read_part,
    notes="its text part",
    is_part=True,
)
