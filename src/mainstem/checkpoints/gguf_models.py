"""Architectures of GGUF files: config.json, names of tensors, and changes to their values."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.checkpoints.gguf_fields import Fields
from mainstem.core.errors import ModelNotFound

Floats = NDArray[np.float32]

# names of a layer's tensors, without ".weight" and ".bias"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    **_LAYER_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF file of one architecture becomes a folder in the Hugging Face layout."""

    layer_names: dict[str, str]
    # fields of config.json in addition to those that all architectures have
    config: Callable[[Fields], dict[str, object]]
    # converts a tensor to transformers' form; `name` is the tensor's name in transformers
    restore: Callable[[Fields, str, Floats], Floats]


def architecture_of(fields: Fields) -> Architecture:
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelNotFound(f"the GGUF file has architecture {name}, known: {known}")
    return _ARCHITECTURES[name]


def model_config(fields: Fields, is_tied: bool) -> dict[str, object]:
    """The contents of config.json."""
    name = fields.text("general.architecture")
    common = {
        "attention_dropout": 0.0,
        **{
            f"{role}_token_id": fields.whole(f"tokenizer.ggml.{theirs}_token_id")
            for role, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
        "hidden_size": fields.whole(f"{name}.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": fields.whole(f"{name}.feed_forward_length"),
        "max_position_embeddings": fields.whole(f"{name}.context_length"),
        "num_attention_heads": fields.whole(f"{name}.attention.head_count"),
        "num_hidden_layers": fields.whole(f"{name}.block_count"),
        "num_key_value_heads": fields.whole(f"{name}.attention.head_count_kv"),
        "rms_norm_eps": fields.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": fields.real(f"{name}.rope.freq_base"),
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": len(fields.items("tokenizer.ggml.tokens")),
    }
    if fields.has(f"{name}.rope.scaling.type"):
        raise ModelNotFound(f"the GGUF file has {name}.rope.scaling, which is not converted")
    return {**architecture_of(fields).config(fields), **common}


def _llama_config(fields: Fields) -> dict[str, object]:
    hidden, heads = (
        fields.whole(f"llama.{name}") for name in ("embedding_length", "attention.head_count")
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
    }


def _qwen2_config(fields: Fields) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _gemma3_config(fields: Fields) -> dict[str, object]:
    """Adds values that GGUF files leave out because llama.cpp has them built in: which layers
    attend to all tokens, and the rope of the other layers."""
    head_dim, count = (
        fields.whole("gemma3.attention.key_length"),
        fields.whole("gemma3.block_count"),
    )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [
            "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(count)
        ],
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": 10000.0,
        "sliding_window": fields.whole("gemma3.attention.sliding_window"),
    }


def _restore_llama(fields: Fields, name: str, values: Floats) -> Floats:
    """Change the rows of q and k from llama.cpp's order (rotary pairs) to Hugging Face's
    (halves)."""
    for part, count in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
        if name.endswith(f"{part}.weight"):
            heads = fields.whole(f"llama.attention.{count}")
            rows, columns = values.shape
            pairs = values.reshape(heads, rows // heads // 2, 2, columns)
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
    return values


def _restore_qwen2(fields: Fields, name: str, values: Floats) -> Floats:
    """Change nothing: the rows are in the same order as in Hugging Face's files."""
    return values


def _restore_gemma3(fields: Fields, name: str, values: Floats) -> Floats:
    """Subtract the 1 that llama.cpp has added to the gains, since transformers adds it itself."""
    return values - 1 if name.endswith("norm.weight") else values


_ARCHITECTURES = {
    "llama": Architecture(_LAYER_NAMES, _llama_config, _restore_llama),
    "qwen2": Architecture(_LAYER_NAMES, _qwen2_config, _restore_qwen2),
    "gemma3": Architecture(_GEMMA_NAMES, _gemma3_config, _restore_gemma3),
}
