"""Phi 1, 1.5 and 2."""

from pathlib import Path

from transformers import PhiConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL


def test_phi_2_answers_as_transformers(tmp_path: Path) -> None:
    """8 of 20 dims of a head are rotated, as 32 of 80 in Phi-2."""
    config = PhiConfig(**SMALL | {"hidden_size": 80, "num_attention_heads": 4})
    config.rope_parameters["partial_rotary_factor"] = 0.4
    check_family(config, tmp_path)


def test_phi_with_grouped_keys_and_tied_embeddings_answers_as_transformers(tmp_path: Path) -> None:
    check_family(PhiConfig(**SMALL, tie_word_embeddings=True), tmp_path)


def test_phi_with_norms_of_heads_answers_as_transformers(tmp_path: Path) -> None:
    check_family(PhiConfig(**SMALL, qk_layernorm=True), tmp_path)
