"""Repeats the evaluation of three papers: every figure and table by its name.

    mainstem bench paper --list
    mainstem bench paper relay-fig7            on a GPU, or on this CPU if the item needs no GPU
    mainstem bench paper --quick all           tiny models on this CPU: the same code on small
                                               numbers, nothing drawn or judged
    mainstem bench paper --draw relay-fig7     plot and verdict again, from stored lines
    mainstem bench paper --model FOLDER store-tab1-1.5b
                                               weights from a folder instead of the hub

An item prints its JSON lines, and writes them to --results with a plot. Then it prints the paper's
claim, our result, and what is different here.
"""

import argparse
import json
import sys
import traceback
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError, MainstemError
from mainstem.core.tables import table
from mainstem_bench.paper.item import Item, Line, Outcome, Settings, Verdict, Where
from mainstem_bench.paper.registry import ITEMS, find_items
from mainstem_bench.paper.results import read_lines, write_lines
from mainstem_bench.paper.rules import held
from mainstem_bench.report import fingerprint, load_average
from mainstem_simulate.plots import new_figure

DEFAULT_RESULTS = Path("out/paper")


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench paper", description=__doc__)
    made.add_argument("items", nargs="*", metavar="ITEM", help="relay-fig7, relay, all")
    made.add_argument(
        "--list", action="store_true", help="list the items and the minutes that each takes"
    )
    made.add_argument("--quick", action="store_true", help="tiny models on a CPU")
    flag = partial(add_flag, made)
    flag("--results", Path, "", DEFAULT_RESULTS, metavar="FOLDER")
    made.add_argument(
        "--model",
        metavar="FOLDER",
        help="weights for the items on Qwen2.5-Coder-1.5B (fetched from the hub)",
    )
    made.add_argument("--draw", action="store_true", help="measure nothing: use stored lines")
    made.add_argument("--no-plot", action="store_true", help="lines and verdicts only")
    flag("--limit-s", float, "start no item that would end after S seconds (no limit)", metavar="S")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.list:
        print(listing())
        return 0
    items = find_items(args.items)
    if not items:
        parser().print_usage(sys.stderr)
        return 2
    _check_model(args, items)
    settings = Settings(is_quick=args.quick, model=args.model)
    began_s, status = perf_counter(), 0
    try:
        for item in items:
            expected_s = item.quick_s if args.quick else item.full_s
            if args.limit_s is not None and perf_counter() - began_s + expected_s > args.limit_s:
                print(
                    f"{item.name}: left out because of --limit-s {args.limit_s:g}", file=sys.stderr
                )
                continue
            if len(items) > 1 and not args.draw and not can_run(item, settings):
                print(f"{item.name}: left out, it needs a CUDA device", file=sys.stderr)
                continue
            status |= _do(item, settings, args)
    finally:
        settings.engines.close()
    return status


def _check_model(args: argparse.Namespace, items: list[Item]) -> None:
    """Raise ConfigError if --model would have no effect."""
    if args.model is None:
        return
    if args.quick or args.draw:
        flag = "--quick" if args.quick else "--draw"
        raise ConfigError(f"--model has no effect with {flag}; leave one of them out")
    if without := [item.name for item in items if item.model is None]:
        able = ", ".join(item.name for item in ITEMS.values() if item.model is not None)
        raise ConfigError(f"--model has no effect on {without[0]}; only on {able}")


def listing() -> str:
    """Every item with the minutes that it takes."""
    header = ["item", "what", "needs", "full, min", "quick, min"]
    rows = [
        [
            item.name,
            item.title,
            "-" if item.run is None else "a card" if item.where is Where.GPU else "a CPU",
            "-" if item.run is None else _minutes(item.full_s),
            "-" if item.run is None else _minutes(item.quick_s),
        ]
        for item in ITEMS.values()
    ]
    quick_s = sum(item.quick_s for item in ITEMS.values() if item.run is not None)
    rows.append(["all", "", "", "", _minutes(quick_s)])
    return table(header, rows)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def _do(item: Item, settings: Settings, args: argparse.Namespace) -> int:
    """Measure an item, or read its lines; then draw and judge it. Returns the exit status."""
    try:
        if args.draw:
            lines = read_lines(args.results, item)
        elif item.run is None:
            lines = []
        else:
            lines = _measure(item, settings)
            write_lines(args.results, item, lines)
        if item.plot is not None and lines and not args.no_plot and not args.quick:
            draw(item, lines, args.results / f"{item.name}.svg")
        print(told(item, judged(item, lines)), file=sys.stderr)
    except Exception as error:
        if not isinstance(error, MainstemError):
            traceback.print_exception(error)
        print(f"{item.name}: failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def can_run(item: Item, settings: Settings) -> bool:
    """Whether this machine has what the item needs."""
    return item.where is Where.CPU or settings.is_quick or torch.cuda.is_available()


def _measure(item: Item, settings: Settings) -> list[Line]:
    """Return the item's lines, and print them as they come. Each line says where and how it was
    measured."""
    assert item.run is not None
    if not can_run(item, settings):
        raise ConfigError(f"{item.name} needs a CUDA device; --quick runs it small on a CPU")
    about = {
        "command": item.command
        + " --quick" * settings.is_quick
        + " --model FOLDER" * (settings.model is not None),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_before": load_average(),
        **fingerprint(),
    }
    lines, began_s = [], perf_counter()
    for found in item.run(settings):
        at_s = round(perf_counter() - began_s, 1)
        lines.append({"item": item.name, **found, "at_s": at_s, **about})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def judged(item: Item, lines: list[Line]) -> Verdict:
    """Return the item's verdict, as the rules allow it; OPEN if it was never measured in full."""
    if item.run is None:
        return item.verdict(lines)
    if not lines:
        needs = "it needs a GPU" if item.where is Where.GPU else "a full run is needed"
        return Verdict(Outcome.OPEN, f"{needs}: `{item.command}`")
    if any("--quick" in line["command"] for line in lines):
        return Verdict(Outcome.OPEN, "a quick run checks the code; its numbers mean little")
    return held(item, lines, item.verdict(lines))


def draw(item: Item, lines: list[Line], path: Path) -> None:
    assert item.plot is not None
    figure = new_figure(8, 4)
    item.plot(lines, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def outcome_at(item: Item, verdict: Verdict) -> str:
    """The outcome and the point at which the claim was judged."""
    if verdict.outcome in (Outcome.OPEN, Outcome.CANNOT):
        return str(verdict.outcome.value)
    where = "at the paper's point" if item.is_papers_point else "at another point"
    return f"{verdict.outcome.value} {where} ({item.point})"


def told(item: Item, verdict: Verdict) -> str:
    return "\n".join(
        [
            f"{item.name}: {item.title}",
            f"  the paper: {item.claim}",
            f"  here: {outcome_at(item, verdict)}: {verdict.reason}",
            f"  different: {item.differs}",
        ]
    )
