"""Ranks read their parts of quantized weights, and answer as the whole model."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    FalconConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from mainstem.core.errors import ConfigError
from mainstem.models.families import read_spec
from mainstem.models.shard import Shard, part_of, shards_that_divide
from mainstem.models.tensors import TensorReader
from mainstem.models.weight_files import SINGLE_FILE
from mainstem.models.weights import Checkpoint
from mainstem.runner.origin import folder_origin, for_rank
from tests.models.checkpoints import SMALL
from tests.models.quantized.cases import CASES, gptq_config
from tests.models.quantized.checkpoints import (
    save_quantized,
    write_gpt_oss,
    write_quantized,
    write_quantized_experts,
)
from tests.models.rank_outputs import TOLERANCE, check_same, outputs
from tests.models.ranks import run_ranks

pytestmark = pytest.mark.torch
WIDE = SMALL | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 256,
}
BY_NAME = {case.name: case for case in CASES}
QUICK = ("gptq act-order", "compressed 4 bits zero points", "fp8 blocks")


def check_ranks(folder: Path, of: int = 2) -> None:
    expected = outputs(folder)
    for found in run_ranks(of, lambda ranks: outputs(folder, ranks)):
        check_same(found, expected, TOLERANCE)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BY_NAME]
)
def test_ranks_answer_as_one_process_in_every_format(name: str, tmp_path: Path) -> None:
    write_quantized(LlamaConfig(**WIDE), tmp_path, BY_NAME[name])
    check_ranks(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "gptq act-order", "fp8 blocks", "fp8 per tensor"])
@pytest.mark.parametrize(
    "config",
    [
        Phi3Config(**WIDE),
        FalconConfig(
            **{
                k: v
                for k, v in WIDE.items()
                if k not in {"intermediate_size", "num_key_value_heads"}
            },
            new_decoder_architecture=True,
            num_kv_heads=2,
            bias=False,
        ),
    ],
    ids=["fused", "turns"],
)
def test_ranks_with_fused_products_answer_as_one_process(
    config: PreTrainedConfig, name: str, tmp_path: Path
) -> None:
    write_quantized(config, tmp_path, BY_NAME[name])
    check_ranks(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq act-order", "awq", "fp8 small blocks"])
def test_ranks_with_quantized_experts_answer_as_one_process(name: str, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **WIDE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96
    )
    write_quantized_experts(config, tmp_path, BY_NAME[name])
    check_ranks(tmp_path)


def test_mxfp4_experts_are_cut_at_groups(tmp_path: Path) -> None:
    """Three groups of 32 are split over two ranks."""
    sizes = WIDE | {"intermediate_size": 96}
    config = GptOssConfig(**sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    write_gpt_oss(config, tmp_path)
    spec = read_spec(tmp_path)
    parts = [part_of(spec, Shard(rank, 2)).layers[0].mlp for rank in range(2)]
    assert [part.size for part in parts if part is not None] == [32, 64]
    check_ranks(tmp_path)
    assert shards_that_divide(spec) == (1, 2)
    with pytest.raises(ConfigError, match="an MLP of 96 columns has fewer than 32 for each"):
        part_of(spec, Shard(0, 4))


def test_ranks_dequantize_columns_in_act_order_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(LlamaConfig(**WIDE), tmp_path, BY_NAME["gptq act-order"])
    with caplog.at_level(logging.WARNING, "mainstem.models"):
        outputs(tmp_path)
        assert not caplog.records
        run_ranks(2, lambda ranks: outputs(tmp_path, ranks))
    for record in caplog.records:
        assert "2 quantized products are dequantized" in record.getMessage()
        assert "self_attn.o_proj, model.layers.0.mlp.down_proj" in record.getMessage()
    assert len(caplog.records) == 2


def write_with_packed_head(folder: Path, vocab_size: int) -> None:
    config = LlamaConfig(**WIDE | {"vocab_size": vocab_size}, tie_word_embeddings=False)
    write_quantized(config, folder, BY_NAME["gptq"])
    tensors = load_file(folder / SINGLE_FILE)
    weight = tensors.pop("lm_head.weight")
    packed, _ = BY_NAME["gptq"].make(np.random.default_rng(1), *weight.shape)
    tensors |= {f"lm_head.{ending}": tensor for ending, tensor in packed.items()}
    save_quantized(folder, tensors, gptq_config(lm_head=True))


def test_a_rank_that_pads_its_rows_of_a_packed_head_dequantizes_it_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 72 rows, the first rank has 48, the second 24: only the second pads them."""
    write_with_packed_head(tmp_path, vocab_size=72)
    with caplog.at_level(logging.WARNING, "mainstem.models"):
        check_ranks(tmp_path)
    (record,) = caplog.records
    assert "1 quantized products are dequantized" in record.getMessage()
    assert "(lm_head)" in record.getMessage()


def test_a_packed_head_is_used_although_the_config_says_tied(tmp_path: Path) -> None:
    write_with_packed_head(tmp_path, vocab_size=64)
    expected = outputs(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    check_same(outputs(tmp_path), expected, 0.0)
    check_ranks(tmp_path)


class Counted(Checkpoint):
    """Records the largest share of a layer's tensor that is read in one call."""

    largest = 0.0

    def stored(self, name: str, shape: tuple[int, ...], at: tuple[slice, ...] = ()) -> Tensor:
        found = super().stored(name, shape, at)
        if name.endswith(("weight", "weight_packed", "qweight")) and "norm" not in name:
            self.largest = max(self.largest, found.numel() / torch.Size(shape).numel())
        return found


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        "gptq whole rows",
        "awq",
        "compressed 4 bits per channel",
        "compressed int8 bytes",
        "compressed fp8 per channel",
        "fp8 per tensor",
    ],
)
def test_a_rank_never_reads_a_whole_matrix(name: str, tmp_path: Path) -> None:
    write_quantized(LlamaConfig(**WIDE), tmp_path, BY_NAME[name])
    spec = read_spec(tmp_path)
    for rank in range(2):
        source = Counted(tmp_path, torch.float32, names=spec.names, quantized=spec.quantized)
        TensorReader(source, spec, Shard(rank, 2)).layer(0)
        assert source.largest == 0.5


def test_the_origin_of_a_rank_reads_packed_weights(tmp_path: Path) -> None:
    write_quantized(LlamaConfig(**WIDE), tmp_path, BY_NAME["awq"])
    source = for_rank(folder_origin(tmp_path)).open(torch.float32, torch.device("cpu"))
    part = (slice(0, 64), slice(0, 128))
    found = source.take_packed("model.layers.0.mlp.down_proj", (64, 256), part)
    assert found is not None
    assert found.shape == (64, 128)
