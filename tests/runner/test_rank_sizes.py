"""Sizes of ranks' weights and pages, from config.json."""

import json
from pathlib import Path

from mainstem.core.config import DType
from mainstem.runner.rank_sizes import RankSize, rank_sizes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
LAYERS = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
ENDS = 2 * 96 * 64


def write(folder: Path, **more: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | more))
    return folder


def test_weights_and_pages_are_divided_by_ranks(tmp_path: Path) -> None:
    """Four ranks store each of two KV heads twice, so each has more than a fourth."""
    one, two, four = rank_sizes(write(tmp_path))
    assert one == RankSize(1, 2 * (LAYERS + ENDS), 2 * 2 * 2 * 2 * 16)
    assert two == RankSize(2, LAYERS + ENDS, 2 * 2 * 2 * 16)
    copies = 2 * 64 * 16  # keys and values of half a head in each of two layers, 2 bytes each
    assert four.num_ranks == 4
    assert four.kv_bytes_per_token == two.kv_bytes_per_token
    vocabulary = 2 * 2 * 64 * 32  # 24 rows are padded to 32
    assert four.weight_bytes == LAYERS // 2 + 2 * copies + vocabulary
    assert rank_sizes(tmp_path, DType.FP32)[0].weight_bytes == 2 * one.weight_bytes


def test_quantized_weights_are_smaller(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    (one, two, *_) = rank_sizes(write(tmp_path, quantization_config=gptq))
    assert one.weight_bytes == LAYERS // 2 + 2 * LAYERS // 32 + 2 * ENDS
    assert two.weight_bytes == one.weight_bytes // 2
    with_zeros = write(tmp_path, quantization_config=gptq | {"sym": False})
    assert rank_sizes(with_zeros)[0].weight_bytes == one.weight_bytes + LAYERS // 32
    blocks = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    found = rank_sizes(write(tmp_path, quantization_config=blocks))[0].weight_bytes
    assert found == LAYERS + 4 * LAYERS // (64 * 32) + 2 * ENDS
