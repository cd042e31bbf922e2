"""Experts that are chosen by sigmoid scores plus a bias, as in DeepSeek-V3, GLM-4.5, Nemotron 3."""

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.spec import Activation, ExpertsSpec, RouterScores


def read_sigmoid_experts(
    config: Config, activation: Activation, *, shared_size: int | None, is_gated: bool = True
) -> ExpertsSpec:
    """Read DeepSeek-V3's fields."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    groups, chosen = config.whole("n_group", 1), config.whole("topk_group", 1)
    if chosen < groups:
        raise UnsupportedModel(
            f"experts of {chosen} of {groups} groups (topk_group, n_group) are not supported; only "
            "models that choose among all experts are"
        )
    return ExpertsSpec(
        num_experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        size=config.whole("moe_intermediate_size"),
        activation=activation,
        is_gated=is_gated,
        is_normalized=config.flag("norm_topk_prob", True),
        shared_size=shared_size,
        scores=RouterScores.SIGMOID,
        has_choice_bias=True,
        weight_scale=config.number("routed_scaling_factor", 1.0),
        weight_floor=1e-20,
    )
