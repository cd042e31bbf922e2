"""Hunyuan, dense and with experts."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from tests.families.equality import check_family
from tests.models.checkpoints import SMALL

HEADS_OF_16 = SMALL | {"head_dim": 16}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}


@pytest.mark.parametrize("rope", [None, ALPHA], ids=["plain", "alpha"])
def test_hunyuan_answers_as_transformers(rope: Mapping[str, object] | None, tmp_path: Path) -> None:
    check_family(HunYuanDenseV1Config(**HEADS_OF_16, rope_parameters=rope), tmp_path)


def test_hunyuan_with_experts_answers_as_transformers(tmp_path: Path) -> None:
    config = HunYuanMoEV1Config(
        **HEADS_OF_16 | {"intermediate_size": 40}, num_experts=6, moe_topk=[2, 2, 2]
    )
    check_family(config, tmp_path)


def test_the_error_names_what_is_not_supported() -> None:
    dense = HunYuanDenseV1Config(**HEADS_OF_16).to_dict()
    dense["architectures"] = ["HunYuanDenseV1ForCausalLM"]
    with pytest.raises(UnsupportedModel, match="use_cla"):
        spec_from_config({**dense, "use_cla": True})
    published_rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}
    rope = spec_from_config({**dense, "rope_scaling": published_rope}).attentions[0].rope
    assert rope is not None
    assert rope.theta == pytest.approx(10_000 * 1000.0 ** (16 / 14))
    with pytest.raises(UnsupportedModel, match="xdrope_section"):
        spec_from_config({**dense, "rope_scaling": {**published_rope, "xdrope_section": [1, 1]}})
    moe = HunYuanMoEV1Config(**HEADS_OF_16, num_experts=4).to_dict()
    moe["architectures"] = ["HunYuanMoEV1ForCausalLM"]
    with pytest.raises(UnsupportedModel, match="moe_topk"):
        spec_from_config({**moe, "moe_topk": [1, 2, 1]})
    with pytest.raises(UnsupportedModel, match="moe_intermediate_size"):
        spec_from_config({**moe, "moe_intermediate_size": 7})
