"""Gemma 4: dense, with experts, and with embeddings for each layer and shared keys and values."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig

from mainstem.runner.cpu_load import load_cpu_runner
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config

SIZES: dict[str, Any] = SMALL | {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 11,
    "final_logit_softcapping": 3.0,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 5000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
OWN_INPUTS = {
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


@pytest.mark.parametrize("changes", [KEYS_AS_VALUES, {"attention_bias": True}], ids=str)
def test_dense_models_answer_as_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_family(Gemma4TextConfig(**SIZES | changes), tmp_path)


def test_models_with_experts_answer_as_transformers(tmp_path: Path) -> None:
    check_family(Gemma4TextConfig(**SIZES | KEYS_AS_VALUES | EXPERTS), tmp_path)


def test_models_with_inputs_of_layers_and_shared_keys_answer_as_transformers(
    tmp_path: Path,
) -> None:
    check_family(Gemma4TextConfig(**SIZES | OWN_INPUTS), tmp_path)


def test_costs_are_those_of_layers_without_a_window() -> None:
    """They read long shared prefixes; here their heads are larger, and there are fewer."""
    spec = RECIPES["Gemma 4 with experts"]
    _, facts = load_cpu_runner(RecipeOrigin(spec), a_config())
    assert (spec.num_kv_heads, spec.head_dim) == (2, 64)
    assert (facts.num_kv_heads, facts.head_dim) == (1, 128)
