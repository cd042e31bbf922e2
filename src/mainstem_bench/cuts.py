"""`mainstem bench cuts`: how well the planner of span attention chooses, on random steps.

A step may have decodes, prefixes of one or two levels, and prompts, on one of six head shapes.
Every way to cut the step that the planner compares is timed as in `mainstem bench kernel`; the way
that the planner chooses is timed again.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.kernels.attention.cutting import ways_to_cut
from mainstem.kernels.attention.plan import Launches, plan_cut
from mainstem_bench.kernel import (
    DTYPE,
    Bench,
    fingerprint,
    make_attention,
    require_card,
    seen_spans,
)
from mainstem_bench.workloads import AttentionCase, Run

HEADS = ((32, 8), (32, 8), (32, 8), (32, 32), (28, 4), (64, 8), (16, 2), (40, 8))
BATCHES = (4, 8, 16, 32, 48, 64, 100, 128, 200, 256, 400, 640)
KINDS = ("own", "one", "groups", "groups", "two levels", "unequal", "mixed", "mixed", "prompts")
PROMPTS = (64, 256, 512, 700)
OWN, SHORT_OWN = (40, 128, 200, 300, 600, 1500), (20, 40, 128, 200)
MANY_HEADS = 4000  # with more sequences x KV heads, contexts are short, to fit into memory
MAX_BYTES = 40 << 30  # above this, the pages of all head shapes are freed


def random_step(rng: random.Random) -> AttentionCase:
    """Make a random step; equal states of `rng` give equal steps."""
    heads, kv_heads = rng.choice(HEADS)
    batch, kind = rng.choice(BATCHES), rng.choice(KINDS)
    own = rng.choice(OWN if batch * kv_heads < MANY_HEADS else SHORT_OWN)
    is_ragged = rng.random() < 0.5
    if kind == "prompts":
        batch = 0
    runs = [Run((row,), rng.randint(1, 2 * own) if is_ragged else own) for row in range(batch)]
    runs += _prefixes(rng, kind, batch)
    if kind in ("mixed", "prompts"):
        runs += _prompts(rng, batch)
    name = f"{heads}/{kv_heads} B{batch} {kind} own {own}{' ragged' if is_ragged else ''}"
    return AttentionCase(name, tuple(runs), heads, kv_heads)


def _prefixes(rng: random.Random, kind: str, batch: int) -> Iterator[Run]:
    if kind in ("one", "two levels"):
        yield Run(tuple(range(batch)), rng.choice((100, 300, 1000, 2000, 4000, 12000)))
    if kind in ("groups", "two levels", "mixed"):
        groups = min(rng.choice((1, 2, 4, 8, 16, 32, 64)), batch)
        for i in range(groups):
            rows = tuple(range(batch * i // groups, batch * (i + 1) // groups))
            yield Run(rows, rng.choice((200, 500, 1500, 3000, 8000)))
    first = 0
    while kind == "unequal" and first < batch:
        rows = tuple(range(first, min(first + rng.randint(1, 50), batch)))
        yield Run(rows, rng.randint(100, 6000))
        first += len(rows)


def _prompts(rng: random.Random, first: int) -> Iterator[Run]:
    for _ in range(rng.randint(1, 6)):
        rows = tuple(range(first, first + rng.choice(PROMPTS)))
        yield Run(rows, len(rows), is_causal=True)
        if rng.random() < 0.6:
            yield Run(rows, rng.choice((500, 2000, 6000)))
        first += len(rows)


def step_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """Return the times of all ways to cut a step, and of the way that the planner chooses."""
    spans = seen_spans(case)
    k_pages, v_pages = bench.pages_of(case, int(spans.page_ids.max()) + 1)
    q = torch.randn(case.num_tokens, case.heads, case.head_dim, dtype=DTYPE, device="cuda")
    attention, out = make_attention(case, spans), torch.empty_like(q)

    @cache
    def replay(launches: Launches) -> Callable[[], None]:
        attention.run(q, k_pages, v_pages, out=out, launches=launches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention.run(q, k_pages, v_pages, out=out, launches=launches)
        return graph.replay

    bench.time_us(replay(attention.plan(spans)))  # raises the card's clocks
    us: dict[tuple[int, int, int], float] = {}
    for way in ways_to_cut(spans, attention.shape):
        plan = plan_cut(spans, way.cut(), attention.shape)
        key = (*plan.num_units, int(way.sms))
        if attention.fits(plan) and key not in us:
            us[key] = bench.time_us(replay(attention.send(plan)))
    return summary(case.name, us, bench.time_us(replay(attention.plan(spans))))


def summary(step: str, us: dict[tuple[int, int, int], float], taken_us: float) -> dict[str, object]:
    """`us` has times by large units, small units and multiprocessors. It is empty if no way fits
    the buffers, so that the planner had to share less.
    """
    best_us = min([*us.values(), taken_us])
    return {
        "step": step,
        "us": round(taken_us, 1),
        "best_us": round(best_us, 1),
        "over_best": round(taken_us / best_us, 3),
        "ways": [
            {"large": large, "small": small, "sms": sms, "us": round(took, 1)}
            for (large, small, sms), took in us.items()
        ],
    }


def main(args: list[str]) -> int:
    """Print one line per step, and a summary."""
    parser = Parser(prog="mainstem bench cuts")
    add_flag(parser, "--steps", positive_count, "random steps", 40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line per step")
    chosen = parser.parse_args(args)
    require_card()
    bench, rng, over = Bench(), random.Random(chosen.seed), []
    for _ in range(chosen.steps):
        line = step_line(bench, random_step(rng))
        over.append(float(str(line["over_best"])))
        if chosen.json:
            print(json.dumps({**line, **fingerprint()}), flush=True)
        else:
            print(f"{line['us']:>8} us, best {line['best_us']:>8}  {line['step']}", flush=True)
        if torch.cuda.memory_allocated() > MAX_BYTES:
            bench.free_pages()
    mean = float(np.exp(np.mean(np.log(over))))
    if chosen.json:
        print(json.dumps({"steps": len(over), "over_best": round(mean, 3), "worst": max(over)}))
    else:
        print(f"{len(over)} steps: {mean:.3f} times the best way, at worst {max(over):.3f}")
    return 0
