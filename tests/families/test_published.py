"""config.json of published models is read: sizes and kinds of layers; no weights are needed."""

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import read_spec, spec_from_config
from mainstem.models.spec import (
    Activation,
    ExpertsSpec,
    KvShape,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormPlace,
    QkNorm,
    Residual,
    RopeScaling,
)
from mainstem.models.weight_files import INDEX_FILE, SINGLE_FILE
from mainstem.runner.kv_size import kv_size
from tests.families.published import PUBLISHED

BILLIONS = {  # billions of weights, as published
    "huggyllama/llama-7b": 6.74,
    "the first LLaMA conversions": 32.53,
    "microsoft/phi-2": 2.78,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/Phi-3-mini-128k-instruct": 3.82,
    "microsoft/phi-4": 14.66,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "tiiuae/falcon-7b": 6.92,
    "tiiuae/falcon-40b": 41.30,
    "tiiuae/falcon-11B": 11.10,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "allenai/OLMo-2-1124-7B": 7.30,
    "ibm-granite/granite-3.1-8b-instruct": 8.17,
    "stabilityai/stablelm-2-1_6b": 1.64,
    "google/gemma-2-2b": 2.61,
    "google/gemma-3-270m": 0.27,
    "google/gemma-3-12b-it": 11.77,  # the text part, here and in the next lines
    "google/gemma-4-31B-it": 30.81,  # the rows of keys that are values, too, count twice
    "google/gemma-4-E2B-it": 2.28,  # without the embeddings of layers
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 23.57,
    "tiiuae/Falcon-H1-0.5B-Instruct": 0.52,
    "LiquidAI/LFM2-1.2B": 1.17,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8.89,
    # with experts: the weights that one token uses
    "mistralai/Mixtral-8x7B-v0.1": 12.88,
    "Qwen/Qwen1.5-MoE-A2.7B": 2.69,
    "Qwen/Qwen3-30B-A3B": 3.35,
    "google/gemma-4-26B-A4B-it": 3.84,
    "openai/gpt-oss-20b, in 16 bits": 4.19,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 3.58,
}


