"""Replays a trace in virtual time, with the tier policy of the engine.

    queue   which request is served next, and what the policy knows of the queue
              saturated: always full; the next N requests of the trace wait (N: the look-ahead)
              arrivals:  first turns come when the trace says, each later turn after the previous
                         answer and the think time; with `batching`, several run at once
    serve   look up, load, prefill, decode; pages are admitted when the request is done
    device  a cache above host memory; each page is stored in both, and both evict by one policy
    links   the disk reads one page after another; a prefetched page may not be there yet. With
            `batching` the link from host memory, too, serves one request after another

Hits are prompt tokens that need no prefill. A hit counts for the device if its page was there when
the request started, for the DRAM if its page was in host memory, otherwise for the disk.
"""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from time import perf_counter

from mainstem.core.errors import ConfigError
from mainstem.kv.places import HOST, Moves
from mainstem.kv.policy import HEADROOM, PolicyConfig, TierPolicy
from mainstem_simulate.batch import Batch, Running
from mainstem_simulate.device import Device
from mainstem_simulate.service import GB, Batching, Prices, ServiceRates
from mainstem_simulate.trace_records import Trace, TraceRequest

DISK = HOST + 1
READ_AHEAD_S = 1.0  # pages are prefetched as long as the disk's queue is shorter than this


class Queue(Enum):
    SATURATED = "saturated"
    ARRIVALS = "arrivals"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """One simulation: a policy, the tiers, the queue, and the rates and prices of the hardware."""

    kv_bytes_per_token: float
    host_gb: float
    disk_gb: float = 0.0
    policy: str = "lookahead"
    lookahead: int | None = None  # see `window`; None: the paper's number, or with belady all
    queue: Queue = Queue.SATURATED
    ttl_s: float | None = None
    warmup: int = 0  # number of first requests that are served but not counted
    headroom: float = HEADROOM
    rates: ServiceRates = field(default_factory=ServiceRates)
    prices: Prices = field(default_factory=Prices)
    # device memory for cached pages, without the memory that running requests need
    device_gb: float = 0.0
    batching: Batching | None = None  # only for arrivals; None: one request after another

    def __post_init__(self) -> None:
        if not self.kv_bytes_per_token > 0:
            raise ConfigError(f"kv_bytes_per_token must be above 0, got {self.kv_bytes_per_token}")
        sizes = (self.device_gb, self.host_gb, self.disk_gb)
        if min(sizes) < 0:
            raise ConfigError(f"sizes must not be negative: {sizes} GB")
        if self.lookahead is not None and self.lookahead < 0:
            raise ConfigError(f"lookahead must not be negative, got {self.lookahead}")
        if self.warmup < 0:
            raise ConfigError(f"warmup must not be negative, got {self.warmup}")
        if self.batching is not None and self.queue is not Queue.ARRIVALS:
            raise ConfigError("batching needs requests that arrive: set queue to arrivals")

    def num_pages(self, size_gb: float, page_tokens: int) -> int:
        return int(size_gb / (page_tokens * self.kv_bytes_per_token / GB))

    def policy_config(self, page_tokens: int) -> PolicyConfig:
        return PolicyConfig(
            tuple(self.num_pages(size, page_tokens) for size in (self.host_gb, self.disk_gb)),
            kind=self.policy,
            headroom=self.headroom,
            ttl_s=self.ttl_s,
        )

    def window(self, trace: Trace) -> int:
        """How many waiting requests the policy knows."""
        if self.lookahead is not None:
            return self.lookahead
        if self.policy == "belady":
            return len(trace.requests)
        sizes = self.policy_config(trace.page_tokens).tier_pages
        device = self.num_pages(self.device_gb, trace.page_tokens)
        return PolicyConfig((device, *sizes)).window_length(trace.mean_chain_pages)


