"""`mainstem simulate TRACE --replicas N`: simulates this workload on many replicas behind a router.

The router is the same as in serving. The trace's times are scaled so that the devices, if they had
one common memory, would be busy for a share --busy of the time. With comma lists, each combination
is one line of the output.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mainstem.cli.flag_types import (
    comma_list,
    member_of,
    not_negative,
    not_negative_count,
    positive,
    positive_count,
)
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.ray.router import RouterKind
from mainstem_simulate import trace_flags
from mainstem_simulate.device_pages import PagedTrace
from mainstem_simulate.fleet_plots import plot_fleets
from mainstem_simulate.plots import require_matplotlib
from mainstem_simulate.printed import print_reports
from mainstem_simulate.replicas import FleetConfig, FleetReport, find_reference, simulate_fleet
from mainstem_simulate.service import ServiceRates
from mainstem_simulate.traces import read_trace

DEVICE_TOKENS = 1_000_000
SHARED_GB_PER_S = 10.0


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem simulate", description=__doc__)
    trace_flags.add_trace_flags(made)
    fleet = made.add_argument_group("replicas")
    fleet.add_argument(
        "--replicas", type=comma_list(positive_count), required=True, metavar="N", help="how many"
    )
    fleet.add_argument(
        "--router",
        type=comma_list(member_of(RouterKind)),
        default=[RouterKind.AFFINE],
        metavar="KIND",
        help="affine, random or round-robin (affine)",
    )
    fleet.add_argument(
        "--device-tokens",
        type=comma_list(positive_count),
        default=[DEVICE_TOKENS],
        metavar="N",
        help=f"tokens that each replica holds ({DEVICE_TOKENS})",
    )
    fleet.add_argument(
        "--shared-gb",
        type=comma_list(not_negative),
        default=[0.0],
        metavar="GB",
        help="a store that all replicas read and write (0: none)",
    )
    fleet.add_argument(
        "--shared-bandwidth",
        type=positive,
        default=SHARED_GB_PER_S,
        metavar="GB/S",
        help=f"GB/s from that store to each replica ({SHARED_GB_PER_S:g})",
    )
    flag = partial(add_flag, fleet)
    flag(
        "--busy",
        positive,
        "share of the time that devices with one common memory would be busy",
        0.7,
    )
    world = made.add_argument_group("service")
    add_flag(
        world, "--warmup", not_negative_count, "leave the first N requests out of the counts", 0
    )
    trace_flags.add_rate_flags(world, ("prefill_tokens_per_s", "decode_tokens_per_s"))
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--plot", type=Path, metavar="FILE", help="hit rates, TTFT and loads")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.plot is not None:
        require_matplotlib()
    if args.ttl is not None:
        raise ConfigError("--ttl is not simulated with --replicas")
    configs = list(_configs(args, trace_flags.kv_bytes_per_token(args)))
    trace = read_trace(args.trace, trace_flags.read_options(args))
    trace_flags.warn_if_nothing_is_shared(trace)
    found = _reports(PagedTrace.of(trace), configs, args)
    reports = print_reports(found, trace, COLUMNS, args.json)
    if args.plot is not None:
        plot_fleets(reports, args.plot)
    return 0


def _configs(args: argparse.Namespace, kv_bytes: float) -> Iterator[FleetConfig]:
    """Yield one config for every number of replicas and every memory size; raises ConfigError."""
    rates = ServiceRates(args.prefill_tokens_per_s, args.decode_tokens_per_s)
    for num_replicas in args.replicas:
        for device_tokens in args.device_tokens:
            yield FleetConfig(
                num_replicas,
                device_tokens,
                shared_gb_per_s=args.shared_bandwidth,
                kv_bytes_per_token=kv_bytes,
                busy=args.busy,
                warmup=args.warmup,
                seed=args.seed,
                rates=rates,
            )


def _reports(
    trace: PagedTrace, configs: Sequence[FleetConfig], args: argparse.Namespace
) -> Iterator[FleetReport]:
    """Reports for each config, with every router and every shared tier."""
    work = 1.0  # pace * replicas, which is about the same for any number of replicas
    for config in configs:
        reference = find_reference(trace, config, work / config.num_replicas)
        work = reference.pace * config.num_replicas
        for router in args.router:
            for shared_gb in args.shared_gb:
                chosen = replace(config, router=router, shared_gb=shared_gb)
                yield simulate_fleet(trace, chosen, reference)


COLUMNS = {  # of a table for people: the report's field, and its form
    "router": ("router", ""),
    "replicas": ("replicas", ""),
    "tokens each": ("device_tokens", ","),
    "shared GB": ("shared_gb", "g"),
    "hit rate": ("hit_rate", ".4f"),
    "of reference": ("hit_rate_kept", ".3f"),
    "TTFT s": ("mean_ttft_s", ".3f"),
    "p99 s": ("p99_ttft_s", ".3f"),
    "busy": ("busy", ".3f"),
    "max/mean load": ("load_max_over_mean", ".3f"),
    "device s": ("device_s", ",.0f"),
}
