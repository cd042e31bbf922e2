"""Measures speed and memory of planning, as JSON lines.

First the industry mix of the paper: 8,000 prompts with 1,570 shared and 30 own tokens, 3 to a
prefix. Then 10,000, 100,000 and 1,000,000 prompts of 200 tokens, 4 to a prefix, and how the time
grows with their number.
Processor seconds are reported in addition to wall time, for machines that have other work.
"""

import resource
from time import perf_counter, process_time

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.plan import Prompts
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import build_tree
from mainstem.plan.saving import LruCache, compare
from mainstem_bench.report import line

ROWS_AT_ONCE = 10_000


def shared_prompts(count: int, degree: int, prefix: int, distinct: int) -> Prompts:
    """Make `count` prompts in random order, in place, so that they take no memory besides the
    arrays."""
    rng = np.random.default_rng(0)
    heads = rng.integers(10, 30_000, (-(-count // degree), prefix), dtype=np.int32)
    groups = rng.permutation(count) // degree
    rows = np.empty((count, prefix + distinct), dtype=np.int32)
    for first in range(0, count, ROWS_AT_ONCE):
        part = slice(first, min(first + ROWS_AT_ONCE, count))
        rows[part, :prefix] = heads[groups[part]]
        rows[part, prefix:] = rng.integers(10, 30_000, rows[part, prefix:].shape, dtype=np.int32)
    return Prompts(rows.reshape(-1), np.arange(count + 1, dtype=np.int64) * rows.shape[1])


def measure(name: str, prompts: Prompts, repeats: int) -> tuple[float, float]:
    """Print a line; return the least wall time and the least processor time of `repeats` plans."""
    times, cpu_times = [], []
    for _ in range(repeats):
        began_cpu_s, began_s = process_time(), perf_counter()
        tree = build_tree(prompts)
        tree_s = perf_counter()
        plan = plan_tree(tree)
        times.append((perf_counter() - began_s, tree_s - began_s))
        cpu_times.append(process_time() - began_cpu_s)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began_s = perf_counter()
    plan_tree(tree, PlanConfig(levels=1))
    single_s = perf_counter() - began_s
    began_s = perf_counter()
    savings = compare(tree, plan, LruCache(450_000))
    compare_s = perf_counter() - began_s
    best_s, best_tree_s = min(times)
    result = {
        "workload": name,
        "prompts": len(prompts),
        "prompt_tokens": len(prompts.token_ids),
        "plan_seconds": round(best_s, 4),
        "cpu_seconds": round(min(cpu_times), 4),
        "tree_seconds": round(best_tree_s, 4),
        "worst_seconds": round(max(times)[0], 4),
        "single_level_seconds": round(single_s, 4),
        "compare_seconds": round(compare_s, 4),
        "peak_gib": round(peak_bytes / 2**30, 2),
        "groups": plan.num_groups,
        "multi_level": round(savings.multi_level, 4),
        "upper_bound": round(savings.upper_bound, 4),
        "lru": round(savings.lru, 4),
    }
    print(line("plan", result), flush=True)
    return best_s, min(cpu_times)


def main(argv: list[str]) -> int:
    """Print a line per workload and, if two differ in the number of prompts, a line about
    growth."""
    parser = Parser("mainstem bench plan", description=__doc__)
    add_flag(parser, "--most", positive_count, "leave out workloads with more prompts", 1_000_000)
    most = parser.parse_args(argv).most
    measure("industry", shared_prompts(8000, 3, 1570, 30), repeats=7)
    seconds = {}
    for count, repeats in ((10_000, 7), (100_000, 3), (1_000_000, 2)):
        if count > most:
            break
        seconds[count] = measure("200 tokens", shared_prompts(count, 4, 150, 50), repeats)
    if len(seconds) < 2:
        return 0
    few, many = min(seconds), max(seconds)
    growth, cpu_growth = (seconds[many][i] / seconds[few][i] for i in range(2))
    ratios = {
        "workload": "growth",
        "prompts_ratio": many // few,
        "seconds_ratio": round(growth, 1),
        "cpu_seconds_ratio": round(cpu_growth, 1),
    }
    print(line("plan", ratios))
    return 0
