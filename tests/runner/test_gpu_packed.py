"""Packed weights through the GPU runner, under Triton's interpreter, against the CPU runner, which
dequantizes the same numbers."""

from dataclasses import replace

import pytest
import torch

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.models.quantized.packing import Layout, PackedKind, Packing, QuantizedSpec, Rule
from mainstem.models.shapes import llama_shape
from mainstem.models.spec import ModelSpec
from mainstem.runner.origin import RandomOrigin
from tests.runner.recipes import RECIPES
from tests.runner.test_gpu import GREEDY, a_config, answers, interpreted, on_cpu

pytestmark = pytest.mark.torch

LLAMA = llama_shape(64, 96, 2, 2, 1, 64, 96, 10_000.0, max_positions=512)
INT4 = Packing(PackedKind.INT4, 32, has_zeros=True)
PROMPTS = [list(range(3, 20)), list(range(40, 45)), [7] * 9]


def packed(spec: ModelSpec, packing: Packing, pattern: str = r"(?!.*lm_head).*") -> ModelSpec:
    return replace(spec, quantized=QuantizedSpec(Layout.GPTQ, None, (Rule(pattern, packing),)))


def on_gpu(spec: ModelSpec, config: EngineConfig | None = None) -> Engine:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    config = config or a_config()
    runner, facts = load_gpu_runner(RandomOrigin(spec, 0), config, torch.device("cpu"))
    return join(runner, facts, config, EventBus())


@interpreted
@pytest.mark.parametrize(
    "spec",
    [
        packed(LLAMA, INT4),
        packed(LLAMA, Packing(PackedKind.INT4, None)),
        packed(RECIPES["GptOssForCausalLM"], Packing(PackedKind.MXFP4, 32), r".*experts.*"),
        packed(RECIPES["Qwen2MoeForCausalLM"], INT4, r".*(experts|shared_expert)\..*"),
        packed(LLAMA, Packing(PackedKind.INT8, 32)),
    ],
    ids=["int4", "int4 per channel", "mxfp4 experts", "int4 experts", "int8: dequantized"],
)
def test_the_same_tokens_as_the_cpu(spec: ModelSpec) -> None:
    assert answers(on_gpu(spec), PROMPTS, GREEDY) == answers(
        on_cpu(a_config(), spec), PROMPTS, GREEDY
    )


@interpreted
@pytest.mark.parametrize("group", [None, 128])
def test_fp8_weights_run(group: int | None) -> None:
    """Rows are rounded to fp8 too, so tokens may differ from the CPU's: some must not."""
    shape = llama_shape(512, 512, 1, 4, 2, 128, 96, 10_000.0, max_positions=512)
    spec = packed(shape, Packing(PackedKind.FP8, group, 1 if group is None else 128))
    found = answers(on_gpu(spec), PROMPTS, GREEDY)
    right = answers(on_cpu(a_config(), spec), PROMPTS, GREEDY)
    assert sum(a == b for a, b in zip(found, right, strict=True)) >= 2


@interpreted
def test_deterministic_answers_do_not_depend_on_the_batch() -> None:
    config = a_config()
    config = replace(config, model=replace(config.model, deterministic=True))
    spec = packed(LLAMA, INT4)
    together = answers(on_gpu(spec, config), PROMPTS, GREEDY)
    alone = [answers(on_gpu(spec, config), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert together == alone
