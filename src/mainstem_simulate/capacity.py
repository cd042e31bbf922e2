"""Computes the storage that a hit rate needs (AttentionStore 4.3.5); `mainstem capacity` prints it.

    DSpUT   the largest number of distinct sessions within one TTL
    CCpS    bytes of K and V of one session
    CCpUT   DSpUT * CCpS: enough for everything that has not expired, in the worst case

In the paper, CCpS is the size of a full context window; --context-tokens sets the window. A window
of 131,072 tokens is far too much for sessions of 2,000 tokens. Without the flag, sessions count
with their own lengths: CCpUT is the maximum that the sessions of one TTL hold together, and CCpS is
CCpUT / DSpUT.

Sessions expire at different times, so a part of CCpUT is enough. The smallest part is found by
replaying the trace through the engine's policy, at the times of the trace. The hit rate is that of
`mainstem simulate`: the share of prompt tokens that are saved.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import log, log2, sqrt

from mainstem.kv.policy import PolicyConfig, TierPolicy
from mainstem_simulate.plots import CapacityPoint
from mainstem_simulate.service import GB, ServiceRates
from mainstem_simulate.simulator import without_garbage_collection
from mainstem_simulate.trace_records import Trace, TraceRequest

PRECISION = 1.03  # factor between a capacity that misses the target and the one that is found
PLOTTED_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
DEFAULT_TTL_S = 3600.0

Progress = Callable[[str, float], None]
"""Called with a stage and how much of it is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The storage that a workload needs: by the paper's formula, and by replaying it."""

    format: str
    policy: str
    requests: int
    sessions: int
    kv_bytes_per_token: float
    ttl_s: float
    span_s: float  # from the first request to the last
    context_tokens: int | None  # None: sessions count with their own lengths
    session_tokens: float  # tokens of a session, from which CCpS is computed
    dsput: int
    ccps_gb: float
    ccput_gb: float
    hit_rate_unbounded: float  # of a store that drops pages only after the TTL
    target_hit_rate: float
    capacity_gb: float | None  # None: no capacity reaches the target
    capacity_share: float | None  # capacity_gb as a share of CCpUT
    hit_rate: float | None  # hit rate at that capacity


