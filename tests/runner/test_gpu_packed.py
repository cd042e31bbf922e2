"""Packed weights in the GPU runner under Triton's interpreter, compared with the CPU runner, which
dequantizes the same numbers."""

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.models.quantized.packing import Layout, PackedKind, Packing, QuantizedSpec, Rule
from mainstem.models.spec import ModelSpec
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import RandomOrigin, folder_origin
from mainstem_bench.shapes import llama_shape
from tests.models.checkpoints import SMALL
from tests.models.quantized.cases import gptq_config
from tests.models.quantized.checkpoints import write_quantized
from tests.models.quantized.oracles import Case, gptq
from tests.models.ranks import Thread, run_ranks
from tests.runner.recipes import RECIPES
from tests.runner.test_gpu import GREEDY, a_config, answers, interpreted, on_cpu

pytestmark = pytest.mark.torch

SLOW = pytest.mark.slow
LLAMA = llama_shape(64, 96, 1, 2, 1, 64, 96, 10_000.0, max_positions=512)
INT4 = Packing(PackedKind.INT4, 32, has_zeros=True)
PROMPTS = [list(range(3, 20)), list(range(40, 45))]


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
        pytest.param(packed(LLAMA, INT4), id="int4"),
        pytest.param(
            packed(LLAMA, Packing(PackedKind.INT4, None)), id="int4 per channel", marks=SLOW
        ),
        pytest.param(
            packed(RECIPES["GptOssForCausalLM"], Packing(PackedKind.MXFP4, 32), r".*experts.*"),
            id="mxfp4 experts",
            marks=SLOW,
        ),
        pytest.param(
            packed(RECIPES["Qwen2MoeForCausalLM"], INT4, r".*(experts|shared_expert)\..*"),
            id="int4 experts",
            marks=SLOW,
        ),
        pytest.param(
            packed(LLAMA, Packing(PackedKind.INT8, 32)), id="int8: dequantized", marks=SLOW
        ),
    ],
)
def test_tokens_are_those_of_the_cpu(spec: ModelSpec) -> None:
    assert answers(on_gpu(spec), PROMPTS, GREEDY) == answers(
        on_cpu(a_config(), spec), PROMPTS, GREEDY
    )


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("group", [None, 128])
def test_fp8_weights_give_at_least_half_of_the_tokens_of_the_cpu(group: int | None) -> None:
    """Rows are rounded to fp8 too, so some tokens may differ from the CPU's."""
    shape = llama_shape(512, 512, 1, 4, 2, 128, 96, 10_000.0, max_positions=512)
    spec = packed(shape, Packing(PackedKind.FP8, group, 1 if group is None else 128))
    found = answers(on_gpu(spec), PROMPTS, GREEDY)
    right = answers(on_cpu(a_config(), spec), PROMPTS, GREEDY)
    pairs = zip(chain(*found), chain(*right), strict=True)
    assert sum(one == other for one, other in pairs) >= 2


@interpreted
@pytest.mark.slow
def test_deterministic_answers_do_not_depend_on_the_batch() -> None:
    config = a_config()
    config = replace(config, model=replace(config.model, deterministic=True))
    spec = packed(LLAMA, INT4)
    together = answers(on_gpu(spec, config), PROMPTS, GREEDY)
    alone = [answers(on_gpu(spec, config), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert together == alone


@interpreted
@pytest.mark.slow
def test_two_ranks_have_parts_of_packed_weights(tmp_path: Path) -> None:
    """The 160 columns of the down projection are cut between groups of 32: 64 and 96."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    case = Case("groups of 32", gptq_config(group_size=32), partial(gptq, group=32))
    write_quantized(LlamaConfig(**sizes | heads), tmp_path, case)
    origin, config = folder_origin(tmp_path), a_config()

    def run(ranks: Thread) -> list[list[int]]:
        runner, facts = load_gpu_runner(origin, config, torch.device("cpu"), ranks)
        return answers(join(runner, facts, config, EventBus()), PROMPTS, GREEDY)

    first, second = run_ranks(2, run)
    assert first == second
    runner, facts = load_cpu_runner(origin, config)
    assert first == answers(join(runner, facts, config, EventBus()), PROMPTS, GREEDY)
