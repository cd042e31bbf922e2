"""Families that are Llama's block, or another known block, with small differences."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    NemotronConfig,
    PreTrainedConfig,
    SeedOssConfig,
    Starcoder2Config,
)

from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL, YARN_ROPE

HEADS_OF_16 = {"head_dim": 16}
FOUR_LAYERS = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 9}  # shorter than every prompt
MINISTRAL3_ROPE = YARN_ROPE | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], Mapping[str, object]]] = {
    "arcee": (ArceeConfig, {"attention_bias": True, "mlp_bias": True}),
    "cohere": (CohereConfig, {"attention_bias": True, "logit_scale": 0.5}),
    "cohere 2": (Cohere2Config, FOUR_LAYERS | WINDOW),
    "cwm": (CwmConfig, FOUR_LAYERS | WINDOW | HEADS_OF_16),
    "dynamic rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "ernie": (Ernie4_5Config, HEADS_OF_16 | {"use_bias": True}),
    "exaone with windows": (Exaone4Config, FOUR_LAYERS | WINDOW),
    "exaone": (
        Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * SMALL["num_hidden_layers"]},
    ),
    "gemma 1": (GemmaConfig, HEADS_OF_16),
    "glm": (GlmConfig, HEADS_OF_16),
    "glm 4": (Glm4Config, HEADS_OF_16 | {"attention_bias": False}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "gpt-neox in series": (GPTNeoXConfig, {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "ministral": (
        MinistralConfig,
        WINDOW
        | HEADS_OF_16
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ministral 3": (
        Ministral3Config,
        HEADS_OF_16
        | {"rope_parameters": MINISTRAL3_ROPE | {"original_max_position_embeddings": 128}},
    ),
    "nemotron": (NemotronConfig, {"attention_bias": True, "mlp_bias": True}),
    "seed-oss": (SeedOssConfig, HEADS_OF_16 | {"attention_out_bias": True}),
    "starcoder 2": (Starcoder2Config, WINDOW),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config_class, changes = CONFIGS[name]
    sizes = dict(SMALL)
    if config_class is GPTNeoXConfig:
        del sizes["num_key_value_heads"]
    check_family(config_class(**{**sizes, **changes}), tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("dynamic rope", "LlamaForCausalLM"), ("ministral 3", "Ministral3ForCausalLM")],
)
def test_contexts_end_where_a_rope_would_change(name: str, architecture: str) -> None:
    """Both ropes change with the length of a context or with positions beyond the original
    length, which kept keys do not."""
    config_class, changes = CONFIGS[name]
    rope = dict(changes["rope_parameters"])  # type: ignore[call-overload]
    rope["original_max_position_embeddings"] = 128
    table = config_class(**{**SMALL, **changes, "rope_parameters": rope}).to_dict()
    spec = spec_from_config(table | {"architectures": [architecture]})
    assert spec.max_positions == 128
