"""Granite 3 and 4: Llama's block with factors on embeddings, scores, residuals and logits. Some
have experts. Granite 4 also has an MLP that every token goes through, and in its small models
nothing else; models with Mamba layers are refused."""

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    gated_mlp,
    make_spec,
    read_activation,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    layers_of,
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
    types = config.items("layer_types") or []
    if len(types) != sizes.layers or set(types) - {"attention", "full_attention"}:
        raise UnsupportedModel(
            "this Granite 4 model has Mamba layers, which do not keep keys and values of every "
            "token; Granite 4 is supported if layer_types has attention layers only"
        )
    for field in config.names():
        if field.startswith("mamba_") or field == "time_step_limit":
            config.get(field)
    config.only("normalization_function", "rmsnorm")
    rope: RopeSpec | None = read_rope(config, sizes)
    config.only("position_embedding_type", "rope", "nope")
    if config.get("position_embedding_type") != "rope":
        rope = None
    size = config.whole("shared_intermediate_size", 1024)
    if config.get("num_local_experts") == 0:
        for field in ("intermediate_size", "num_experts_per_tok"):  # of the experts
            config.get(field)
        return _read(config, sizes, MlpSpec(size, read_activation(config)), _ONE_MLP, rope)
    return _read(config, sizes, _experts(config, size), _EXPERTS, rope)


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
) -> ModelSpec:
    scale = config.number("attention_multiplier", 1.0)
    if rope is not None:
        scale *= rope.score_factor**2
    has_bias = config.flag("attention_bias")
    return make_spec(
        config,
        sizes,
        layers_of([AttentionSpec(rope, scale)] * sizes.layers, mlp),
        rms_norm(config),
        names=names,
        residual_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
    )


GRANITE = Family("Granite 3", ("GraniteForCausalLM",), _read_granite)
GRANITE_MOE = Family("Granite 3 MoE", ("GraniteMoeForCausalLM",), _read_moe, notes="experts")
GRANITE4 = Family(
    "Granite 4",
    ("GraniteMoeHybridForCausalLM",),
    _read_granite4,
    notes="models without Mamba layers",
)
