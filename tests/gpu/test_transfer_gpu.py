"""Copies between a GPU and pinned memory are right, and steps wait for them layer by layer."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import (  # noqa: E402
    CacheConfig,
    EngineConfig,
    Fetch,
    ModelConfig,
    StoreConfig,
)
from mainstem.core.events import EventBus  # noqa: E402
from mainstem.core.ids import RequestId  # noqa: E402
from mainstem.core.metrics import Counters  # noqa: E402
from mainstem.core.request import Request, SamplingParams  # noqa: E402
from mainstem.engine.build import build_random_engine  # noqa: E402
from mainstem.engine.engine import Engine  # noqa: E402
from mainstem.kv.transfer import LoadId  # noqa: E402
from mainstem.runner import gpu_transfer  # noqa: E402
from mainstem.runner.copy_engine import MAX_PITCH  # noqa: E402
from mainstem.runner.gpu_pages import GpuPages  # noqa: E402
from mainstem.runner.gpu_transfer import GpuCopier  # noqa: E402
from mainstem.runner.origin import RandomOrigin  # noqa: E402
from mainstem_bench.shapes import SHAPES, llama_shape  # noqa: E402

PROMPTS = np.random.default_rng(0).integers(0, 500, (4, 70)).astype(np.int32)
LONG_PROMPTS = np.random.default_rng(1).integers(0, 500, (12, 900)).astype(np.int32)


@pytest.mark.parametrize("max_pitch", [MAX_PITCH, 0], ids=["as rows", "one by one"])
def test_pages_that_were_saved_are_loaded_unchanged(
    max_pitch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_transfer, "MAX_PITCH", max_pitch)
    spec = RandomOrigin(SHAPES["llama31-8b"], 0).spec
    device = torch.device("cuda")
    pages = GpuPages(spec, 600, 16, torch.bfloat16, device)
    for layer in range(pages.num_layers):
        pages.joint(layer).normal_()
    copier = GpuCopier(pages, host_bytes=600 << 20)
    before = [pages.joint(layer)[:, :300].clone() for layer in range(pages.num_layers)]
    rng = np.random.default_rng(0)
    count = min(256, copier.num_slots)
    sources = rng.permutation(300)[:count].astype(np.int32)
    slots = rng.permutation(copier.num_slots)[:count].astype(np.int32)
    targets = (300 + rng.permutation(300)[:count]).astype(np.int32)
    for _ in range(3):
        save = copier.save(sources, slots)
        save.wait()
        load = copier.load(LoadId(1), slots, targets)
        load.wait()
    num_bytes = count * copier.page_bytes
    rates = [num_bytes / transfer.seconds() / 1e9 for transfer in (save, load)]
    print(f"save {rates[0]:.1f} GB/s, load {rates[1]:.1f} GB/s, {num_bytes / 1e6:.0f} MB")
    for layer in range(pages.num_layers):
        now = pages.joint(layer)
        assert torch.equal(now[:, :300], before[layer]), "a save changed its source"
        assert torch.equal(now[:, targets], before[layer][:, sources])
    first = torch.stack([layer[:, int(sources[0])].cpu() for layer in before]).contiguous()
    assert bytes(copier.slot(int(slots[0]))) == first.view(torch.uint8).numpy().tobytes()
    copier.close()


TokenLogits = tuple[int, float, tuple[float, ...]]

# 18 layers make three pieces of a graph and of a load; 28,000 logits show any difference
DEEP = llama_shape(512, 1024, 18, 8, 2, 128, 28_000, 10_000.0, max_positions=4096)


def ask(engine: Engine, number: int) -> list[TokenLogits]:
    """Ids and the largest logprobs, not rounded, of every token of an answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=10, logprobs=20, ignore_eos=True)
    engine.submit(Request(RequestId(str(number)), PROMPTS[number], sampling))
    answer = []
    while engine.has_work:
        for output in engine.step():
            answer += [(p.token_id, p.logprob, p.top_logprobs) for p in output.logprobs]
    engine.check()
    return answer


def ask_in_place() -> list[list[TokenLogits]]:
    """Answers to prompts whose pages are on the device: nothing is saved or loaded."""
    config = EngineConfig(cache=CacheConfig(kv_tokens=2048))
    roomy = build_random_engine(DEEP, config, EventBus())
    for number in range(4):
        ask(roomy, number)
    answers = [ask(roomy, number) for number in range(4)]
    roomy.close()
    return answers


@pytest.mark.parametrize("preload", ["auto", "all", "0"])
def test_logits_after_save_and_load_are_the_same_bits(preload: str, tmp_path: Path) -> None:
    in_place = ask_in_place()
    assert all(len(answer) == 10 for answer in in_place)
    bus = EventBus()
    counters = Counters().attach(bus)
    store = StoreConfig(
        host_gb=0.05, disk_dir=str(tmp_path), disk_gb=0.2, fetch=Fetch.ALWAYS, preload=preload
    )
    config = EngineConfig(cache=CacheConfig(kv_tokens=112), store=store)
    small = build_random_engine(DEEP, config, bus)  # only one prompt with its answer fits
    for number in range(4):
        ask(small, number)
    assert [ask(small, number) for number in range(4)] == in_place
    assert counters.loaded_pages["host"] >= 4 * len(PROMPTS[0]) // 16 - 4
    assert counters.loaded_pages["disk"] == 0
    small.close()
    again = build_random_engine(DEEP, config, bus)
    assert [ask(again, number) for number in range(4)] == in_place
    assert counters.loaded_pages["disk"] + counters.prefetched_pages > 0
    again.close()


def test_logits_of_requests_that_start_while_others_load_are_the_same_bits(tmp_path: Path) -> None:
    """All requests at once: steps are prepared while others run, and rely on loads in flight."""

    def ask_all(engine: Engine) -> dict[str, list[TokenLogits]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=20, ignore_eos=True)
        answers: dict[str, list[TokenLogits]] = {}
        for number, prompt in enumerate(LONG_PROMPTS):
            answers[str(number)] = []
            engine.submit(Request(RequestId(str(number)), prompt, sampling))
        while engine.has_work:
            for output in engine.step():
                found = [(p.token_id, p.logprob, p.top_logprobs) for p in output.logprobs]
                answers[str(output.request_id)] += found
        engine.check()
        return answers

    bus = EventBus()
    counters = Counters().attach(bus)
    model = ModelConfig(deterministic=True)  # concurrent requests do not change a bit
    store = StoreConfig(host_gb=0.3, disk_dir=str(tmp_path), disk_gb=1.0, fetch=Fetch.ALWAYS)
    config = EngineConfig(model=model, cache=CacheConfig(kv_tokens=16_384), store=store)
    engine = build_random_engine(DEEP, config, bus)
    ask_all(engine)
    in_place = ask_all(engine)
    assert counters.loaded_pages["host"] == 0
    engine.flush()
    engine.clear_device()
    assert ask_all(engine) == in_place
    assert counters.loaded_pages["host"] >= 12 * (900 // 16)
    engine.close()
    again = build_random_engine(DEEP, config, bus)
    assert ask_all(again) == in_place
    assert counters.loaded_pages["disk"] + counters.prefetched_pages >= 12 * (900 // 16)
    again.close()
