"""GLM-4 9B and GLM-4-0414, dense: half of each head rotated, in pairs of adjacent dims. The 0414
models also have norms after attention and MLP."""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names
from mainstem.models.spec import ModelSpec, NormPlace, same_layers

_NAMES = Names(
    gate_up=("mlp.gate_up_proj",),
    after_attention_norm="post_self_attn_layernorm",
    after_mlp_norm="post_mlp_layernorm",
)


def _read_glm(config: Config) -> ModelSpec:
    return _read(config, NormPlace.BEFORE)


def _read_glm4(config: Config) -> ModelSpec:
    return _read(config, NormPlace.BOTH)


def _read(config: Config, norm_place: NormPlace) -> ModelSpec:
    sizes = common.read_sizes(config, head_dim=128)
    rope = replace(common.read_rope(config, sizes, rotary_share=0.5), has_adjacent_pairs=True)
    layers = same_layers(
        common.full_attention(sizes.head_dim, rope), common.gated_mlp(config), sizes.layers
    )
    return common.make_spec(
        config,
        sizes,
        layers,
        common.rms_norm(config, 1.5625e-7),
        names=_NAMES,
        norm_place=norm_place,
        has_qkv_bias=config.flag("attention_bias", True),
    )


GLM = Family("GLM-4 9B", ("GlmForCausalLM",), _read_glm)
GLM4 = Family("GLM-4-0414", ("Glm4ForCausalLM",), _read_glm4)
