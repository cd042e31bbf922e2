"""Finds what became slower: runs a set of other benchmarks and compares with stored lines.

    device    whole jobs, decode steps, attention: times of the card, compared with --lines. More
              than 3 % longer is a failure
    host      requests that arrive one by one, returning sessions: hosts differ by a factor of two,
              so they are compared with another tree (--against FOLDER), in turns, on this machine.
              The best of two runs each counts, and more than 10 % longer is a failure

Each benchmark runs in its own process, with --json. A figure without a stored line is new. With
--record the figures of this run become the stored lines. `--list` prints the commands.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mainstem.cli.parser import Parser
from mainstem.core.errors import ConfigError
from mainstem.core.tables import table
from mainstem_bench.report import line

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "benchmarks/results/guard-h200.jsonl"
DEVICE_BAR, HOST_BAR = 1.03, 1.1
NAMES = ("case", "seqs", "tier", "turn")  # fields that tell the lines of one command apart
ROUNDS = 2  # of each tree, for figures of the host

Figures = dict[str, float]  # by command and line; the smaller, the better


@dataclass(frozen=True, slots=True)
class Guarded:
    """A command, and the fields of its lines that are compared."""

    command: str  # after `mainstem bench`
    fields: tuple[str, ...]

    def figures(self, lines: list[Mapping[str, object]]) -> Figures:
        found: Figures = {}
        for values in lines:
            names = [str(values[name]) for name in NAMES if name in values]
            for field in self.fields:
                if field in values:
                    found[" | ".join((self.command, *names, field))] = float(str(values[field]))
        return found


def _job(flags: str, workload: str = "b2000-sd16") -> Guarded:
    return Guarded(f"offline --workload {workload} {flags}", ("device_ms_per_step",))


DEVICE = (
    _job("--groups 30"),
    _job("--groups 30 --quantize fp8"),
    _job("--groups 30 --model-shape qwen3-30b-a3b"),
    _job("--groups 30 --model-shape gpt-oss-20b --weights mxfp4"),
    _job("--groups 15 --model-shape gemma3-12b --kv-tokens 200000"),
    _job("--groups 15 --model-shape qwen36-35b-a3b --kv-tokens 200000"),
    _job("--groups 8", "b16000-sd4"),
    _job("--requests 500", "noshare-512"),
    Guarded("decode --seqs 1,16,64,256", ("device_ms_per_step",)),
    Guarded(
        "decode --model-shape gpt-oss-20b --weights mxfp4 --seqs 1,16,64,256 --kv-tokens 1000000",
        ("device_ms_per_step",),
    ),
    Guarded("kernel --case B256", ("us",)),
    Guarded("heads --case gqa", ("us",)),
)
HOST = (
    *(
        Guarded(
            f"offline --workload {workload} --requests 320 --arrivals {rate}",
            ("ttft_ms_mean", "ttft_ms_p99", "itl_ms_mean", "itl_ms_p99"),
        )
        for workload, rate in (
            ("b2000-sd16", 20), ("b2000-sd16", 40), ("b16000-sd4", 4), ("noshare-512", 40)
        )
    ),
    Guarded("sessions --part turns --tier host", ("mean_ttft_ms", "p95_ttft_ms")),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench guard", description=__doc__)
    made.add_argument("--only", metavar="TEXT", help="commands that contain this")
    made.add_argument("--lines", type=Path, default=LINES, help="stored lines (%(default)s)")
    made.add_argument("--record", action="store_true", help="store the figures of this run")
    made.add_argument(
        "--against", type=Path, metavar="FOLDER", help="another checkout, for figures of the host"
    )
    made.add_argument("--list", action="store_true", help="print the commands, and run none")
    return made


def main(argv: list[str]) -> int:
    """Return 1 if something became slower or could not be measured."""
    args = parser().parse_args(argv)
    if args.against is not None and not (args.against / "src" / "mainstem").is_dir():
        raise ConfigError(f"--against: {args.against} is no checkout of mainstem")
    device, host = (
        [guarded for guarded in every if args.only is None or args.only in guarded.command]
        for every in (DEVICE, HOST)
    )
    if not device and not host:
        raise ConfigError(f"--only: no command contains {args.only!r}")
    if args.list:
        print(*(f"mainstem bench {guarded.command}" for guarded in (*device, *host)), sep="\n")
        return 0
    stored, slower = read_lines(args.lines), 0
    found: Figures = {}
    for guarded in device:
        figures = run(guarded, ROOT)
        slower += report(figures, stored, DEVICE_BAR)
        found |= figures
    for guarded in host if args.against is not None else ():
        runs = [run(guarded, tree) for _ in range(ROUNDS) for tree in (args.against, ROOT)]
        slower += report(best(runs[1::2]), best(runs[::2]), HOST_BAR)
    if host and args.against is None:
        print(f"{len(host)} commands need --against and were not run")
    if args.record:
        write_lines(args.lines, stored | found)
    return 1 if slower else 0


def run(guarded: Guarded, tree: Path) -> Figures:
    """Run a command with the code of a checkout. Its exit status is ignored: some say with it that
    a limit of their own was missed."""
    paths = (str(tree / "src"), str(tree))
    words = [sys.executable, "-m", "mainstem", "bench", *shlex.split(guarded.command), "--json"]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    figures = guarded.figures(lines)
    if not figures:
        print(f"nothing was measured: mainstem bench {guarded.command}", flush=True)
    return figures or {guarded.command: float("nan")}


def best(runs: list[Figures]) -> Figures:
    return {name: min(run.get(name, float("nan")) for run in runs) for name in runs[0]}


def report(found: Figures, before: Figures, bar: float) -> int:
    """Print each figure beside the earlier one; returns how many are too large."""
    rows, slower = [], 0
    for name, value in found.items():
        ratio = value / before[name] if name in before else None
        is_slower = math.isnan(value) or (ratio is not None and not ratio <= bar)
        slower += is_slower
        shown = "new" if ratio is None else f"{ratio:.3f}"
        rows.append([name, f"{value:.5g}", shown, "SLOWER" if is_slower else ""])
    print(table(["figure", "now", "times", ""], rows), flush=True)
    return slower


def read_lines(path: Path) -> Figures:
    """The stored figures; none if there is no such file."""
    if not path.is_file():
        return {}
    stored = map(json.loads, path.read_text().splitlines())
    return {values["figure"]: float(values["value"]) for values in stored}


def write_lines(path: Path, figures: Figures) -> None:
    """Store figures, except those that could not be measured."""
    lines = [
        line("guard", {"figure": name, "value": value})
        for name, value in figures.items()
        if not math.isnan(value)
    ]
    path.write_text("".join(f"{text}\n" for text in lines))
