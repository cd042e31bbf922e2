"""Qwen 2 and 3 with experts in some or all layers; Qwen 2 also has a shared expert."""

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.spec import ExpertsSpec, LayerSpec, ModelSpec, QkNorm


def _read_qwen2(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    shared_size = config.whole("shared_expert_intermediate_size", 5632)
    layers = _read_layers(config, sizes, shared_size)
    has_bias = config.flag("qkv_bias", True)
    return common.make_spec(config, sizes, layers, common.rms_norm(config), has_qkv_bias=has_bias)


def _read_qwen3(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    # Qwen3-Coder says what every Qwen 3 does
    config.only("shared_expert_intermediate_size", 0)
    config.only("use_qk_norm", True)
    return common.make_spec(
        config,
        sizes,
        _read_layers(config, sizes, None),
        common.rms_norm(config),
        qk_norm=QkNorm.HEADS,
        has_bias=config.flag("attention_bias"),
    )


def _read_layers(config: Config, sizes: Sizes, shared_size: int | None) -> list[LayerSpec]:
    """Return the layers. Each `decoder_sparse_step`-th one that is not in `mlp_only_layers` has
    experts."""
    config.get("sliding_window")  # used only with use_sliding_window, which is refused
    attention = common.rotated(config, sizes)
    mlp = common.gated_mlp(config)
    older_first = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = ExpertsSpec(
        num_experts=config.whole(older_first),
        top_k=config.whole("num_experts_per_tok"),
        size=config.whole("moe_intermediate_size"),
        activation=common.read_activation(config),
        is_normalized=config.flag("norm_topk_prob"),
        shared_size=shared_size,
        has_shared_gate=shared_size is not None,
    )
    step, dense = config.whole("decoder_sparse_step", 1), config.items("mlp_only_layers") or []
    if not all(isinstance(index, int) for index in dense):
        raise UnsupportedModel(f"config field mlp_only_layers={dense!r} must be numbers of layers")
    return [
        LayerSpec(attention, mlp if index in dense or (index + 1) % step else experts)
        for index in range(sizes.layers)
    ]


QWEN2 = Family(
    "Qwen 2 MoE", ("Qwen2MoeForCausalLM",), _read_qwen2, notes="experts, one of them shared"
)
QWEN3 = Family("Qwen 3 MoE", ("Qwen3MoeForCausalLM",), _read_qwen3, notes="experts")
