"""BatchLLM's Fig. 10: attention over shared prefixes, for decode steps and mixed steps."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mainstem.plan.cost import H200
from mainstem_bench.floors import span_floor_s
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Outcome, Settings, Verdict
from mainstem_bench.paper.relay_attention import cpu_point
from mainstem_bench.paper.results import only
from mainstem_bench.paper.rivals import rivals
from mainstem_bench.paper.style import Figure
from mainstem_bench.workloads import AttentionCase, Run, grouped, own_runs, prefill_runs

if TYPE_CHECKING:  # needs a GPU's Triton
    from mainstem_bench.kernel import Bench

BATCH = 256
# (prefix, own tokens, sequences per prefix) -> the case's name in the measurements of rivals
DECODES = {
    (2048, 256, 256): "gqa32/8 B256 1x2048+256",
    (2000, 250, 16): "gqa32/8 B256 16x2000+250",
    (16000, 300, 16): "gqa32/8 B256 16x16000+300",
    (512, 512, 4): "gqa32/8 B256 64x512+512",
    (256, 2048, 256): None,
}
RIVALS = {
    "flashinfer_decode": "FlashInfer decode",
    "flashinfer_cascade_graph": "FlashInfer cascade",
    "fa3": "FlashAttention-3",
}


def _cases(prefix: int, own: int, degree: int) -> dict[str, tuple[Run, ...]]:
    """Return a decode step with shared and with plain spans, and a mixed step with shared spans."""
    shared = grouped(BATCH, BATCH // degree, prefix, own)
    return {
        "decode, read once": shared,
        "decode, read each": own_runs([prefix + own] * BATCH),
        "mixed, read once": shared + prefill_runs(BATCH),
    }


def run_cases(settings: Settings) -> Iterator[Line]:
    """Check every case, then time it."""
    if settings.is_quick:
        yield {"case": "decode, read once", "degree": 8, **cpu_point(8, 64, 256)}
        return
    from mainstem_bench.kernel import Bench  # noqa: PLC0415  # needs a GPU's Triton

    bench = Bench()
    for (prefix, own, degree), name in DECODES.items():
        theirs = rivals()["kernel"].get(name, {})
        for kind, runs in _cases(prefix, own, degree).items():
            case = AttentionCase(f"{kind} {prefix}/{own}/{degree}", runs)
            floor_s = span_floor_s(
                H200, case.spans(), heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim
            )
            measured = bench.measure(case)
            about: Line = {}
            if kind == "decode, read once":
                about = {**theirs, "apart_us": _apart_us(bench, runs)}
            yield {
                "case": kind, "prefix": prefix, "own": own, "degree": degree,
                "us": round(measured.us, 1), "floor_us": round(1e6 * floor_s, 1),
                "max_error": float(f"{measured.max_error:.2g}"), **about,
            }  # fmt: skip
    bench.free_pages()


def _apart_us(bench: "Bench", runs: tuple[Run, ...]) -> float:
    """Return the time of two separate attentions, over prefixes and over own tokens. Merging what
    they find does not count."""
    parts = [
        tuple(run for run in runs if (len(run.rows) > 1) == is_prefix)
        for is_prefix in (True, False)
    ]
    return round(sum(bench.measure(AttentionCase("a part", part)).us for part in parts), 1)


def plot_cases(lines: Sequence[Line], figure: Figure) -> None:
    decode, mixed = figure.subplots(1, 2, width_ratios=(2, 1))
    once = only(lines, case="decode, read once")
    names = [_name(line) for line in once]
    series: dict[str, tuple[list[float | None], style.Look]] = {
        "here, read once": ([line["us"] for line in once], style.OURS)
    }
    if each := only(lines, case="decode, read each"):
        series["here, read each"] = ([line["us"] for line in each], style.STORED)
    for (key, label), colour in zip(RIVALS.items(), ("#777777", "#a5a5a5", "#cfcfcf"), strict=True):
        series[label] = ([line.get(key) for line in once], {"color": colour})
    style.bars(decode, names, series, "{:.0f}")
    style.caps(decode, [line["floor_us"] for line in once], "limit of the card")
    style.log_y(decode)
    x = "prefix / own tokens / sequences to a prefix"
    style.finish(decode, "256 decodes, 32 heads over 8, one layer, H200", x, "us")
    both = _mixed(lines)
    style.bars(mixed, [_name(line) for line in both],
               {"here": ([line["us"] for line in both], style.OURS)}, "{:.0f}")  # fmt: skip
    style.caps(mixed, [line["floor_us"] for line in both])
    style.finish(mixed, "with 7 prompt chunks of 512", "the same", "us")
    for axes in (decode, mixed):
        axes.tick_params(axis="x", labelsize=7)


def _name(line: Line) -> str:
    degree = "all" if line["degree"] == BATCH else line["degree"]
    return f"{line['prefix']}/\n{line['own']}/{degree}"


def judge_cases(lines: Sequence[Line]) -> Verdict:
    once = only(lines, case="decode, read once")
    over = [line["us"] / line["floor_us"] for line in once]
    ratios = [min(line[name] for name in RIVALS) / line["us"] for line in once if "fa3" in line]
    is_faster, has_mixed = min(ratios) > 1, any("fa3" in line for line in _mixed(lines))
    some = Outcome.PARTLY if is_faster else Outcome.NOT
    return Verdict(
        Outcome.REPRODUCED if is_faster and has_mixed else some,
        f"in {len(ratios)} decode steps it is {min(ratios):.1f} to {max(ratios):.1f} times as fast "
        "as the best of FlashInfer 0.6.12 and FlashAttention-3, and takes "
        f"{min(over):.2f} to {max(over):.2f} times the least time that the card allows"
        + ("" if has_mixed else ". No rival was timed on steps with prompt chunks")
        + _told_apart(lines),
    )


def _told_apart(lines: Sequence[Line]) -> str:
    """How much longer separate attentions take, where this was measured."""
    ratios = [line["apart_us"] / line["us"] for line in lines if "apart_us" in line]
    if not ratios:
        return ""
    times = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
    several = f"{len(ratios)} of the steps take" if len(ratios) > 1 else "one of the steps takes"
    return f". As two attentions, one after another, {several} {times} times as long"


def _mixed(lines: Sequence[Line]) -> list[Line]:
    return only(lines, case="mixed, read once")