class Replay:
    """Hit rates of one trace at any capacity, at the times of the trace."""

    def __init__(self, trace: Trace, config: PolicyConfig, lookahead: int | None) -> None:
        self._trace = trace
        self._config = config  # its capacity is replaced in each run
        self._lookahead = lookahead
        self.all_pages = len({key for request in trace.requests for key in request.kept})
        self.prompt_tokens = sum(request.input_tokens for request in trace.requests)

    def hit_rate(self, num_pages: int) -> float:
        """The share of prompt tokens that a store of `num_pages` saves."""
        config = replace(self._config, tier_pages=(num_pages,))
        window = self._lookahead
        if window is None:
            window = config.window_length(self._trace.mean_chain_pages)
        policy: TierPolicy[int] = TierPolicy(config)
        requests, page_tokens = self._trace.requests, self._trace.page_tokens
        hits = num_known = 0
        with without_garbage_collection():
            for index, request in enumerate(requests):
                known_to = min(index + 1 + window, len(requests))
                for ahead in range(num_known, known_to):
                    policy.expect(ahead, requests[ahead].keys)
                num_known = max(num_known, known_to)
                policy.expire(request.arrival_s)
                tokens = policy.match(request.keys) * page_tokens
                hits += min(tokens, max(0, request.input_tokens - 1))
                policy.finish(index, request.kept, request.arrival_s)
        return hits / max(1, self.prompt_tokens)

    def least_pages(self, target: float, progress: Progress) -> int:
        """Return the smallest capacity, within PRECISION, that reaches a hit rate of `target`. Less
        than 1/1024 of all pages is not tried. The caller has checked that all pages reach it."""
        high = self.all_pages
        low = max(1, high // 1024)
        if self.hit_rate(low) >= target:
            return low
        num_tries = max(1, round(log2(log(high / low) / log(PRECISION) + 1)))
        for tried in count():
            if high - low <= 1 or high <= low * PRECISION:
                return high
            progress("replaying", min(1.0, tried / num_tries))
            middle = round(sqrt(low * high))
            if self.hit_rate(middle) >= target:
                high = middle
            else:
                low = middle
        raise AssertionError


def most_sessions(requests: Sequence[TraceRequest], ttl_s: float) -> int:
    """Return DSpUT: the maximum number of distinct sessions within any period of `ttl_s`."""
    return _most_held(requests, ttl_s, lambda _: 1)


def most_tokens(requests: Sequence[TraceRequest], ttl_s: float) -> int:
    """Return the maximum number of tokens that the sessions of any period of `ttl_s` hold, each at
    its longest."""
    longest: dict[int, int] = {}
    for request in requests:
        tokens = request.input_tokens + request.output_tokens
        longest[request.session] = max(longest.get(request.session, 0), tokens)
    return _most_held(requests, ttl_s, longest.__getitem__)


def _most_held(
    requests: Sequence[TraceRequest], ttl_s: float, size_of: Callable[[int], int]
) -> int:
    """Return the maximum of the sizes of the sessions of any period, taken together."""
    active: Counter[int] = Counter()
    held = most = first = 0
    for request in requests:
        if not active[request.session]:
            held += size_of(request.session)
        active[request.session] += 1
        while requests[first].arrival_s <= request.arrival_s - ttl_s:
            left = requests[first].session
            active[left] -= 1
            if not active[left]:
                held -= size_of(left)
            first += 1
        most = max(most, held)
    return most


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """The wanted hit rate, the policy, and the size of the model's K and V."""

    target_hit_rate: float
    policy: str
    kv_bytes_per_token: float
    ttl_s: float = DEFAULT_TTL_S
    context_tokens: int | None = None  # None: sessions have their own lengths
    lookahead: int | None = None  # requests known ahead; None: depends on the capacity


def plan_capacity(
    trace: Trace, asked: CapacityQuestion, progress: Progress
) -> tuple[CapacityReport, Replay]:
    """Compute the paper's three numbers, and search for the capacity that reaches the target."""
    requests, ttl_s, target = trace.requests, asked.ttl_s, asked.target_hit_rate
    replay = Replay(trace, PolicyConfig((0,), kind=asked.policy, ttl_s=ttl_s), asked.lookahead)
    page_gb = trace.page_tokens * asked.kv_bytes_per_token / GB
    dsput = most_sessions(requests, ttl_s)
    session_tokens = float(asked.context_tokens or most_tokens(requests, ttl_s) / dsput)
    ccps_gb = session_tokens * asked.kv_bytes_per_token / GB
    unbounded = replay.hit_rate(replay.all_pages)
    pages = replay.least_pages(target, progress) if unbounded >= target else None
    capacity_gb = None if pages is None else pages * page_gb
    report = CapacityReport(
        format=trace.format.value,
        policy=asked.policy,
        requests=len(requests),
        sessions=len({request.session for request in requests}),
        kv_bytes_per_token=asked.kv_bytes_per_token,
        ttl_s=ttl_s,
        span_s=requests[-1].arrival_s - requests[0].arrival_s,
        context_tokens=asked.context_tokens,
        session_tokens=session_tokens,
        dsput=dsput,
        ccps_gb=ccps_gb,
        ccput_gb=dsput * ccps_gb,
        hit_rate_unbounded=unbounded,
        target_hit_rate=target,
        capacity_gb=capacity_gb,
        capacity_share=None if capacity_gb is None else capacity_gb / (dsput * ccps_gb),
        hit_rate=None if pages is None else replay.hit_rate(pages),
    )
    return report, replay


def curve(trace: Trace, replay: Replay, report: CapacityReport) -> list[CapacityPoint]:
    """Return hit rate and throughput at several shares of CCpUT (the paper's figure 23)."""
    rates, points = ServiceRates(), []
    page_gb = trace.page_tokens * report.kv_bytes_per_token / GB
    decode_s = rates.decode_s(sum(request.output_tokens for request in trace.requests))
    for share in PLOTTED_SHARES:
        capacity_gb = share * report.ccput_gb
        hit_rate = replay.hit_rate(max(1, round(capacity_gb / page_gb)))
        prefill_s = rates.prefill_s(round((1 - hit_rate) * replay.prompt_tokens))
        per_s = replay.prompt_tokens / (prefill_s + decode_s)
        points.append(CapacityPoint(capacity_gb, share, hit_rate, per_s))
    return points
