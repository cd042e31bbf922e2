"""Falcon-H1: each layer has attention and a Mamba-2 recurrence side by side, and factors on most
products. Factors are folded into the weights when they are read."""

from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    gated_mlp,
    make_spec,
    read_rope,
    read_sizes,
    rms_norm,
)
from mainstem.models.families.mamba import mamba_names, read_mamba
from mainstem.models.names import Names
from mainstem.models.recurrence import GateOrder, MambaSpec
from mainstem.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

_NAMES = mamba_names(
    Names(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    "mamba",
)


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    for name in ("num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices"):
        config.get(name)
    for name in ("layer_types", "layers_block_type"):
        config.only(name, ["hybrid"] * sizes.layers)
    config.only("mamba_use_mlp", True)
    config.only("mamba_proj_bias", False)
    config.only("projectors_bias", False)
    attention = _attention(config, sizes.head_dim, read_rope(config, sizes))
    layer = LayerSpec(attention, _mlp(config), _mamba(config, sizes.hidden))
    return make_spec(
        config,
        sizes,
        [layer] * sizes.layers,
        rms_norm(config, default_eps=1e-5),
        names=_NAMES,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def _attention(config: Config, head_dim: int, rope: RopeSpec) -> AttentionSpec:
    """The factor of the input is part of the scores twice, and once of the values."""
    attention, before = (
        full_attention(head_dim, rope),
        config.number("attention_in_multiplier", 1.0),
    )
    return replace(
        attention,
        scale=attention.scale * config.number("key_multiplier", 1.0) * before**2,
        out_scale=config.number("attention_out_multiplier", 1.0) * before,
    )


def _mlp(config: Config) -> MlpSpec:
    gate, out = _factors(config, "mlp_multipliers", 2)
    mlp = gated_mlp(config, has_bias=config.flag("mlp_bias"))
    return replace(mlp, gate_scale=gate, out_scale=out)


def _mamba(config: Config, hidden_size: int) -> MambaSpec:
    order = GateOrder.NO_NORM
    is_norm_first = config.flag("mamba_norm_before_gate", True)
    if config.flag("mamba_rms_norm"):
        order = GateOrder.NORM_FIRST if is_norm_first else GateOrder.GATE_FIRST
    spec = read_mamba(config, hidden_size, order)
    before = config.number("ssm_in_multiplier", 1.0)
    return replace(
        spec,
        norm_groups=spec.groups,
        row_scales=tuple(before * factor for factor in _factors(config, "ssm_multipliers", 5)),
        out_scale=config.number("ssm_out_multiplier", 1.0),
    )


def _factors(config: Config, name: str, count: int) -> tuple[float, ...]:
    if not config.has(name):
        return (1.0,) * count
    factors = config.numbers(name)
    if len(factors) != count:
        raise UnsupportedModel(f"config field {name} has {len(factors)} numbers instead of {count}")
    return factors


FAMILY = Family(
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    _read,
    notes="attention and Mamba-2 side by side in each layer",
)
