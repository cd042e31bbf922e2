"""Mixtral with a sliding window."""

from pathlib import Path

from transformers import MixtralConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL


def test_mixtral_with_a_window_answers_as_transformers(tmp_path: Path) -> None:
    config = MixtralConfig(
        **SMALL, num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=11
    )
    check_family(config, tmp_path)
