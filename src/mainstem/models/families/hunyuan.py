"""Hunyuan, dense and with experts: Llama's block, with queries and keys normed after rotation."""

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    full_attention,
    gated_mlp,
    make_spec,
    read_activation,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.names import Names
from mainstem.models.spec import ExpertsSpec, MlpSpec, ModelSpec, QkNorm, RopeSpec, layers_of

_NAMES = Names(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)

_UNUSED_WITH_ALPHA = (
    "type", "rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


def _read_dense(config: Config) -> ModelSpec:
    config.only("num_experts", 1)
    return _read(config, gated_mlp(config))


def _read_moe(config: Config) -> ModelSpec:
    """Softmax scores; the best experts' are scaled to a sum of 1. One shared MLP."""
    size = config.whole("intermediate_size")
    if _of_all_layers(config, "moe_intermediate_size", size) != size:
        raise UnsupportedModel("moe_intermediate_size must be intermediate_size")
    if _of_all_layers(config, "num_shared_expert", 1) != 1:
        raise UnsupportedModel("num_shared_expert must be 1")
    config.only("use_mixed_mlp_moe", True)
    config.only("norm_topk_prob", True)
    config.only("moe_layer_num_skipped", 0)
    experts = ExpertsSpec(
        num_experts=_of_all_layers(config, "num_experts", 1),
        top_k=_of_all_layers(config, "moe_topk", 1),
        size=size,
        activation=read_activation(config),
        shared_size=size,
    )
    return _read(config, experts)


def _of_all_layers(config: Config, name: str, default: int) -> int:
    """A number that the file has once, or for each layer; it must be the same for all."""
    listed = config.items(name) if isinstance(config.get(name), list) else None
    if listed is None:
        return config.whole(name, default)
    first = listed[0] if listed else None
    if not isinstance(first, int) or set(listed) != {first}:
        raise UnsupportedModel(f"config field {name}={listed!r}: layers must have the same number")
    return first


def _read(config: Config, mlp: MlpSpec | ExpertsSpec) -> ModelSpec:
    sizes = read_sizes(config)
    config.only("attention_head_dim", sizes.head_dim)
    config.only("norm_type", "rms", "hf_rms")
    for name in ("use_qk_norm", "use_rotary_pos_emb", "is_causal"):
        config.only(name, True)
    # layers that share K and V, latent attention, positions in images
    for name in ("use_cla", "use_mla", "position_embedding_xdrope", "mlp_bias"):
        config.only(name, False)
    # used only with use_cla; the end of a document in training; tokens without padding
    for name in ("cla_share_factor", "eod_token_id", "org_vocab_size"):
        config.get(name)
    attention = full_attention(sizes.head_dim, _read_rope(config, sizes))
    return make_spec(
        config,
        sizes,
        layers_of([attention] * sizes.layers, mlp),
        rms_norm(config, 1e-5),
        names=_NAMES,
        qk_norm=QkNorm.TURNED_HEADS,
        has_bias=config.flag("attention_bias"),
    )


def _read_rope(config: Config, sizes: Sizes) -> RopeSpec:
    """What the files call dynamic has a fixed `alpha`, which only changes theta."""
    table = config.table("rope_scaling").merged(config.table("rope_parameters"))
    if not table.get("alpha"):
        return read_rope(config, sizes)
    for name in _UNUSED_WITH_ALPHA:
        table.get(name)
    theta = table.number("rope_theta", config.number("rope_theta", 10000.0))
    dim = sizes.head_dim
    if unknown := table.unread():
        raise UnsupportedModel(f"the rope with alpha has unknown settings {sorted(unknown)}")
    return RopeSpec(theta * table.number("alpha") ** (dim / (dim - 2)), dim)


DENSE = Family(
    "Hunyuan", ("HunYuanDenseV1ForCausalLM",), _read_dense, notes="heads are normed after rotation"
)
MOE = Family(
    "Hunyuan MoE",
    ("HunYuanMoEV1ForCausalLM",),
    _read_moe,
    notes="experts, one of them shared; heads are normed after rotation",
)
