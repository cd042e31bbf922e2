"""Pages come back from host memory and disk with the same bits, and layers wait for their loads."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mainstem.core.config import CacheConfig, DType, EngineConfig, Fetch, ModelConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.kernels.memory.cpu import move_pages
from mainstem.kv.transfer import LoadId
from mainstem.models.shard import Shard
from mainstem.models.spec import ModelSpec
from mainstem.runner.origin import RandomOrigin
from mainstem.runner.pages import DevicePages
from mainstem.runner.ranks.shared_memory import SharedMemory
from mainstem.runner.slab import SlabPart, count_slots, slot_bytes
from mainstem.runner.transfer import CpuCopier, CpuGate, CpuTransfer
from mainstem_bench.shapes import SHAPES
from tests.runner.recipes import RECIPES

PROMPTS = np.random.default_rng(0).integers(0, 500, (4, 70)).astype(np.int32)
P = ParamSpec("P")
T = TypeVar("T")
Answer = list[tuple[int, float, tuple[float, ...]]]


def tiny_spec() -> ModelSpec:
    return RandomOrigin(SHAPES["tiny"], 0).spec


def an_engine(store: StoreConfig, bus: EventBus, kv_tokens: int) -> Engine:
    model = ModelConfig(dtype=DType.FP32)
    cache = CacheConfig(kv_tokens=kv_tokens)
    return build_random_engine(
        SHAPES["tiny"], EngineConfig(model=model, cache=cache, store=store), bus
    )


def ask(engine: Engine, number: int) -> Answer:
    """Tokens and top log-probabilities, not rounded: they show every bit of the largest logits."""
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=20, ignore_eos=True)
    engine.submit(Request(RequestId(str(number)), PROMPTS[number], sampling))
    answer: Answer = []
    while engine.has_work:
        for output in engine.step():
            answer += [(p.token_id, p.logprob, p.top_logprobs) for p in output.logprobs]
    engine.check()
    return answer


@pytest.mark.parametrize("preload", ["auto", "all", "0"])
def test_logits_after_save_and_load_are_the_same_bits(preload: str, tmp_path: Path) -> None:
    roomy = an_engine(StoreConfig(), EventBus(), kv_tokens=2000)
    for number in range(len(PROMPTS)):
        ask(roomy, number)
    in_place = [ask(roomy, number) for number in range(len(PROMPTS))]
    roomy.close()
    bus = EventBus()
    counters = Counters().attach(bus)
    config = StoreConfig(
        host_gb=0.01, disk_dir=str(tmp_path), disk_gb=0.1, fetch=Fetch.ALWAYS, preload=preload
    )
    small = an_engine(config, bus, kv_tokens=96)  # one conversation at a time
    for number in range(len(PROMPTS)):
        ask(small, number)
    assert [ask(small, number) for number in range(len(PROMPTS))] == in_place
    assert counters.loaded_pages["host"] == 4 * len(PROMPTS)
    small.close()
    again = an_engine(config, bus, kv_tokens=96)
    assert [ask(again, number) for number in range(len(PROMPTS))] == in_place
    assert counters.loaded_pages["disk"] + counters.prefetched_pages >= 4 * len(PROMPTS)
    again.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copier_copies_whole_pages(dtype: torch.dtype) -> None:
    pages = DevicePages(tiny_spec(), 12, 4, dtype)
    for layer in range(pages.num_layers):
        pages.joint(layer).normal_()
    copier = CpuCopier(pages, host_bytes=1 << 20)
    before = [pages.joint(layer).clone() for layer in range(pages.num_layers)]
    copier.save(np.array([7, 3, 9], np.int32), np.array([5, 0, 2], np.int32)).wait()
    copier.load(LoadId(1), np.array([0, 5], np.int32), np.array([1, 11], np.int32)).wait()
    for layer in range(pages.num_layers):
        now = pages.joint(layer)
        assert torch.equal(now[:, 1], before[layer][:, 3])
        assert torch.equal(now[:, 11], before[layer][:, 7])
        others = [page for page in range(12) if page not in (1, 11)]
        assert torch.equal(now[:, others], before[layer][:, others]), "another page was touched"
    first = bytes(copier.slot(5))
    parts = [layer[:, 7].contiguous().view(torch.uint8).numpy().tobytes() for layer in before]
    assert first == b"".join(parts)
    copier.close()


def test_each_part_of_a_page_is_copied_from_its_own_place() -> None:
    spec = RECIPES["Gemma 4 with inputs of layers"]  # two layers with their own K and V
    pages = DevicePages(spec, 6, 4, torch.float32, num_parts=3)
    for layer in range(pages.num_layers):
        pages.joint(layer).normal_()
    before = [pages.joint(layer).clone() for layer in range(pages.num_layers)]
    with closing(CpuCopier(pages, host_bytes=1 << 20)) as copier:
        slots = np.array([5, 2], np.int32)
        copier.save(np.array([4, 1], np.int32), slots, np.array([2, 0], np.int32)).wait()
        whole = (before[1][:, 4], before[0][:, 2])  # the full part comes first
        assert bytes(copier.slot(5)) == b"".join(
            part.contiguous().view(torch.uint8).numpy().tobytes() for part in whole
        )
        load = copier.load(LoadId(1), slots, np.array([0, 5], np.int32), np.array([1, 3], np.int32))
        load.wait()
    assert torch.equal(pages.joint(1)[:, [0, 5]], before[1][:, [4, 1]])
    assert torch.equal(pages.joint(0)[:, [1, 3]], before[0][:, [2, 0]])
    assert torch.equal(pages.joint(0)[:, [0, 2]], before[0][:, [0, 2]]), "another part was touched"


class AtOnce(ThreadPoolExecutor):
    """Runs work in the caller's thread, where the profiler sees it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def test_a_copy_reads_only_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one page out of 5,000 allocates at most two pages at a time, never a copy of the
    layer's whole cache."""
    monkeypatch.setattr("mainstem.runner.transfer.ThreadPoolExecutor", AtOnce)
    pages = DevicePages(tiny_spec(), 5000, 4, torch.float32)
    joint = pages.joint(0).zero_()
    turns = torch.ones(1, 1, 1, joint.shape[-1] // 2, dtype=torch.complex64)
    one, other = np.array([7], np.int32), np.array([1], np.int32)
    with closing(CpuCopier(pages, host_bytes=1 << 20)) as copier:
        for copy in (
            lambda: copier.save(one, other),
            lambda: copier.load(LoadId(1), other, one),
            lambda: move_pages(joint, torch.tensor([7]), torch.tensor([1]), turns),
        ):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
                copy()
            most_bytes = max(event.self_cpu_memory_usage for event in made.events())
            assert 0 < most_bytes <= 2 * pages.page_bytes // pages.num_layers


def test_a_drained_copier_has_no_copies_in_flight() -> None:
    pages = DevicePages(tiny_spec(), 12, 4, torch.float32)
    copier = CpuCopier(pages, host_bytes=1 << 20)
    numbers = np.arange(4, dtype=np.int32)
    copies = [copier.save(numbers, numbers) for _ in range(20)]
    copies += [copier.load(LoadId(number), numbers, numbers) for number in range(20)]
    copier.drain()
    assert {copy.num_layers_done() for copy in copies} == {pages.num_layers}
    copier.close()


def test_a_slot_has_the_parts_of_all_ranks_side_by_side() -> None:
    with closing(SharedMemory()) as memory:
        copiers, parts = [], []
        for rank in range(2):
            pages = DevicePages(tiny_spec(), 4, 4, torch.float32)
            for layer in range(pages.num_layers):
                pages.joint(layer).normal_()
            whole_bytes = 2 * pages.page_bytes
            slots = memory.resize(count_slots(1 << 18, whole_bytes) * slot_bytes(whole_bytes))
            copiers.append(CpuCopier(pages, 1 << 18, SlabPart(Shard(rank, 2), memory.fd)))
            layers = [pages.joint(layer)[:, 3].contiguous() for layer in range(pages.num_layers)]
            parts.append(b"".join(layer.numpy().tobytes() for layer in layers))
        three, five = np.array([3], np.int32), np.array([5], np.int32)
        for copier in copiers:
            copier.save(three, five).wait()
        first = 5 * slot_bytes(whole_bytes)
        assert bytes(slots[first : first + whole_bytes]) == b"".join(parts)
        assert [bytes(copier.slot(5)) for copier in copiers] == parts
        for copier in copiers:
            copier.load(LoadId(1), five, np.array([0], np.int32)).wait()
            copier.save(np.array([0], np.int32), np.array([6], np.int32)).wait()
        assert [bytes(copier.slot(6)) for copier in copiers] == parts
        for copier in copiers:
            copier.close()


def test_slots_are_aligned_for_files() -> None:
    pages = DevicePages(tiny_spec(), 4, 1, torch.float32)  # 2 KiB a page
    copier = CpuCopier(pages, host_bytes=1 << 16)
    assert copier.page_bytes == 2048
    assert copier.num_slots == 16
    for slot in (0, 3):
        address = np.frombuffer(copier.slot(slot), np.uint8).ctypes.data
        assert address % 4096 == 0
    copier.close()


def test_a_gate_delays_a_layer_until_its_pages_are_loaded() -> None:
    transfer = CpuTransfer(num_layers=2)
    gate, go = CpuGate([transfer]), [Event(), Event()]
    passed: list[int] = []

    def step() -> None:
        for layer in range(2):
            gate.before(layer)
            passed.append(layer)

    threads = [Thread(target=transfer.run, args=(lambda layer: go[layer].wait(),))]
    threads.append(Thread(target=step))
    for thread in threads:
        thread.start()
    sleep(0.02)
    assert passed == []
    go[0].set()
    transfer.wait_for(1)
    while not passed:
        sleep(0.001)
    sleep(0.02)
    assert passed == [0]
    go[1].set()
    for thread in threads:
        thread.join()
    assert passed == [0, 1]
    assert transfer.num_layers_done() == 2


def test_waiting_for_a_failed_copy_raises_its_error() -> None:
    def fail(_: int) -> None:
        raise ValueError("no such page")

    transfer = CpuTransfer(num_layers=2)
    transfer.run(fail)
    with pytest.raises(ValueError, match="no such page"):
        transfer.wait()
