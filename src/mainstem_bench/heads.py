"""`mainstem bench heads`: compares span attention on a GPU, for many head layouts, with its floor,
the least possible time (kernel.py).

Some shapes have names: layouts of models, and layouts that once were slow. The others are random,
and equal seeds give equal shapes: 1 to 16 query heads for each KV head, head_dim 64, 80, 128 and
256, groups of equal and unequal size, prompts together with decodes; every third one has a window.
Each shape is checked against the reference before it is timed, as in `mainstem bench kernel`.

The limits: 1.6 times the floor plus 8 us in the mean over the random shapes, and 2.2 times the
floor plus 8 us for each random shape.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.plan.cost import H200
from mainstem_bench.kernel import (
    FIXED_US,
    Bench,
    about,
    fingerprint,
    floor_us,
    require_card,
    show_case,
)
from mainstem_bench.workloads import AttentionCase, Run, grouped, own_runs, unequal_groups

# the rate that attention can reach, which is lower than the rate of products
CARD = replace(H200, flops_per_s=600e12)
MEAN_BAR, WORST_BAR = 1.6, 2.2
HEAD_DIMS = (64, 80, 128, 256)
KV_HEADS = (1, 2, 4, 8, 16, 32)
MOST_RATIO, MOST_HEADS = 16, 64
WINDOW_EVERY = 3
WINDOWS = (128, 512, 1024, 4096)
BATCHES = (8, 16, 32, 64, 100, 128, 200, 256, 400)
KINDS = ("own", "one", "groups", "two levels", "unequal", "unequal", "mixed")
OWN, PREFIXES = (128, 200, 300, 600, 1500), (500, 1500, 3000, 8000)
PROMPTS = (256, 512, 700)
# shapes with a lower floor are skipped: most of their time is launches
LEAST_FLOOR_US = 15.0
MOST_OWN_KEYS = 1_000_000  # sequences x KV heads x own tokens


def named_shapes() -> list[AttentionCase]:
    """Return layouts of models, and layouts that were slow at some time."""
    rng = random.Random(0)
    return [
        AttentionCase("gqa16/2 B128 1x8000+500", grouped(128, 1, 8000, 500), 16, 2),
        AttentionCase("gqa8/1 B256 16x4000+300", grouped(256, 16, 4000, 300), 8, 1),
        AttentionCase("gqa32/4 B256 unequal +256", unequal_groups(rng, 256, 256), 32, 4),
        AttentionCase("gqa64/8 B128 4x10000+600", grouped(128, 4, 10000, 600), 64, 8),
        AttentionCase("Phi-2 B128 8x2000+250", grouped(128, 8, 2000, 250), 32, 32, 80),
        AttentionCase("Falcon 7B B128 1x2000+300", grouped(128, 1, 2000, 300), 71, 1, 64),
        AttentionCase("gpt-oss B256 16x2000+250", grouped(256, 16, 2000, 250), 64, 8, 64),
        AttentionCase(
            "gpt-oss B256 16x2000+250 w128", grouped(256, 16, 2000, 250), 64, 8, 64, window=128
        ),
        AttentionCase("Gemma 3 12B B128 8x2000+250", grouped(128, 8, 2000, 250), 16, 8, 256),
        AttentionCase(
            "Gemma 3 12B B128 8x2000+250 w1024", grouped(128, 8, 2000, 250), 16, 8, 256, window=1024
        ),
        AttentionCase(
            "Mistral 7B B64 own 6000 w4096", own_runs([6000] * 64), 32, 8, window=4096
        ),
    ]  # fmt: skip


def random_shapes(seed: int, count: int) -> Iterator[AttentionCase]:
    rng = random.Random(seed)
    for index in range(count):
        head_dim = HEAD_DIMS[index % len(HEAD_DIMS)]
        has_window = index % WINDOW_EVERY == 0
        case = _random_shape(rng, head_dim, has_window)
        while floor_us(case, CARD) < LEAST_FLOOR_US:
            case = _random_shape(rng, head_dim, has_window)
        yield case


def _random_shape(rng: random.Random, head_dim: int, has_window: bool) -> AttentionCase:
    ratio = rng.randint(1, MOST_RATIO)
    kv_heads = rng.choice([n for n in KV_HEADS if n * ratio <= MOST_HEADS])
    batch, kind = rng.choice(BATCHES), rng.choice(KINDS)
    most = max(MOST_OWN_KEYS // (batch * kv_heads), min(OWN))
    own = rng.choice([n for n in OWN if n <= most])
    runs = tuple(_runs(rng, kind, batch, own))
    name = f"{ratio * kv_heads}/{kv_heads} d{head_dim} B{batch} {kind} +{own}"
    window = rng.choice(WINDOWS) if has_window else None
    if has_window:
        name += f" w{window}"
    return AttentionCase(name, runs, ratio * kv_heads, kv_heads, head_dim, window=window)


def _runs(rng: random.Random, kind: str, batch: int, own: int) -> Iterator[Run]:
    """Return the runs, prefixes first, since their order gives the positions. Own tokens have
    different lengths."""
    if kind == "unequal":
        yield from unequal_groups(rng, batch, 0)[:-batch]
    if kind in ("one", "two levels"):
        yield Run(tuple(range(batch)), rng.choice(PREFIXES))
    if kind in ("groups", "two levels", "mixed"):
        groups = min(rng.choice((2, 4, 8, 16)), batch)
        for i in range(groups):
            rows = tuple(range(batch * i // groups, batch * (i + 1) // groups))
            yield Run(rows, rng.choice(PREFIXES))
    for row in range(batch):
        yield Run((row,), rng.randint(1, 2 * own), is_causal=True)
    first = batch
    for _ in range(rng.randint(1, 4) if kind == "mixed" else 0):
        rows = tuple(range(first, first + rng.choice(PROMPTS)))
        yield Run(rows, len(rows) + rng.choice((0, 500, 2000)), is_causal=True)
        first += len(rows)


def shape_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    measured, floor = bench.measure(case), floor_us(case, CARD)
    bench.free_pages()
    over = max(measured.us - FIXED_US, 0.0) / floor
    return about(case, measured, CARD) | {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "window": case.window,
        "over_floor_less_8_us": round(over, 2),
        "is_within_bar": over <= WORST_BAR,
    }


def summary(lines: list[dict[str, object]], seed: int) -> dict[str, object]:
    """The summary of the random shapes."""
    over = [float(str(line["over_floor_less_8_us"])) for line in lines]
    mean = float(np.mean(over))
    return {
        "seed": seed,
        "shapes": len(lines),
        "mean": round(mean, 2),
        "worst": max(over),
        "is_within_bar": mean <= MEAN_BAR and max(over) <= WORST_BAR,
    }


def main(args: list[str]) -> int:
    """Print one line per shape, and a summary of the random ones; returns 1 if they miss a
    limit."""
    parser = Parser(prog="mainstem bench heads")
    flag = partial(add_flag, parser)
    flag("--shapes", positive_count, "random shapes", 24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", help="only the shapes whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON line per shape")
    chosen = parser.parse_args(args)
    require_card()
    bench = Bench()
    for case in named_shapes():
        if chosen.case in case.name:
            show_case(shape_line(bench, case), chosen.json)
    lines = []
    for case in random_shapes(chosen.seed, chosen.shapes):
        if chosen.case in case.name:
            lines.append(shape_line(bench, case))
            show_case(lines[-1], chosen.json)
    if not lines:
        return 0
    total = summary(lines, chosen.seed)
    print(json.dumps({**total, **fingerprint()}) if chosen.json else total, flush=True)
    return 0 if total["is_within_bar"] else 1