def read(name: str, **changes: object) -> ModelSpec:
    return spec_from_config({**PUBLISHED[name], **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_is_known_and_the_size_is_right(name: str) -> None:
    spec = read(name)
    assert spec.ignored_fields == ()
    num_tables = 1 if spec.has_tied_embeddings else 2
    found = spec.num_layer_params + num_tables * spec.vocab_size * spec.hidden_size
    assert found / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_phi_2_is_read() -> None:
    spec = read("microsoft/phi-2")
    assert (spec.head_dim, spec.rotary_dim(spec.attentions[0])) == (80, 32)
    assert (spec.norm.kind, spec.norm.has_bias) == (NormKind.LAYER, True)
    assert spec.residual is Residual.PARALLEL
    assert spec.layers[0].mlp == MlpSpec(10240, Activation.GELU_TANH, is_gated=False, has_bias=True)
    assert spec.has_head_bias


def test_phi_3_is_read() -> None:
    (kind,) = read("microsoft/Phi-3-mini-4k-instruct").attention_kinds
    assert kind.window == 2047
    spec = read("microsoft/Phi-3-mini-128k-instruct")
    (rope,) = spec.ropes
    assert (rope.scaling, rope.original_positions) == (RopeScaling.LONGROPE, 4096)
    assert rope.score_factor == pytest.approx(1.19024, abs=1e-5)
    assert spec.at_context(4096).ropes[0].divisors == rope.divisors
    assert spec.at_context(4097).ropes[0].divisors == rope.long_divisors
    assert [kind.window for kind in spec.at_context(131072).attention_kinds] == [None]


def test_phi_4_is_read() -> None:
    spec = read("microsoft/phi-4")
    assert (spec.num_kv_heads, spec.head_dim, spec.ropes[0].theta) == (10, 128, 250000)
    mini = read("microsoft/Phi-4-mini-instruct")
    assert (mini.head_dim, mini.rotary_dim(mini.attentions[0]), mini.has_tied_embeddings) == (
        128,
        96,
        True,
    )
    with pytest.raises(UnsupportedModel, match="longrope"):
        replace(mini, qk_norm=QkNorm.HEADS)  # a norm would cancel the factor on scores


@pytest.mark.parametrize(
    ("name", "kv_heads", "residual", "is_tied", "positions"),
    [
        ("tiiuae/falcon-7b", 1, Residual.PARALLEL, True, 2048),
        ("tiiuae/falcon-40b", 8, Residual.PARALLEL_TWO_NORMS, True, 2048),
        ("tiiuae/falcon-11B", 8, Residual.PARALLEL, False, 8192),
    ],
)
def test_falcon_is_read(
    name: str, kv_heads: int, residual: Residual, is_tied: bool, positions: int
) -> None:
    spec = read(name)
    assert (spec.num_kv_heads, spec.residual, spec.head_dim) == (
        kv_heads,
        residual,
        128 if name.endswith("11B") else 64,
    )
    assert (spec.has_tied_embeddings, spec.max_positions) == (is_tied, positions)


def test_smollm3_is_read() -> None:
    spec = read("HuggingFaceTB/SmolLM3-3B")
    assert [kind.rope is None for kind in spec.attentions[:8]] == [
        False,
        False,
        False,
        True,
    ] * 2
    assert spec.ropes[0].theta == 5e6
    assert spec.has_tied_embeddings
    windowed = read(
        "HuggingFaceTB/SmolLM3-3B", use_sliding_window=True, sliding_window=8, layer_types=None
    )
    assert [attention.window for attention in windowed.attentions[:4]] == [None, None, None, 8]


def test_olmo2_is_read() -> None:
    spec = read("allenai/OLMo-2-1124-7B")
    assert (spec.norm_place, spec.qk_norm) == (NormPlace.AFTER, QkNorm.ROWS)
    assert spec.norm.eps == 1e-6


def test_granite_is_read() -> None:
    spec = read("ibm-granite/granite-3.1-8b-instruct")
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (12.0, 0.22, 1 / 16)
    assert spec.attentions[0].scale == 0.0078125


@pytest.mark.parametrize("name", ["huggyllama/llama-7b", "the first LLaMA conversions"])
def test_llama_1_is_read(name: str) -> None:
    spec = read(name)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_positions) == (spec.num_heads, 128, 2048)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiiuae/falcon-7b", {"alibi": True}),
        ("tiiuae/falcon-7b", {"apply_residual_connection_post_layernorm": True}),
        ("tiiuae/falcon-11B", {"ff_factor": 3}),
        ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("microsoft/Phi-4-mini-instruct", {"interpolate_factor": 2}),
        ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [1, 0]}),
        ("allenai/OLMo-2-1124-7B", {"clip_qkv": 8.0}),
        ("ibm-granite/granite-3.1-8b-instruct", {"residual_multiplier": "0.22"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_error_names_a_feature_that_a_family_does_not_have(
    name: str, changes: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        read(name, **changes)


def windows(spec: ModelSpec) -> Counter[int | None]:
    return Counter(attention.window for attention in spec.attentions)


def test_gemma_2_2b_is_read() -> None:
    spec = read("google/gemma-2-2b")
    assert windows(spec) == {4096: 13, None: 13}
    assert spec.attentions[0].window == 4096
    assert {kind.softcap for kind in spec.attention_kinds} == {50.0}
    assert {kind.scale for kind in spec.attention_kinds} == {1 / 16}
    assert spec.logit_softcap == 30.0
    assert spec.embedding_scale == 48.0
    assert spec.has_tied_embeddings
    assert spec.norm.gain_offset == 1.0


def test_gemma_2_scales_scores_by_query_pre_attn_scalar() -> None:
    spec = read("google/gemma-2-2b", query_pre_attn_scalar=144, attn_logit_softcapping=None)
    assert {kind.scale for kind in spec.attention_kinds} == {1 / 12}
    assert {kind.softcap for kind in spec.attention_kinds} == {None}


def test_gemma_3_270m_is_read() -> None:
    spec = read("google/gemma-3-270m")
    assert windows(spec) == {512: 15, None: 3}
    assert [(kind.window, kind.rope and kind.rope.theta) for kind in spec.attention_kinds] == [
        (512, 1e4),
        (None, 1e6),
    ]
    assert (spec.head_dim, spec.num_kv_heads, spec.qk_norm) == (256, 1, QkNorm.HEADS)
    assert spec.logit_softcap is None
    assert {kind.softcap for kind in spec.attention_kinds} == {None}


def test_gemma_4_31b_has_heads_of_two_sizes() -> None:
    spec = read("google/gemma-4-31B-it")
    assert windows(spec) == {1024: 50, None: 10}
    local, full = spec.attention_kinds
    assert (spec.kv_shape(local), spec.kv_shape(full)) == (KvShape(16, 256), KvShape(4, 512))
    assert not local.has_keys_as_values
    assert full.has_keys_as_values
    assert full.rope is not None
    assert (full.rope.rotary_dim, full.rope.turned_pairs) == (512, 64)
    assert (spec.num_full_layers, len(spec.windowed), spec.part_window) == (10, 50, 1024)
    # a token keeps 11 times as much in windowed layers as in the others
    assert (spec.kv_elements_per_token, spec.windowed_kv_elements) == (450_560, 409_600)


def test_gemma_4_e2b_keeps_keys_and_values_of_15_of_35_layers() -> None:
    spec = read("google/gemma-4-E2B-it")
    assert (spec.num_full_layers, len(spec.windowed)) == (3, 12)
    assert {layer.kv_layer for layer in spec.layers} == {None, 13, 14}
    assert spec.layer_inputs is not None
    assert spec.num_weights / 1e9 == pytest.approx(4.63, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9"),
        ({"num_kv_shared_layers": 35}, "leaves no layer"),
        ({"num_kv_shared_layers": 32}, "no layer before is full_attention"),
        ({"per_layer_config": {"01": {"head_dim": 128}}}, "per_layer_config"),
        ({"per_layer_config": {"04": {"scale": 2}}}, "per_layer_config has scale"),
        ({"rope_parameters": {"chunked_attention": {}}}, "rope_parameters has chunked_attention"),
    ],
    ids=str,
)
def test_what_gemma_4_does_not_support_is_refused_by_name(
    changes: dict[str, object], match: str
) -> None:
    published = PUBLISHED["google/gemma-4-E2B-it"]
    text = published["text_config"]
    assert isinstance(text, dict)
    with pytest.raises(UnsupportedModel, match=match):
        read("google/gemma-4-E2B-it", text_config={**text, **changes})


def test_gemma_3_12b_is_the_text_part_of_a_multimodal_checkpoint() -> None:
    spec = read("google/gemma-3-12b-it")
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
    config = copy.deepcopy(PUBLISHED["google/gemma-3-12b-it"])
    text = config["text_config"]
    assert isinstance(text, dict)
    text["scale_depth"] = 2
    with pytest.raises(UnsupportedModel, match="scale_depth"):
        spec_from_config(config)
    assert spec_from_config(config, ["scale_depth"]).ignored_fields == ("scale_depth",)


def test_mistral_small_3_1_is_read() -> None:
    spec = read("mistralai/Mistral-Small-3.1-24B-Instruct-2503")
    assert (spec.hidden_size, spec.num_layers, spec.head_dim) == (5120, 40, 128)
    assert windows(spec) == {None: 40}
    assert not spec.has_tied_embeddings
    assert spec.dropped


def test_other_decoders_under_the_name_of_mistral_small_are_refused() -> None:
    config = copy.deepcopy(PUBLISHED["mistralai/Mistral-Small-3.1-24B-Instruct-2503"])
    text = config["text_config"]
    assert isinstance(text, dict)
    text["model_type"] = "mistral9"
    with pytest.raises(UnsupportedModel, match="model_type='mistral9'"):
        spec_from_config(config)


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    """The experts of the layers, which are the same in all."""
    (mlp,) = {layer.mlp for layer in spec.layers}
    assert isinstance(mlp, ExpertsSpec)
    return mlp


def test_mixtral_8x7b_is_read() -> None:
    experts = experts_of(read("mistralai/Mixtral-8x7B-v0.1"))
    assert (experts.num_experts, experts.top_k, experts.size) == (8, 2, 14336)
    assert experts.is_normalized
    assert experts.shared_size is None


def test_qwen_15_moe_is_read() -> None:
    spec = read("Qwen/Qwen1.5-MoE-A2.7B")
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (60, 4, 1408)
    assert (experts.shared_size, experts.has_shared_gate) == (5632, True)
    assert not experts.is_normalized
    assert spec.has_qkv_bias
    assert windows(spec) == {None: 24}


def test_qwen_3_30b_a3b_is_read() -> None:
    spec = read("Qwen/Qwen3-30B-A3B")
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (128, 8, 768)
    assert experts.is_normalized
    assert spec.qk_norm is QkNorm.HEADS


def test_qwen_3_coder_says_that_it_has_no_shared_expert() -> None:
    plain = read("Qwen/Qwen3-30B-A3B")
    coder = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}
    assert read("Qwen/Qwen3-30B-A3B", **coder) == plain
    with pytest.raises(UnsupportedModel, match="shared_expert_intermediate_size=5472"):
        read("Qwen/Qwen3-30B-A3B", shared_expert_intermediate_size=5472)
    with pytest.raises(UnsupportedModel, match="use_qk_norm=False"):
        read("Qwen/Qwen3-30B-A3B", use_qk_norm=False)


def test_qwen_has_experts_in_some_layers_only() -> None:
    spec = read("Qwen/Qwen3-30B-A3B", mlp_only_layers=[3], decoder_sparse_step=2)
    dense = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MlpSpec)]
    assert dense == sorted({3, *range(0, 48, 2)})


