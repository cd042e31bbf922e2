"""Qwen3-Next, Qwen 3.5 and 3.6: three of four layers have a gated delta rule instead of attention.

The other layers have attention with gates. Some models have experts, one of them shared.
"""

from collections.abc import Sequence
from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    checked_kinds,
    full_attention,
    gated_mlp,
    make_spec,
    part_of,
    read_activation,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.names import Names, RecurrentOrder
from mainstem.models.recurrence import DeltaSpec
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    QkNorm,
)

_DROPPED = ("mtp.", "model.mtp.")  # heads that guess several tokens at once
_NEXT_NAMES = Names(
    recurrent=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    recurrent_order=RecurrentOrder.KEY_HEADS,
    ignored_beginnings=_DROPPED,
)
_NAMES = Names(ignored_beginnings=_DROPPED)


def _read_next(config: Config) -> ModelSpec:
    step, dense = config.whole("decoder_sparse_step", 1), config.items("mlp_only_layers") or []
    mlp, experts = gated_mlp(config), _experts(config)
    mlps = [mlp if i in dense or (i + 1) % step else experts for i in range(_count(config))]
    return _read(config, mlps, _NEXT_NAMES)


def _read_dense(config: Config) -> ModelSpec:
    return _read(config, [gated_mlp(config)] * _count(config), _NAMES)


def _read_moe(config: Config) -> ModelSpec:
    config.get("intermediate_size")  # no layer is dense
    return _read(config, [_experts(config)] * _count(config), _NAMES)


def _count(config: Config) -> int:
    return config.whole("num_hidden_layers")


def _read(config: Config, mlps: Sequence[MlpSpec | ExpertsSpec], names: Names) -> ModelSpec:
    sizes = read_sizes(config, head_dim=256)
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"):
        config.get(name)
    attention, delta = _attention(config, sizes), _delta(config)
    layers = [
        LayerSpec(attention, mlp) if kind == "full_attention" else LayerSpec(None, mlp, delta)
        for kind, mlp in zip(_layer_types(config, sizes.layers), mlps, strict=True)
    ]
    return make_spec(
        config,
        sizes,
        layers,
        rms_norm(config, gain_offset=1.0),
        names=names,
        qk_norm=QkNorm.HEADS,
        has_bias=config.flag("attention_bias"),
    )


def _attention(config: Config, sizes: Sizes) -> AttentionSpec:
    config.only("attn_output_gate", True)
    for table in (config.table("rope_parameters"), config.table("rope_scaling")):
        # positions of images; a text has the same position in all three dims
        table.get("mrope_section")
        table.get("mrope_interleaved")
    rope = read_rope(config, sizes, rotary_share=0.25)
    return replace(full_attention(sizes.head_dim, rope), has_gate=True)


def _delta(config: Config) -> DeltaSpec:
    spec = DeltaSpec(
        key_heads=config.whole("linear_num_key_heads"),
        value_heads=config.whole("linear_num_value_heads"),
        key_dim=config.whole("linear_key_head_dim"),
        value_dim=config.whole("linear_value_head_dim"),
        kernel=config.whole("linear_conv_kernel_dim"),
    )
    if spec.value_heads % spec.key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads={spec.value_heads} is not a multiple of "
            f"linear_num_key_heads={spec.key_heads}"
        )
    return spec


def _layer_types(config: Config, count: int) -> list[str]:
    """The kind of each layer. If the file does not say, each `full_attention_interval`-th one has
    attention."""
    interval = config.whole("full_attention_interval", 4)
    types = config.items("layer_types")
    if types is None:
        return [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
        ]
    return checked_kinds(types, count, ("full_attention", "linear_attention"))


def _experts(config: Config) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        size=config.whole("moe_intermediate_size"),
        activation=read_activation(config),
        is_normalized=config.flag("norm_topk_prob", True),
        shared_size=config.whole("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


_NOTES = "gated delta rule in most layers; heads for several tokens are left out"
QWEN3_NEXT = Family("Qwen3-Next", ("Qwen3NextForCausalLM",), _read_next, notes=_NOTES)
QWEN35 = Family("Qwen 3.5, 3.6", ("Qwen3_5ForCausalLM",), _read_dense, notes=_NOTES)
QWEN35_WITH_VISION = part_of(QWEN35, "Qwen 3.5, 3.6, text part", "Qwen3_5ForConditionalGeneration")
QWEN35_MOE = Family("Qwen 3.5, 3.6 MoE", ("Qwen3_5MoeForCausalLM",), _read_moe, notes=_NOTES)
QWEN35_MOE_WITH_VISION = part_of(
    QWEN35_MOE, "Qwen 3.5, 3.6 MoE, text part", "Qwen3_5MoeForConditionalGeneration"
)
