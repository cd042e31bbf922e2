"""gpt-oss: experts with biases and a clamped activation, windows in every other layer, sinks."""

from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.spec import Activation, ExpertsSpec, ModelSpec, layers_of

_NAMES = Names(
    router="mlp.router",
    expert_layout=ExpertLayout.INTERLEAVED,
    expert_gate="mlp.experts.gate_up_proj",
    expert_down="mlp.experts.down_proj",
)


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        raise UnsupportedModel("config field rope_scaling is missing")
    full = replace(common.rotated(config, sizes, theta=150_000.0), has_sinks=True)
    sliding = full
    if not config.is_null("sliding_window"):
        sliding = replace(full, window=config.whole("sliding_window", 128))
    types = common.layer_types(config, sizes.layers, pattern=2)
    return common.make_spec(
        config,
        sizes,
        layers_of(common.by_kind(types, full, sliding), _experts(config)),
        replace(common.rms_norm(config, 1e-5), is_rounded_once=True),
        names=_NAMES,
        has_bias=config.flag("attention_bias", True),
    )


def _experts(config: Config) -> ExpertsSpec:
    # Activation.CLAMPED_SILU has these numbers built in
    config.only("swiglu_limit", 7.0)
    config.only("swiglu_alpha", 1.702)
    config.only("hidden_act", "silu")
    top_k = config.whole("num_experts_per_tok")
    config.only("experts_per_token", top_k)  # an older name for the same
    config.get("initial_context_length")  # an older name for the rope's original length
    return ExpertsSpec(
        num_experts=config.whole("num_local_experts"),
        top_k=top_k,
        size=config.whole("intermediate_size"),
        activation=Activation.CLAMPED_SILU,
        has_bias=True,
    )


FAMILY = Family(
    "gpt-oss", ("GptOssForCausalLM",), _read, notes="experts, sinks, windows; MXFP4 or 16 bits"
)
