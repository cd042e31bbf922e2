"""GPT-NeoX (Pythia): LayerNorm, attention and a plain MLP side by side with a norm each, a quarter
of each head rotated."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family
from mainstem.models.names import Names, QkvOrder
from mainstem.models.spec import ModelSpec, Residual, same_layers

_NAMES = Names(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    qkv_order=QkvOrder.GROUPS,
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    ignored_endings=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    # transformers 5 writes the head like other models do
    renamed_beginnings=(("lm_head.", "embed_out."),),
)


def _read(config: Config) -> ModelSpec:
    sizes = common.read_sizes(config)
    rope = common.read_rope(
        config,
        sizes,
        theta=config.number("rotary_emb_base", 10_000.0),
        rotary_share=config.number("rotary_pct", 0.25),
    )
    is_parallel = config.flag("use_parallel_residual", True)
    return common.make_spec(
        config,
        sizes,
        same_layers(
            common.full_attention(sizes.head_dim, rope),
            common.plain_mlp(config, "gelu", has_bias=True),
            sizes.layers,
        ),
        common.layer_norm(config),
        names=_NAMES,
        residual=Residual.PARALLEL_TWO_NORMS if is_parallel else Residual.SERIAL,
        has_bias=config.flag("attention_bias", True),
    )


FAMILY = Family("GPT-NeoX, Pythia", ("GPTNeoXForCausalLM",), _read)
