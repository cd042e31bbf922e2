"""StableLM 3B and StableLM 2 1.6B: Llama's block, LayerNorm, a quarter of each head rotated."""

from mainstem.models.config_file import Config
from mainstem.models.families.common import (
    Family,
    full_attention,
    gated_mlp,
    layer_norm,
    make_spec,
    read_rope,
    read_sizes,
)
from mainstem.models.spec import ModelSpec, Residual, same_layers


def _read(config: Config) -> ModelSpec:
    sizes = read_sizes(config)
    config.only("qk_layernorm", False)  # StableLM 2 12B has norms of heads
    attention = full_attention(sizes.head_dim, read_rope(config, sizes, rotary_share=0.25))
    is_parallel = config.flag("use_parallel_residual")
    return make_spec(
        config,
        sizes,
        same_layers(attention, gated_mlp(config), sizes.layers),
        layer_norm(config),
        residual=Residual.PARALLEL if is_parallel else Residual.SERIAL,
        has_qkv_bias=config.flag("use_qkv_bias"),
    )


FAMILY = Family("StableLM", ("StableLmForCausalLM",), _read, notes="without norms of heads")
