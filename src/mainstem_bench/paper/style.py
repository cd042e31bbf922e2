"""The style of plots: few colours of different darkness, each with its own marker or hatch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib import axes, figure

    Axes = axes.Axes
    Figure = figure.Figure
else:
    Axes = Figure = Any

Look = dict[str, Any]

OURS: Look = {"color": "#0b3c6f", "marker": "o", "linewidth": 2.0}
STORED: Look = {"color": "#2f8fd0", "marker": "s", "linewidth": 1.6}  # ours, with less shared
NOTHING: Look = {"color": "#9db8cc", "marker": "D", "linewidth": 1.6}  # ours, nothing shared
PAPER: Look = {"color": "#b5651d", "marker": "^", "linewidth": 1.4, "linestyle": "-."}
RIVAL: Look = {"color": "#777777", "marker": "x", "linewidth": 1.4, "linestyle": ":"}
LIMIT: Look = {"color": "black", "linewidth": 1.0, "linestyle": "--"}
HATCHES = ("", "//", "..", "xx", "\\\\", "--")


def finish(axes: Axes, title: str, x: str, y: str, *, legend: bool = True) -> None:
    """Add labels, a light grid, and the legend where it covers least; with bars, above them."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if legend:
        from matplotlib.container import BarContainer  # noqa: PLC0415 (an extra)

        place: Look = {}
        if any(isinstance(each, BarContainer) for each in axes.containers):
            columns = 3 if _num_columns(axes) == 1 else 2
            num_rows = -(-len(axes.get_legend_handles_labels()[0]) // columns)
            place = {"loc": "upper left", "ncols": columns, "columnspacing": 0.8}
            if axes.get_yscale() == "linear":
                axes.margins(y=0.12 + 0.08 * num_rows)
            else:
                axes.set_ylim(top=axes.get_ylim()[1] * 2**num_rows)
        axes.legend(fontsize=8, frameon=False, **place)


def _num_columns(axes: Axes) -> int:
    spec = axes.get_subplotspec()
    return 1 if spec is None else int(spec.get_gridspec().ncols)


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, tuple[Sequence[float | None], Mapping[str, Any]]],
    form: str = "{:.2g}",
) -> None:
    """Draw bars side by side, with their values above them; None leaves a bar out."""
    width = 0.84 / len(series)
    for index, (name, (values, look)) in enumerate(series.items()):
        places = [at + (index - (len(series) - 1) / 2) * width for at in range(len(groups))]
        shown = [(at, value) for at, value in zip(places, values, strict=True) if value is not None]
        drawn = axes.bar(
            [at for at, _ in shown],
            [value for _, value in shown],
            0.94 * width,
            label=name,
            color=look["color"],
            hatch=HATCHES[index],
            edgecolor="white",
        )
        axes.bar_label(
            drawn,
            [form.format(value) for _, value in shown],
            fontsize=7,
            padding=1,
            # readable where a line of limits crosses it
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2},
            zorder=5,
        )
    axes.set_xticks(range(len(groups)), groups)


def curve(
    axes: Axes,
    lines: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    label: str | None,
    look: Look,
    factor: float = 1.0,
) -> None:
    """Draw `factor` times one value of the lines over another."""
    ys = [factor * line[y] for line in lines]
    axes.plot([line[x] for line in lines], ys, label=label, **look)


def caps(axes: Axes, values: Sequence[float], label: str | None = None) -> None:
    """Draw the limit of each group of bars."""
    for at, value in enumerate(values):
        named = label if at == 0 else None
        axes.plot([at - 0.45, at + 0.45], [value] * 2, label=named, **LIMIT)


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 (an extra)

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def log2_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with ticks at the measured points."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.minorticks_off()
