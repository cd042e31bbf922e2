"""Qwen3-Next and Qwen 3.5: layers with a gated delta rule among layers with gated attention."""

from pathlib import Path

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

HYBRID = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def test_qwen3_next_answers_as_transformers(tmp_path: Path) -> None:
    check_family(Qwen3NextConfig(**HYBRID, **EXPERTS, norm_topk_prob=True), tmp_path, std=0.2)


@pytest.mark.parametrize("kernel", [2, 4])
def test_qwen35_answers_as_transformers(tmp_path: Path, kernel: int) -> None:
    check_family(Qwen3_5TextConfig(**HYBRID, linear_conv_kernel_dim=kernel), tmp_path, std=0.2)


def test_qwen35_moe_that_ends_with_a_recurrent_layer_answers_as_transformers(
    tmp_path: Path,
) -> None:
    types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    check_family(Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS, layer_types=types), tmp_path, std=0.2)
