"""Falcon: blocks of 7B, 40B and 11B, and a block that runs attention and MLP in turn."""

from pathlib import Path
from typing import Any

import pytest
from transformers import FalconConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL_FALCON


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="7B"),
        pytest.param({"new_decoder_architecture": True, "num_kv_heads": 2}, id="40B"),
        pytest.param(
            {
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
                "num_ln_in_parallel_attn": 1,
                "ffn_hidden_size": 80,
                "tie_word_embeddings": False,
            },
            id="11B",
        ),
        pytest.param(
            {"parallel_attn": False, "multi_query": False, "bias": True},
            id="one after the other, with biases",
        ),
    ],
)
def test_falcon_answers_as_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    check_family(FalconConfig(**SMALL_FALCON, **fields), tmp_path)
