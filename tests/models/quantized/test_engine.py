"""Tiny checkpoints of every format through the whole engine, compared with the dequantized
models."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    FalconH1Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.cpu.quantize import quantize_decoder
from mainstem.models.families import read_spec
from mainstem_bench.perplexity import perplexity
from tests.families.equality import check_batch
from tests.models.checkpoints import SMALL, SMALL_FALCON
from tests.models.quantized.cases import CASES, gptq_config
from tests.models.quantized.checkpoints import (
    write_gpt_oss,
    write_quantized,
    write_quantized_experts,
)
from tests.models.quantized.oracles import Case, Numbers, Tensors, gptq

pytestmark = pytest.mark.torch
TWO_LAYERS = {**SMALL, "num_hidden_layers": 2}
BY_NAME = {case.name: case for case in CASES}
FIRST = ("gptq act-order", "awq", "compressed 4 bits zero points", "fp8 blocks")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in BY_NAME],
)
def test_a_llama_answers_as_its_dequantized_model(name: str, tmp_path: Path) -> None:
    model = write_quantized(LlamaConfig(**TWO_LAYERS), tmp_path, BY_NAME[name])
    check_batch(model, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**TWO_LAYERS),  # with biases
        Phi3Config(**TWO_LAYERS),  # fused products
        # rows of queries, keys and values alternate
        FalconConfig(
            **SMALL_FALCON | {"num_hidden_layers": 1},
            new_decoder_architecture=True,
            num_kv_heads=2,
            bias=False,
        ),
    ],
    ids=["biases", "fused", "turns"],
)
@pytest.mark.parametrize("name", ["gptq", pytest.param("fp8 blocks", marks=pytest.mark.slow)])
def test_families_with_other_fused_products_answer_as_dequantized_models(
    config: PreTrainedConfig, name: str, tmp_path: Path
) -> None:
    check_batch(write_quantized(config, tmp_path, BY_NAME[name]), tmp_path)


MAMBA = TWO_LAYERS | {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
}
FALCON_H1 = FalconH1Config(
    **MAMBA, mamba_d_ssm=96, ssm_multipliers=[0.7, 1.2, 0.5, 1.5, 0.4], mlp_multipliers=[0.8, 1.4]
)
GRANITE4 = GraniteMoeHybridConfig(
    **MAMBA, num_local_experts=0, shared_intermediate_size=64, layer_types=["mamba", "attention"]
)
HYBRID = TWO_LAYERS | {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN35 = Qwen3_5TextConfig(**HYBRID)
LFM2 = Lfm2Config(
    **TWO_LAYERS, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]
)


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        pytest.param("gptq act-order", marks=pytest.mark.slow),
        "awq",
        "fp8 small blocks",
    ],
)
@pytest.mark.parametrize(
    ("config", "plain"),
    [(FALCON_H1, ()), (GRANITE4, ()), (QWEN35, ("in_proj_a", "in_proj_b")), (LFM2, ())],
    ids=["falcon h1", "granite 4", "qwen 3.5", "lfm2"],
)
def test_recurrent_layers_answer_as_dequantized_models(
    config: PreTrainedConfig, plain: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """Published checkpoints of Qwen 3.5 leave the smallest products as they are."""
    check_batch(write_quantized(config, tmp_path, BY_NAME[name], plain), tmp_path)


def test_fused_parts_in_different_act_orders_are_dequantized_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seeds = iter(range(1000))

    def make(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, Numbers]:
        return gptq(rng, out, width, has_order=True, order_seed=next(seeds))

    case = Case("orders", gptq_config(desc_act=True), make)
    model = write_quantized(LlamaConfig(**SMALL | {"num_hidden_layers": 1}), tmp_path, case)
    with caplog.at_level(logging.WARNING, "mainstem.models"):
        check_batch(model, tmp_path)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("2 quantized products are dequantized")
    assert "self_attn.q_proj + model.layers.0.self_attn.k_proj" in said


MOE = Qwen3MoeConfig(
    **TWO_LAYERS,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


@pytest.mark.parametrize(
    "name", ["gptq act-order", "awq", pytest.param("fp8 blocks", marks=pytest.mark.slow)]
)
def test_quantized_experts_answer_as_their_dequantized_model(name: str, tmp_path: Path) -> None:
    model = write_quantized_experts(MOE, tmp_path, BY_NAME[name])
    check_batch(model, tmp_path)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_hybrid_with_quantized_experts_answers_as_its_dequantized_model(
    name: str, tmp_path: Path
) -> None:
    config = Qwen3_5MoeTextConfig(
        **HYBRID,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    plain = ("attn", "shared_expert")
    check_batch(write_quantized_experts(config, tmp_path, BY_NAME[name], plain), tmp_path)


def test_gpt_oss_in_mxfp4_answers_as_its_dequantized_model(tmp_path: Path) -> None:
    config = GptOssConfig(
        **TWO_LAYERS | {"hidden_size": 64, "intermediate_size": 32},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
            "rope_theta": 150000.0,
        },
    )
    check_batch(write_gpt_oss(config, tmp_path), tmp_path)


def test_quantized_checkpoints_can_be_requantized_to_int8(tmp_path: Path) -> None:
    model = write_quantized(LlamaConfig(**TWO_LAYERS), tmp_path / "packed", BY_NAME["gptq"])
    model.save_pretrained(tmp_path / "plain")
    ids = np.random.default_rng(0).integers(3, SMALL["vocab_size"], 64).astype(np.int32)
    scores = [
        perplexity(quantize_decoder(load_decoder(folder, read_spec(folder), torch.float32)), ids)
        for folder in (tmp_path / "packed", tmp_path / "plain")
    ]
    assert scores[0] == scores[1]
