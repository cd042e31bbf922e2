"""A model split over ranks answers as the whole one, whatever its family."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Quantize,
    SchedConfig,
)
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.request import Output, SamplingParams
from mainstem.engine.build import join
from mainstem.models.collectives import ALONE, Collectives
from mainstem.models.families import read_spec
from mainstem.models.shapes import SHAPES
from mainstem.models.shard import Shard, part_of, shards_that_divide
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from tests.builders import a_request, run_all
from tests.models.checkpoints import SMALL, write_checkpoint
from tests.models.ranks import Thread, run_ranks

TOLERANCE = 1e-4
TOP = 4
WIDE = SMALL | {  # query heads for four ranks; KV heads for two, so that four have copies
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
FALCON = {k: v for k, v in WIDE.items() if k not in {"intermediate_size", "num_key_value_heads"}}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
UNEQUAL = {"intermediate_size": 82}  # 48 and 34; 16, 16, 16 and 34
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE | UNEQUAL, attention_bias=True, mlp_bias=True),
    "llama, tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral": MistralConfig(**WIDE, sliding_window=11, head_dim=16),
    "qwen 2": Qwen2Config(**WIDE),
    "qwen 3": Qwen3Config(**WIDE, head_dim=16, attention_bias=True),
    "qwen 2 moe": Qwen2MoeConfig(
        **WIDE, **EXPERTS, shared_expert_intermediate_size=96, mlp_only_layers=[1]
    ),
    "qwen 3 moe": Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "mixtral": MixtralConfig(**WIDE, num_local_experts=5, num_experts_per_tok=2, head_dim=16),
    "gpt-oss": GptOssConfig(
        **WIDE, num_local_experts=5, num_experts_per_tok=3, head_dim=16, sliding_window=11
    ),
    "gemma 2": Gemma2Config(
        **WIDE, head_dim=16, sliding_window=11, final_logit_softcapping=3.0, attention_bias=True
    ),
    "gemma 3": Gemma3TextConfig(**WIDE, head_dim=16, sliding_window=11),
    "falcon 7b": FalconConfig(**FALCON),
    "falcon 40b": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon 11b": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    ),
    "falcon, biases": FalconConfig(**FALCON, parallel_attn=False, multi_query=False, bias=True),
    "granite": GraniteConfig(
        **WIDE, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=2.5
    ),
    "olmo 2": Olmo2Config(**WIDE),
    "phi 2": PhiConfig(**WIDE | {"hidden_size": 128}),
    "phi 3": Phi3Config(**WIDE),
    "smollm 3": SmolLM3Config(**WIDE, no_rope_layer_interval=2),
    "stablelm": StableLmConfig(**WIDE | {"hidden_size": 128}, use_parallel_residual=True),
}
QUICK = ("llama", "falcon 40b", "gpt-oss", "olmo 2", "phi 2")


def a_config(quantize: Quantize = Quantize.NONE) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(dtype=DType.FP32, quantize=quantize),
        cache=CacheConfig(page_size=4, kv_tokens=512),
        sched=SchedConfig(chunk_tokens=16),
    )


def outputs(
    folder: Path, ranks: Collectives = ALONE, quantize: Quantize = Quantize.NONE
) -> list[Output]:
    """Of prompts that share a beginning, longer than the windows, in chunks; then of a lone one."""
    config = a_config(quantize)
    runner, facts = load_cpu_runner(folder_origin(folder), config, ranks)
    engine = join(runner, facts, config, EventBus())
    rng = np.random.default_rng(3)
    head = rng.integers(3, facts.vocab_size, 13).tolist()
    prompts = [head + rng.integers(3, facts.vocab_size, count).tolist() for count in (2, 9)]
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=TOP, prompt_logprobs=TOP)
    requests = [a_request(ids, name=str(n), sampling=sampling) for n, ids in enumerate(prompts)]
    found = run_all(engine, requests).outputs
    found += run_all(engine, [a_request(head[:3], name="lone", sampling=sampling)]).outputs
    engine.close()
    return found


def check_same(found: Sequence[Output], expected: Sequence[Output], tolerance: float) -> None:
    assert [(o.request_id, list(o.token_ids)) for o in found] == [
        (o.request_id, list(o.token_ids)) for o in expected
    ]
    for mine, other in zip(found, expected, strict=True):
        records = [*mine.logprobs, *(mine.prompt_logprobs or ())]
        others = [*other.logprobs, *(other.prompt_logprobs or ())]
        for one, two in zip(records, others, strict=True):
            if one is not None and two is not None:
                assert one.logprob == pytest.approx(two.logprob, abs=tolerance)
                assert one.top_logprobs == pytest.approx(two.top_logprobs, abs=tolerance)


@pytest.mark.parametrize("of", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_ranks_answer_as_one(name: str, of: int, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[name], tmp_path)
    expected = outputs(tmp_path)
    for found in run_ranks(of, lambda ranks: outputs(tmp_path, ranks)):
        check_same(found, expected, TOLERANCE)
