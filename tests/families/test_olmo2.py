"""OLMo 2."""

from pathlib import Path

from transformers import Olmo2Config

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL


def test_olmo2_answers_as_transformers(tmp_path: Path) -> None:
    check_family(Olmo2Config(**SMALL, attention_bias=True), tmp_path)
