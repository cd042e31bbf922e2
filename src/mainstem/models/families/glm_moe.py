"""GLM-4.5, 4.6 and 4.7, dots.llm1, MiniMax M2: experts chosen by sigmoid scores and a bias. In GLM
and dots.llm1 the first layers are dense, and all tokens go through shared experts."""

from collections.abc import Sequence
from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.families.routers import read_sigmoid_experts
from mainstem.models.names import Names
from mainstem.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    QkNorm,
    RouterScores,
)

_SHARED = Names(
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
_MINIMAX_NAMES = Names(
    router="block_sparse_moe.gate",
    choice_bias="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
    ignored_beginnings=("model.mtp.", "mtp."),
)


def _read_glm(config: Config) -> ModelSpec:
    """The layer after the last one guesses several tokens at once; it is left out."""
    sizes = common.read_sizes(config, head_dim=128)
    attention = common.rotated(config, sizes, rotary_share=0.5)
    has_extra = bool(config.get("num_nextn_predict_layers"))
    extra = config.whole("num_nextn_predict_layers") if has_extra else 0
    ignored = tuple(f"model.layers.{sizes.layers + number}." for number in range(extra))
    return common.make_spec(
        config,
        sizes,
        _layers(config, [attention] * sizes.layers),
        common.rms_norm(config, 1e-5),
        names=replace(_SHARED, ignored_beginnings=ignored),
        qk_norm=QkNorm.HEADS if config.flag("use_qk_norm") else QkNorm.NONE,
        has_qkv_bias=config.flag("attention_bias"),
        dropped=("heads for several tokens",) if extra else (),
    )


def _read_dots1(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes)
    return common.make_spec(
        config,
        sizes,
        _layers(config, _windowed(config, attention, sizes.layers)),
        common.rms_norm(config),
        names=_SHARED,
        qk_norm=QkNorm.HEADS,
        has_bias=config.flag("attention_bias"),
    )


def _windowed(config: Config, attention: AttentionSpec, count: int) -> list[AttentionSpec]:
    """dots.llm1: layers from number `max_window_layers` on may have a window."""
    types, first = common.read_layer_types(config, count), config.whole("max_window_layers", 62)
    windowed = common.with_window(config, attention)
    if types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return common.by_kind(types, attention, windowed)


def _layers(config: Config, attentions: Sequence[AttentionSpec]) -> list[LayerSpec]:
    config.only("moe_layer_freq", 1)
    mlp, first = common.gated_mlp(config), config.whole("first_k_dense_replace", 0)
    shared_size = config.whole("moe_intermediate_size") * config.whole("n_shared_experts", 1)
    experts = read_sigmoid_experts(config, common.read_activation(config), shared_size=shared_size)
    return [
        LayerSpec(attention, mlp if index < first else experts)
        for index, attention in enumerate(attentions)
    ]


def _read_minimax(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=128)
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("shared_intermediate_size", 0)
    config.only("shared_moe_mode", "sigmoid")
    for part in ("full_attention", "linear_attention", "mlp"):
        config.only(f"layernorm_{part}_beta", 1.0)
    # of heads for several tokens, and of dense layers, which there are none of
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"):
        config.get(name)
    config.only("attn_type_list", [1] * sizes.layers)  # 0: linear attention
    experts = ExpertsSpec(
        num_experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        size=config.whole("intermediate_size"),
        activation=common.read_activation(config),
        scores=RouterScores.SIGMOID,
        has_choice_bias=True,
    )
    share = config.whole("rotary_dim", sizes.head_dim) / sizes.head_dim
    rope = common.read_rope(config, sizes, theta=5_000_000.0, rotary_share=share)
    attention = common.full_attention(sizes.head_dim, rope)
    return common.make_spec(
        config,
        sizes,
        [LayerSpec(attention, experts)] * sizes.layers,
        common.rms_norm(config),
        names=_MINIMAX_NAMES,
        qk_norm=QkNorm.ROWS,
    )


_NOTES = "experts by sigmoid scores and a bias"
GLM = Family("GLM-4.5 to 4.7", ("Glm4MoeForCausalLM",), _read_glm, notes=_NOTES)
DOTS1 = Family("dots.llm1", ("Dots1ForCausalLM",), _read_dots1, notes=_NOTES)
MINIMAX = Family("MiniMax M2", ("MiniMaxM2ForCausalLM",), _read_minimax, notes=_NOTES)
