"""Nemotron-H and Nemotron 3: a layer is one of Mamba-2, attention (without positions), an MLP or
experts. MLPs and experts have no gate."""

from collections.abc import Mapping

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    Sizes,
    full_attention,
    make_spec,
    read_activation,
)
from mainstem.models.families.mamba import checked, mamba_names, read_dt_limits
from mainstem.models.families.routers import read_sigmoid_experts
from mainstem.models.names import Names
from mainstem.models.recurrence import GateOrder, MambaSpec
from mainstem.models.spec import (
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormSpec,
)

_NAMES = mamba_names(
    Names(
        embedding="backbone.embeddings",
        layer="backbone.layers.{}",
        final_norm="backbone.norm_f",
        attention_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        router="mixer.gate",
        choice_bias="mixer.gate.e_score_correction_bias",
        expert_up="mixer.experts.{}.up_proj",
        expert_down="mixer.experts.{}.down_proj",
        stacked_experts=("mixer.experts.up_proj", "mixer.experts.down_proj"),
        shared_gate_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        ignored_beginnings=("mtp.",),
        renamed_beginnings=(("model.", "backbone."),),
    ),
    "mixer",
)
_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _read(config: Config) -> ModelSpec:
    kinds = _kinds(config)
    sizes = _sizes(config, len(kinds))
    _check(config)
    layer = _layers(config, sizes, frozenset(kinds))
    eps = config.number("layer_norm_epsilon", config.number("norm_eps", 1e-5))
    return make_spec(
        config,
        sizes,
        [layer[kind] for kind in kinds],
        NormSpec(NormKind.RMS, eps, is_rounded_once=True),
        names=_NAMES,
        dropped=("heads for several tokens",) if config.get("num_nextn_predict_layers") else (),
    )


def _kinds(config: Config) -> list[str]:
    """The kind of each layer: a list, or in older files a letter for each."""
    listed, pattern = config.items("layers_block_type"), config.get("hybrid_override_pattern")
    found = list(str(pattern or "")) if listed is None else [str(kind) for kind in listed]
    kinds = [_OLDER_KINDS.get(kind, _KINDS.get(kind, kind)) for kind in found]
    if unknown := [kind for kind in kinds if kind not in _KINDS.values()]:
        raise UnsupportedModel(
            f"layers of kind {unknown[0]!r} are not supported; known: {', '.join(_KINDS.values())}"
        )
    if not kinds:
        raise UnsupportedModel("config field layers_block_type is missing")
    config.only("num_hidden_layers", len(kinds))
    return kinds


def _sizes(config: Config, layers: int) -> Sizes:
    head_dim = config.whole("attention_head_dim", 128)
    heads = config.whole("num_attention_heads")
    return Sizes(
        vocab=config.whole("vocab_size"),
        hidden=config.whole("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", head_dim),
        positions=config.whole("max_position_embeddings"),
    )


def _check(config: Config) -> None:
    """Read the fields that change nothing, and refuse values that are not supported."""
    for name in (
        "rope_theta rope_parameters rope_scaling partial_rotary_factor",  # no layer has positions
        "chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep",
        "time_step_floor time_step_max time_step_min rescale_prenorm_residual expand",
        "mtp_layers_block_type mtp_hybrid_override_pattern moe_shared_expert_overlap",
        "num_nextn_predict_layers",
    ):
        for each in name.split():
            config.get(each)
    config.only("mamba_hidden_act", "silu")
    config.only("mamba_proj_bias", False)
    config.only("residual_in_fp32", False)
    config.only("sliding_window")


def _layers(config: Config, sizes: Sizes, kinds: frozenset[str]) -> Mapping[str, LayerSpec]:
    """The layer of each kind. Fields of experts are in every file, also where there are none."""
    activation = read_activation(config, "mlp_hidden_act", "relu2")
    mlp = MlpSpec(
        config.whole("intermediate_size"),
        activation,
        is_gated=False,
        has_bias=config.flag("mlp_bias"),
    )
    layers = {
        "linear_attention": LayerSpec(None, None, _mamba(config)),
        "full_attention": LayerSpec(full_attention(sizes.head_dim, None), None),
        "mlp": LayerSpec(None, mlp),
    }
    if "moe" in kinds:
        layers["moe"] = LayerSpec(None, _experts(config, mlp))
    else:
        for name in config.names():
            if name.startswith(("moe_", "n_routed_", "n_shared_", "n_group", "topk_group")):
                config.get(name)
        for name in ("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"):
            config.get(name)
    return layers


def _mamba(config: Config) -> MambaSpec:
    """transformers' kernel for prompts limits dt by `time_step_min`, but not its kernel for the
    next token; the models were trained with `time_step_limit`."""
    groups = config.whole("n_groups", 8)
    return checked(
        MambaSpec(
            heads=config.whole("mamba_num_heads", 128),
            head_dim=config.whole("mamba_head_dim", 64),
            groups=groups,
            state_dim=config.whole("ssm_state_size", 128),
            kernel=config.whole("conv_kernel", 4),
            gate_order=GateOrder.GATE_FIRST,
            norm_groups=groups,
            dt_limits=read_dt_limits(config),
            has_bias=config.flag("use_bias"),
            has_conv_bias=config.flag("use_conv_bias", True),
        )
    )


def _experts(config: Config, mlp: MlpSpec) -> ExpertsSpec:
    shared_size = config.whole("moe_shared_expert_intermediate_size")
    config.only("n_shared_experts", 1)
    if config.has("moe_latent_size"):
        raise UnsupportedModel(
            f"config field moe_latent_size={config.get('moe_latent_size')!r}: experts of a "
            "smaller latent space are not supported"
        )
    if mlp.has_bias:
        raise UnsupportedModel("config field mlp_bias=True: experts with biases are not supported")
    return read_sigmoid_experts(config, mlp.activation, shared_size=shared_size, is_gated=False)


FAMILY = Family(
    "Nemotron-H, Nemotron 3",
    ("NemotronHForCausalLM",),
    _read,
    notes="layers of Mamba-2, of attention, and of MLPs or experts",
)
