"""Pages between a GPU and pinned memory: right, fast enough, and waited for layer by layer."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import CacheConfig, EngineConfig, Fetch, StoreConfig  # noqa: E402
from mainstem.core.events import EventBus  # noqa: E402
from mainstem.core.ids import RequestId  # noqa: E402
from mainstem.core.metrics import Counters  # noqa: E402
from mainstem.core.request import Request, SamplingParams  # noqa: E402
from mainstem.core.shapes import SHAPES  # noqa: E402
from mainstem.engine.build import build_random_engine  # noqa: E402
from mainstem.engine.engine import Engine  # noqa: E402
from mainstem.kv.transfer import LoadId  # noqa: E402
from mainstem.runner.gpu_pages import GpuPages  # noqa: E402
from mainstem.runner.gpu_transfer import GpuCopier  # noqa: E402
from mainstem.runner.load import RandomOrigin  # noqa: E402

PROMPTS = np.random.default_rng(0).integers(0, 500, (4, 70)).astype(np.int32)


def test_pages_come_back_as_they_went_and_fast() -> None:
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


def ask(engine: Engine, number: int) -> list[tuple[int, float, tuple[float, ...]]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=20, ignore_eos=True)
    engine.submit(Request(RequestId(str(number)), PROMPTS[number], sampling))
    answer = []
    while engine.has_work:
        for output in engine.step():
            answer += [(p.token_id, p.logprob, p.top_logprobs) for p in output.logprobs]
    engine.check()
    return answer


@pytest.mark.parametrize("preload", ["auto", "all", "0"])
def test_logits_after_save_and_load_are_the_same_bits(preload: str, tmp_path: object) -> None:
    def an_engine(store: StoreConfig, bus: EventBus, kv_tokens: int) -> Engine:
        config = EngineConfig(cache=CacheConfig(kv_tokens=kv_tokens), store=store)
        return build_random_engine(SHAPES["tiny"], config, bus)

    roomy = an_engine(StoreConfig(), EventBus(), 2048)
    for number in range(4):
        ask(roomy, number)
    in_place = [ask(roomy, number) for number in range(4)]
    roomy.close()
    bus = EventBus()
    counters = Counters().attach(bus)
    config = StoreConfig(
        host_gb=0.01, disk_dir=str(tmp_path), disk_gb=0.1, fetch=Fetch.ALWAYS, preload=preload
    )
    small = an_engine(config, bus, 96)
    for number in range(4):
        ask(small, number)
    assert [ask(small, number) for number in range(4)] == in_place
    assert counters.loaded_pages["host"] > 0
    small.close()
    again = an_engine(config, bus, 96)
    assert [ask(again, number) for number in range(4)] == in_place
    assert counters.loaded_pages["disk"] + counters.prefetched_pages > 0
    again.close()
