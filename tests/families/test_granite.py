"""Granite 3 and 4."""

from pathlib import Path

import pytest
from transformers import GraniteConfig, GraniteMoeConfig, GraniteMoeHybridConfig

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}


def test_granite_answers_as_transformers(tmp_path: Path) -> None:
    config = GraniteConfig(
        **SMALL, **FACTORS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    )
    check_family(config, tmp_path)


def test_granite_with_experts_answers_as_transformers(tmp_path: Path) -> None:
    check_family(GraniteMoeConfig(**SMALL | EXPERTS, **FACTORS), tmp_path)


def granite4(layer: str, **changes: object) -> GraniteMoeHybridConfig:
    fields = SMALL | EXPERTS | FACTORS | changes
    return GraniteMoeHybridConfig(
        **fields,
        shared_intermediate_size=40,
        layer_types=[layer] * SMALL["num_hidden_layers"],
        mamba_n_heads=6,
    )


@pytest.mark.parametrize("positions", ["rope", "nope"])
@pytest.mark.parametrize("num_experts", [0, 5])
def test_granite_4_answers_as_transformers(
    positions: str, num_experts: int, tmp_path: Path
) -> None:
    config = granite4(
        "full_attention", position_embedding_type=positions, num_local_experts=num_experts
    )
    check_family(config, tmp_path)


def test_a_model_without_any_attention_layer_is_refused() -> None:
    table = granite4("linear_attention").to_dict() | {"mamba_d_head": 16}
    with pytest.raises(UnsupportedModel, match="without any attention layer"):
        spec_from_config(table | {"architectures": ["GraniteMoeHybridForCausalLM"]})


def test_quantized_experts_in_stacked_tensors_are_refused() -> None:
    table = GraniteMoeConfig(**SMALL | EXPERTS).to_dict()
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}
    fields = {"architectures": ["GraniteMoeForCausalLM"], "quantization_config": quantization}
    with pytest.raises(UnsupportedModel, match="stacked"):
        spec_from_config(table | fields)
