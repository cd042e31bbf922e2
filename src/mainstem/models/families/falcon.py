"""Falcon: 7B (one KV head; attention and MLP share a norm), 40B and 180B (separate norms), 11B."""

from mainstem.models.config_file import Config
from mainstem.models.families import common
from mainstem.models.families.common import Family, Sizes
from mainstem.models.names import Names, QkvOrder
from mainstem.models.spec import MlpSpec, ModelSpec, Residual, same_layers


def _read(config: Config) -> ModelSpec:
    config.only("alibi", False)
    is_new = config.flag("new_decoder_architecture")
    sizes = _sizes(config, is_new)
    attention = common.rotated(config, sizes)
    has_bias = config.flag("bias")
    residual = _residual(config, is_new)
    layers = same_layers(attention, _mlp(config, sizes.hidden, has_bias), sizes.layers)
    return common.make_spec(
        config,
        sizes,
        layers,
        common.layer_norm(config, "layer_norm_epsilon"),
        is_tied=True,
        names=_names(residual),
        residual=residual,
        has_bias=has_bias,
    )


def _sizes(config: Config, is_new: bool) -> Sizes:
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_kv_heads", heads)
    has_one = config.flag("multi_query", True)
    if not is_new:  # the older models do not use num_kv_heads
        kv_heads = 1 if has_one else heads
    return Sizes(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        positions=config.whole("max_position_embeddings", 2048),
    )


def _residual(config: Config, is_new: bool) -> Residual:
    is_parallel = config.flag("parallel_attn", True)
    num_norms = config.get("num_ln_in_parallel_attn")
    if not is_new:
        return Residual.PARALLEL if is_parallel else Residual.SERIAL
    config.only("parallel_attn", True)
    config.only("num_ln_in_parallel_attn", 1, 2)
    return Residual.PARALLEL if num_norms == 1 else Residual.PARALLEL_TWO_NORMS


def _mlp(config: Config, hidden: int, has_bias: bool) -> MlpSpec:
    size = config.whole("ffn_hidden_size", 4 * hidden)
    config.only("ff_factor", size // hidden)
    activation = common.read_activation(config, "activation", "gelu")
    return MlpSpec(size, activation, is_gated=False, has_bias=has_bias)


def _names(residual: Residual) -> Names:
    has_two = residual is Residual.PARALLEL_TWO_NORMS
    return Names(
        embedding="transformer.word_embeddings",
        layer="transformer.h.{}",
        final_norm="transformer.ln_f",
        attention_norm="ln_attn" if has_two else "input_layernorm",
        mlp_norm="ln_mlp" if has_two else "post_attention_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_order=QkvOrder.GROUPS,
        out="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


FAMILY = Family(
    "Falcon", ("FalconForCausalLM",), _read, notes="with rotary positions; ALiBi is refused"
)
