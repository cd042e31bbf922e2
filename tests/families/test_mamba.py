"""Families with Mamba-2 layers or short convolutions."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
)

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

STD = 0.2  # recurrences of random models amplify rounding
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
GRANITE = SMALL | MAMBA | {
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 24,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}  # fmt: skip


def test_granite4_answers_as_transformers(tmp_path: Path) -> None:
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
    config = GraniteMoeHybridConfig(**GRANITE | experts, position_embedding_type="rope")
    check_family(config, tmp_path, std=STD)


def test_granite4_without_experts_and_positions_answers_as_transformers(tmp_path: Path) -> None:
    """With limits of dt, and biases of products but not of the convolution."""
    config = GraniteMoeHybridConfig(
        **GRANITE,
        num_local_experts=0,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=(0.4, 1.1),
    )
    check_family(config, tmp_path, std=STD)


FALCON = SMALL | MAMBA | {
    "mamba_d_ssm": 72,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.4],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.2, 0.5, 1.5, 0.4],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
}  # fmt: skip


@pytest.mark.parametrize("norm", ["none", "before gate", "after gate"])
def test_falcon_h1_answers_as_transformers(tmp_path: Path, norm: str) -> None:
    config = FalconH1Config(
        **FALCON,
        mamba_rms_norm=norm != "none",
        mamba_norm_before_gate=norm == "before gate",
        mlp_bias=norm == "none",
    )
    check_family(config, tmp_path, std=STD)


def test_lfm2_answers_as_transformers(tmp_path: Path) -> None:
    types = ["conv", "full_attention", "conv"]
    check_family(Lfm2Config(**SMALL, layer_types=types), tmp_path, std=STD)


def test_lfm2_moe_answers_as_transformers(tmp_path: Path) -> None:
    config = Lfm2MoeConfig(
        **SMALL,
        layer_types=["conv", "conv", "full_attention"],
        conv_bias=True,
        conv_L_cache=4,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    )
    check_family(config, tmp_path, std=STD)


NEMOTRON = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"} | {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-9,  # a limit that transformers has in prompts; models were trained without
}
M, E, A, D = "linear_attention", "moe", "full_attention", "mlp"


@pytest.mark.parametrize("kinds", [(M, E, M, A, E), (D, M, D, D, A, M)], ids=["experts", "dense"])
def test_nemotron_h_answers_as_transformers(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Layers without an MLP and without a mixer, in any order."""
    config = NemotronHConfig(**NEMOTRON, layers_block_type=list(kinds), use_bias=D in kinds)
    check_family(config, tmp_path, std=STD)


def read(config: PreTrainedConfig, architecture: str, **changes: object) -> None:
    spec_from_config(config.to_dict() | {"architectures": [architecture]} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers_block_type": [M, "mlp", "conv"]}, "layers of kind 'conv'"),
        ({"layers_block_type": [M, E]}, "without any attention layer"),
        ({"moe_latent_size": 16}, "moe_latent_size=16: experts of a smaller latent space"),
        ({"mlp_bias": True}, "experts with biases"),
        ({"n_group": 2}, r"experts of 1 of 2 groups \(topk_group, n_group\)"),
        ({"n_groups": 3}, "4 Mamba heads are not a multiple of 3 groups"),
        ({"residual_in_fp32": True}, "residual_in_fp32=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"time_step_limit": [0.1]}, "time_step_limit"),
    ],
)
def test_variants_of_nemotron_h_are_refused_by_name(changes: dict[str, object], said: str) -> None:
    config = NemotronHConfig(**NEMOTRON, layers_block_type=[M, E, A, D])
    with pytest.raises(UnsupportedModel, match=said):
        read(config, "NemotronHForCausalLM", **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"projectors_bias": True}, "projectors_bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers has 2 numbers instead of 5"),
        ({"mamba_d_head": 16}, "mamba_n_heads=6 heads of mamba_d_head=16 are not 72 columns"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_variants_of_falcon_h1_are_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read(FalconH1Config(**FALCON), "FalconH1ForCausalLM", **changes)


def test_letters_name_the_layers_of_older_nemotron_h_files() -> None:
    config = NemotronHConfig(**NEMOTRON, layers_block_type=[M, E, A, D])
    table = config.to_dict() | {"architectures": ["NemotronHForCausalLM"]}
    newer = spec_from_config(table)
    older = table | {"layers_block_type": None, "hybrid_override_pattern": "ME*-"}
    assert spec_from_config(older).layers == newer.layers
