"""quantization_config: which fields are read, and which are refused with their name."""

from typing import Any

import pytest

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from mainstem.models.quantized.packing import Layout, PackedKind, Packing, QuantizedSpec
from tests.models.quantized.cases import AWQ, FLOAT8, FP8, compressed_config, gptq_config, ints

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def quantized(config: dict[str, Any]) -> QuantizedSpec:
    found = spec_from_config({**LLAMA, "quantization_config": config}).quantized
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gptq_config(group_size=128, sym=True), "GPTQ, 4 bits, groups of 128"),
        (
            gptq_config(group_size=-1, bits=8, desc_act=True),
            "GPTQ, 8 bits, a scale per channel, zero points, act-order",
        ),
        (
            gptq_config(dynamic={"+:.*down_proj": {"desc_act": True}}),  # for some products only
            "GPTQ, 4 bits, groups of 16, zero points, act-order",
        ),
        (AWQ, "AWQ, 4 bits, groups of 16, zero points"),
        (compressed_config(ints()), "compressed-tensors, 4 bits, groups of 16"),
        (compressed_config(FLOAT8), "compressed-tensors, FP8, a scale per channel"),
        ({**FP8, "weight_block_size": [128, 128]}, "FP8, blocks of 128 x 128"),
        (FP8, "FP8, one scale"),
        ({"quant_method": "mxfp4"}, "MXFP4, groups of 32"),
    ],
)
def test_a_format_is_described_in_words(config: dict[str, Any], words: str) -> None:
    assert str(quantized(config)) == words


# as published, with all fields
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPTQ, 4 bits, groups of 128": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
        "group_size": 128, "max_input_length": None, "model_seqlen": None,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
        "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None,
        "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
    },
    "GPTQ, 4 bits, groups of 128, act-order": {
        "bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.1, "desc_act": True,
        "group_size": 128, "model_file_base_name": None, "model_name_or_path": None,
        "quant_method": "gptq", "static_groups": False, "sym": True, "true_sequential": True,
        "meta": {"quantizer": "gptqmodel:1.4.0"}, "dynamic": None, "lm_head": False,
    },
    "GPTQ, 8 bits, groups of 128": {
        "bits": 8, "checkpoint_format": "gptq", "desc_act": False, "format": "gptq",
        "group_size": 128, "lm_head": False, "method": "gptq", "pack_dtype": "int32",
        "quant_method": "gptq", "sym": True, "meta": {"quantizer": ["gptqmodel:6.0.0"]},
    },
    "AWQ, 4 bits, groups of 64, zero points": {
        "bits": 4, "checkpoint_format": "gemm", "desc_act": False, "format": "gemm",
        "group_size": 64, "lm_head": False, "method": "awq", "pack_dtype": "int32",
        "quant_method": "awq", "version": "gemm", "zero_point": True,
        "meta": {"quantizer": ["gptqmodel:6.0.0"]},
    },
    "AWQ, 4 bits, groups of 128, zero points": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None,
        "fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None,
        "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "compressed-tensors, 4 bits, groups of 128": {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": "weight", "block_structure": None, "dynamic": False,
                    "group_size": 128, "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                    "strategy": "group", "symmetric": True, "type": "int",
                },
            }
        },
        "format": "pack-quantized", "global_compression_ratio": 1.9, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.12.2",
    },
    "compressed-tensors, FP8, a scale per channel": {
        "config_groups": {
            "group_0": {
                "input_activations": {
                    "actorder": None, "block_structure": None, "dynamic": True, "group_size": None,
                    "num_bits": 8, "observer": None, "strategy": "token", "symmetric": True,
                    "type": "float",
                },
                "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False,
                    "group_size": None, "num_bits": 8, "observer": "minmax",
                    "strategy": "channel", "symmetric": True, "type": "float",
                },
            }
        },
        "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    },
    "FP8, blocks of 128 x 128": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
    },
    "MXFP4, groups of 32": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("words", PUBLISHED)
def test_published_configs_are_read(words: str) -> None:
    assert str(quantized(PUBLISHED[words])) == words


AUTO_ROUND: dict[str, Any] = {
    "amp": True, "autoround_version": "0.4.5", "batch_size": 8, "data_type": "int",
    "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True,
    "gradient_accumulate_steps": 1, "iters": 200, "low_gpu_mem_usage": False, "lr": 0.005,
    "minmax_lr": 0.005, "nsamples": 128, "provider": "auto-round", "scale_dtype": "torch.float16",
    "seqlen": 2048, "to_quant_block_names": None,
}  # fmt: skip


@pytest.mark.parametrize("config", [gptq_config(), AWQ], ids=["gptq", "awq"])
def test_autoround_exports_are_read_as_what_they_were_exported_to(config: dict[str, Any]) -> None:
    assert quantized(config | AUTO_ROUND) == quantized(config)
    with pytest.raises(UnsupportedModel, match="data_type='mx_fp'"):
        quantized(config | AUTO_ROUND | {"data_type": "mx_fp"})