@pytest.mark.parametrize("name", ["Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen3-30B-A3B"])
def test_windows_of_qwen_with_experts_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="use_sliding_window"):
        read(name, use_sliding_window=True)


def test_gpt_oss_20b_is_read() -> None:
    spec = read("openai/gpt-oss-20b, in 16 bits")
    experts = experts_of(spec)
    assert (experts.num_experts, experts.top_k, experts.size) == (32, 4, 2880)
    assert experts.has_bias
    assert (spec.has_qkv_bias, spec.has_out_bias) == (True, True)
    assert windows(spec) == {128: 12, None: 12}
    assert all(kind.has_sinks for kind in spec.attention_kinds)
    (rope,) = spec.ropes
    assert (rope.scaling, rope.factor, rope.has_whole_bounds) == (RopeScaling.YARN, 32.0, False)


def gpt_oss_as_shipped() -> dict[str, object]:
    """The file names no dtype."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quantized = {"modules_to_not_convert": [*kept, "lm_head"], "quant_method": "mxfp4"}
    config = PUBLISHED["openai/gpt-oss-20b, in 16 bits"] | {"quantization_config": quantized}
    del config["torch_dtype"]
    return config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_a_dtype_in_the_config_that_of_the_embedding_counts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The embedding is in the second shard; all other tensors have other dtypes."""
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss_as_shipped()))
    shards = {
        "model-00000-of-00002.safetensors": {
            "model.norm.weight": torch.ones(2, dtype=torch.float64),
            "model.layers.0.mlp.experts.down_proj_blocks": torch.ones(2, dtype=torch.uint8),
        },
        "model-00001-of-00002.safetensors": {
            "lm_head.weight": torch.ones(2, dtype=torch.float64),
            "model.embed_tokens.weight": torch.ones(2, 2, dtype=dtype),
        },
    }
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    where = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": where}))
    assert f"torch.{read_spec(tmp_path).dtype.value}" == str(dtype)
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss_as_shipped() | {"dtype": "float16"}))
    assert read_spec(tmp_path).dtype is DType.FP16  # what the config says comes first


