"""Granite 3 and 4: Llama's block with factors on embeddings, scores, residuals and logits. Some
have experts. Granite 4 also has an MLP that every token goes through, and in its small models
nothing else. Most layers of its larger models have a Mamba-2 recurrence instead of attention."""

from collections.abc import Sequence

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    checked_kinds,
    gated_mlp,
    make_spec,
    read_activation,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.families.mamba import mamba_names, read_mamba
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.recurrence import GateOrder, MambaSpec
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)

_SHARED = ("shared_mlp.input_linear",)
_EXPERTS = Names(
    router="block_sparse_moe.router.layer",
    expert_layout=ExpertLayout.STACKED,
    expert_gate="block_sparse_moe.input_linear.weight",
    expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=_SHARED,
    shared_down="shared_mlp.output_linear",
)
_ONE_MLP = Names(gate_up=_SHARED, down="shared_mlp.output_linear")
_MAMBA_KINDS = {"mamba", "linear_attention"}


def _read_granite(config: Config) -> ModelSpec:
    mlp = gated_mlp(config, has_bias=config.flag("mlp_bias"))
    sizes = read_sizes(config)
    return _read(config, sizes, mlp, Names(), read_rope(config, sizes))


def _read_moe(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    return _read(config, sizes, _experts(config, None), _EXPERTS, read_rope(config, sizes))


def _read_granite4(config: Config) -> ModelSpec:
    """The fields for Mamba layers are in every file, also where there are none."""
    sizes = read_sizes(config)
    kinds = _kinds(config, sizes.layers)
    mamba = None
    if _MAMBA_KINDS.intersection(kinds):
        mamba = read_mamba(config, sizes.hidden, GateOrder.GATE_FIRST)
    else:
        for field in config.names():
            if field.startswith("mamba_") or field == "time_step_limit":
                config.get(field)
    mambas = [mamba if kind in _MAMBA_KINDS else None for kind in kinds]
    config.only("normalization_function", "rmsnorm")
    rope: RopeSpec | None = read_rope(config, sizes)
    config.only("position_embedding_type", "rope", "nope")
    if config.get("position_embedding_type") != "rope":
        rope = None
    size = config.whole("shared_intermediate_size", 1024)
    if config.get("num_local_experts") == 0:
        for field in ("intermediate_size", "num_experts_per_tok"):  # of the experts
            config.get(field)
        return _read(config, sizes, MlpSpec(size, read_activation(config)), _ONE_MLP, rope, mambas)
    return _read(config, sizes, _experts(config, size), _EXPERTS, rope, mambas)


def _kinds(config: Config, count: int) -> list[str]:
    types = config.items("layer_types")
    if types is None:
        return ["mamba"] * count
    older = ("linear_attention", "full_attention")
    return checked_kinds(types, count, ("mamba", "attention"), older)


def _experts(config: Config, shared_size: int | None) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=config.whole("num_local_experts", 8),
        top_k=config.whole("num_experts_per_tok", 2),
        size=config.whole("intermediate_size"),
        activation=read_activation(config),
        shared_size=shared_size,
    )


def _read(
    config: Config,
    sizes: Sizes,
    mlp: MlpSpec | ExpertsSpec,
    names: Names,
    rope: RopeSpec | None,
    mambas: Sequence[MambaSpec | None] = (),
) -> ModelSpec:
    """`mambas`: of each layer its recurrence, if it has one instead of attention."""
    scale = config.number("attention_multiplier", 1.0)
    if rope is not None:
        scale *= rope.score_factor**2
    attention = LayerSpec(AttentionSpec(rope, scale), mlp)
    return make_spec(
        config,
        sizes,
        [
            attention if mamba is None else LayerSpec(None, mlp, mamba)
            for mamba in mambas or [None] * sizes.layers
        ],
        rms_norm(config),
        names=mamba_names(names, "mamba"),
        residual_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        has_bias=config.flag("attention_bias"),
    )


GRANITE = Family("Granite 3", ("GraniteForCausalLM",), _read_granite)
GRANITE_MOE = Family("Granite 3 MoE", ("GraniteMoeForCausalLM",), _read_moe, notes="experts")
GRANITE4 = Family(
    "Granite 4",
    ("GraniteMoeHybridForCausalLM",),
    _read_granite4,
    notes="Mamba-2 in most layers of larger models",
)
