"""Small models of every kind of block, with no weight at its default."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedConfig
from mainstem.models.families import spec_from_config
from mainstem.models.shard import shards_that_divide
from mainstem.models.spec import ModelSpec
from mainstem.models.weights import RandomWeights, WeightSource

_SMALL: dict[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 14,
    "global_head_dim": 128, "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh", "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
_CONFIGS: dict[str, Mapping[str, object]] = {
    "PhiForCausalLM": {
        "hidden_size": 160, "intermediate_size": 96, "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5, "num_key_value_heads": 2,
        "head_dim": None, "rms_norm_eps": None,
    },
    "Phi with norms of heads": {
        "architectures": ["PhiForCausalLM"], "qk_layernorm": True, "layer_norm_eps": 1e-5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None, "hidden_size": 256,
        "rms_norm_eps": None,
    },
    "StableLM with norms of heads": {
        "architectures": ["StableLmForCausalLM"], "qk_layernorm": True, "head_dim": None,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256,
        "rms_norm_eps": None,
    },
    "HunYuanDenseV1ForCausalLM": {
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "FalconForCausalLM": {
        "new_decoder_architecture": True, "parallel_attn": True, "bias": False, "alibi": False,
        "num_kv_heads": 1, "layer_norm_epsilon": 1e-5, "multi_query": False,
        "num_key_value_heads": None, "intermediate_size": None, "rms_norm_eps": None,
        "hidden_size": 128, "head_dim": None,
    },
    "Gemma2ForCausalLM": {
        "head_dim": 256, "query_pre_attn_scalar": 144, "sliding_window": 14,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 64, "sliding_window": 14, "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0, "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Gemma4ForCausalLM": _GEMMA4 | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True, "global_head_dim": 512,
    },
    "Gemma 4 with experts": _GEMMA4 | {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "num_key_value_heads": 2,
        "moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma 4 with inputs of layers": _GEMMA4 | {
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "CohereForCausalLM": {"layer_norm_eps": 1e-5, "rms_norm_eps": None},
    "NemotronForCausalLM": {
        "hidden_act": "relu2", "norm_eps": 1e-5, "rms_norm_eps": None, "attention_bias": True,
        "mlp_bias": True,
    },
    "OlmoForCausalLM": {"rms_norm_eps": None},
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32,
        "shared_intermediate_size": 48, "position_embedding_type": "rope",
        "layer_types": ["attention", "mamba"], "attention_multiplier": 0.1, "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
    "Qwen2MoeForCausalLM": _EXPERTS | {
        "num_experts": 6, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "Qwen3_5MoeForCausalLM": _EXPERTS | {
        "num_experts": 6, "shared_expert_intermediate_size": 48, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
    },
    "FalconH1ForCausalLM": {
        "mamba_n_heads": 2, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_n_groups": 2,
        "mamba_rms_norm": True, "mlp_multipliers": [0.8, 1.4], "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3, "ssm_multipliers": [0.7, 1.2, 0.5, 1.5, 0.4],
        "ssm_out_multiplier": 0.6,
    },
    "Lfm2MoeForCausalLM": _EXPERTS | {
        "num_experts": 6, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"],
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "rms_norm_eps": None,
    },
    "NemotronHForCausalLM": _EXPERTS | {
        "num_hidden_layers": 4, "hybrid_override_pattern": "M*-E", "mamba_num_heads": 2,
        "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 48, "time_step_limit": [0.3, 0.9],
        "rms_norm_eps": None,
    },
    "GptOssForCausalLM": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "sliding_window": 14, "attention_bias": True, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 128,
        },
    },
}  # fmt: skip


def _spec(architecture: str) -> ModelSpec:
    return spec_from_config({"architectures": [architecture], **_SMALL, **_CONFIGS[architecture]})


RECIPES: dict[str, ModelSpec] = {name: _spec(name) for name in _CONFIGS}


class _Weights(RandomWeights):
    """Gains of norms are around one; other weights are larger than a real model's, so that an error
    changes answers. A tensor depends only on its name: it is equal on every device and rank.

    If scores are not scaled (Gemma 4), the gains of keys are those that usual scores would need: a
    trained model has learned them. With gains around one, scores of 512 dims are far over 20, so
    that a token sees a single other one, and a rounding to bf16 changes which one that is."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, spec: ModelSpec, key_bias: float
    ) -> None:
        super().__init__(dtype, device, 0)
        self._spec, self._key_bias = spec, key_bias
        kinds = {layer.attention for layer in spec.layers if layer.attention is not None}
        self._is_scaled = all(kind.scale != 1.0 for kind in kinds)

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        sizes = tuple(shape)
        noise = torch.empty(sizes).normal_(generator=generator)[at]
        is_gain = "norm" in name and name.endswith(".weight")
        tensor = 1.0 + 0.2 * noise if is_gain else 0.15 * noise
        if name.endswith("k_norm.weight") and not self._is_scaled:
            tensor /= math.sqrt(sizes[0])
        if name.endswith("k_proj.bias") and self._key_bias:
            heads = tensor.view(-1, self._spec.head_dim)
            heads[:, self._spec.ropes[0].rotary_dim // 2 - 1] += self._key_bias
            heads[:, -1] -= self._key_bias
        return tensor.contiguous().to(self.device, self.dtype)


@dataclass(frozen=True)
class RecipeOrigin:
    """A source whose weights are equal on every device."""

    spec: ModelSpec
    key_bias: float = 0.0  # of keys in the pair that turns slowest, and in the last dim

    def digest(self) -> bytes:
        return b"recipe"

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return _Weights(dtype, device, self.spec, self.key_bias)

    def kv_scales(self) -> None:
        return None


def a_config(dtype: DType = DType.FP32) -> EngineConfig:
    return EngineConfig(
        ModelConfig(dtype=dtype),
        CacheConfig(page_size=16, kv_tokens=2048),
        SchedConfig(chunk_tokens=24),
    )


def can_split(spec: ModelSpec, ranks: int) -> bool:
    return ranks in shards_that_divide(spec, ranks)


def deeper(spec: ModelSpec) -> ModelSpec:
    """The same model with every layer twice."""
    return replace(spec, layers=spec.layers * 2)
