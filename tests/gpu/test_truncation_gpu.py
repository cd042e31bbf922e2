"""Conversations longer than the context window, on a GPU: pages are moved, and chosen by
attention."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import (  # noqa: E402
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    SchedConfig,
)
from mainstem.core.ids import RequestId, SessionId  # noqa: E402
from mainstem.core.request import Overflow, Request  # noqa: E402
from mainstem.core.step import InFlight, Step, StepResult  # noqa: E402
from mainstem.engine.build import build_random_engine  # noqa: E402
from mainstem.kernels.attention.mass import page_masses  # noqa: E402
from mainstem_bench.kept import KeptModel  # noqa: E402
from mainstem_bench.shapes import llama_shape  # noqa: E402
from mainstem_bench.truncation import read_on  # noqa: E402
from mainstem_bench.ways import WAYS  # noqa: E402
from tests.models.checkpoints import make_checkpoint  # noqa: E402
from tests.runner.conversations import GREEDY, answer, check_conversation  # noqa: E402

WINDOW, VOCAB = 512, 4096
ONE_LAYER = llama_shape(256, 512, 1, 4, 2, 64, VOCAB, 10_000.0, max_positions=2048)
SIX_LAYERS = llama_shape(512, 1024, 6, 8, 2, 64, VOCAB, 10_000.0, max_positions=2048)


def a_config(dtype: DType) -> EngineConfig:
    return EngineConfig(
        ModelConfig(dtype=dtype, device=Device.CUDA),
        CacheConfig(kv_tokens=8 * WINDOW),
        SchedConfig(max_model_len=WINDOW, chunk_tokens=256),
    )


@pytest.mark.parametrize("overflow", [Overflow.KV, Overflow.IMPORTANT])
def test_answers_are_those_of_the_kept_tokens(overflow: Overflow) -> None:
    engine = build_random_engine(ONE_LAYER, a_config(DType.FP32))
    chosen = check_conversation(engine, overflow, VOCAB, turns=12, turn_tokens=90)
    engine.close()
    assert (chosen > 0) is (overflow is Overflow.IMPORTANT)


def test_masses_on_the_device_are_those_of_a_cpu() -> None:
    torch.manual_seed(0)
    q, k_pages = torch.randn(64, 8, 64), torch.randn(40, 2, 16, 64)
    page_ids = torch.randperm(40)[:30]
    there = page_masses(q.cuda(), k_pages.cuda(), page_ids.cuda(), 410, scale=0.125, window=300)
    here = page_masses(q, k_pages, page_ids, 410, scale=0.125, window=300)
    assert torch.allclose(there.cpu(), here, rtol=1e-3, atol=1e-3)


def test_weights_of_all_layers_and_heads_come_back_with_the_step() -> None:
    """Weights of a query sum up to 1 in each head of each layer."""
    engine = build_random_engine(SIX_LAYERS, a_config(DType.BF16))
    results: list[tuple[Step, StepResult]] = []
    launch = engine._runner.launch

    class Watched:
        def __init__(self, step: Step, handle: InFlight) -> None:
            self.step, self.handle = step, handle

        def wait(self) -> StepResult:
            result = self.handle.wait()
            results.append((self.step, result))
            return result

        def has_ended(self) -> bool:
            return self.handle.has_ended()

    engine._runner.launch = lambda step: Watched(step, launch(step))  # type: ignore[method-assign]
    rng = np.random.default_rng(3)
    said = rng.integers(3, VOCAB, 500).tolist()
    for turn in range(4):
        request = Request(
            RequestId(f"turn-{turn}"),
            np.array(said, np.int32),
            replace(GREEDY, max_tokens=8),
            session=SessionId("s"),
            overflow=Overflow.IMPORTANT,
        )
        said += answer(engine, request)
        said += rng.integers(3, VOCAB, 100).tolist()
    weighed = [
        (each, masses)
        for step, result in results
        for each, masses in zip(step.weighings, result.page_masses, strict=True)
    ]
    engine.check()
    engine.close()
    assert weighed
    for weighing, masses in weighed:
        assert len(masses) == len(weighing.page_ids)
        assert (masses > 0).all()
        assert float(masses.sum()) == pytest.approx(weighing.num_rows * 6 * 8, rel=1e-3)


@pytest.mark.parametrize("way", ["recompute", "kv", "important", "naive"])
def test_a_text_that_is_cut_is_scored_as_on_a_cpu(way: str, tmp_path: Path) -> None:
    """Six query heads share a KV head, as in Qwen2.5-1.5B."""
    make_checkpoint(
        "qwen2", tmp_path, hidden_size=384, num_attention_heads=6, num_key_value_heads=1
    )
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 99, 640)]
    config = a_config(DType.FP32)
    config = replace(config, sched=replace(config.sched, max_model_len=256))
    on_cpu = replace(config, model=replace(config.model, device=Device.CPU))
    there, here = (
        read_on(KeptModel(tmp_path), each, WAYS[way], ids, 48) for each in (config, on_cpu)
    )
    assert there.perplexity == pytest.approx(here.perplexity, rel=5e-3)
    assert (there.moved_pages, there.computed_tokens) == (here.moved_pages, here.computed_tokens)
