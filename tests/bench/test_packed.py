"""Random packed weights: which products are packed, their memory, and the limit of the card."""

import json

import pytest

from mainstem.core.config import EngineConfig, ModelConfig, Quantize
from mainstem.plan.cost import H200, full_speed_tokens, step_s
from mainstem_bench.offline import FP8_FLOPS_PER_S, main, model_cost
from mainstem_bench.packed import PACKED, shape_with
from mainstem_bench.shapes import SHAPES
from tests.bench.test_offline import SMALL

LAYER = "model.layers.3."


def test_layers_are_packed_and_the_head_is_not() -> None:
    for name in ("gptq", "awq", "fp8", "fp8-blocks"):
        spec = PACKED[name]
        assert spec.packing_of("lm_head") is None
        assert spec.packing_of(f"{LAYER}self_attn.q_proj") is not None
        assert spec.packing_of(f"{LAYER}mlp.gate") is None  # a router
        assert spec.packing_of(f"{LAYER}mlp.gate_proj") is not None
    assert PACKED["mxfp4"].packing_of(f"{LAYER}self_attn.q_proj") is None
    assert PACKED["mxfp4"].packing_of(f"{LAYER}mlp.experts.gate_up_proj") is not None
    assert PACKED["mxfp4"].packing_of(f"{LAYER}mlp.router") is None


def test_packed_weights_have_their_expected_size() -> None:
    per_param = {
        weights: shape_with("llama31-70b", weights).bytes_per_param(2)
        for weights in (None, "gptq", "awq", "fp8", "fp8-blocks")
    }
    assert per_param[None] == 2.0
    assert per_param["gptq"] == 0.5 + 2 / 128
    assert per_param["awq"] == 0.5 + 3 / 128
    assert per_param["fp8"] == 1.0
    assert per_param["fp8-blocks"] == 1.0 + 4 / 128**2
    gpt_oss = shape_with("gpt-oss-20b", "mxfp4")
    weights = gpt_oss.bytes_per_param(2) * (gpt_oss.num_layer_params + gpt_oss.num_idle_params)
    assert weights + 2 * 2 * gpt_oss.num_head_params < 16e9


def test_small_steps_read_packed_weights_and_large_steps_compute_in_16_bits() -> None:
    config = EngineConfig(ModelConfig(model="llama31-70b"))
    packed = model_cost(shape_with("llama31-70b", "gptq"), config, has_gpu=True).size
    plain = model_cost(shape_with("llama31-70b", None), config, has_gpu=True).size
    assert 3.5 < step_s(H200, plain, 1, 1, 0) / step_s(H200, packed, 1, 1, 0) < 4
    assert step_s(H200, plain, 8192, 1, 0) == step_s(H200, packed, 8192, 1, 0)


def test_the_limit_of_fp8_checkpoints_assumes_products_in_fp8() -> None:
    config = EngineConfig(ModelConfig(model="llama31-8b"))
    by_order = EngineConfig(ModelConfig(model="llama31-8b", quantize=Quantize.FP8))
    assert model_cost(SHAPES["llama31-8b"], config, True).gemm_flops_per_s is None
    assert model_cost(SHAPES["llama31-8b"], by_order, True).gemm_flops_per_s == FP8_FLOPS_PER_S
    for weights in ("fp8", "fp8-blocks"):
        cost = model_cost(shape_with("llama31-8b", weights), config, True)
        assert cost.gemm_flops_per_s == FP8_FLOPS_PER_S


def test_steps_are_larger_if_weights_are_dequantized() -> None:
    def tokens(name: str, weights: str | None) -> int:
        return full_speed_tokens(H200, shape_with(name, weights).moved_bytes_per_param)

    assert tokens("llama31-70b", None) == tokens("llama31-70b", "fp8") == 4096
    assert tokens("llama31-70b", "gptq") == 8192
    assert tokens("gpt-oss-20b", "mxfp4") == 4096  # experts are read without conversion


@pytest.mark.torch
def test_a_job_runs_on_packed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--weights", "awq"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["weights"] == "awq"
    assert result["requests"] == 6
