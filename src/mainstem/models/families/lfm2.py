"""LFM2: most layers have a short gated convolution instead of attention; queries and keys are
normed. Some models have experts in all layers but the first ones."""

from collections.abc import Sequence

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    checked_kinds,
    full_attention,
    make_spec,
    read_rope,
    read_sizes,
)
from mainstem.models.names import Names
from mainstem.models.recurrence import ShortConvSpec
from mainstem.models.spec import (
    Activation,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormSpec,
    QkNorm,
    RouterScores,
)

_NAMES = Names(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    out="self_attn.out_proj",
    recurrent=("conv.in_proj",),
    conv="conv.conv",
    recurrent_out="conv.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{}.w1",
    expert_up="feed_forward.experts.{}.w3",
    expert_down="feed_forward.experts.{}.w2",
    stacked_experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
)
_THETA = 1000000.0


def _read_dense(config: Config) -> ModelSpec:
    return _read(config, [_dense(config)] * config.whole("num_hidden_layers"))


def _read_moe(config: Config) -> ModelSpec:
    count, dense = config.whole("num_hidden_layers"), config.whole("num_dense_layers", 2)
    mlp = MlpSpec(config.whole("intermediate_size"), Activation.SILU)
    experts = ExpertsSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        size=config.whole("moe_intermediate_size"),
        activation=Activation.SILU,
        is_normalized=config.flag("norm_topk_prob", True),
        scores=RouterScores.SIGMOID,
        has_choice_bias=config.flag("use_expert_bias", True),
        weight_scale=config.number("routed_scaling_factor", 1.0),
        weight_floor=1e-6,
    )
    return _read(config, [mlp] * dense + [experts] * (count - dense))


def _dense(config: Config) -> MlpSpec:
    """The file's size is that of an MLP without a gate; with a gate it is two thirds, rounded."""
    config.only("block_use_swiglu", True)
    size = config.whole("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
    unit, factor = config.whole("block_multiple_of", 256), config.get("block_ffn_dim_multiplier")
    if config.flag("block_auto_adjust_ff_dim", True):
        size = 2 * size // 3
        if factor is not None:
            size = int(config.number("block_ffn_dim_multiplier") * size)
            size = -(-size // unit) * unit
    return MlpSpec(size, Activation.SILU)


def _read(config: Config, mlps: Sequence[MlpSpec | ExpertsSpec]) -> ModelSpec:
    sizes = read_sizes(config)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.only(name, sizes.hidden)
    config.only("num_heads", sizes.heads)
    config.only("use_pos_enc", True)
    for name in config.names():
        if name.endswith(("_init_scale", "_use_xavier_init")):
            config.get(name)
    conv = ShortConvSpec(
        sizes.hidden, config.whole("conv_L_cache", 3), has_bias=config.flag("conv_bias")
    )
    rope = read_rope(config, sizes, theta=config.number("theta", _THETA))
    attention = full_attention(sizes.head_dim, rope)
    layers = [
        LayerSpec(None, mlp, conv) if kind == "conv" else LayerSpec(attention, mlp)
        for kind, mlp in zip(_layer_types(config, sizes.layers), mlps, strict=True)
    ]
    eps = config.number("norm_eps", config.number("block_norm_eps", 1e-5))
    is_tied = config.flag("tie_embedding", True)
    norm = NormSpec(NormKind.RMS, eps)
    return make_spec(
        config, sizes, layers, norm, is_tied=is_tied, names=_NAMES, qk_norm=QkNorm.HEADS
    )


def _layer_types(config: Config, count: int) -> list[str]:
    """`conv` or `full_attention` for each layer; older files list the layers with attention."""
    types, full = config.items("layer_types"), config.items("full_attn_idxs")
    if types is None:
        full = list(range(count)) if full is None else full
        return ["full_attention" if index in full else "conv" for index in range(count)]
    return checked_kinds(types, count, ("conv", "full_attention"))


_NOTES = "short convolutions in most layers"
LFM2 = Family("LFM2", ("Lfm2ForCausalLM",), _read_dense, notes=_NOTES)
LFM2_MOE = Family("LFM2 MoE", ("Lfm2MoeForCausalLM",), _read_moe, notes=_NOTES)
