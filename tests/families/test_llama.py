"""Llama with biases."""

from pathlib import Path

from transformers import LlamaConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL


def test_llama_with_biases_answers_as_transformers(tmp_path: Path) -> None:
    check_family(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), tmp_path)
