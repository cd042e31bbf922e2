"""Qwen 3, dense."""

from pathlib import Path

from transformers import Qwen3Config

from tests.families.equality import PREFIX_TOKENS, check_family
from tests.models.checkpoints import SMALL


def test_qwen3_with_windows_in_the_upper_layers_answers_as_transformers(tmp_path: Path) -> None:
    config = Qwen3Config(
        **SMALL,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=PREFIX_TOKENS // 2,
        max_window_layers=1,
    )
    check_family(config, tmp_path)
