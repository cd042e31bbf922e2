"""Mixtral: Mistral's block with experts in place of the MLP."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ExpertsSpec, ModelSpec, layers_of

_NAMES = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes, theta=1e6)
    attention = common.with_window(config, attention)
    experts = ExpertsSpec(
        num_experts=config.whole("num_local_experts", 8),
        top_k=config.whole("num_experts_per_tok", 2),
        size=config.whole("intermediate_size"),
        activation=common.read_activation(config),
    )
    layers = layers_of([attention] * sizes.layers, experts)
    return common.make_spec(config, sizes, layers, common.rms_norm(config, 1e-5), names=_NAMES)


FAMILY = Family("Mixtral", ("MixtralForCausalLM",), _read, notes="experts")
