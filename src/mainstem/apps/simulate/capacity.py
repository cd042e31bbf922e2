"""`mainstem capacity TRACE`: the storage that a hit rate needs (AttentionStore 4.3.5).

    DSpUT   most distinct sessions in a time of TTL
    CCpS    what one session can take: the context window, in bytes of K and V
    CCpUT   DSpUT * CCpS: enough for everything that does not expire, whatever the sessions do

Real sessions rarely fill their context and die at different times, so a share of CCpUT is enough.
How much, is searched for by replaying the trace through the engine's policy. Time is the trace's
own here. The hit rate is that of `mainstem simulate`: prompt tokens saved of all prompt tokens.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import log, log2, sqrt
from pathlib import Path
from time import perf_counter

from mainstem.apps.flag_types import not_negative_count, positive
from mainstem.apps.progress import StageBar
from mainstem.apps.simulate.flags import add_trace_flags, read_options, warn_if_nothing_is_shared
from mainstem.apps.simulate.plots import CapacityPoint, plot_capacity, require_matplotlib
from mainstem.apps.simulate.service import GB, ServiceRates
from mainstem.apps.simulate.simulator import without_garbage_collection
from mainstem.apps.simulate.traces import Trace, TraceRequest, read_trace
from mainstem.core.errors import InvalidRequest
from mainstem.kv.policy import PolicyConfig, PolicyKind, TierPolicy

PRECISION = 1.03  # the capacity found is at most so many times the least one
PLOTTED_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
DEFAULT_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """What a workload could ask of a store by the paper's formula, and what it needs."""

    format: str
    policy: str
    requests: int
    sessions: int
    ttl_s: float
    context_tokens: int
    dsput: int
    ccps_gb: float
    ccput_gb: float
    hit_rate_unbounded: float  # within the TTL
    target_hit_rate: float
    capacity_gb: float | None  # None: no capacity reaches the target
    capacity_share: float | None  # of CCpUT
    hit_rate: float | None  # at that capacity


