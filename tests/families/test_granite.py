"""Granite 3."""

from pathlib import Path

from transformers import GraniteConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL


def test_granite_answers_as_transformers(tmp_path: Path) -> None:
    config = GraniteConfig(
        **SMALL,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=2.5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    check_family(config, tmp_path)
