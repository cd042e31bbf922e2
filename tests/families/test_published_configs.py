"""config.json as makers published it: every field is known, and what follows from it is right."""

import json
from collections import Counter

import pytest

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from mainstem.models.spec import ExpertsSpec, MlpSpec, ModelSpec, QkNorm, RopeScaling

GEMMA_2_2B = """{
  "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
  "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
  "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
  "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
  "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
  "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "float32",
  "transformers_version": "4.42.4", "use_cache": true, "vocab_size": 256000
}"""
GEMMA_3_270M = """{
  "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "eos_token_id": 1,
  "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 640, "initializer_range": 0.02, "intermediate_size": 2048,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
    "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
    "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
    "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
    "sliding_attention", "sliding_attention", "full_attention"],
  "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
  "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
  "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 512,
  "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0",
  "use_bidirectional_attention": false, "use_cache": true, "vocab_size": 262144
}"""
GEMMA_3_12B_IT = """{
  "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
  "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
  "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
  "text_config": {
    "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text",
    "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
  },
  "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
  "vision_config": {
    "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
    "patch_size": 14, "vision_use_head": false
  }
}"""
MISTRAL_SMALL_3_1 = """{
  "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
  "model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
  "spatial_merge_size": 2,
  "text_config": {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
    "sliding_window": null, "use_cache": true, "vocab_size": 131072
  },
  "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
  "vision_config": {
    "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
    "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096,
    "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
    "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0
  },
  "vision_feature_layer": -1
}"""
MIXTRAL_8X7B = """{
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000
}"""
QWEN_15_MOE = """{
  "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
  "model_type": "qwen2_moe", "num_attention_heads": 16, "num_hidden_layers": 24,
  "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
  "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
  "norm_topk_prob": false, "output_router_logits": false, "router_aux_loss_coef": 0.001
}"""
QWEN_3_30B_A3B = """{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
  "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
  "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
  "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
GPT_OSS_20B = """{
  "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
  "intermediate_size": 2880,
  "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
  "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
  "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
  "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
  "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
}"""


def read(text: str, **changes: object) -> ModelSpec:
    return spec_from_config({**json.loads(text), **changes})


def windows(spec: ModelSpec) -> Counter[int | None]:
    return Counter(layer.attention.window for layer in spec.layers)


def test_gemma_2_2b() -> None:
    spec = read(GEMMA_2_2B)
    assert windows(spec) == {4096: 13, None: 13}
    assert spec.layers[0].attention.window == 4096
    assert {kind.softcap for kind in spec.attention_kinds} == {50.0}
    assert {kind.scale for kind in spec.attention_kinds} == {1 / 16}
    assert spec.logit_softcap == 30.0
    assert spec.embedding_scale == 48.0
    assert spec.has_tied_embeddings
    assert spec.norm.gain_offset == 1.0


def test_gemma_2_scales_its_scores_by_a_number_of_its_own() -> None:
    spec = read(GEMMA_2_2B, query_pre_attn_scalar=144, attn_logit_softcapping=None)
    assert {kind.scale for kind in spec.attention_kinds} == {1 / 12}
    assert {kind.softcap for kind in spec.attention_kinds} == {None}


def test_gemma_3_270m() -> None:
    spec = read(GEMMA_3_270M)
    assert windows(spec) == {512: 15, None: 3}
    assert [(kind.window, kind.rope and kind.rope.theta) for kind in spec.attention_kinds] == [
        (512, 1e4),
        (None, 1e6),
    ]
    assert (spec.head_dim, spec.num_kv_heads, spec.qk_norm) == (256, 1, QkNorm.HEADS)
    assert spec.logit_softcap is None
    assert {kind.softcap for kind in spec.attention_kinds} == {None}


def test_gemma_3_12b_is_the_text_part_of_a_multimodal_checkpoint() -> None:
    spec = read(GEMMA_3_12B_IT)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (3840, 48, 16)
    assert (spec.vocab_size, spec.max_positions) == (262_208, 131_072)
    assert spec.eos_ids == (1, 106)
    assert spec.dtype is DType.BF16
    assert spec.dropped
    assert windows(spec) == {1024: 40, None: 8}
    ropes = {kind.window: kind.rope for kind in spec.attention_kinds}
    full, local = ropes[None], ropes[1024]
    assert full is not None
    assert (full.theta, full.scaling, full.factor) == (1e6, RopeScaling.LINEAR, 8.0)
    assert local is not None
    assert (local.theta, local.scaling) == (1e4, RopeScaling.NONE)


def test_fields_of_the_text_part_are_known_or_refused() -> None:
    config = json.loads(GEMMA_3_12B_IT)
    config["text_config"]["scale_depth"] = 2
    with pytest.raises(UnsupportedModel, match="scale_depth"):
        spec_from_config(config)
    assert spec_from_config(config, ["scale_depth"]).ignored_fields == ("scale_depth",)


def test_mistral_small_3_1() -> None:
    spec = read(MISTRAL_SMALL_3_1)
    assert (spec.hidden_size, spec.num_layers, spec.head_dim) == (5120, 40, 128)
    assert windows(spec) == {None: 40}
    assert not spec.has_tied_embeddings
    assert spec.dropped


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    """Those of all layers, which are the same."""
    (mlp,) = {layer.mlp for layer in spec.layers}
    assert isinstance(mlp, ExpertsSpec)
    return mlp


def test_mixtral_8x7b() -> None:
    experts = experts_of(read(MIXTRAL_8X7B))
    assert (experts.num_experts, experts.top_k, experts.size) == (8, 2, 14336)
    assert experts.is_normalized
    assert experts.shared_size is None


def test_qwen_15_moe() -> None:
    spec = read(QWEN_15_MOE)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (60, 4, 1408)
    assert (experts.shared_size, experts.has_shared_gate) == (5632, True)
    assert not experts.is_normalized
    assert spec.has_qkv_bias
    assert windows(spec) == {None: 24}


def test_qwen_3_30b_a3b() -> None:
    spec = read(QWEN_3_30B_A3B)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (128, 8, 768)
    assert experts.is_normalized
    assert spec.qk_norm is QkNorm.HEADS


def test_qwen_has_experts_in_some_layers_only() -> None:
    spec = read(QWEN_3_30B_A3B, mlp_only_layers=[3], decoder_sparse_step=2)
    dense = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MlpSpec)]
    assert dense == sorted({3, *range(0, 48, 2)})


@pytest.mark.parametrize("text", [QWEN_15_MOE, QWEN_3_30B_A3B])
def test_windows_of_qwen_with_experts_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedModel, match="use_sliding_window"):
        read(text, use_sliding_window=True)


def test_gpt_oss_20b() -> None:
    spec = read(GPT_OSS_20B)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (32, 4, 2880)
    assert experts.has_bias
    assert (spec.has_qkv_bias, spec.has_out_bias) == (True, True)
    assert windows(spec) == {128: 12, None: 12}
    assert all(kind.has_sinks for kind in spec.attention_kinds)
    (rope,) = spec.ropes
    assert (rope.scaling, rope.factor, rope.has_whole_bounds) == (RopeScaling.YARN, 32.0, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
    ],
)
def test_what_gpt_oss_does_not_know_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read(GPT_OSS_20B, **changes)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("Qwen3NextForCausalLM", "layers of linear attention"),
        ("Qwen3_5ForConditionalGeneration", "layers of linear attention"),
        ("JambaForCausalLM", "Mamba layers"),
    ],
)
def test_hybrids_are_refused_with_the_reason(architecture: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{architecture} .* it has {why}, whose state"):
        read(QWEN_3_30B_A3B, architectures=[architecture])


def test_hybrid_layers_of_a_known_architecture_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="linear_attention layers are not supported"):
        read(GEMMA_3_270M, layer_types=["linear_attention"] * 18)