def test_the_text_config_may_have_the_dtype(tmp_path: Path) -> None:
    config = copy.deepcopy(PUBLISHED["google/gemma-3-12b-it"])
    text = config["text_config"]
    assert isinstance(text, dict)
    text["dtype"] = config.pop("torch_dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"language_model.model.embed_tokens.weight": torch.ones(2)}, tmp_path / SINGLE_FILE)
    assert read_spec(tmp_path).dtype is DType.BF16
    del text["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).dtype is DType.FP32


def test_without_a_dtype_and_weights_gpt_oss_has_bf16(tmp_path: Path) -> None:
    """`mainstem doctor --model` reads config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss_as_shipped()))
    assert kv_size(tmp_path).dtype is DType.BF16
    (tmp_path / SINGLE_FILE).write_bytes(b"\xff" * 100)  # the loader says that it is damaged
    assert kv_size(tmp_path).dtype is DType.BF16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
    ],
)
def test_unknown_features_of_gpt_oss_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read("openai/gpt-oss-20b, in 16 bits", **changes)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("KimiLinearForCausalLM", r"multi-head latent attention \(MLA\)"),
        ("MiniMaxText01ForCausalLM", "layers of linear attention"),
        ("JambaForCausalLM", "layers of Mamba 1"),
    ],
)
def test_other_blocks_are_refused_with_the_reason(architecture: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{architecture} is not supported: it has {why}"):
        read("Qwen/Qwen3-30B-A3B", architectures=[architecture])


def test_hybrid_layers_of_a_known_architecture_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="linear_attention layers are not supported"):
        read("google/gemma-3-270m", layer_types=["linear_attention"] * 18)
