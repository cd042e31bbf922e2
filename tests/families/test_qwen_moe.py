"""Qwen 2 and 3 with experts."""

from pathlib import Path

import pytest
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

from mainstem.core.config import EngineConfig, ModelConfig, Quantize
from mainstem.core.errors import ConfigError
from mainstem.engine.build import build_engine
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL, write_checkpoint

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def test_qwen2_moe_with_dense_layer_and_shared_expert_answers_as_transformers(
    tmp_path: Path,
) -> None:
    config = Qwen2MoeConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    )
    check_family(config, tmp_path)


def test_qwen3_moe_with_every_other_layer_dense_answers_as_transformers(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SMALL | {"num_hidden_layers": 4},
        **EXPERTS,
        head_dim=16,
        norm_topk_prob=True,
        attention_bias=True,
        decoder_sparse_step=2,
    )
    check_family(config, tmp_path)


def test_quantizing_experts_on_a_cpu_is_refused(tmp_path: Path) -> None:
    write_checkpoint(Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16), tmp_path)
    config = EngineConfig(model=ModelConfig(quantize=Quantize.INT8))
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM is a mixture of experts"):
        build_engine(tmp_path, config)
