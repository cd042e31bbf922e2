"""StableLM 3B and StableLM 2: Llama's block, LayerNorm, a quarter of each head rotated."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, QkNorm, Residual, same_layers

_NAMES = Names(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    attention = common.rotated(config, sizes, rotary_share=0.25)
    is_parallel = config.flag("use_parallel_residual")
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, common.gated_mlp(config), sizes.layers),
        common.layer_norm(config),
        names=_NAMES,
        residual=Residual.PARALLEL if is_parallel else Residual.SERIAL,
        qk_norm=QkNorm.LAYER_EACH if config.flag("qk_layernorm") else QkNorm.NONE,
        has_qkv_bias=config.flag("use_qkv_bias"),
    )


FAMILY = Family("StableLM", ("StableLmForCausalLM",), _read)
