"""A simulated card, host memory and disk in virtual time, under the real engine.

Everything that reads a clock reads a virtual one, which moves when the engine waits: for a step,
for a read, or because there is nothing to do. So a large workload on a large card takes seconds
here, with the same result each time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from mainstem.core.config import Fetch, SchedConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.core.step import Int32s, Step, StepResult
from mainstem.engine import engine as engine_module
from mainstem.engine.engine import Engine
from mainstem.kv import loading as page_loading_module
from mainstem.kv import saving as saving_module
from mainstem.kv import stack as stack_module
from mainstem.kv import transfer as transfer_module
from mainstem.kv.bytes.disk import FIRST_RATE, NUM_READERS, READ_RUN
from mainstem.kv.stack import TierStack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import FoundPage, Read, ReadJob, WriteJob, Written
from mainstem.kv.transfer import LoadId, SharedLink
from mainstem.sched import loading as loading_module
from mainstem.sched import scheduler as scheduler_module
from mainstem.sched.fetching import Fetching
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.step_times import StepTimes
from tests.builders import a_request

PAGE_BYTES = 2 << 20  # 16 tokens of Llama 8B in bf16
PAGE_SIZE = 16
LAYERS = 32
HOST_BYTES_PER_S = 50e9
STEP_S, TOKEN_S, DECODE_S = 5.5e-3, 21.7e-6, 0.07e-3  # measured on an H200
LAUNCH_S = 2.5e-3  # host time per step
CHUNK_TOKENS = 2048
VOCAB_SIZE = 512  # as of the shape `tiny`


class VirtualClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (
            engine_module, stack_module, saving_module, page_loading_module, transfer_module,
            loading_module, scheduler_module,
        ):  # fmt: skip
            for name in ("perf_counter", "monotonic", "time"):
                monkeypatch.setattr(module, name, self.read, raising=False)
            monkeypatch.setattr(module, "sleep", self.sleep, raising=False)

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1e-5)

    def wait_until(self, then_s: float) -> None:
        self.now_s = max(self.now_s, then_s)


@dataclass
class VirtualTransfer:
    clock: VirtualClock
    begin_s: float
    end_s: float

    def num_layers_done(self) -> int:
        part = (self.clock.now_s - self.begin_s) / (self.end_s - self.begin_s)
        return max(0, min(LAYERS, int(part * LAYERS)))

    def wait(self) -> None:
        self.clock.wait_until(self.end_s)

    def seconds(self) -> float:
        return self.end_s - self.begin_s


class VirtualCopier:
    """Copies of one direction run one after the other; the two directions run in parallel."""

    num_layers = LAYERS
    page_bytes = PAGE_BYTES

    def __init__(self, clock: VirtualClock, num_slots: int) -> None:
        self.num_slots = num_slots
        self.loads: dict[LoadId, VirtualTransfer] = {}
        self._clock = clock
        self._up_s = self._down_s = 0.0
        self._bytes = memoryview(bytearray(PAGE_BYTES))

    def slot(self, slot: int) -> memoryview:
        return self._bytes

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> VirtualTransfer:
        copy = self._copy(self._down_s, len(pages))
        self._down_s = copy.end_s
        return copy

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> VirtualTransfer:
        copy = self.loads[load_id] = self._copy(self._up_s, len(pages))
        self._up_s = copy.end_s
        return copy

    def _copy(self, free_s: float, num_pages: int) -> VirtualTransfer:
        begin_s = max(self._clock.now_s, free_s)
        return VirtualTransfer(
            self._clock, begin_s, begin_s + num_pages * PAGE_BYTES / HOST_BYTES_PER_S
        )

    def forget(self, load_id: LoadId) -> None:
        self.loads.pop(load_id, None)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Run:
    jobs: Sequence[ReadJob]
    bytes_left: float
    began_s: float


class VirtualDisk:
    """A lower tier. Up to NUM_READERS reads share the rate evenly; writes run when there are no
    reads."""

    name = "disk"
    is_shared = False
    is_open = can_write = True

    def __init__(self, clock: VirtualClock, num_records: int, bytes_per_s: float) -> None:
        self.num_places = max(1, num_records - 1 - num_records // 64)
        self.num_writes_pending = 0
        self.link = SharedLink(FIRST_RATE, NUM_READERS * READ_RUN * PAGE_BYTES)
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._now_s = clock.now_s
        self._reads: deque[Sequence[ReadJob]] = deque()
        self._under_way: list[_Run] = []
        self._writes: deque[WriteJob] = deque()
        self._done: list[Read | Written] = []

    def recover(self) -> Sequence[FoundPage]:
        return []

    def opened(self, num_pages: int) -> None:
        pass

    def take_place(self, key: PageKey) -> bool:
        return True  # the policy keeps to `num_places`

    def delete(self, key: PageKey) -> None:
        pass

    def end_soon(self) -> None:
        """Does nothing: writes always finish."""

    def touch(self, used_at: dict[PageKey, float]) -> None:
        pass

    def ask(self, keys: Sequence[PageKey]) -> None:
        pass

    def write(self, job: WriteJob) -> None:
        self._pass_time()
        self._writes.append(job)
        self.num_writes_pending += 1

    def read(self, jobs: Sequence[ReadJob], limit_s: float) -> None:
        self._pass_time()
        self._reads.extend(
            jobs[begin : begin + READ_RUN] for begin in range(0, len(jobs), READ_RUN)
        )

    def poll(self) -> Iterator[Read | Written]:
        self._pass_time()
        done, self._done = self._done, []
        self.num_writes_pending -= sum(isinstance(item, Written) for item in done)
        yield from done

    def flush(self) -> None:
        while self._writes:
            self._clock.sleep(0.01)
            self._pass_time()

    def close(self) -> None:
        pass

    def _pass_time(self) -> None:
        while self._now_s < self._clock.now_s:
            while self._reads and len(self._under_way) < NUM_READERS:
                jobs = self._reads.popleft()
                self._under_way.append(_Run(jobs, len(jobs) * PAGE_BYTES, self._now_s))
            if self._under_way:
                self._read_on(self._clock.now_s - self._now_s)
            elif self._writes:
                self._now_s += PAGE_BYTES / self._bytes_per_s
                self._done.append(Written(self._writes.popleft().key))
            else:
                self._now_s = self._clock.now_s

    def _read_on(self, most_s: float) -> None:
        each = self._bytes_per_s / len(self._under_way)
        passed_s = min(most_s, min(run.bytes_left for run in self._under_way) / each)
        self._now_s += max(passed_s, 1e-9)
        for run in self._under_way:
            run.bytes_left -= passed_s * each
            if run.bytes_left < 1.0:
                self._done += [
                    Read(job.key, PAGE_BYTES, run.began_s, self._now_s) for job in run.jobs
                ]
        self._under_way = [run for run in self._under_way if run.bytes_left >= 1.0]


@dataclass
class _InFlight:
    clock: VirtualClock
    end_s: float
    result: StepResult

    def wait(self) -> StepResult:
        self.clock.wait_until(self.end_s)
        return self.result

    def has_ended(self) -> bool:
        return self.clock.now_s >= self.end_s


@dataclass
class VirtualRunner:
    """Steps run one after the other; each layer waits until its pages are loaded."""

    clock: VirtualClock
    copier: VirtualCopier | None
    can_overlap: bool = True
    free_s: float = 0.0

    def launch(self, step: Step) -> _InFlight:
        self.clock.now_s += LAUNCH_S
        begin_s = max(self.clock.now_s, self.free_s)
        prompt_tokens = step.num_tokens - step.num_decodes
        length_s = STEP_S + prompt_tokens * TOKEN_S + step.num_decodes * DECODE_S
        loads = [] if self.copier is None else [
            self.copier.loads[LoadId(load_id)]
            for load_id in step.load_ids.tolist()
            if load_id in self.copier.loads
        ]  # fmt: skip
        end_s = begin_s
        for layer in range(1, LAYERS + 1):
            there_s = [load.begin_s + load.seconds() * layer / LAYERS for load in loads]
            end_s = max(end_s, *there_s, 0.0) + length_s / LAYERS
        self.free_s = end_s
        token_ids = np.full(len(step.sample_rows), 7, np.int32)
        return _InFlight(self.clock, end_s, StepResult(token_ids, {}, (), end_s - begin_s))

    def drain(self) -> None:
        self.clock.wait_until(self.free_s)

    def check(self) -> None:
        """Does nothing: there is no other process."""

    def close(self) -> None:
        pass


class VirtualTime:
    """A TimedEngine (mainstem_bench/speeds.py) whose seconds are virtual."""

    def __init__(self, clock: VirtualClock, engine: Engine) -> None:
        self.submit, self.step = engine.submit, engine.step
        self._clock, self._engine = clock, engine

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def wait_until(self, at_s: float) -> None:
        self._clock.wait_until(at_s + 1e-6)


@dataclass
class VirtualCard:
    """An engine on a simulated card, with methods that send it prompts."""

    clock: VirtualClock
    engine: Engine
    counters: Counters = field(default_factory=Counters)

    def ask(self, prompts: Sequence[list[int]], output: int) -> list[float]:
        """Send all prompts at once; returns the seconds to the first token of each."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        began_s = self.clock.now_s
        first_s: dict[str, float] = {}
        names = [str(number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.submit(
                a_request(prompt, name=name, sampling=sampling, expected_tokens=output)
            )
        while self.engine.has_work:
            for news in self.engine.step():
                first_s.setdefault(str(news.request_id), self.clock.now_s - began_s)
        return [first_s[name] for name in names]

    def replay(self, arrivals: Sequence[tuple[float, list[int]]], output: int) -> list[float]:
        """Send each prompt when it is due; returns the seconds to the first token of each."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        began_s, first_s, num_asked = self.clock.now_s, dict[int, float](), 0
        while num_asked < len(arrivals) or self.engine.has_work:
            for due_s, prompt in arrivals[num_asked:]:
                if due_s > self.clock.now_s - began_s:
                    break
                name = str(num_asked)
                self.engine.submit(
                    a_request(prompt, name=name, sampling=sampling, expected_tokens=output)
                )
                num_asked += 1
            if not self.engine.has_work:
                self.clock.wait_until(began_s + arrivals[num_asked][0] + 1e-6)
                continue
            for news in self.engine.step():
                number = int(news.request_id)
                first_s.setdefault(number, self.clock.now_s - began_s - arrivals[number][0])
        return [first_s[number] for number in range(len(arrivals))]


def a_virtual_card(
    clock: VirtualClock,
    device_tokens: int,
    host_pages: int,
    disk_bytes_per_s: float,
    policy: str = "lookahead",
    disk_pages: int = 50_000,
    fetch: Fetch = Fetch.AUTO,
    max_seqs: int | None = None,
) -> VirtualCard:
    """Steps of at most 2,048 tokens. If `host_pages` is 0, there is no tier below the device."""
    bus = EventBus()
    card = VirtualCard(clock, None)  # type: ignore[arg-type]  # made below
    card.counters.attach(bus)
    copier = stack = fetching = None
    if host_pages:
        copier = VirtualCopier(clock, host_pages)
        disk = VirtualDisk(clock, disk_pages, disk_bytes_per_s)
        stack = TierStack(bus, copier, [disk], policy)
    settings = StoreConfig(policy=policy)
    store = KVStore(device_tokens // PAGE_SIZE, PAGE_SIZE, b"virtual", bus, stack, settings)
    if host_pages:
        steps = StepTimes(25e-6, 3.5e-3)
        fetching = Fetching(StoreConfig(host_gb=1.0, fetch=fetch), store.loader, PAGE_SIZE, steps)
    config = SchedConfig(chunk_tokens=CHUNK_TOKENS, max_seqs=max_seqs)
    scheduler = Scheduler(config, store, VOCAB_SIZE, 10_000, bus, fetching=fetching)
    card.engine = Engine(scheduler, VirtualRunner(clock, copier), bus)
    return card
