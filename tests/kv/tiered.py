"""Tiers below FakeRunner: host slots hold copies of its pages; a test decides when copies end."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from mainstem.core.config import Fetch, Saving, SchedConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.step import InFlight, Int32s, Step, StepResult
from mainstem.engine.engine import Engine
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.line import Address
from mainstem.kv.bytes.remote import RemoteSettings, RemoteTier
from mainstem.kv.bytes.segments import SegmentFiles
from mainstem.kv.parts import WindowParts
from mainstem.kv.stack import TierStack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import LowerTier
from mainstem.kv.transfer import LoadId
from mainstem.sched.fetching import Fetching
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.step_times import StepTimes
from tests.builders import VOCAB
from tests.fakes import FakeRunner

REMOTE = RemoteSettings(b"fake", b"a secret", ttl_s=3600.0, max_bytes=1 << 30)
PIECES = 3  # of a state, each as large as a page


class Overwritten(BaseException):
    """A copy that must not be. Not an Exception: these pass for faults of the copier."""


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
        if self._asked > self._copier.patience and self._done < len(self._layers):
            self._copy()
        return self._done

    def wait(self) -> None:
        for _ in self._layers:
            self._copy()

    def seconds(self) -> float:
        return 1e-6

    def _copy(self) -> None:
        with self._lock:
            if self._fails and self._done == len(self._layers) - 1:
                raise CopyFault("the last layer cannot be copied")
            if self._done < len(self._layers):
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
    is started, `late` while it runs. In both cases a layer was copied before. A page has two
    layers, its token ids and positions, so that a half-copied page is noticed; with a window, its
    windowed part has two more.
    """

    def __init__(self, runner: "TieredRunner", num_slots: int) -> None:
        self._runner = runner
        page_size = runner.page_size
        self.num_layers = len(runner.memory())
        self._slab = np.zeros((num_slots, self.num_layers, page_size), np.int64)
        self._bytes = memoryview(self._slab.reshape(-1).view(np.uint8).data)
        self._loads: dict[LoadId, FakeTransfer] = {}
        self.num_slots = num_slots
        self.page_bytes = self.num_layers * page_size * 8
        self.patience = 0
        self.save_faults: deque[str | None] = deque()
        self.load_faults: deque[str | None] = deque()

    def slot(self, slot: int) -> memoryview:
        return self._bytes[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> FakeTransfer:
        if parts is not None:
            assert (parts < self._runner.num_parts).all(), "half of a page is saved"
        layers = [
            (_View(self._slab[:, layer], slots), view)
            for layer, view in enumerate(self._views(pages, parts))
        ]
        fault = self.save_faults.popleft() if self.save_faults else None
        return FakeTransfer(self, layers, fault)  # type: ignore[arg-type]  # views stand for arrays

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> FakeTransfer:
        if parts is not None and np.isin(parts, self._runner.parts_in_flight()).any():
            raise Overwritten("a step in flight uses a part that is loaded")
        if np.isin(pages, self._runner.pieces_in_flight()).any():
            raise Overwritten("a step in flight uses a state that is loaded")
        layers = [
            (view, _View(self._slab[:, layer], slots))
            for layer, view in enumerate(self._views(pages, parts))
        ]
        fault = self.load_faults.popleft() if self.load_faults else None
        transfer = FakeTransfer(self, layers, fault)  # type: ignore[arg-type]
        self._loads[load_id] = transfer
        return transfer

    def _views(self, pages: Int32s, parts: Int32s | None) -> list["_View"]:
        memory = self._runner.memory()
        assert (parts is None) == (len(memory) == 2), "a copy says nothing of windowed parts"
        places = [pages, pages] if parts is None else [pages, pages, parts, parts]
        return [_View(rows, place) for rows, place in zip(memory, places, strict=True)]

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


ROWS_MARK = -2
STATES: dict[int, list[int]] = {}  # what is in all states so far, by number


class TieredRunner(FakeRunner):
    """FakeRunner whose pages and states can be copied, and whose steps wait for loads.

    States lie behind the pages, in pieces of the size of a page. Each piece has the number of its
    state, and its own, in both layers: so a state with a piece of another one is noticed. Where
    rows are, all pieces have the same mark.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        can_overlap: bool,
        num_states: int = 0,
        window: int | None = None,
        num_parts: int = 0,
        row_slots_per_state: int = 0,
    ) -> None:
        super().__init__(
            num_pages,
            page_size,
            VOCAB,
            can_overlap,
            num_states,
            window=window,
            num_parts=num_parts,
            row_slots_per_state=row_slots_per_state,
        )
        self.page_size = page_size
        self.num_parts = num_parts
        self.copier: FakeCopier | None = None
        size = (num_pages + num_states * PIECES) * page_size
        self._token_at = np.full(size, -1, np.int64)
        self._position_at = np.full(size, -1, np.int64)
        self._first_piece = num_pages
        self._in_flight: deque[Step] = deque()

    def memory(self) -> list[np.ndarray]:
        """Token ids and positions by page, then those in windowed parts."""
        arrays = [self._token_at, self._position_at]
        if self._window is not None:
            arrays += [self._window.token_at, self._window.position_at]
        return [array.reshape(-1, self.page_size) for array in arrays]

    def parts_in_flight(self) -> np.ndarray:
        """The windowed parts that launched steps use, which were not waited for."""
        assert self._window is not None
        used = [self._window.used(step) for step in self._in_flight]
        return np.concatenate([np.empty(0, np.int64), *used])

    def pieces_in_flight(self) -> np.ndarray:
        """The pieces of states and rows that launched steps use, which were not waited for."""
        slots: list[Int32s] = [np.empty(0, np.int32)]
        for use in [step.states for step in self._in_flight if step.states is not None]:
            slots += [use.reads, use.writes]
            if use.rows is not None:
                slots.append(use.rows[use.rows >= 0] // self._rows_per_state)
        used = np.concatenate(slots)
        first = self._first_piece + used[used >= 0] * PIECES
        return (first[:, None] + np.arange(PIECES)).ravel()

    def note_rows(self, slot: int, *, is_first: bool) -> None:
        for piece in self._pieces(slot):
            assert is_first or (piece == ROWS_MARK).all(), "rows were overwritten"
            piece[:] = ROWS_MARK

    def state(self, slot: int) -> list[int] | None:
        pieces = self._pieces(slot)
        found = {int(words[0]) for rows in pieces for words in rows}
        number = int(pieces[0][0, 0]) // PIECES
        is_whole = found == {number * PIECES + piece for piece in range(PIECES)}
        return STATES.get(number) if is_whole else None

    def set_state(self, slot: int, tokens: list[int]) -> None:
        number = len(STATES)
        STATES[number] = tokens
        for rows in self._pieces(slot):
            rows[:] = np.arange(number * PIECES, (number + 1) * PIECES)[:, None]

    def _pieces(self, slot: int) -> list[np.ndarray]:
        """A slot's rows in both layers."""
        first = self._first_piece + slot * PIECES
        return [layer[first : first + PIECES] for layer in self.memory()]

    def drain(self) -> None:
        """No step is waited for any more."""
        self._in_flight.clear()

    def launch(self, step: Step) -> InFlight:
        assert self.copier is not None
        self.copier.finish(step.load_ids.tolist())
        launched = super().launch(step)
        self._in_flight.append(step)
        return _Waited(launched, self._in_flight)


@dataclass
class _Waited:
    """A launched step, which is in flight until `wait`."""

    launched: InFlight
    in_flight: deque[Step]

    def wait(self) -> StepResult:
        self.in_flight.popleft()
        return self.launched.wait()

    def has_ended(self) -> bool:
        return self.launched.has_ended()


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
    num_states: int = 0,
    window: int | None = None,
    num_parts: int = 0,
    num_rows: int = 0,
) -> Tiered:
    bus = bus or EventBus()
    per_state = 2 if num_rows else 0
    runner = TieredRunner(
        num_pages, page_size, can_overlap, num_states, window, num_parts, per_state
    )
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
    parts = None if window is None else WindowParts(num_pages, num_parts, window, page_size)
    store = KVStore(
        num_pages, page_size, b"fake", bus, stack, config, num_states, pages_per_state=PIECES,
        rows_per_slot=num_rows, row_slots_per_state=per_state, parts=parts,
    )  # fmt: skip
    fetching = Fetching(config, store.loader, page_size, StepTimes(token_s=1e-3))
    sched = SchedConfig(chunk_tokens=chunk_tokens)
    scheduler = Scheduler(sched, store, VOCAB, max_model_len, bus, fetching=fetching)
    return Tiered(Engine(scheduler, runner, bus), store, stack, copier, runner)
