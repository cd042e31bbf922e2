"""Replays a trace over many replicas behind a router, in virtual time.

    arrive   the router chooses a replica; pages that the shared tier has begin to load
    ready    the pages are loaded; the request waits for the device
    done     the device has answered; the request's pages are copied to the shared tier

Each replica is a device that serves one request after another (service.py), in the order in which
they are ready, with an LRU cache of pages. The router is the same as in serving; here, too, it only
estimates what replicas hold.

Times of the trace are multiplied by one number, the pace. It is chosen such that devices with one
common cache would be busy for the share `busy` of the time. Such devices are also the reference for
hit rates and times.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from time import perf_counter
from typing import Any

from mainstem.core.errors import ConfigError
from mainstem.ray.router import Router, RouterConfig, RouteRequest, RouterKind, Ticket
from mainstem_simulate.device_pages import PagedTrace, ReplicaPages
from mainstem_simulate.service import GB, ServiceRates
from mainstem_simulate.simulator import without_garbage_collection
from mainstem_simulate.trace_records import TraceRequest

PACES_TRIED = 12
PACE_STEP = 3.0
SATURATED = 0.95
BUSY_ERROR = 0.005


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Replicas, their memory, and what they share."""

    num_replicas: int
    device_tokens: int  # tokens of each replica's cache
    router: RouterKind = RouterKind.AFFINE
    shared_gb: float = 0.0  # a store that all replicas read and write
    shared_gb_per_s: float = 10.0  # rate of the link to each replica
    kv_bytes_per_token: float = 131_072.0
    busy: float = 0.7
    warmup: int = 0
    seed: int = 0
    rates: ServiceRates = field(default_factory=ServiceRates)

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.device_tokens < 1:
            raise ConfigError("the number of replicas and their tokens must be at least 1")
        if not 0 < self.busy < 1:
            raise ConfigError(f"busy must be between 0 and 1, got {self.busy}")
        if self.shared_gb < 0 or not self.shared_gb_per_s > 0:
            raise ConfigError("a shared tier's size must not be negative, its rate must be above 0")
        if not self.kv_bytes_per_token > 0:
            raise ConfigError(f"kv_bytes_per_token must be above 0, got {self.kv_bytes_per_token}")


@dataclass(frozen=True, slots=True)
class Reference:
    """The results of the same devices with one common cache, where the router knows loads and
    sessions but no pages, and the pace at which the devices are as busy as wanted."""

    pace: float  # times of the trace are multiplied by it
    hit_rate: float
    p99_ttft_s: float
    busy: float


@dataclass(slots=True)
class FleetReport:
    """The results. Tokens and times count only requests after the warm-up."""

    router: str
    replicas: int
    device_tokens: int
    shared_gb: float
    page_tokens: int
    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    hit_rate: float = 0.0
    hit_rate_shared: float = 0.0  # part of the hit rate that comes from the shared tier
    hit_rate_reference: float = 0.0
    hit_rate_kept: float = 0.0  # hit rate as a share of the reference's hit rate
    mean_ttft_s: float = 0.0
    p50_ttft_s: float = 0.0
    p99_ttft_s: float = 0.0
    p99_ttft_reference_s: float = 0.0
    busy: float = 0.0  # share of the time that replicas work, without the first and last tenth
    load_max_over_mean: float = 0.0  # largest load / mean load, in seconds of work
    device_s: float = 0.0
    virtual_s: float = 0.0
    pace: float = 1.0
    seconds: float = 0.0


def find_reference(trace: PagedTrace, config: FleetConfig, pace: float = 1.0) -> Reference:
    """Simulate devices with one common cache, at the pace at which they are as busy as `config`
    says. The search starts at `pace`."""
    total = config.num_replicas * config.device_tokens
    memory = replace(config, device_tokens=total, shared_gb=0.0)
    last_busy = 0.0
    for _ in range(PACES_TRIED):
        report = _Fleet(trace, memory, pace, has_one_memory=True).run()
        ratio = report.busy / config.busy
        if abs(ratio - 1) <= BUSY_ERROR or abs(report.busy - last_busy) <= BUSY_ERROR * last_busy:
            break  # as busy as wanted, or as possible, since turns wait for each other
        last_busy = report.busy if report.busy < SATURATED else 0.0
        # if saturated, the devices are overloaded, but it is not known by how much
        pace *= ratio if report.busy < SATURATED else PACE_STEP
    return Reference(report.pace, report.hit_rate, report.p99_ttft_s, report.busy)


