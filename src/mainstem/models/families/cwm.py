"""Code World Model: Llama's block with windows in three of four layers."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import ModelSpec, layers_of

_PATTERN = 4  # layers 0, 4, 8, ... see all tokens


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=128)
    full = common.rotated(config, sizes, theta=1e6)
    types = common.layer_types(config, sizes.layers, pattern=_PATTERN, first_full=0)
    kinds = common.by_kind(types, full, common.with_window(config, full, default=8192))
    mlp = common.gated_mlp(config, has_bias=config.flag("mlp_bias"))
    return common.make_spec(config, sizes, layers_of(kinds, mlp), common.rms_norm(config, 1e-5))


FAMILY = Family("CWM", ("CwmForCausalLM",), _read, notes="windows in 3 of 4 layers")