@dataclass(slots=True)
class SimulationReport:
    """The results. Tokens, pages and times count only requests after the warm-up."""

    policy: str
    lookahead: int
    host_gb: float
    disk_gb: float
    device_gb: float
    host_pages: int
    disk_pages: int
    device_pages: int
    page_tokens: int
    warmup: int
    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    hit_rate: float = 0.0
    hit_rate_device: float = 0.0
    hit_rate_dram: float = 0.0
    hit_rate_disk: float = 0.0
    hit_rate_unbounded: float = 0.0
    mean_ttft_s: float = 0.0
    p95_ttft_s: float = 0.0
    mean_wait_s: float = 0.0  # part of the time to the first token: until a request was started
    prefill_s: float = 0.0  # prefill, and loads that it had to wait for
    loaded_gb: float = 0.0  # from host memory to the device
    device_s: float = 0.0
    virtual_s: float = 0.0
    cost: float = 0.0
    cost_storage: float = 0.0
    disk_read_gb: float = 0.0
    disk_written_gb: float = 0.0
    pages_dropped: int = 0
    page_events: int = 0
    seconds: float = 0.0


def simulate(trace: Trace, config: SimulationConfig) -> SimulationReport:
    """Serve the whole trace; `seconds` of the report is the run time of the simulation."""
    with without_garbage_collection():
        return _Simulation(trace, config).run()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off. There are millions of small objects without cycles, and
    collection would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _DiskLink:
    """The link from disk to host memory: one page at a time, prefetches in the order given."""

    def __init__(self, page_s: float) -> None:
        self._page_s = page_s
        self._free_s = 0.0
        self._ready_s: dict[int, float] = {}  # pages being read -> when they are ready

    def room(self, now: float) -> int:
        """The number of pages that may be requested before the queue is too long."""
        return max(0, int((now + READ_AHEAD_S - max(self._free_s, now)) / self._page_s) + 1)

    def is_busy(self, now: float) -> bool:
        return self._free_s > now

    def load(self, keys: list[int], now: float) -> None:
        if not self.is_busy(now):
            self._ready_s.clear()
        free_s = max(self._free_s, now)
        for key in keys:
            free_s += self._page_s
            self._ready_s[key] = free_s
        self._free_s = free_s

    def wait_s(self, key: int, now: float) -> float:
        """Return the seconds until a page that counts as in host memory has been read."""
        return max(0.0, self._ready_s.get(key, now) - now)

    def read_now(self, num_pages: int, now: float) -> float:
        """Read pages for a request, before all prefetches; returns the seconds that it takes."""
        self._free_s = max(self._free_s, now) + num_pages * self._page_s
        return num_pages * self._page_s


