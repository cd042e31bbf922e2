"""StableLM."""

from pathlib import Path

import pytest
from transformers import StableLmConfig

from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.families.published import PUBLISHED
from tests.models.checkpoints import SMALL

HEADS_OF_16 = SMALL | {"hidden_size": 96}  # 4 of 16 dims are rotated


@pytest.mark.parametrize("is_parallel", [False, True])
def test_stablelm_answers_as_transformers(is_parallel: bool, tmp_path: Path) -> None:
    config = StableLmConfig(
        **HEADS_OF_16, use_qkv_bias=not is_parallel, use_parallel_residual=is_parallel
    )
    check_family(config, tmp_path)


def test_stablelm_with_norms_of_heads_answers_as_transformers(tmp_path: Path) -> None:
    """As in StableLM 2 12B, every head has a gain of its own."""
    config = StableLmConfig(**HEADS_OF_16, qk_layernorm=True, use_parallel_residual=True)
    check_family(config, tmp_path)


def test_a_quarter_of_each_head_is_rotated() -> None:
    (attention,) = spec_from_config(PUBLISHED["stabilityai/stablelm-2-1_6b"]).attention_kinds
    assert attention.rope is not None
    assert attention.rope.rotary_dim == 16


def test_the_page_about_adding_a_model_shows_this_family() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/add-a-model.md").read_text()
    family = root / "src/mainstem/models/families/stablelm.py"
    assert f"```python\n{family.read_text()}```" in page
