"""Gemma 4: windowed layers with small heads, others with large ones; values are normed.

Some models have experts beside each MLP (26B-A4B), some embeddings of their own for each layer and
layers that read K and V of an earlier one (E2B, E4B). Layers without a window may take values from
the key product (31B, 26B-A4B).
"""

import math
from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    layer_types,
    make_rope,
    make_spec,
    part_of,
    read_activation,
    rms_norm,
)
from mainstem.models.families.gemma import read_gemma_sizes, read_softcap
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    KvShape,
    LayerInputSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormPlace,
    QkNorm,
    RopeSpec,
)

FULL, SLIDING = "full_attention", "sliding_attention"
_NAMES = Names(
    mlp_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert_layout=ExpertLayout.STACKED,
    expert_gate="experts.gate_up_proj",
    expert_down="experts.down_proj",
    stacked_experts=("experts.gate_up_proj", "experts.down_proj"),
    shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
    shared_down="mlp.down_proj",
)
# prefixes of the decoder in files of the whole model, of the text model, and of older versions
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_OTHER_PARTS = ("embed_vision.", "audio_tower.", "embed_audio.")


def _read(config: Config) -> ModelSpec:
    sizes = read_gemma_sizes(config, vocab=262_144, layers=30, positions=131_072)
    types = [*layer_types(config, sizes.layers, 6)[:-1], FULL]  # as transformers has it
    config.only("use_bidirectional_attention", "vision")  # only tokens of images see later ones
    num_shared = _count(config, "num_kv_shared_layers", 0)
    kinds = _attention(config, sizes, types)
    layers = _layers(config, types, kinds, num_shared)
    spec = make_spec(
        config,
        sizes,
        layers,
        replace(rms_norm(config), is_rounded_once=True),
        is_tied=True,
        names=replace(_NAMES, ignored_beginnings=_unused(types, num_shared)),
        norm_place=NormPlace.BOTH,
        embedding_scale=math.sqrt(sizes.hidden),
        logit_softcap=read_softcap(config, "final_logit_softcapping"),
        qk_norm=QkNorm.HEADS,
        has_bias=config.flag("attention_bias"),
    )
    return replace(
        spec,
        has_value_norm=True,
        has_layer_scale=True,
        layer_inputs=_layer_inputs(config, sizes),
    )


def _attention(config: Config, sizes: Sizes, types: list[str]) -> dict[str, AttentionSpec]:
    """The attention of both kinds of layers. Scores are not scaled: queries and keys are normed."""
    has_keys_as_values = config.flag("attention_k_eq_v")
    full = _full_sizes(config, sizes, types, has_keys_as_values)
    ropes = _ropes(config, sizes, full)
    shape = KvShape(full.kv_heads, full.head_dim)
    return {
        FULL: AttentionSpec(
            ropes[FULL], 1.0, kv_shape=shape, has_keys_as_values=has_keys_as_values
        ),
        SLIDING: AttentionSpec(ropes[SLIDING], 1.0, config.whole("sliding_window", 512)),
    }


def _full_sizes(config: Config, sizes: Sizes, types: list[str], has_keys_as_values: bool) -> Sizes:
    """The sizes of layers without a window. Published files have them in two fields; transformers
    writes, for each layer, what differs from the usual sizes."""
    by_layer = config.table("per_layer_config")
    if not by_layer.names():
        dim = config.whole("global_head_dim", 512)
        kv_heads = _count(config, "num_global_key_value_heads", 0)
        if not has_keys_as_values:
            kv_heads = 0
        return replace(sizes, head_dim=dim, kv_heads=kv_heads or sizes.kv_heads)
    found: dict[str, set[tuple[int, int]]] = {kind: set() for kind in types}
    width = len(by_layer.names()[0])  # transformers writes 05 in a model of 30 layers
    for index, kind in enumerate(types):
        own = by_layer.table(f"{index:0{width}}")
        dim = own.whole("head_dim", sizes.head_dim)
        kv_heads = own.whole("num_key_value_heads", sizes.kv_heads)
        if unknown := own.unread():
            raise UnsupportedModel(f"per_layer_config has {', '.join(unknown)}")
        found[kind].add((dim, kv_heads))
    usual = {(sizes.head_dim, sizes.kv_heads)}
    if by_layer.unread() or len(found[FULL]) > 1 or found.get(SLIDING, usual) != usual:
        raise UnsupportedModel(
            "per_layer_config: only layers of full_attention may have other heads, all the same"
        )
    ((dim, kv_heads),) = found[FULL]
    return replace(sizes, head_dim=dim, kv_heads=kv_heads)


