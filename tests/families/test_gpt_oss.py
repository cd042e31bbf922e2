"""gpt-oss: experts with biases, attention sinks, sliding windows in every other layer, YaRN."""

from pathlib import Path

from transformers import GptOssConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def test_gpt_oss_answers_as_transformers(tmp_path: Path) -> None:
    config = GptOssConfig(
        **SMALL,
        num_local_experts=5,
        num_experts_per_tok=3,
        head_dim=16,
        sliding_window=11,
        rope_parameters=YARN,
    )
    check_family(config, tmp_path)