def test_stars_in_module_names_match_any_text() -> None:
    found = quantized(PUBLISHED["MXFP4, groups of 32"])
    assert found.packing_of("model.layers.7.self_attn.q_proj") is None
    assert found.packing_of("model.layers.7.mlp.experts.gate_up_proj") == found.packing


def test_a_plain_checkpoint_has_no_quantization() -> None:
    assert spec_from_config(LLAMA).quantized is None
    assert spec_from_config({**LLAMA, "quantization_config": None}).quantized is None


def test_excluded_modules_are_plain() -> None:
    names = ["model.layers.0.mlp.gate", "self_attn"]
    for config in (
        {**AWQ, "modules_to_not_convert": names},
        {**FP8, "modules_to_not_convert": names},
        {**FP8, "ignored_layers": names},
    ):
        found = quantized(config)
        assert found.packing_of("model.layers.0.mlp.gate") is None
        assert found.packing_of("model.layers.0.self_attn.q_proj") is None
        assert found.packing_of("lm_head") is None
        assert found.packing_of("model.layers.0.mlp.gate_proj") == found.packing
        assert found.packing_of("model.layers.1.mlp.gate") == found.packing


def test_compressed_groups_are_found_by_name_or_pattern_and_else_by_class() -> None:
    config = compressed_config(ints(), "mixed-precision")
    config["ignore"] = ["lm_head", r"re:.*\.k_proj"]
    config["config_groups"]["fp8"] = {
        "targets": [r"re:.*down_proj", "model.layers.0.mlp.up_proj"],
        "weights": FLOAT8,
        "format": "float-quantized",
    }
    found = quantized(config)
    assert found.layout is Layout.COMPRESSED
    fp8 = Packing(PackedKind.FP8, None)
    assert found.packing_of("model.layers.3.mlp.down_proj") == fp8
    assert found.packing_of("model.layers.0.mlp.up_proj") == fp8
    assert found.packing_of("model.layers.1.mlp.up_proj") == Packing(PackedKind.INT4, 16)
    assert found.packing_of("model.layers.1.self_attn.k_proj") is None
    assert found.packing_of("lm_head") is None


def test_rules_may_put_modules_in_act_order() -> None:
    found = quantized(gptq_config(dynamic={"+:.*down_proj": {"desc_act": True}}))
    assert found.has_order
    assert not quantized(gptq_config(dynamic={"+:.*down_proj": {"bits": 8}})).has_order


def test_versions_of_gptq_differ_in_their_zero_points() -> None:
    assert quantized(gptq_config()).is_zero_less_one
    assert not quantized(gptq_config(checkpoint_format="gptq_v2")).is_zero_less_one


STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"'bitsandbytes', 4 bits; known:"),
        ({"quant_method": "hqq"}, "'hqq'; known: awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({"bits": 4}, "quant_method=None, 4 bits"),
        (gptq_config(bits=3), "bits=3 is not supported, only 4 or 8"),
        (gptq_config(bits=2), "bits=2"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (gptq_config(is_marlin_format=True), "is_marlin_format=True"),
        (gptq_config(group_size=20), "group_size=20"),
        (gptq_config(dynamic={"+:.*": {"bits": 3}}), "bits=3"),
        (gptq_config(dynamic={"+:.*": {"surprise": 3}}), r"dynamic \+:\.\*"),
        (gptq_config(adapter={"rank": 8}), "adapter"),
        (gptq_config(surprise=1), "surprise"),
        (gptq_config(method="qqq"), "method='qqq'"),
        (gptq_config(pack_dtype="int16"), "pack_dtype='int16'"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported, only gemm"),
        ({**AWQ, "checkpoint_format": "gemv_fast"}, "checkpoint_format='gemv_fast'"),
        ({**AWQ, "bits": 8}, "bits=8 is not supported, only 4"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        (compressed_config(ints(num_bits=3)), r"num_bits='3 \(int\)'"),
        (compressed_config(ints(), "marlin-24"), "format='marlin-24'"),
        (compressed_config(FLOAT8, "nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (compressed_config(ints(num_bits=8), "int-quantized", input_activations=STATIC), "static"),
        (compressed_config(ints(strategy="tensor", symmetric=False)), "tensor with zero points"),
        (
            {**compressed_config(ints()), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask",
        ),
        (
            {**compressed_config(ints()), "transform_config": {"config_groups": {"u": {}}}},
            "transform_config",
        ),
        (compressed_config(ints(), output_activations=STATIC), "output_activations"),
    ],
)
def test_the_error_names_an_unsupported_field(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        quantized(config)


def test_a_refusal_says_what_is_supported() -> None:
    with pytest.raises(UnsupportedModel, match=r"Supported: GPTQ .*AWQ.*compressed-tensors.*MXFP4"):
        quantized(gptq_config(bits=3))
