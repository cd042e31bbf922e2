"""Cuts a plan for many workers; prints seconds, balance and what the cut costs, as JSON lines.

The plan is synthetic: groups of 1 to 40 rows with prefixes of 50 to 2,000 tokens. Prompts have
lengths, but no tokens. Planning itself is not timed (`mainstem bench plan`).
"""

import resource
from functools import partial
from time import perf_counter, process_time

import numpy as np

from mainstem.cli.flag_types import positive, positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.plan import Int64s, Plan
from mainstem.plan.cut import cut_plan
from mainstem_bench.report import line, load_average

SIZES = ((1_000_000, 8), (10_000_000, 1000))  # rows, workers


def lengths_only(num_rows: int) -> tuple[Plan, Int64s]:
    """Make a plan of groups of 1 to 40 rows, and the lengths of the prompts, which have no
    tokens."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 41, num_rows)
    starts = np.append(0, np.cumsum(sizes))
    starts = np.append(starts[starts < num_rows], num_rows)
    count = len(starts) - 1
    prefixes = rng.integers(50, 2000, count)
    zero = np.zeros(1, dtype=np.int64)
    nodes = np.repeat(np.arange(1, count + 1), np.diff(starts))
    plan = Plan(
        members=np.arange(num_rows),
        member_nodes=nodes,
        group_starts=starts,
        group_nodes=np.arange(1, count + 1),
        node_parents=np.zeros(count + 1, dtype=np.int64),
        node_tokens=np.append(zero, prefixes),
        node_begins=np.append(zero, starts[:-1]),
        node_ends=np.append(zero + num_rows, starts[1:]),
        node_is_span=np.zeros(count + 1, dtype=np.bool_),
    )
    return plan, plan.node_tokens[nodes] + rng.integers(1, 200, num_rows)


def measure(num_rows: int, num_workers: int, output_tokens: float) -> dict[str, object]:
    """Cut the plan once, and check that every row is in one bundle."""
    plan, lengths = lengths_only(num_rows)
    expected = np.full(num_rows, output_tokens)
    began_cpu_s, began_s = process_time(), perf_counter()
    cut = cut_plan(plan, lengths, expected, num_workers)
    seconds, cpu_seconds = perf_counter() - began_s, process_time() - began_cpu_s
    cut.check(plan)
    return {
        "rows": num_rows,
        "workers": num_workers,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "bundles": len(cut.begins),
        "longest_over_mean": round(cut.balance, 4),
        "saving": round(cut.saving, 4),
        "lost_saving": round(cut.lost_saving, 6),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load_average": load_average(),
    }


def main(argv: list[str]) -> int:
    """Print a line for each size."""
    parser = Parser("mainstem bench shares", description=__doc__)
    parser.add_argument("--rows", type=positive_count, metavar="N", help="number (1M and 10M)")
    parser.add_argument("--workers", type=positive_count, metavar="N", help="number (8 and 1,000)")
    flag = partial(add_flag, parser)
    flag("--output-tokens", positive, "tokens of an answer", 64.0, metavar="N")
    args = parser.parse_args(argv)
    if (args.rows is None) != (args.workers is None):
        parser.error("--rows and --workers go together")
    sizes = SIZES if args.rows is None else ((args.rows, args.workers),)
    for num_rows, num_workers in sizes:
        print(line("shares", measure(num_rows, num_workers, args.output_tokens)), flush=True)
    return 0
