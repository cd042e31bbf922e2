"""StableLM 3B and StableLM 2 1.6B: Llama's block, LayerNorm, a quarter of each head rotated."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.spec import ModelSpec, Residual, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.only("qk_layernorm", False)  # StableLM 2 12B has norms of heads
    attention = common.rotated(config, sizes, rotary_share=0.25)
    is_parallel = config.flag("use_parallel_residual")
    return common.make_spec(
        config,
        sizes,
        same_layers(attention, common.gated_mlp(config), sizes.layers),
        common.layer_norm(config),
        residual=Residual.PARALLEL if is_parallel else Residual.SERIAL,
        has_qkv_bias=config.flag("use_qkv_bias"),
    )


FAMILY = Family("StableLM", ("StableLmForCausalLM",), _read, notes="without norms of heads")