class _Simulation:
    """One run: the policy, the clock, the queue, and the sums."""

    def __init__(self, trace: Trace, config: SimulationConfig) -> None:
        self._trace = trace
        self._config = config
        policy_config = config.policy_config(trace.page_tokens)
        self._policy: TierPolicy[int] = TierPolicy(policy_config)
        device_pages = config.num_pages(config.device_gb, trace.page_tokens)
        self._device: Device | None = None
        if device_pages:
            config_here = PolicyConfig((device_pages,), config.policy, ttl_s=config.ttl_s)
            holds = config.batching is not None and config.batching.shares_device
            self._device = Device(config_here, trace.page_tokens, holds=holds)
        self._window = config.window(trace)
        self._page_bytes = trace.page_tokens * config.kv_bytes_per_token
        self._disk = _DiskLink(config.rates.disk_read_s(self._page_bytes))
        self._now = 0.0
        self._seen: set[int] = set()
        self._num_served = 0
        self._hits = [0, 0, 0]  # tokens on the device, from DRAM, from disk
        self._hits_unbounded = 0
        self._ttfts: list[float] = []
        self._waits_s = 0.0
        self._link_free_s = 0.0
        self._pages_read = 0
        self._pages_written = 0
        self._counted_from_s = 0.0
        self._report = SimulationReport(
            policy=config.policy,
            lookahead=self._window,
            host_gb=config.host_gb,
            disk_gb=config.disk_gb,
            device_gb=config.device_gb,
            host_pages=policy_config.tier_pages[HOST],
            disk_pages=policy_config.tier_pages[1],
            device_pages=device_pages,
            page_tokens=trace.page_tokens,
            warmup=config.warmup,
        )

    def run(self) -> SimulationReport:
        started = perf_counter()
        if self._config.queue is Queue.SATURATED:
            self._run_saturated()
        elif self._config.batching is None:
            self._run_arrivals()
        else:
            self._run_batched(self._config.batching)
        self._policy.check()
        if self._device is not None:
            self._device.policy.check()
        return self._finish(perf_counter() - started)

    # -- the queue -----------------------------------------------------------------------------

    def _run_saturated(self) -> None:
        """Serve requests in the order of the trace, without pauses. The policy knows the next
        `window` requests."""
        requests, num_known = self._trace.requests, 0
        for index, request in enumerate(requests):
            known_to = min(index + 1 + self._window, len(requests))
            for ahead in range(num_known, known_to):
                self._expect(ahead)
            num_known = max(num_known, known_to)
            self._serve(index, request, waited_s=0.0)

    def _run_arrivals(self) -> None:
        """Serve requests in the order they come. The policy knows those that wait, up to `window`
        requests."""
        requests, followers, coming = self._trace.requests, self._followers(), self._first_turns()
        queue: deque[tuple[float, int]] = deque()
        while coming or queue:
            if not queue:
                self._now = max(self._now, coming[0][0])
            self._take_arrivals(coming, queue)
            arrived_s, index = self._next_of(queue)
            self._serve(index, requests[index], waited_s=self._now - arrived_s)
            follower = followers.get(index)
            if follower is not None:
                heappush(coming, (self._now + requests[follower].think_s, follower))

    def _followers(self) -> dict[int | None, int]:
        """The index of each turn's next turn."""
        return {request.previous: index for index, request in enumerate(self._trace.requests)}

    def _first_turns(self) -> list[tuple[float, int]]:
        """A heap of first turns: when they come, and their index."""
        requests = enumerate(self._trace.requests)
        coming = [(each.arrival_s, index) for index, each in requests if each.previous is None]
        heapify(coming)
        return coming

    def _take_arrivals(
        self, coming: list[tuple[float, int]], queue: deque[tuple[float, int]]
    ) -> None:
        """Move requests that have come to the queue."""
        while coming and coming[0][0] <= self._now:
            arrived_s, index = heappop(coming)
            queue.append((arrived_s, index))
            if len(queue) <= self._window + 1:
                self._expect(index)
                self._prefetch(arrived_s)

    def _next_of(self, queue: deque[tuple[float, int]]) -> tuple[float, int]:
        """Take the first request from the queue; the policy gets to know another one."""
        first = queue.popleft()
        if len(queue) > self._window:
            self._expect(queue[self._window][1])
        return first

    def _run_batched(self, batching: Batching) -> None:
        """Serve requests in the order they come, up to `max_running` at once. A step is made while
        the step before it runs: until that one begins, `_now` stands still."""
        requests, followers, coming = self._trace.requests, self._followers(), self._first_turns()
        queue: deque[tuple[float, int]] = deque()
        loading: list[tuple[float, int, Running]] = []  # a heap: when all pages are there
        batch, ending = Batch(batching, self._config.rates), deque[tuple[float, Running]]()
        num_running, free_s = 0, 0.0
        while coming or queue or num_running:
            while ending and ending[0][0] <= self._now:
                ended_s, request = ending.popleft()
                num_running -= 1
                self._keep(request.ticket, requests[request.ticket])
                follower = followers.get(request.ticket)
                if follower is not None:
                    heappush(coming, (ended_s + requests[follower].think_s, follower))
            self._take_arrivals(coming, queue)
            while queue and num_running < batching.max_running:
                if self._device is not None and not self._device.may_start(requests[queue[0][1]]):
                    break
                arrived_s, index = self._next_of(queue)
                ready_s, request = self._start(index, requests[index], arrived_s)
                heappush(loading, (ready_s, index, request))
                num_running += 1
            while loading and loading[0][0] <= self._now:
                batch.add(heappop(loading)[-1])
            if not batch:
                next_s = [events[0][0] for events in (coming, loading, ending) if events]
                self._now = min(next_s, default=self._now)
                continue
            self._now = max(self._now, free_s)
            seconds, first, last = batch.step()
            free_s = self._now + seconds
            self._count_device(seconds)
            for request in first:
                self._count_first_token(request, free_s)
            ending.extend((free_s, request) for request in last)
            if self._device is not None and not batch.num_steps % self._trace.page_tokens:
                self._device.grow(batch.answering(), self._now)

    def _start(self, ticket: int, request: TraceRequest, arrived_s: float) -> tuple[float, Running]:
        """Start to load a request's pages; returns when all of them are there."""
        start, rates = self._now, self._config.rates
        new_tokens, loaded_bytes, wait_s = self._find(request)
        if self._device is not None:
            self._device.start(ticket, request, start)
        is_counted = self._num_served >= self._config.warmup
        load_s, ready_s = rates.host_load_s(loaded_bytes), start
        if loaded_bytes:  # what comes from disk is loaded page by page, as it is read
            self._link_free_s = max(self._link_free_s, start) + load_s
            ready_s = max(self._link_free_s, start + wait_s)
        if is_counted:
            self._report.prefill_s += rates.prefill_s(new_tokens) + load_s
        self._num_served += 1
        return ready_s, Running(
            ticket, arrived_s, start, request.input_tokens, new_tokens, request.output_tokens,
            is_counted,
        )  # fmt: skip

    def _count_first_token(self, request: Running, at_s: float) -> None:
        if request.is_counted:
            self._ttfts.append(at_s - request.arrived_s)
            self._waits_s += request.started_s - request.arrived_s

    def _count_device(self, seconds: float) -> None:
        if self._num_served > self._config.warmup:
            self._report.device_s += seconds

    def _expect(self, index: int) -> None:
        """Announce a request to the policies."""
        keys = self._trace.requests[index].keys
        self._policy.expect(index, keys)
        if self._device is not None:
            self._device.policy.expect(index, keys)

    # -- one request ---------------------------------------------------------------------------

    def _serve(self, ticket: int, request: TraceRequest, waited_s: float) -> None:
        start, rates = self._now, self._config.rates
        new_tokens, loaded_bytes, wait_s = self._find(request)
        host_s = rates.host_load_s(loaded_bytes)
        first_token_s = max(rates.prefill_s(new_tokens), host_s, wait_s)
        self._now = start + first_token_s + rates.decode_s(request.output_tokens)
        self._keep(ticket, request)
        if self._num_served >= self._config.warmup:
            report = self._report
            self._ttfts.append(waited_s + first_token_s)
            self._waits_s += waited_s
            report.prefill_s += first_token_s
            report.device_s += self._now - start
        self._num_served += 1

    def _find(self, request: TraceRequest) -> tuple[int, float, float]:
        """Look up the pages of a request that starts now. Returns how many of its tokens must be
        computed, the bytes to load, and the seconds until they can be loaded."""
        self._expire(self._now)
        self._prefetch(self._now)
        here = 0 if self._device is None else self._device.policy.match(request.keys)
        from_host, from_disk, wait_s = self._look_up(request.keys[here:], self._now)
        if self._num_served == self._config.warmup:
            self._counted_from_s = self._now
        hit_tokens = self._count_hits(request, here, from_host, from_disk)
        new_tokens = request.input_tokens - hit_tokens
        loaded_bytes = (from_host + from_disk) * self._page_bytes
        if self._num_served >= self._config.warmup:
            report = self._report
            report.prompt_tokens += request.input_tokens
            report.prefill_tokens += new_tokens
            report.loaded_gb += loaded_bytes / GB
        return new_tokens, loaded_bytes, wait_s

    def _expire(self, now: float) -> None:
        if self._config.ttl_s is not None:
            self._policy.expire(now)
            if self._device is not None:
                self._device.policy.expire(now)

    def _keep(self, ticket: int, request: TraceRequest) -> None:
        """Store the pages of a request that has ended."""
        if self._device is not None:
            self._device.end(ticket, request, self._now)
        moves = self._policy.finish(ticket, request.kept, self._now)
        copies = self._policy.back_up(DISK, request.kept) if self._report.disk_pages else Moves()
        spilled = self._policy.make_headroom()
        if self._num_served >= self._config.warmup:
            report = self._report
            report.page_events += len(request.kept)
            for each in (moves, copies, spilled):
                report.pages_dropped += len(each.drop)
                self._pages_written += len(each.write)

    def _look_up(self, keys: Sequence[int], now: float) -> tuple[int, int, float]:
        """Return how many pages are in host memory, how many come from disk (prefetches that have
        not ended, too), and the wait for the latter."""
        disk, tiers = self._disk, self._policy.tiers_of(keys)
        num_hits = len(tiers)
        from_host = tiers.count(HOST)
        to_read, wait_s = num_hits - from_host, 0.0
        if from_host and disk.is_busy(now):  # the disk may still be reading some of them
            waits = [disk.wait_s(key, now) for key in keys[:num_hits]]
            late = [wait for wait, tier in zip(waits, tiers, strict=True) if tier == HOST and wait]
            from_host -= len(late)
            wait_s = max(late, default=0.0)
        if to_read:
            wait_s = max(wait_s, disk.read_now(to_read, now))
            self._pages_read += to_read if self._num_served >= self._config.warmup else 0
        return from_host, num_hits - from_host, wait_s

    def _count_hits(self, request: TraceRequest, here: int, from_host: int, from_disk: int) -> int:
        """Count the prompt tokens that need no prefill. The last token is always computed."""
        most = max(0, request.input_tokens - 1)
        page_tokens = self._trace.page_tokens
        hit_tokens = min((here + from_host + from_disk) * page_tokens, most)
        if self._num_served >= self._config.warmup:
            disk_tokens = min(from_disk * page_tokens, hit_tokens)
            device_tokens = min(here * page_tokens, hit_tokens - disk_tokens)
            self._hits[0] += device_tokens
            self._hits[1] += hit_tokens - disk_tokens - device_tokens
            self._hits[2] += disk_tokens
            known = _known_prefix(request.keys, self._seen)
            self._hits_unbounded += min(known * page_tokens, most)
        self._seen.update(request.kept)
        return hit_tokens

    def _prefetch(self, now: float) -> None:
        room = self._disk.room(now)
        if room:
            moves = self._policy.choose_prefetch(room)
            if moves.load:
                self._disk.load(moves.load, now)
            if self._num_served >= self._config.warmup:
                self._pages_read += len(moves.load)
                self._pages_written += len(moves.write)
                self._report.pages_dropped += len(moves.drop)

    # -- sums ----------------------------------------------------------------------------------

    def _finish(self, seconds: float) -> SimulationReport:
        report, prices = self._report, self._config.prices
        report.requests = len(self._ttfts)
        tokens = max(1, report.prompt_tokens)
        shares = [hits / tokens for hits in self._hits]
        report.hit_rate_device, report.hit_rate_dram, report.hit_rate_disk = shares
        report.hit_rate = sum(self._hits) / tokens
        report.hit_rate_unbounded = self._hits_unbounded / tokens
        if self._ttfts:
            report.mean_ttft_s = sum(self._ttfts) / len(self._ttfts)
            report.mean_wait_s = self._waits_s / len(self._ttfts)
            report.p95_ttft_s = sorted(self._ttfts)[int(0.95 * (len(self._ttfts) - 1))]
        report.virtual_s = self._now - self._counted_from_s
        report.cost_storage = prices.storage_cost(
            self._config.host_gb, self._config.disk_gb, report.virtual_s
        )
        report.cost = prices.device_cost(report.device_s) + report.cost_storage
        report.disk_read_gb = self._pages_read * self._page_bytes / GB
        report.disk_written_gb = self._pages_written * self._page_bytes / GB
        report.seconds = seconds
        return report


def _known_prefix(keys: Sequence[int], seen: set[int]) -> int:
    """Return how many leading pages were stored at any time before."""
    for index, key in enumerate(keys):
        if key not in seen:
            return index
    return len(keys)
