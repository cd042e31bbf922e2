"""Shapes of well-known models, for measuring speed with random weights.

Each is read by its family from a config.json with the model's own sizes.
"""

from collections.abc import Mapping

from mainstem.models.families import spec_from_config
from mainstem.models.spec import ModelSpec


def llama_shape(*sizes: float, max_positions: int = 131_072) -> ModelSpec:
    """Return the shape of a Llama without biases and with untied embeddings; sizes as in
    `_LLAMA_SIZES`."""
    return spec_from_config(_llama(*sizes) | {"max_position_embeddings": max_positions})


_LLAMA_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
)


def _llama(*sizes: float) -> dict[str, object]:
    return dict(zip(_LLAMA_SIZES, sizes, strict=True)) | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
    }


def _like(config: Mapping[str, object], architecture: str, **changes: object) -> dict[str, object]:
    return {**config, "architectures": [architecture], **changes}


_GEMMA3 = {
    "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0, "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512,
    "attention_k_eq_v": True, "sliding_window": 1024, "vocab_size": 262_144,
    "max_position_embeddings": 262_144, "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip
_QWEN36 = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
# fields of config.json
CONFIGS: dict[str, dict[str, object]] = {
    "llama31-8b": _llama(4096, 14336, 32, 32, 8, 128, 128_256, 500_000.0),
    "llama31-70b": _llama(8192, 28672, 80, 64, 8, 128, 128_256, 500_000.0),
    "llama32-1b": _llama(2048, 8192, 16, 32, 8, 64, 128_256, 500_000.0),
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, 128, 32_000, 10_000.0),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40, 128, 32_000, 10_000.0),
    "llama-30b": _llama(6656, 17920, 60, 52, 52, 128, 32_000, 10_000.0),
    "llama-65b": _llama(8192, 22016, 80, 64, 64, 128, 32_000, 10_000.0),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8, 128, 32_000, 10_000.0),
    "mistral-7b": _like(
        _llama(4096, 14336, 32, 32, 8, 128, 32_000, 10_000.0),
        "MistralForCausalLM",
        sliding_window=4096,
    ),
    "qwen25-7b": _like(
        _llama(3584, 18944, 28, 28, 4, 128, 152_064, 1e6), "Qwen2ForCausalLM"
    ),
    "qwen25-14b": _like(
        _llama(5120, 13824, 48, 40, 8, 128, 152_064, 1e6), "Qwen2ForCausalLM"
    ),
    "qwen3-30b-a3b": _like(
        _llama(2048, 6144, 48, 32, 4, 128, 151_936, 1e6),
        "Qwen3MoeForCausalLM",
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "qwen36-27b": _like(
        _llama(5120, 17408, 64, 24, 4, 256, 248_320, 1e7),
        "Qwen3_5ForCausalLM",
        **_QWEN36 | {"linear_num_value_heads": 48},
    ),
    "qwen36-35b-a3b": _like(
        _llama(2048, 512, 40, 16, 2, 256, 248_320, 1e7),
        "Qwen3_5MoeForCausalLM",
        **_QWEN36 | {"linear_num_value_heads": 32},
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "gemma3-12b": _like(
        _llama(3840, 15360, 48, 16, 8, 256, 262_208, 1e6), "Gemma3ForCausalLM", **_GEMMA3
    ),
    "gemma3-27b": _like(
        _llama(5376, 21504, 62, 32, 16, 128, 262_208, 1e6),
        "Gemma3ForCausalLM",
        **_GEMMA3 | {"query_pre_attn_scalar": 168},
    ),
    "gemma4-31b": _GEMMA4 | {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
    "gemma4-26b-a4b": _GEMMA4 | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "granite-4-h-small": _like(
        _llama(4096, 768, 40, 32, 8, 128, 100_352, 10_000.0),
        "GraniteMoeHybridForCausalLM",
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536,
        position_embedding_type="nope", mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        attention_multiplier=0.0078125, embedding_multiplier=12, logits_scaling=16,
        residual_multiplier=0.22, tie_word_embeddings=True,
    ),
    "gpt-oss-20b": _like(
        _llama(2880, 2880, 24, 64, 8, 64, 201_088, 150_000.0),
        "GptOssForCausalLM",
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
        swiglu_limit=7.0,
        layer_types=["sliding_attention", "full_attention"] * 12,
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    ),
    # the model has 2,048 positions; the workloads need a few more
    "phi-2": {
        "architectures": ["PhiForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 51_200,
        "max_position_embeddings": 4096, "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new", "dtype": "bfloat16",
    },
    "falcon-40b": {  # more positions, as above
        "architectures": ["FalconForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65_024, "alibi": False,
        "max_position_embeddings": 4096, "new_decoder_architecture": True, "bias": False,
        "parallel_attn": True, "layer_norm_epsilon": 1e-5, "dtype": "bfloat16",
    },
    "tiny": _llama(128, 256, 2, 4, 2, 64, 512, 10_000.0) | {"max_position_embeddings": 4096},
}  # fmt: skip

SHAPES: dict[str, ModelSpec] = {name: spec_from_config(config) for name, config in CONFIGS.items()}
