"""ERNIE 4.5: Llama's block with rotary pairs of adjacent dims; some models have experts."""

from collections.abc import Sequence
from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ExpertsSpec, LayerSpec, MlpSpec, ModelSpec

_MOE_NAMES = Names(
    choice_bias="mlp.moe_statics.e_score_correction_bias",
    is_choice_bias_row=True,
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    ignored_beginnings=("model.mtp_", "mtp_"),
)


def _read_dense(config: Config) -> ModelSpec:
    return _read(config, [_mlp(config)] * config.whole("num_hidden_layers"), Names())


def _read_moe(config: Config) -> ModelSpec:
    """Some layers have experts, chosen by a softmax and a bias."""
    config.only("use_bias", False)
    for name in ("moe_capacity", "num_nextn_predict_layers", "moe_use_aux_free"):
        config.get(name)
    config.only("moe_gate", "topk")
    num_shared = config.get("moe_num_shared_experts")
    size, shared = config.whole("moe_intermediate_size", 1536), 2
    if num_shared is not None and num_shared != 0:
        shared = config.whole("moe_num_shared_experts")
    experts = ExpertsSpec(
        num_experts=config.whole("moe_num_experts", 64),
        top_k=config.whole("moe_k", 6),
        size=size,
        activation=common.read_activation(config),
        shared_size=None if num_shared == 0 else shared * size,
        has_choice_bias=True,
        weight_floor=config.number("moe_norm_min", 1e-12),
    )
    count, step = config.whole("num_hidden_layers"), config.whole("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    first = first if isinstance(first, int) else 1
    last = last if isinstance(last, int) and last >= 0 else count - 1
    mlp = _mlp(config)
    has_experts = [(i + 1) % step == 0 and first <= i <= last for i in range(count)]
    return _read(config, [experts if has else mlp for has in has_experts], _MOE_NAMES)


def _mlp(config: Config) -> MlpSpec:
    return common.gated_mlp(config, has_bias=config.flag("use_bias"))


def _read(config: Config, mlps: Sequence[MlpSpec | ExpertsSpec], names: Names) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=None if config.has("moe_num_experts") else 128)
    rope = replace(common.read_rope(config, sizes, theta=500_000.0), has_adjacent_pairs=True)
    attention = common.full_attention(sizes.head_dim, rope)
    return common.make_spec(
        config,
        sizes,
        [LayerSpec(attention, mlp) for mlp in mlps],
        common.rms_norm(config, 1e-5),
        names=names,
        is_tied=True,
        has_bias=config.flag("use_bias"),
    )


DENSE = Family("ERNIE 4.5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _read_dense)
MOE = Family(
    "ERNIE 4.5 MoE",
    ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
    _read_moe,
    notes="experts by softmax scores and a bias, some shared",
)
