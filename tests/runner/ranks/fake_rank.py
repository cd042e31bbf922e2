"""A rank over FakeRunner, which starts quickly and fails on request."""

import os
import signal
from dataclasses import dataclass, replace
from time import sleep
from typing import TYPE_CHECKING

from mainstem.core.config import CacheConfig, Device, DType, EngineConfig, ModelConfig
from mainstem.core.errors import ConfigError
from mainstem.core.step import InFlight, Step
from mainstem.kv.transfer import PageCopier
from mainstem.models.spec import ModelSpec
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.ranks.protocol import BeginRank, Loaded
from mainstem.runner.ranks.rank import RankPart
from mainstem_bench.shapes import SHAPES
from tests.fakes import FakeRunner

if TYPE_CHECKING:  # without torch, which is slow to import
    import torch

    from mainstem.models.weights import WeightSource

MODULE = "tests.runner.ranks.fake_rank_process"
VOCAB = 97
NUM_PAGES, PAGE_SIZE = 64, 4


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, when it launches a step or, if `step` is None, when it loads."""

    rank: int
    step: int | None
    kind: str  # one of: raise, memory, config, die, hang


@dataclass(frozen=True)
class FakeOrigin:
    """Stands for weights, and tells each rank how to behave."""

    can_overlap: bool = False
    faults: tuple[Fault, ...] = ()
    slow_rank: int | None = None
    spec: ModelSpec = SHAPES["tiny"]

    def digest(self) -> bytes:
        return b"fake"

    def open(self, dtype: "torch.dtype", device: "torch.device") -> "WeightSource":
        raise NotImplementedError

    def kv_scales(self) -> None:
        return None


class FakeRank(FakeRunner):
    """Runs steps with the faults of its rank."""

    def __init__(self, origin: FakeOrigin, rank: int) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE, VOCAB, origin.can_overlap)
        self._faults = {fault.step: fault for fault in origin.faults if fault.rank == rank}
        self._delay_s = 0.02 if origin.slow_rank == rank else 0.0

    def launch(self, step: Step) -> InFlight:
        if (fault := self._faults.get(len(self.steps))) is not None:
            happen(fault.kind)
        sleep(self._delay_s)
        return super().launch(step)


def happen(kind: str) -> None:
    match kind:
        case "raise":
            raise RuntimeError("connection closed by peer")
        case "memory":
            raise OutOfMemoryError("tried to allocate 20 GiB")
        case "config":
            raise ConfigError("kv_tokens=1 needs more")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            sleep(600)


def load_part(begin: BeginRank) -> RankPart:
    origin, rank = begin.origin, begin.shard.rank
    assert isinstance(origin, FakeOrigin)
    for fault in origin.faults:
        if fault.rank == rank and fault.step is None:
            happen(fault.kind)
    runner = FakeRank(origin, rank)
    # parts of ranks may differ in size, also those of quantized weights
    facts = replace(FACTS, num_params=1000 + rank, bytes_per_param=2.0 - rank / 16)
    loaded = Loaded(facts, runner.can_overlap, page_bytes=64, num_layers=1)
    return RankPart(runner, loaded, no_copier, lambda: None)


def no_copier(host_bytes: int) -> PageCopier:
    raise NotImplementedError


FACTS = RunnerFacts(
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    vocab_size=VOCAB,
    max_model_len=200,
    identity=b"",
    num_params=1000,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    dtype=DType.FP32,
)


def a_config(num_ranks: int) -> EngineConfig:
    model = ModelConfig(device=Device.CPU, tensor_parallel=num_ranks)
    return EngineConfig(model=model, cache=CacheConfig(page_size=PAGE_SIZE))
