"""Mixtral: Mistral's block with experts in place of the MLP."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    make_spec,
    read_activation,
    read_rope,
    read_sizes,
    rms_norm,
    with_window,
)
from mainstem.models.names import Names
from mainstem.models.spec import ExpertsSpec, ModelSpec, layers_of

_NAMES = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    attention = full_attention(sizes.head_dim, read_rope(config, sizes, theta=1e6))
    attention = with_window(config, attention)
    experts = ExpertsSpec(
        num_experts=config.whole("num_local_experts", 8),
        top_k=config.whole("num_experts_per_tok", 2),
        size=config.whole("intermediate_size"),
        activation=read_activation(config),
    )
    layers = layers_of([attention] * sizes.layers, experts)
    return make_spec(config, sizes, layers, rms_norm(config, 1e-5), names=_NAMES)


FAMILY = Family("Mixtral", ("MixtralForCausalLM",), _read, notes="experts")
