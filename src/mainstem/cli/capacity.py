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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from mainstem.checkpoints.progress import StageBar
from mainstem.cli.flag_types import not_negative_count, positive
from mainstem.cli.trace_flags import add_trace_flags, read_options, warn_if_nothing_is_shared
from mainstem.core.errors import InvalidRequest
from mainstem.kv.policy import PolicyKind
from mainstem.simulate.capacity import (
    DEFAULT_TTL_S,
    CapacityQuestion,
    CapacityReport,
    curve,
    plan_capacity,
)
from mainstem.simulate.plots import plot_capacity, require_matplotlib
from mainstem.simulate.service import GB
from mainstem.simulate.traces import read_trace


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
    asked = CapacityQuestion(
        target_hit_rate=args.target_hit_rate,
        policy=PolicyKind(args.policy),
        kv_bytes_per_token=args.kv_bytes_per_token,
        ttl_s=args.ttl or DEFAULT_TTL_S,
        context_tokens=args.context_tokens,
        lookahead=args.lookahead,
    )
    with StageBar() as bar:
        report, replay = plan_capacity(trace, asked, bar)
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