def _ropes(config: Config, sizes: Sizes, full: Sizes) -> dict[str, RopeSpec]:
    tables = config.table("rope_parameters")
    if tables.names():
        wide, near = tables.table(FULL), tables.table(SLIDING)
        if unknown := tables.unread():
            raise UnsupportedModel(
                f"rope_parameters has {', '.join(unknown)}; known: {FULL}, {SLIDING}"
            )
    else:
        wide = Config({"rope_type": "proportional", "partial_rotary_factor": 0.25})
        near = Config({})
    return {
        FULL: make_rope(wide, config, full, theta=1e6),
        SLIDING: make_rope(near, config, sizes, theta=1e4),
    }


def _layers(
    config: Config, types: list[str], kinds: dict[str, AttentionSpec], num_shared: int
) -> list[LayerSpec]:
    """The last `num_shared` layers read K and V of the last layer of their kind before them."""
    first_shared = len(types) - num_shared
    if num_shared and first_shared < 1:
        raise UnsupportedModel(f"num_kv_shared_layers={num_shared} leaves no layer with K and V")
    size = config.whole("intermediate_size", 9216)
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    factor = 2 if config.flag("use_double_wide_mlp") else 1
    has_experts = config.flag("enable_moe_block")
    own = {kind: index for index, kind in enumerate(types[:first_shared])}
    layers = []
    for index, kind in enumerate(types):
        is_shared = index >= first_shared
        if is_shared and kind not in own:
            raise UnsupportedModel(f"num_kv_shared_layers: no layer before is {kind}")
        width = factor * size if is_shared else size
        mlp: MlpSpec | ExpertsSpec = MlpSpec(width, activation)
        if has_experts:
            mlp = _experts(config, width, activation)
        layers.append(LayerSpec(kinds[kind], mlp, kv_layer=own[kind] if is_shared else None))
    return layers


def _experts(config: Config, shared_size: int, activation: Activation) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("top_k_experts"),
        size=config.whole("moe_intermediate_size"),
        activation=activation,
        shared_size=shared_size,
        has_own_norms=True,
    )


def _layer_inputs(config: Config, sizes: Sizes) -> LayerInputSpec | None:
    rows = config.whole("vocab_size_per_layer_input", sizes.vocab)
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    size = _count(config, "hidden_size_per_layer_input", 256)
    if size == 0:
        return None
    if rows != sizes.vocab:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input={rows} must be vocab_size={sizes.vocab}"
        )
    return LayerInputSpec(size, activation)


def _count(config: Config, name: str, default: int) -> int:
    """A whole number, which may be 0; null means 0."""
    value = config.get(name)
    if value == 0 or config.is_null(name) or (value is None and default == 0):
        return 0
    return config.whole(name, default)


def _unused(types: list[str], num_shared: int) -> tuple[str, ...]:
    """Beginnings of the names of tensors that the decoder does not need: other parts of the whole
    model, and keys and values of layers that have none of their own."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = range(len(types) - num_shared, len(types))
    kept = [
        f"{prefix}layers.{index}.self_attn.{part}."
        for prefix in _PREFIXES
        for index in shared
        for part in parts
    ]
    return (*kept, *_OTHER_PARTS, *(f"model.{name}" for name in _OTHER_PARTS))


_NOTES = "two sizes of heads; some with experts, or with embeddings for each layer"
GEMMA4 = Family("Gemma 4", ("Gemma4ForCausalLM",), _read, notes=_NOTES)
GEMMA4_WITH_VISION = part_of(GEMMA4, "Gemma 4, text part", "Gemma4ForConditionalGeneration")
