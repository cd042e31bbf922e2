"""Plots of simulations, like AttentionStore's figures 21 and 23."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem_simulate.simulator import SimulationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"lookahead": "#1f5fa8", "lru": "#c8702a", "fifo": "#5b8c3e", "belady": "#777777"}


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """The result for one capacity."""

    capacity_gb: float
    share: float  # of CCpUT
    hit_rate: float
    prompt_tokens_per_s: float  # of device time


def plot_reports(reports: Sequence[SimulationReport], path: Path) -> None:
    """Plot Fig. 21, 22 and 24: the hit rate by policy and storage, split into device, DRAM and
    disk, and the device time."""
    figure = new_figure(11, 4)
    hits, times = figure.subplots(1, 2)
    sizes = list(dict.fromkeys(map(_sizes, reports)))
    policies = list(dict.fromkeys(report.policy for report in reports))
    width = 0.8 / len(policies)
    for report in reports:
        place = sizes.index(_sizes(report))
        x = place + (policies.index(report.policy) - (len(policies) - 1) / 2) * width
        colour = COLOURS[report.policy]
        is_first = place == 0
        above = report.hit_rate_device
        hits.bar(
            x, above, 0.92 * width, color=colour, alpha=0.7, hatch="..", edgecolor="white",
        )  # fmt: skip
        hits.bar(
            x, report.hit_rate_dram, 0.92 * width, bottom=above, color=colour,
            label=f"{report.policy}, from DRAM" if is_first else None,
        )  # fmt: skip
        hits.bar(
            x, report.hit_rate_disk, 0.92 * width, bottom=above + report.hit_rate_dram,
            color=colour, alpha=0.4, hatch="//", edgecolor="white",
        )  # fmt: skip
        times.bar(
            x, report.device_s / 3600, 0.92 * width, color=colour,
            label=report.policy if is_first else None,
        )  # fmt: skip
    unbounded = max(report.hit_rate_unbounded for report in reports)
    hits.axhline(unbounded, color="black", linewidth=0.8, linestyle=":")
    hits.text(-0.45, unbounded, "unbounded", va="bottom", fontsize=8)
    hits.set_ylim(0, max(unbounded * 1.35, 0.01))
    has_device = any(report.device_gb for report in reports)
    names = [" / ".join(f"{size:g}" for size in row[0 if has_device else 1 :]) for row in sizes]
    dotted = ", dotted: on the device" if has_device else ""
    for axes, title in (
        (hits, f"hit rate (hatched: from disk{dotted})"),
        (times, "device time, hours"),
    ):
        axes.set_xticks(range(len(sizes)), names)
        axes.set_xlabel("device / host / disk, GB" if has_device else "host / disk, GB")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, ncols=2, loc="upper left", frameon=False)
    times.set_ylim(0, times.get_ylim()[1] * 1.25)
    save_figure(figure, path)


def _sizes(report: SimulationReport) -> tuple[float, float, float]:
    return report.device_gb, report.host_gb, report.disk_gb


def plot_capacity(
    points: Sequence[CapacityPoint], unbounded: float, found_gb: float | None, path: Path
) -> None:
    """Plot Fig. 23: hit rate and throughput against capacity, in GB and as a share of CCpUT.

    `found_gb` is the capacity that reaches the target.
    """
    figure = new_figure(11, 4.2)
    hits, speed = figure.subplots(1, 2)
    sizes = [point.capacity_gb for point in points]
    hits.plot(sizes, [point.hit_rate for point in points], "o-", color=COLOURS["lookahead"])
    hits.axhline(unbounded, color="black", linewidth=0.8, linestyle=":")
    hits.text(min(sizes), unbounded, "unbounded", va="bottom", fontsize=8)
    hits.set_ylim(0, max(unbounded * 1.12, 0.01))
    per_s = [point.prompt_tokens_per_s / 1000 for point in points]
    speed.plot(sizes, per_s, "o-", color=COLOURS["lookahead"])
    speed.set_ylim(0, max(per_s) * 1.12)
    titles = ("hit rate", "prompt tokens a second of device time, thousands")
    for axes, title in zip((hits, speed), titles, strict=True):
        axes.set_xlabel("capacity, GB")
        axes.set_title(title)
        axes.spines[["right"]].set_visible(False)
        _log_ticks(axes, points)
        if found_gb is not None:
            axes.axvline(found_gb, color=COLOURS["lru"], linewidth=0.8, linestyle="--")
            axes.text(found_gb, 0, f" target: {found_gb:,.4g} GB", fontsize=8, va="bottom")
    save_figure(figure, path)


def _log_ticks(axes: "Axes", points: Sequence[CapacityPoint]) -> None:
    """Set the ticks: GB on the lower axis, shares of CCpUT on the upper one."""
    sizes = [point.capacity_gb for point in points]
    axes.set_xscale("log")
    names = [f"{size:,.0f}" if size >= 100 else f"{size:.3g}" for size in sizes]
    axes.set_xticks(sizes, names, fontsize=8)
    axes.minorticks_off()
    above = axes.secondary_xaxis("top")
    above.set_xticks(sizes, [f"{point.share:g}" for point in points], fontsize=8)
    above.minorticks_off()
    above.set_xlabel("capacity / CCpUT", fontsize=8)


def require_matplotlib() -> None:
    """Raise if matplotlib is missing; called before the simulation."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mainstem[plot]'")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; sizes in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure in the format of the file's suffix; raises InvalidRequest."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidRequest("--plot", str(error)) from None
