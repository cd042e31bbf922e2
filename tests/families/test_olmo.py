"""OLMo 1 to 3 and OLMoE."""

from pathlib import Path

from transformers import Olmo2Config, Olmo3Config, OlmoConfig, OlmoeConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL, YARN_ROPE


def test_olmo_answers_as_transformers(tmp_path: Path) -> None:
    check_family(OlmoConfig(**SMALL, attention_bias=True), tmp_path)


def test_olmo2_answers_as_transformers(tmp_path: Path) -> None:
    check_family(Olmo2Config(**SMALL, attention_bias=True), tmp_path)


def test_olmo3_answers_as_transformers(tmp_path: Path) -> None:
    ropes = {
        "full_attention": YARN_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = Olmo3Config(
        **SMALL | {"num_hidden_layers": 4}, sliding_window=9, rope_parameters=ropes
    )
    check_family(config, tmp_path)


def test_olmoe_answers_as_transformers(tmp_path: Path) -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
    check_family(OlmoeConfig(**SMALL | experts), tmp_path)
