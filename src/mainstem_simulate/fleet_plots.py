"""Plots hit rate, tail latency and balance against the number of replicas."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mainstem.ray.router import LOAD_BOUND
from mainstem_simulate.plots import new_figure, save_figure
from mainstem_simulate.replicas import FleetReport

COLOURS = {"affine": "#1f5fa8", "random": "#c8702a", "round-robin": "#5b8c3e"}
PANELS: tuple[tuple[str, Callable[[FleetReport], float]], ...] = (
    ("hit rate", lambda report: report.hit_rate),
    ("p99 of the time to the first token, s", lambda report: report.p99_ttft_s),
    ("largest load / mean load", lambda report: report.load_max_over_mean),
)


def plot_fleets(reports: Sequence[FleetReport], path: Path) -> None:
    """Draw a row of plots for each memory size, with a line for each router and shared tier. Dotted
    lines show one common memory, and in the plots of load a line shows the router's bound."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415  # an extra

    bound = f"bound of affine ({LOAD_BOUND:g} times the mean)"
    sizes = list(dict.fromkeys(report.device_tokens for report in reports))
    figure = new_figure(13, 3.6 * len(sizes) + 0.4)
    grid = figure.subplots(len(sizes), len(PANELS), squeeze=False)
    for row, size in zip(grid, sizes, strict=True):
        mine = [report for report in reports if report.device_tokens == size]
        counts = sorted({report.replicas for report in mine})
        for axes, (title, value) in zip(row, PANELS, strict=True):
            for router, shared_gb in dict.fromkeys((r.router, r.shared_gb) for r in mine):
                line = sorted(
                    (report.replicas, value(report))
                    for report in mine
                    if (report.router, report.shared_gb) == (router, shared_gb)
                )
                axes.plot(
                    *zip(*line, strict=True),
                    "s--" if shared_gb else "o-",
                    color=COLOURS[router],
                    markersize=4,
                    label=f"{router}, {shared_gb:g} GB shared" if shared_gb else router,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set_xlabel("replicas")
            axes.set_title(f"{title} ({size / 1e6:g}M tokens each)", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        references = {r.replicas: (r.hit_rate_reference, r.p99_ttft_reference_s) for r in mine}
        for axes, place in ((row[0], 0), (row[1], 1)):
            values = [references[count][place] for count in counts]
            axes.plot(counts, values, ":", color="black", label="one memory for all")
        row[0].set_ylim(bottom=0)
        row[1].set_yscale("log")
        row[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        row[1].yaxis.set_major_formatter("{x:g}")
        row[1].minorticks_off()
        row[2].axhline(LOAD_BOUND, color="black", linewidth=0.8, linestyle="-.", label=bound)
        row[2].set_ylim(bottom=1)
    shown: dict[str, Any] = {}
    for axes in (grid[0][0], grid[0][2]):
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)
