"""`mainstem simulate TRACE`: shows what a tiered KV store would save on this workload, and what it
would cost.

Replays a trace through the policy that the engine's store uses. Policies and sizes may be comma
lists: the first --host-gb goes with the first --disk-gb and --device-gb, and so on. Each of these
sets of sizes with each policy is one line of the output and one bar of the plot.

With --replicas N it simulates many replicas behind a router, with other flags:
`mainstem simulate --replicas 1 --help`.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mainstem.cli.flag_types import (
    comma_list,
    not_negative,
    not_negative_count,
    one_of,
    positive_count,
)
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.kv.eviction import POLICIES
from mainstem.kv.policy import HEADROOM
from mainstem_simulate import replicas_command, trace_flags
from mainstem_simulate.plots import plot_reports, require_matplotlib
from mainstem_simulate.printed import print_reports
from mainstem_simulate.service import Prices, ServiceRates
from mainstem_simulate.simulator import Queue, SimulationConfig, simulate
from mainstem_simulate.traces import read_trace


def parser() -> argparse.ArgumentParser:
    prices = Prices()
    made = Parser("mainstem simulate", description=__doc__)
    trace_flags.add_trace_flags(made)
    store = made.add_argument_group("store")
    store.add_argument(
        "--policy",
        type=comma_list(one_of(POLICIES)),
        default=["lookahead"],
        metavar="KIND",
        help="lookahead, lru, fifo or belady (lookahead)",
    )
    sizes = comma_list(not_negative)
    store.add_argument("--host-gb", type=sizes, required=True, metavar="GB", help="host memory")
    store.add_argument("--disk-gb", type=sizes, default=[0.0], metavar="GB", help="disk (0)")
    store.add_argument(
        "--device-gb",
        type=sizes,
        default=[0.0],
        metavar="GB",
        help="device memory for cached pages (0: all hits come from host memory)",
    )
    flag = partial(add_flag, store)
    flag(
        "--lookahead",
        not_negative_count,
        "waiting requests that the policy sees (as many as the store holds; belady: all)",
    )
    flag("--headroom", not_negative, "share of host memory kept free, if there is a disk", HEADROOM)
    world = made.add_argument_group("service")
    world.add_argument(
        "--queue",
        choices=[member.value for member in Queue],
        default=Queue.SATURATED.value,
        help="saturated: requests always wait; arrivals: they come when the trace says (saturated)",
    )
    add_flag(
        world, "--warmup", not_negative_count, "leave the first N requests out of the counts", 0
    )
    trace_flags.add_rate_flags(world, list(ServiceRates.__dataclass_fields__))
    money = made.add_argument_group("prices")
    flag = partial(add_flag, money)
    flag("--gpu-price", not_negative, "US dollars per GPU and hour", prices.gpu, metavar="$")
    trace_flags.add_storage_prices(money)
    flag("--gpus", positive_count, "number of GPUs that make up the device", prices.num_gpus)
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--plot", type=Path, metavar="FILE", help="hit rates and device time")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == "--replicas" for word in words):
        return replicas_command.main(words)
    args = parser().parse_args(words)
    if args.plot is not None:
        require_matplotlib()
    trace = read_trace(args.trace, trace_flags.read_options(args))
    trace_flags.warn_if_nothing_is_shared(trace)
    if args.warmup >= len(trace.requests):
        raise ConfigError(
            f"--warmup {args.warmup} leaves no request to count: there are {len(trace.requests)}"
        )
    found = (simulate(trace, each) for each in configs(args, trace_flags.kv_bytes_per_token(args)))
    reports = print_reports(found, trace, COLUMNS, args.json)
    if args.plot is not None:
        plot_reports(reports, args.plot)
    return 0


def configs(args: argparse.Namespace, kv_bytes: float) -> list[SimulationConfig]:
    """One simulation for every set of sizes (the n-th of each flag) and every policy."""
    sizes = {"--host-gb": args.host_gb, "--disk-gb": args.disk_gb, "--device-gb": args.device_gb}
    num_sizes = max(map(len, sizes.values()))
    if not {len(given) for given in sizes.values()} <= {1, num_sizes}:
        counted = ", ".join(f"{len(given)} of {flag}" for flag, given in sizes.items())
        raise ConfigError(f"lists of sizes must have the same length, or one value: {counted}")
    rows = zip(*(given * (num_sizes // len(given)) for given in sizes.values()), strict=True)
    rates = ServiceRates(
        args.prefill_tokens_per_s,
        args.decode_tokens_per_s,
        args.host_gb_per_s,
        args.disk_gb_per_s,
    )
    return [
        SimulationConfig(
            kv_bytes_per_token=kv_bytes,
            host_gb=host_gb,
            disk_gb=disk_gb,
            device_gb=device_gb,
            policy=policy,
            lookahead=args.lookahead,
            queue=Queue(args.queue),
            ttl_s=args.ttl,
            warmup=args.warmup,
            headroom=args.headroom,
            rates=rates,
            prices=Prices(args.gpu_price, args.dram_price, args.disk_price, args.gpus),
        )
        for host_gb, disk_gb, device_gb in rows
        for policy in args.policy
    ]


COLUMNS = {  # of a table for people: the report's field, and its form
    "policy": ("policy", ""),
    "lookahead": ("lookahead", ","),
    "device GB": ("device_gb", "g"),
    "host GB": ("host_gb", "g"),
    "disk GB": ("disk_gb", "g"),
    "hit rate": ("hit_rate", ".4f"),
    "device": ("hit_rate_device", ".4f"),
    "DRAM": ("hit_rate_dram", ".4f"),
    "disk": ("hit_rate_disk", ".4f"),
    "unbounded": ("hit_rate_unbounded", ".4f"),
    "TTFT s": ("mean_ttft_s", ".3f"),
    "prefill tokens": ("prefill_tokens", ","),
    "device s": ("device_s", ",.0f"),
    "cost $": ("cost", ".2f"),
    "seconds": ("seconds", ".1f"),
}