def simulate_fleet(trace: PagedTrace, config: FleetConfig, reference: Reference) -> FleetReport:
    """Serve the whole trace; `seconds` of the report is the run time of the simulation."""
    report = _Fleet(trace, config, reference.pace).run()
    report.hit_rate_reference = reference.hit_rate
    report.p99_ttft_reference_s = reference.p99_ttft_s
    report.hit_rate_kept = report.hit_rate / reference.hit_rate if reference.hit_rate else 1.0
    return report


class _Device:
    """One replica: its memory, its queue and its link to the shared tier."""

    def __init__(self, memory: ReplicaPages) -> None:
        self.memory = memory
        self.queue: deque[_Visit] = deque()
        self.is_busy = False
        self.busy_s = 0.0
        self.link_free_s = 0.0


@dataclass(slots=True, eq=False)
class _Visit:
    """A request at its replica."""

    index: int
    request: TraceRequest
    device: _Device
    ticket: Ticket
    arrived_s: float
    # leading pages that are certainly cached: held when the request arrived, or loaded since then
    leased: int = 0
    loaded: int = 0  # leased pages that came from the shared tier


Event = Callable[[Any], None]


class _Fleet:
    """One run: the clock, the replicas, the router and the sums."""

    def __init__(
        self, trace: PagedTrace, config: FleetConfig, pace: float, has_one_memory: bool = False
    ) -> None:
        if config.warmup >= len(trace.requests):
            raise ConfigError(f"a warm-up of {config.warmup} leaves no request to count")
        self._trace, self._config, self._pace = trace, config, pace
        self._has_one_memory = has_one_memory
        pages = config.device_tokens // trace.page_tokens
        common = ReplicaPages(pages, trace.num_pages)
        self._devices = [
            _Device(common if has_one_memory else ReplicaPages(pages, trace.num_pages))
            for _ in range(config.num_replicas)
        ]
        rates = config.rates
        self._router = Router(
            config.num_replicas,
            RouterConfig(
                RouterKind.AFFINE if has_one_memory else config.router,
                trace.page_tokens,
                pages_per_replica=max(1, pages),
                output_cost=rates.prefill_tokens_per_s / rates.decode_tokens_per_s,
                seed=config.seed,
            ),
        )
        page_bytes = trace.page_tokens * config.kv_bytes_per_token
        self._shared = ReplicaPages(int(config.shared_gb * GB / page_bytes), trace.num_pages)
        self._load_page_s = page_bytes / GB / config.shared_gb_per_s
        self._followers = {
            request.previous: index
            for index, request in enumerate(trace.requests)
            if request.previous is not None
        }
        self._events: list[tuple[float, int, Event, Any]] = []
        self._numbers = count()
        self._now = 0.0
        self._counted_from_s = 0.0
        self._num_served = 0
        self._hits = self._shared_hits = 0
        self._ttfts: list[float] = []
        self._served: list[tuple[float, float]] = []  # (when a request was served, for how long)
        self._report = FleetReport(
            router=config.router.value,
            replicas=config.num_replicas,
            device_tokens=config.device_tokens,
            shared_gb=config.shared_gb,
            page_tokens=trace.page_tokens,
            pace=pace,
        )

    def run(self) -> FleetReport:
        began_s = perf_counter()
        for index, request in enumerate(self._trace.requests):
            if request.previous is None:
                self._at(request.arrival_s * self._pace, self._arrive, index)
        with without_garbage_collection():
            while self._events:
                self._now, _, happen, what = heappop(self._events)
                happen(what)
        return self._finish(perf_counter() - began_s)

    def _at(self, time_s: float, happen: Event, what: object) -> None:
        heappush(self._events, (time_s, next(self._numbers), happen, what))

    # -- what happens --------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        request = self._trace.requests[index]
        pages = () if self._has_one_memory else self._trace.names[index]
        session = request.session if self._trace.has_sessions else None
        ticket = self._router.choose(RouteRequest(pages, request.input_tokens, session))
        self._router.learn(ticket)  # immediately: in a trace every request is answered
        visit = _Visit(index, request, self._devices[ticket.replica], ticket, self._now)
        self._at(self._load(visit), self._queue, visit)

    def _load(self, visit: _Visit) -> float:
        """Return the time at which the shared tier's pages are loaded. Nothing is loaded, and `now`
        is returned, if loading takes longer than computing and longer than the wait for the device.
        """
        if not self._shared.capacity:
            return self._now
        device, keys = visit.device, self._trace.prompts[visit.index]
        held = device.memory.num_leading(keys)
        more = self._shared.num_leading(keys) - held
        load_s = more * self._load_page_s
        begin_s = max(device.link_free_s, self._now)
        rates = self._config.rates
        ticket = visit.ticket
        before = self._router.open_work(ticket.replica) - ticket.prompt_work - ticket.output_work
        wait_s = before / rates.prefill_tokens_per_s
        compute_s = rates.prefill_s(more * self._trace.page_tokens)
        if more <= 0 or begin_s - self._now + load_s > max(compute_s, wait_s):
            return self._now
        device.link_free_s = begin_s + load_s
        visit.leased, visit.loaded = held + more, more
        return device.link_free_s

    def _queue(self, visit: _Visit) -> None:
        visit.device.queue.append(visit)
        self._serve_next(visit.device)

    def _serve_next(self, device: _Device) -> None:
        if device.queue and not device.is_busy:
            self._serve(device.queue.popleft())

    def _serve(self, visit: _Visit) -> None:
        device, request, rates = visit.device, visit.request, self._config.rates
        page_tokens = self._trace.page_tokens
        most = max(0, request.input_tokens - 1)  # the last token is always computed
        held = device.memory.num_leading(self._trace.prompts[visit.index])
        hit_tokens = min(max(held, visit.leased) * page_tokens, most)
        new_tokens = request.input_tokens - hit_tokens
        first_token_s = rates.prefill_s(new_tokens)
        done_s = first_token_s + rates.decode_s(request.output_tokens)
        device.is_busy = True
        device.memory.use(self._trace.kept[visit.index])
        self._at(self._now + first_token_s, self._router.start, visit.ticket)
        self._at(self._now + done_s, self._leave, visit)
        if self._num_served == self._config.warmup:
            self._counted_from_s = self._now
        if self._num_served >= self._config.warmup:
            device.busy_s += done_s
            self._served.append((self._now, done_s))
            self._ttfts.append(self._now + first_token_s - visit.arrived_s)
            self._hits += hit_tokens
            self._shared_hits += min(max(0, visit.leased - held) * page_tokens, hit_tokens)
            self._report.prompt_tokens += request.input_tokens
            self._report.prefill_tokens += new_tokens
        self._num_served += 1

    def _leave(self, visit: _Visit) -> None:
        visit.device.is_busy = False
        self._router.finish(visit.ticket, visit.request.output_tokens)
        self._shared.use(self._trace.kept[visit.index])
        follower = self._followers.get(visit.index)
        if follower is not None:
            arrival_s = self._trace.requests[follower].arrival_s * self._pace
            self._at(max(self._now, arrival_s), self._arrive, follower)
        self._serve_next(visit.device)

    # -- sums ----------------------------------------------------------------------------------

    def _finish(self, seconds: float) -> FleetReport:
        report = self._report
        tokens = max(1, report.prompt_tokens)
        report.requests = len(self._ttfts)
        report.hit_rate = self._hits / tokens
        report.hit_rate_shared = self._shared_hits / tokens
        ttfts = sorted(self._ttfts)
        report.mean_ttft_s = sum(ttfts) / len(ttfts)
        report.p50_ttft_s, report.p99_ttft_s = (
            ttfts[int(share * (len(ttfts) - 1))] for share in (0.5, 0.99)
        )
        loads = [device.busy_s for device in self._devices]
        report.device_s = sum(loads)
        report.virtual_s = self._now - self._counted_from_s
        mean_s = report.device_s / len(loads)
        report.busy = _busy(self._served, len(loads))
        report.load_max_over_mean = max(loads) / mean_s if mean_s else 1.0
        report.seconds = seconds
        return report


def _busy(served: Sequence[tuple[float, float]], num_devices: int) -> float:
    """Return the share of time in which devices work. The first and last tenth of requests are left
    out, since few sessions are left at the end of a trace."""
    begin_s, end_s = (served[int(share * (len(served) - 1))][0] for share in (0.1, 0.9))
    work_s = sum(
        max(0.0, min(start_s + took_s, end_s) - max(start_s, begin_s)) for start_s, took_s in served
    )
    return work_s / (num_devices * (end_s - begin_s)) if end_s > begin_s else 0.0
