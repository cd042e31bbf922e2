"""Phi 3, 3.5 and 4: Llama's block with fused products; models with 128k tokens use LongRoPE."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, same_layers

_NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    config.get("original_max_position_embeddings")  # only LongRoPE uses it
    for field in ("full_attn_mod", "interpolate_factor"):  # in Phi-4-mini's file
        config.only(field, 1)
    rope = common.read_rope(config, sizes, rotary_share=1.0)
    attention = common.with_window(config, common.full_attention(sizes.head_dim, rope))
    layers = same_layers(attention, common.gated_mlp(config), sizes.layers)
    return common.make_spec(config, sizes, layers, common.rms_norm(config, 1e-5), names=_NAMES)


FAMILY = Family(
    "Phi 3, 3.5, 4",
    ("Phi3ForCausalLM",),
    _read,
    notes="LongRoPE: max_model_len chooses between the short and the long factors",
)