class Replay:
    """Hit rates of one trace at any capacity; the clock is the trace's own."""

    def __init__(self, trace: Trace, config: PolicyConfig, lookahead: int | None) -> None:
        self._trace = trace
        self._config = config  # its capacity is replaced by the one tried
        self._lookahead = lookahead
        self.all_pages = len({key for request in trace.requests for key in request.kept})
        self.prompt_tokens = sum(request.input_tokens for request in trace.requests)

    def hit_rate(self, num_pages: int) -> float:
        """Prompt tokens saved by a store of `num_pages`, of all."""
        config = replace(self._config, host_pages=num_pages)
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

    def least_pages(self, target: float) -> int:
        """The least capacity, to PRECISION, with a hit rate of `target`, which all pages reach."""
        high = self.all_pages
        low = max(1, high // 1024)
        if self.hit_rate(low) >= target:
            return low
        num_tries = max(1, round(log2(log(high / low) / log(PRECISION) + 1)))
        with StageBar() as bar:
            for tried in count():
                if high - low <= 1 or high <= low * PRECISION:
                    return high
                bar("replaying", min(1.0, tried / num_tries))
                middle = round(sqrt(low * high))
                if self.hit_rate(middle) >= target:
                    high = middle
                else:
                    low = middle
        raise AssertionError


def most_sessions(requests: Sequence[TraceRequest], ttl_s: float) -> int:
    """DSpUT: the most distinct sessions that came within a time of `ttl_s`."""
    active: Counter[int] = Counter()
    most = first = 0
    for request in requests:
        active[request.session] += 1
        while requests[first].arrival_s <= request.arrival_s - ttl_s:
            left = requests[first].session
            active[left] -= 1
            if not active[left]:
                del active[left]
            first += 1
        most = max(most, len(active))
    return most


def plan_capacity(trace: Trace, args: argparse.Namespace) -> tuple[CapacityReport, Replay]:
    """The paper's three numbers, and the search for the target."""
    requests, ttl_s = trace.requests, args.ttl or DEFAULT_TTL_S
    config = PolicyConfig(0, kind=PolicyKind(args.policy), ttl_s=ttl_s)
    replay = Replay(trace, config, args.lookahead)
    context_tokens = args.context_tokens or max(r.input_tokens + r.output_tokens for r in requests)
    page_gb = trace.page_tokens * args.kv_bytes_per_token / GB
    dsput = most_sessions(requests, ttl_s)
    ccps_gb = context_tokens * args.kv_bytes_per_token / GB
    unbounded = replay.hit_rate(replay.all_pages)
    pages = replay.least_pages(args.target_hit_rate) if unbounded >= args.target_hit_rate else None
    capacity_gb = None if pages is None else pages * page_gb
    report = CapacityReport(
        format=trace.format.value,
        policy=args.policy,
        requests=len(requests),
        sessions=len({request.session for request in requests}),
        ttl_s=ttl_s,
        context_tokens=context_tokens,
        dsput=dsput,
        ccps_gb=ccps_gb,
        ccput_gb=dsput * ccps_gb,
        hit_rate_unbounded=unbounded,
        target_hit_rate=args.target_hit_rate,
        capacity_gb=capacity_gb,
        capacity_share=None if capacity_gb is None else capacity_gb / (dsput * ccps_gb),
        hit_rate=None if pages is None else replay.hit_rate(pages),
    )
    return report, replay


def curve(trace: Trace, replay: Replay, ccput_pages: float) -> list[CapacityPoint]:
    """Hit rate and throughput at shares of CCpUT (the paper's figure 23)."""
    rates, points = ServiceRates(), []
    decode_s = rates.decode_s(sum(request.output_tokens for request in trace.requests))
    for share in PLOTTED_SHARES:
        hit_rate = replay.hit_rate(max(1, round(share * ccput_pages)))
        prefill_s = rates.prefill_s(round((1 - hit_rate) * replay.prompt_tokens))
        per_s = replay.prompt_tokens / (prefill_s + decode_s)
        points.append(CapacityPoint(share, hit_rate, per_s))
    return points


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mainstem capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_flags(made)
    made.add_argument(
        "--target-hit-rate",
        type=positive,
        default=0.9,
        metavar="X",
        help="prompt tokens saved of all prompt tokens (0.9)",
    )
    made.add_argument(
        "--policy",
        choices=[kind.value for kind in PolicyKind],
        default=PolicyKind.LOOKAHEAD.value,
        help="(lookahead)",
    )
    made.add_argument(
        "--lookahead", type=not_negative_count, metavar="N", help="requests known (by capacity)"
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--plot", type=Path, metavar="FILE", help="hit rate against capacity")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.plot is not None:
        require_matplotlib()
    if args.target_hit_rate > 1:
        raise InvalidRequest("--target-hit-rate", f"must be at most 1, got {args.target_hit_rate}")
    started = perf_counter()
    trace = read_trace(args.trace, read_options(args))
    warn_if_nothing_is_shared(trace)
    report, replay = plan_capacity(trace, args)
    if args.plot is not None:
        page_gb = trace.page_tokens * args.kv_bytes_per_token / GB
        points = curve(trace, replay, report.ccput_gb / page_gb)
        plot_capacity(points, report.hit_rate_unbounded, args.plot)
    if args.json:
        print(json.dumps({**asdict(report), "seconds": perf_counter() - started}))
    else:
        print(as_text(report))
    return 0


def as_text(report: CapacityReport) -> str:
    lines = [
        f"sessions          {report.sessions:,} in {report.requests:,} requests",
        f"DSpUT             {report.dsput:,} sessions in {report.ttl_s:g} s",
        f"CCpS              {report.ccps_gb:,.3g} GB ({report.context_tokens:,} tokens)",
        f"CCpUT             {report.ccput_gb:,.1f} GB",
        f"unbounded store   hit rate {report.hit_rate_unbounded:.4f}",
    ]
    if report.capacity_gb is None:
        lines.append(f"hit rate {report.target_hit_rate:g}      not reached by any capacity")
    else:
        lines.append(
            f"hit rate {report.target_hit_rate:<8g} {report.capacity_gb:,.1f} GB,"
            f" {report.capacity_share:.3f} of CCpUT (reaches {report.hit_rate:.4f})"
        )
    return "\n".join(lines)
