"""Families that choose experts by scores and a bias."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Dots1Config, Ernie4_5_MoeConfig, Glm4MoeConfig, MiniMaxM2Config

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

EXPERTS: dict[str, Any] = SMALL | {
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def test_glm45_answers_as_transformers(tmp_path: Path) -> None:
    check_family(Glm4MoeConfig(**EXPERTS, use_qk_norm=True, attention_bias=True), tmp_path)


def test_dots1_answers_as_transformers(tmp_path: Path) -> None:
    config = Dots1Config(**EXPERTS, norm_topk_prob=True, sliding_window=14, max_window_layers=2)
    check_family(config, tmp_path)


def test_minimax_m2_answers_as_transformers(tmp_path: Path) -> None:
    sizes = SMALL | {"head_dim": 16, "num_local_experts": 8, "intermediate_size": 24}
    check_family(MiniMaxM2Config(**sizes, num_experts_per_tok=3, rotary_dim=8), tmp_path)


def test_ernie45_moe_answers_as_transformers(tmp_path: Path) -> None:
    config = Ernie4_5_MoeConfig(
        **SMALL, moe_intermediate_size=24, moe_num_experts=8, moe_k=3, moe_num_shared_experts=2
    )
    check_family(config, tmp_path)


def test_groups_of_experts_are_refused() -> None:
    table = Glm4MoeConfig(**EXPERTS, n_group=4, topk_group=2).to_dict()
    with pytest.raises(UnsupportedModel, match=r"experts of 2 of 4 groups \(topk_group, n_group\)"):
        spec_from_config(table | {"architectures": ["Glm4MoeForCausalLM"]})
