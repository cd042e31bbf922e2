"""Falcon in its three forms."""

from pathlib import Path
from typing import Any

import pytest
from transformers import FalconConfig

from tests.families.equality import check_family
from tests.models.checkpoints import VOCAB

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


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
def test_falcon(fields: dict[str, Any], tmp_path: Path) -> None:
    check_family(FalconConfig(**SMALL, **fields), tmp_path)
