"""`mainstem capacity TRACE`: the storage that a hit rate needs (AttentionStore 4.3.5).

Prints DSpUT (the largest number of distinct sessions within one TTL), CCpS (bytes of K and V of one
session) and CCpUT (DSpUT * CCpS). It then replays the trace through the engine's policy to find
which share of CCpUT reaches the target hit rate. The hit rate is that of `mainstem simulate`: saved
prompt tokens / all prompt tokens. If no capacity reaches the target, the exit status is 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

from mainstem.checkpoints.progress import StageBar
from mainstem.cli.flag_types import not_negative_count, positive
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import InvalidRequest
from mainstem.core.words import counted
from mainstem.kv.eviction import POLICIES
from mainstem_simulate import trace_flags
from mainstem_simulate.capacity import (
    DEFAULT_TTL_S,
    CapacityQuestion,
    CapacityReport,
    curve,
    plan_capacity,
)
from mainstem_simulate.plots import plot_capacity, require_matplotlib
from mainstem_simulate.service import Prices
from mainstem_simulate.traces import read_trace


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem capacity", description=__doc__)
    trace_flags.add_trace_flags(made)
    flag = partial(add_flag, made)
    flag("--target-hit-rate", positive, "the target: saved prompt tokens / all prompt tokens", 0.9)
    made.add_argument(
        "--policy",
        choices=list(POLICIES),
        default="lookahead",
        help="which pages are evicted first (lookahead)",
    )
    flag("--lookahead", not_negative_count, "waiting requests that the policy sees")
    trace_flags.add_storage_prices(made)
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--plot", type=Path, metavar="FILE", help="hit rate against capacity in GB")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.plot is not None:
        require_matplotlib()
    if args.target_hit_rate > 1:
        raise InvalidRequest("--target-hit-rate", f"must be at most 1, got {args.target_hit_rate}")
    started = perf_counter()
    trace = read_trace(args.trace, trace_flags.read_options(args))
    trace_flags.warn_if_nothing_is_shared(trace)
    asked = CapacityQuestion(
        target_hit_rate=args.target_hit_rate,
        policy=args.policy,
        kv_bytes_per_token=trace_flags.kv_bytes_per_token(args),
        ttl_s=args.ttl or DEFAULT_TTL_S,
        context_tokens=args.context_tokens,
        lookahead=args.lookahead,
    )
    with StageBar() as bar:
        report, replay = plan_capacity(trace, asked, bar)
    if args.plot is not None:
        points = curve(trace, replay, report)
        plot_capacity(points, report.hit_rate_unbounded, report.capacity_gb, args.plot)
    if args.json:
        print(json.dumps({**asdict(report), "seconds": perf_counter() - started}))
    else:
        print(as_text(report, Prices(dram_gb=args.dram_price, disk_gb=args.disk_price)))
    if report.capacity_gb is None:
        best = f"an unbounded store reaches {report.hit_rate_unbounded:.4f}"
        reason = f"no capacity reaches a hit rate of {args.target_hit_rate:g}: {best}"
        print(f"mainstem capacity: {reason}", file=sys.stderr)
        return 1
    return 0


def as_text(report: CapacityReport, prices: Prices) -> str:
    unit = f"{report.ttl_s:g} s"
    if report.span_s < report.ttl_s:
        unit = f"{report.span_s:,.0f} s, all of the trace (the TTL is {unit})"
    kind = "the mean length of a session"
    if report.context_tokens is not None:
        kind = "the context window"
    lines = [
        f"sessions          {report.sessions:,} in {counted(report.requests, 'request')}",
        f"K and V           {report.kv_bytes_per_token:,.0f} bytes a token",
        f"DSpUT             {counted(report.dsput, 'session')} in {unit}",
        f"CCpS              {report.ccps_gb:,.3g} GB ({report.session_tokens:,.0f} tokens, {kind})",
        f"CCpUT             {report.ccput_gb:,.1f} GB",
        f"unbounded store   hit rate {report.hit_rate_unbounded:.4f}",
    ]
    if report.capacity_gb is None:
        lines.append(f"hit rate {report.target_hit_rate:g}      not reached by any capacity")
        return "\n".join(lines)
    dram, disk = report.capacity_gb * prices.dram_gb, report.capacity_gb * prices.disk_gb
    lines += [
        f"hit rate {report.target_hit_rate:<8g} {report.capacity_gb:,.1f} GB,"
        f" {report.capacity_share:.3f} of CCpUT (reaches {report.hit_rate:.4f})",
        f"cost              {dram:,.4g} $ an hour in host memory, {disk:,.4g} $ an hour on disk",
    ]
    return "\n".join(lines)
