"""RelayAttention's kernel alone: Fig. 1 (time) and Fig. 6 (speed-up compared with Eq. 10)."""

import argparse
from collections.abc import Iterator, Sequence

from mainstem.plan.cost import H200
from mainstem_bench.attention import measure as measure_on_cpu
from mainstem_bench.attention import parser as cpu_parser
from mainstem_bench.floors import relay_speedup, span_floor_s
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Number, Outcome, Settings, Verdict
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import weighed
from mainstem_bench.paper.style import Figure
from mainstem_bench.workloads import relay_case

SYSTEM_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (4, 8, 16, 32)
CONTEXTS = (128, 256)
CLOSE = 0.2  # "close to Eq. 10"


def _points(settings: Settings, points: Sequence[tuple[int, int, int]]) -> Iterator[Line]:
    """Measure each (batch, context, system): read once, and read by every sequence."""
    if settings.is_quick:
        yield from (cpu_point(*point) for point in points)
        return
    from mainstem_bench.kernel import Bench  # noqa: PLC0415  # needs a GPU's Triton

    bench = Bench()
    for batch, context, system in points:
        case = relay_case(batch, context, system, is_shared=True)
        once = bench.measure(case)
        each = bench.measure(relay_case(batch, context, system, is_shared=False))
        floor_s = span_floor_s(
            H200, case.spans(), heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim
        )
        yield _point(batch, context, system, once.us, each.us) | {
            "floor_us": round(1e6 * floor_s, 1)
        }
    bench.free_pages()


def cpu_point(batch: int, context: int, system: int) -> Line:
    """Compare the CPU's kernel with torch's attention over each sequence's whole context."""
    flags = ["--seqs", batch, "--prefix", system, "--own", context, "--rounds", 3]
    args: argparse.Namespace = cpu_parser().parse_args([str(flag) for flag in flags])
    found = measure_on_cpu(args)
    once_us, each_us = (1e3 * float(str(found[name])) for name in ("spans_ms", "sdpa_ms"))
    return _point(batch, context, system, once_us, each_us)


def _point(batch: int, context: int, system: int, once_us: float, each_us: float) -> Line:
    return {
        "batch": batch,
        "context": context,
        "system": system,
        "reads_us": round(once_us, 1),
        "storage_us": round(each_us, 1),
        "speedup": round(each_us / once_us, 2),
        "theory": round(relay_speedup(system, context, batch), 2),
    }


def run_time(settings: Settings) -> Iterator[Line]:
    """Fig. 1."""
    systems = (64, 256) if settings.is_quick else SYSTEM_TOKENS
    yield from _points(settings, [(32, 128, system) for system in systems])


def run_speedup(settings: Settings) -> Iterator[Line]:
    """Fig. 6."""
    systems = (64, 256) if settings.is_quick else SYSTEM_TOKENS
    batches = (4, 8) if settings.is_quick else BATCHES
    yield from _points(settings, [(b, c, s) for c in CONTEXTS for b in batches for s in systems])


def plot_time(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    systems = [line["system"] for line in lines]
    style.curve(axes, lines, "system", "storage_us", "read by every sequence", style.STORED)
    style.curve(axes, lines, "system", "reads_us", "read once", style.OURS)
    if "floor_us" in lines[0]:
        style.curve(axes, lines, "system", "floor_us", "limit", style.LIMIT)
    style.log_y(axes)
    style.log2_ticks(axes, systems)
    title = "one layer of Llama-30B's attention, 32 sequences, 128 own tokens"
    style.finish(axes, title, "system prompt, tokens", "microseconds")


def judge_time(lines: Sequence[Line]) -> Verdict:
    first, last = one(lines, system=64), one(lines, system=4096)
    grows = {name: last[name] / first[name] for name in ("storage_us", "reads_us")}
    return Verdict(
        Outcome.REPRODUCED if grows["reads_us"] < grows["storage_us"] / 3 else Outcome.NOT,
        f"from 64 to 4,096 tokens the time grows {grows['storage_us']:.1f}-fold if every "
        f"sequence reads the prompt, and {grows['reads_us']:.1f}-fold if it is read once "
        f"({last['storage_us']:.0f} and {last['reads_us']:.0f} us)",
    )


def plot_speedup(lines: Sequence[Line], figure: Figure) -> None:
    looks = (style.OURS, style.STORED, style.PAPER, style.NOTHING)
    for axes, context in zip(figure.subplots(1, 2, sharey=True), CONTEXTS, strict=True):
        for look, batch in zip(looks, BATCHES, strict=True):
            found = only(lines, batch=batch, context=context)
            solid = {**look, "linestyle": "-"}
            style.curve(axes, found, "system", "speedup", f"batch {batch}", solid)
            theory = {"color": look["color"], "linestyle": "--", "linewidth": 1}
            style.curve(axes, found, "system", "theory", None, theory)
        style.log2_ticks(axes, [line["system"] for line in only(lines, batch=4, context=context)])
        title = f"{context} own tokens; dashed: the paper's Eq. 10"
        style.finish(axes, title, "system prompt, tokens", "times as fast as reading it each")


def judge_speedup(lines: Sequence[Line]) -> Verdict:
    numbers = [Number(line["speedup"], line["theory"], CLOSE) for line in lines]
    share = [number.ours / number.paper for number in numbers]
    num_close = sum(abs(each - 1) <= CLOSE for each in share)
    best = max(lines, key=lambda line: line["speedup"])
    worst = min(lines, key=lambda line: line["speedup"])
    at = f"batch {worst['batch']}, system prompt {worst['system']}"
    why = ": there the launch takes longer than reading, so the engine does not share"
    return Verdict(
        weighed(numbers),
        f"the speed-up is {min(share):.0%} to {max(share):.0%} of Eq. 10, and within {CLOSE:.0%} "
        f"of it at {num_close} of {len(lines)} points, most of all with many sequences. The "
        f"largest is {best['speedup']:.1f} (Eq. 10: {best['theory']:.1f}), the smallest "
        f"{worst['speedup']:.2f} ({at})" + why * (worst["speedup"] < 1),
        tuple(numbers),
    )
