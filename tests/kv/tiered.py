"""Tiers below FakeRunner: host slots hold copies of its pages; a test decides when copies end."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from mainstem.core.config import Fetch, Saving, SchedConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.step import InFlight, Int32s, Step
from mainstem.engine.engine import Engine
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.line import Address
from mainstem.kv.bytes.remote import RemoteSettings, RemoteTier
from mainstem.kv.bytes.segments import SegmentFiles
from mainstem.kv.stack import TierStack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import LowerTier
from mainstem.kv.transfer import LoadId
from mainstem.sched.fetching import Fetching
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.step_times import StepTimes
from tests.builders import VOCAB
from tests.fakes import FakeRunner

REMOTE = RemoteSettings(b"fake", b"a secret", ttl_s=60.0, max_bytes=1 << 30)
NUM_LAYERS = 2  # token ids and positions, so that a half-copied page is noticed


class CopyFault(Exception):
    """The error of a device that cannot copy."""


class FakeTransfer:
    """Ignores `patience` calls of `num_layers_done`; each later call copies one layer."""

    def __init__(
        self, copier: "FakeCopier", layers: list[tuple[np.ndarray, np.ndarray]], fault: str | None
    ) -> None:
        self._copier = copier
        self._layers = layers
        self._fails = fault == "late"
        self._done = 0
        self._asked = 0
        self._lock = Lock()  # the disk's writer waits for saves on its own thread
        if fault == "early":
            self._copy()
            raise CopyFault("no memory for the copy")

    def num_layers_done(self) -> int:
        self._asked += 1
        if self._asked > self._copier.patience and self._done < NUM_LAYERS:
            self._copy()
        return self._done

    def wait(self) -> None:
        for _ in range(NUM_LAYERS):
            self._copy()

    def seconds(self) -> float:
        return 1e-6

    def _copy(self) -> None:
        with self._lock:
            if self._fails and self._done == NUM_LAYERS - 1:
                raise CopyFault("the last layer cannot be copied")
            if self._done < NUM_LAYERS:
                target, source = self._layers[self._done]
                target[...] = source[...]
                self._done += 1


class _View:
    """Some rows of an array; they are read and written when the copy runs, not earlier."""

    def __init__(self, rows: np.ndarray, places: Int32s) -> None:
        self._rows = rows
        self._places = places.copy()

    def __getitem__(self, _: object) -> np.ndarray:
        return np.asarray(self._rows[self._places])

    def __setitem__(self, _: object, values: np.ndarray) -> None:
        self._rows[self._places] = values


class FakeCopier:
    """PageCopier over the memory of a FakeRunner.

    Each save or load takes the next planned fault, if there is one: `early` raises when the copy
    is started, `late` while it runs. In both cases one of the two layers was copied before.
    """

    def __init__(self, runner: "TieredRunner", num_slots: int) -> None:
        self._runner = runner
        page_size = runner.page_size
        self._slab = np.zeros((num_slots, NUM_LAYERS, page_size), np.int64)
        self._bytes = memoryview(self._slab.reshape(-1).view(np.uint8).data)
        self._loads: dict[LoadId, FakeTransfer] = {}
        self.num_slots = num_slots
        self.num_layers = NUM_LAYERS
        self.page_bytes = NUM_LAYERS * page_size * 8
        self.patience = 0
        self.save_faults: deque[str | None] = deque()
        self.load_faults: deque[str | None] = deque()

    def slot(self, slot: int) -> memoryview:
        return self._bytes[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def save(self, pages: Int32s, slots: Int32s) -> FakeTransfer:
        layers = [
            (_View(self._slab[:, layer], slots), _View(memory, pages))
            for layer, memory in enumerate(self._runner.memory())
        ]
        fault = self.save_faults.popleft() if self.save_faults else None
        return FakeTransfer(self, layers, fault)  # type: ignore[arg-type]  # views stand for arrays

    def load(self, load_id: LoadId, slots: Int32s, pages: Int32s) -> FakeTransfer:
        layers = [
            (_View(memory, pages), _View(self._slab[:, layer], slots))
            for layer, memory in enumerate(self._runner.memory())
        ]
        fault = self.load_faults.popleft() if self.load_faults else None
        transfer = FakeTransfer(self, layers, fault)  # type: ignore[arg-type]
        self._loads[load_id] = transfer
        return transfer

    def forget(self, load_id: LoadId) -> None:
        self._loads.pop(load_id, None)

    def finish(self, load_ids: Iterable[int]) -> None:
        """Wait for these loads: a step is about to read their pages."""
        for load_id in load_ids:
            if (transfer := self._loads.get(LoadId(load_id))) is not None:
                transfer.wait()

    def drain(self) -> None:
        """Does nothing: failed copies move no more bytes."""

    def close(self) -> None:
        pass


class TieredRunner(FakeRunner):
    """FakeRunner whose pages can be copied, and whose steps wait for loads."""

    def __init__(self, num_pages: int, page_size: int, can_overlap: bool) -> None:
        super().__init__(num_pages, page_size, VOCAB, can_overlap)
        self.page_size = page_size
        self.copier: FakeCopier | None = None

    def memory(self) -> list[np.ndarray]:
        """Token ids and positions by page."""
        return [
            self._token_at.reshape(-1, self.page_size),
            self._position_at.reshape(-1, self.page_size),
        ]

    def launch(self, step: Step) -> InFlight:
        assert self.copier is not None
        self.copier.finish(step.load_ids.tolist())
        return super().launch(step)


@dataclass
class Tiered:
    """An engine over FakeRunner with tiers below it, and its parts."""

    engine: Engine
    store: KVStore
    stack: TierStack
    copier: FakeCopier
    runner: TieredRunner


def a_tiered_engine(  # noqa: PLR0917
    num_pages: int = 16,
    page_size: int = 4,
    num_slots: int = 32,
    disk_dir: Path | None = None,
    num_records: int = 64,
    files: type[SegmentFiles] = SegmentFiles,
    bus: EventBus | None = None,
    can_overlap: bool = False,
    policy: str = "lookahead",
    ttl_s: float | None = None,
    preload: str = "auto",
    chunk_tokens: int = 64,
    max_model_len: int = 10_000,
    remote: Address | None = None,
    remote_settings: RemoteSettings = REMOTE,
    fetch: Fetch = Fetch.ALWAYS,
    save: Saving = Saving.DECODING,
) -> Tiered:
    bus = bus or EventBus()
    runner = TieredRunner(num_pages, page_size, can_overlap)
    copier = FakeCopier(runner, num_slots)
    runner.copier = copier
    below = list[LowerTier]()
    if disk_dir is not None:
        record_bytes = files(disk_dir, copier.page_bytes).record_bytes
        room = num_records * record_bytes
        below.append(DiskTier(disk_dir, copier.page_bytes, room, "fake", files))
    if remote is not None:
        below.append(RemoteTier(remote, copier.page_bytes, remote_settings))
    stack = TierStack(bus, copier, below, policy, ttl_s)
    config = StoreConfig(host_gb=1.0, fetch=fetch, preload=preload, policy=policy, save=save)
    store = KVStore(num_pages, page_size, b"fake", bus, stack, config)
    fetching = Fetching(config, store.loader, page_size, StepTimes(token_s=1e-3))
    sched = SchedConfig(chunk_tokens=chunk_tokens)
    scheduler = Scheduler(sched, store, VOCAB, max_model_len, bus, fetching=fetching)
    return Tiered(Engine(scheduler, runner, bus), store, stack, copier, runner)
