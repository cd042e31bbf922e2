"""Gemma 2 and 3."""

from pathlib import Path

from transformers import Gemma2Config, Gemma3TextConfig

from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

SIZES = {"head_dim": 16, "sliding_window": 11}


def test_gemma2_answers_as_transformers(tmp_path: Path) -> None:
    config = Gemma2Config(
        **SMALL,
        **SIZES,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        attention_bias=True,
        attn_implementation="eager",  # transformers 5.17 chooses one of torch's, which has no cap
    )
    check_family(config, tmp_path)


def test_gemma3_answers_as_transformers(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        **SMALL,
        **SIZES,
        query_pre_attn_scalar=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )
    check_family(config, tmp_path)
