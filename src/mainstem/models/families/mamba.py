"""What families with Mamba-2 layers have in common: fields of config.json and names of tensors."""

import math
from dataclasses import replace

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.names import Names, RecurrentOrder
from mainstem.models.recurrence import GateOrder, MambaSpec


def mamba_names(names: Names, prefix: str) -> Names:
    """The names with those of a Mamba layer whose tensors begin with `prefix`."""
    return replace(
        names,
        recurrent=(f"{prefix}.in_proj",),
        recurrent_order=RecurrentOrder.GATE_FIRST,
        conv=f"{prefix}.conv1d",
        decay=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        recurrent_norm=f"{prefix}.norm",
        recurrent_out=f"{prefix}.out_proj",
    )


def read_mamba(config: Config, hidden_size: int, gate_order: GateOrder) -> MambaSpec:
    """Read the fields that begin with `mamba_`, which Granite and Falcon-H1 have."""
    config.only("hidden_act", "silu")
    config.get("mamba_chunk_size")  # of transformers' kernels
    heads = config.whole("mamba_n_heads", 128)
    width = config.whole("mamba_expand", 2) * hidden_size
    if config.has("mamba_d_ssm"):
        width = config.whole("mamba_d_ssm")
    if config.get("mamba_d_head") == "auto":
        head_dim = width // heads
    else:
        head_dim = config.whole("mamba_d_head", width // heads)
    if heads * head_dim != width:
        raise UnsupportedModel(
            f"mamba_n_heads={heads} heads of mamba_d_head={head_dim} are not {width} columns wide"
        )
    return checked(
        MambaSpec(
            heads=heads,
            head_dim=head_dim,
            groups=config.whole("mamba_n_groups", 1),
            state_dim=config.whole("mamba_d_state", 256),
            kernel=config.whole("mamba_d_conv", 4),
            gate_order=gate_order,
            dt_limits=read_dt_limits(config),
            has_bias=config.flag("mamba_proj_bias"),
            has_conv_bias=config.flag("mamba_conv_bias", True),
        )
    )


def checked(spec: MambaSpec) -> MambaSpec:
    if spec.heads % spec.groups:
        raise UnsupportedModel(
            f"{spec.heads} Mamba heads are not a multiple of {spec.groups} groups"
        )
    return spec


def read_dt_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`: a list of two numbers, where transformers writes infinity as an object."""
    limits = config.items("time_step_limit")
    if limits is None:
        return (0.0, math.inf)
    found = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    low, high = (found[0], found[1]) if len(found) == 2 else (None, None)
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise UnsupportedModel(f"config field time_step_limit={limits!r} must be two numbers")
    return (float(low), float(high))
