"""`mainstem plan`: shows what a batch of prompts shares, what planning saves, and the best order.

Reads what `mainstem batch` reads, with the same rules; a line that could not be answered is
reported and left out of the plan. Works for other engines too: --emit-order writes the same lines
in the planned order (those left out come last).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import numpy as np

from mainstem.batch.bar import PhaseLine, read_so_far
from mainstem.batch.done import Done
from mainstem.batch.driver import KeptLines
from mainstem.batch.files import LINES_PER_LOOK, InputFile, Line, new_pack
from mainstem.batch.ordering import output_limits
from mainstem.batch.windows import Failure, RowReader, RowSource, WindowReader
from mainstem.checkpoints.fetch import fetch_tokenizer
from mainstem.cli.app_flag import add_app_flag, apps_by_name
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import ModelConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.files import replacing
from mainstem.core.plan import Int64s, Plan, Prompts
from mainstem.core.tables import table
from mainstem.core.words import counted
from mainstem.plan.cut import Cut, cut_plan
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import PrefixTree, build_tree
from mainstem.plan.saving import LruCache, Savings, compare
from mainstem.text.parsers.formats import find_formats
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.chat.parsing import CallParser

GROUPS_DRAWN = 12
GROUPS_PLOTTED = 40
BAR_CHARS = 40
FAILURES_SHOWN = 5
SHARES_SHOWN = 16


@dataclass(frozen=True, slots=True)
class ReadPrompts:
    """The rows of a batch file that can be answered, and the time it took to read them."""

    prompts: Prompts
    max_tokens: Int64s
    lines: list[int]  # the line of each prompt
    failures: list[Failure]
    read_s: float
    tokenize_s: float


# --- reading -------------------------------------------------------------------------------------


class WatchedLines:
    """An input that reports how far it was read."""

    def __init__(self, source: RowSource, line: PhaseLine) -> None:
        self._source = source
        self._line = line

    def __iter__(self) -> Iterator[Line]:
        for number, line in enumerate(self._source, 1):
            yield line
            if number % LINES_PER_LOOK == 0:
                self._line.show("reading" + read_so_far(number, self.progress))

    @property
    def progress(self) -> float | None:
        return self._source.progress


def read_prompts(source: RowSource, rows: RowReader) -> ReadPrompts:
    """All prompts of a batch file, as `mainstem batch` reads them."""
    began_s = perf_counter()
    reader = WindowReader(source, rows, Done(), sys.maxsize)
    windows = list(reader)
    prompts = windows[0].prompts if windows else Prompts.from_lists([])
    found = windows[0].rows if windows else []
    return ReadPrompts(
        prompts=prompts,
        max_tokens=output_limits(found),
        lines=[row.line for row in found],
        failures=windows[0].failures if windows else [],
        read_s=perf_counter() - began_s - reader.tokenize_s,
        tokenize_s=reader.tokenize_s,
    )


# --- showing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Tokens of one group, for the picture."""

    num_members: int
    prefix: int
    computed: int  # tokens that members share, counted once
    saved: int  # shared tokens, counted once for each member that need not compute them
    own: int


def biggest_groups(plan: Plan, prompts: Prompts, limit: int) -> list[GroupSizes]:
    """The groups with the most prompt tokens, largest first.

    Tokens shared between groups count as computed in the first of these groups.
    """
    lengths = prompts.num_tokens[plan.members]
    shared = plan.node_tokens[plan.member_nodes]
    group_of = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_starts))
    node_groups = group_of[plan.node_begins[1:]]
    computed = np.bincount(node_groups, plan.node_runs[1:], plan.num_groups)
    totals = np.bincount(group_of, lengths, plan.num_groups)
    owns = np.bincount(group_of, lengths - shared, plan.num_groups)
    found = []
    for index in np.argsort(-totals, kind="stable")[:limit].tolist():
        found.append(
            GroupSizes(
                num_members=int(plan.group_starts[index + 1] - plan.group_starts[index]),
                prefix=int(plan.node_tokens[plan.group_nodes[index]]),
                computed=int(computed[index]),
                saved=int(totals[index] - owns[index] - computed[index]),
                own=int(owns[index]),
            )
        )
    return found


def _bars(groups: list[GroupSizes]) -> str:
    longest = max((g.computed + g.saved + g.own for g in groups), default=0) or 1
    rows = []
    for group in groups:
        ends = np.cumsum([group.computed, group.own, group.saved]) * BAR_CHARS // longest
        sizes = np.diff(ends, prepend=0).tolist()
        bar = "".join(mark * size for mark, size in zip("#=.", sizes, strict=True))
        numbers = (group.num_members, group.prefix, group.computed, group.own, group.saved)
        rows.append([*(f"{number:,}" for number in numbers), bar])
    header = ["members", "prefix", "shared #", "own =", "saved .", "prompt tokens"]
    return table(header, rows)


def _report(read: ReadPrompts, plan: Plan, savings: Savings, plan_s: float, lru: LruCache) -> str:
    ways = {
        "no sharing": 0.0,
        "first level": savings.first_level,
        "first level, enlarged (Algorithm 1)": savings.first_level_enlarged,
        "multi-level": savings.multi_level,
        "upper bound": savings.upper_bound,
        f"LRU cache of {lru.capacity_tokens:,} tokens, input order": savings.lru,
    }
    count, total = len(read.prompts), len(read.prompts.token_ids)
    biggest = biggest_groups(plan, read.prompts, GROUPS_DRAWN)
    return "\n".join(
        [
            f"{counted(count, 'request')}, {counted(total, 'prompt token')}, "
            f"{counted(plan.num_groups, 'group')}",
            f"read {read.read_s:.2f} s, tokenized {read.tokenize_s:.2f} s, planned {plan_s:.3f} s",
            "",
            table(
                ["sharing", "tokens saved"],
                [[way, f"{100 * ratio:.2f} %"] for way, ratio in ways.items()],
            ),
            "",
            "the biggest group" if len(biggest) == 1 else f"the {len(biggest)} biggest groups",
            _bars(biggest),
        ]
    )


def _cut_report(cut: Cut, cut_s: float) -> str:
    """Describe the shares of workers, their balance, and the saving that the cut loses."""
    saving, lost = 100 * cut.saving, 100 * cut.lost_saving
    rows = np.bincount(cut.workers, cut.ends - cut.begins, cut.num_workers).astype(int)
    bundles = np.bincount(cut.workers, minlength=cut.num_workers)
    longest = np.argsort(-cut.share_s, kind="stable").tolist()
    # show the longest shares, and the shortest as the last row
    shown = longest if len(longest) <= SHARES_SHOWN else [*longest[: SHARES_SHOWN - 1], longest[-1]]
    mean_s = float(cut.share_s.mean()) or 1.0
    shares = cut.share_s / mean_s
    return "\n".join(
        [
            f"cut for {cut.num_workers:,} workers in {cut_s:.3f} s: {len(cut.begins):,} bundles",
            f"balance {cut.balance:.3f} (longest share over mean); the costliest row alone takes "
            f"{cut.dearest_s / mean_s:.3f} of a mean share",
            f"saving {saving - lost:.2f} %, {lost:.2f} points lost to the cut",
            "",
            table(
                ["worker", "rows", "bundles", "share over mean"],
                [
                    [str(at), f"{rows[at]:,}", f"{bundles[at]:,}", f"{shares[at]:.3f}"]
                    for at in shown
                ],
            ),
        ]
    )


def _cut_json(cut: Cut, cut_s: float) -> dict[str, object]:
    return {
        "workers": cut.num_workers,
        "bundles": len(cut.begins),
        "balance": round(cut.balance, 6),
        "saving": round(cut.saving - cut.lost_saving, 6),
        "saving_lost": round(cut.lost_saving, 6),
        "share_seconds": [round(seconds, 6) for seconds in cut.share_s.tolist()],
        "dearest_row_seconds": round(cut.dearest_s, 6),
        "cut_seconds": round(cut_s, 6),
    }


def _save_plot(path: Path, plan: Plan, read: ReadPrompts, savings: Savings) -> None:
    """Draw saving ratios and the biggest groups."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'mainstem[plot]'") from None
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    ways = {name.replace("_", " "): 100 * ratio for name, ratio in asdict(savings).items()}
    left.barh(list(ways), list(ways.values()), color="tab:blue")
    left.invert_yaxis()
    left.set(xlim=(0, 100), xlabel="prompt tokens saved, %")
    groups = biggest_groups(plan, read.prompts, GROUPS_PLOTTED)
    places = np.arange(len(groups))
    before = np.zeros(len(groups))
    for name, color in (("computed", "tab:blue"), ("own", "tab:orange"), ("saved", "lightgray")):
        sizes = np.array([getattr(group, name) for group in groups], dtype=np.float64)
        label = {"computed": "shared, computed once", "own": "own", "saved": "shared, saved"}[name]
        right.bar(places, sizes, bottom=before, color=color, label=label)
        before += sizes
    right.set(xlabel="groups, biggest first", ylabel="prompt tokens")
    right.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, no such format
        raise InvalidRequest("--plot", str(error)) from None


def _text(line: Line) -> bytes:
    """The line with one line end; nothing for a line that is blank or too long to be read."""
    text = (line.data or b"").rstrip(b"\r\n")
    return text + b"\n" if text.strip() else b""


def _write_lines(name: str, lines: Iterable[bytes]) -> None:
    """Write lines to a file, which appears only when it is complete, or to standard output if the
    name is "-"."""
    if name == "-":
        sys.stdout.flush()
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        return
    pack = new_pack(name)
    try:
        with replacing(Path(name)) as target:
            if pack is None:
                target.writelines(lines)
            else:
                target.writelines(map(pack.line, lines))
                target.write(pack.end())
    except OSError as error:
        raise InvalidRequest(name, error.strerror or str(error)) from None


# --- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem plan", description=__doc__)
    made.add_argument(
        "file", metavar="FILE", help="JSON lines, .gz and .zst too; -: standard input"
    )
    flag = partial(add_flag, made)
    flag("--model", str, "model whose tokenizer is used for text", "smollm2")
    flag("--chat-template", str, "used for chats instead of the model's own", metavar="FILE.jinja")
    add_app_flag(made)
    flag(
        "--levels", int, "maximum levels of shared prefixes; 1: as in BatchLLM", PlanConfig().levels
    )
    made.add_argument(
        "--group-tokens", type=int, default=PlanConfig().group_tokens, metavar="N",
        help="distinct tokens above which a group is split if possible (%(default)s)",
    )  # fmt: skip
    flag("--lru-tokens", int, "tokens in the LRU cache to compare with", 450_000)
    flag("--page-size", int, "page size of that cache", 16)
    flag("--workers", int, "also cut the plan for N workers: shows balance, and saving lost")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the biggest groups")
    flag("--emit-order", str, "write the lines in planned order; -: standard output", metavar="OUT")
    flag("--emit-plan", str, "write the plan as JSON lines; -: standard output", metavar="OUT")
    made.add_argument("--no-progress", action="store_true", help="show no progress")
    return made


Load = Callable[[str, str | None], Tokenizer]


def load_tokenizer(model: str, template: str | None) -> Tokenizer:
    """The tokenizer of a model folder, hub id or smollm2; `template` as in Tokenizer.load."""
    return fetch_tokenizer(ModelConfig(model, chat_template=template))


def main(args: list[str], load: Load = load_tokenizer) -> int:
    """Exit status 0; errors in the call or the file are raised as MainstemError."""
    flags = parser().parse_args(args)
    config = PlanConfig(levels=flags.levels, group_tokens=flags.group_tokens)
    if flags.lru_tokens < 0 or flags.page_size < 1:
        raise ConfigError("--lru-tokens must not be negative, and --page-size must be positive")
    if flags.workers is not None and flags.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {flags.workers}")
    lru = LruCache(flags.lru_tokens, flags.page_size)
    tokenizer = cache(lambda: load(flags.model, flags.chat_template))
    call_parser = CallParser(find_formats=cache(lambda: find_formats(tokenizer())))
    rows = RowReader(call_parser, tokenizer, apps_by_name(flags.app))
    with (
        closing(InputFile(flags.file)) as source,
        closing(PhaseLine("mainstem plan", not flags.no_progress)) as line,
    ):
        kept = KeptLines(source)
        lines = kept if flags.emit_order is not None else source
        read = read_prompts(WatchedLines(lines, line), rows)
        num_tokens = len(read.prompts.token_ids)
        what = f"{counted(len(read.prompts), 'prompt')} of {counted(num_tokens, 'token')}"
        line.begin(f"planning {what}")
        began_s = perf_counter()
        tree = build_tree(read.prompts)
        plan = plan_tree(tree, config, read.max_tokens)
        plan_s = perf_counter() - began_s
        cut, cut_s = None, 0.0
        if flags.workers is not None:
            line.begin(f"cutting for {flags.workers:,} workers")
            began_s = perf_counter()
            outputs = read.max_tokens.astype(np.float64)
            cut = cut_plan(plan, read.prompts.num_tokens, outputs, flags.workers)
            cut_s = perf_counter() - began_s
        line.begin("comparing with other ways of sharing")
        savings = compare(tree, _multi_level(tree, plan, config), lru)
    _report_failures(read.failures)

    if flags.emit_order is not None:
        ordered = [read.lines[index] for index in plan.members.tolist()]
        numbers = [*ordered, *(failure.line for failure in read.failures)]
        _write_lines(flags.emit_order, (_text(kept.lines[number]) for number in numbers))
    if flags.emit_plan is not None:
        _write_lines(flags.emit_plan, (f"{line}\n".encode() for line in plan.to_lines()))
    if flags.plot is not None:
        _save_plot(flags.plot, plan, read, savings)
    report = _report(read, plan, savings, plan_s, lru)
    if cut is not None:
        report += "\n\n" + _cut_report(cut, cut_s)
    if flags.json:
        report = json.dumps(
            {
                "requests": len(read.prompts),
                "prompt_tokens": len(read.prompts.token_ids),
                "groups": plan.num_groups,
                "failed_lines": len(read.failures),
                "plan_seconds": round(plan_s, 6),
                "read_seconds": round(read.read_s, 6),
                "tokenize_seconds": round(read.tokenize_s, 6),
                "saving": asdict(savings),
            }
            | ({} if cut is None else {"cut": _cut_json(cut, cut_s)})
        )
    takes_stdout = "-" in (flags.emit_order, flags.emit_plan)
    print(report, file=sys.stderr if takes_stdout else sys.stdout)
    return 0


def _report_failures(failures: Sequence[Failure]) -> None:
    """Print the lines that `mainstem batch` would answer with an error row."""
    for failure in failures[:FAILURES_SHOWN]:
        reason = failure.error.message
        print(f"mainstem plan: line {failure.line} cannot be answered: {reason}", file=sys.stderr)
    if len(failures) > FAILURES_SHOWN:
        more = len(failures) - FAILURES_SHOWN
        print(f"mainstem plan: and {more:,} other lines", file=sys.stderr)


def _multi_level(tree: PrefixTree, plan: Plan, config: PlanConfig) -> Plan:
    """The multi-level plan for the report, even if a single level was asked for."""
    return plan if config.levels > 1 else plan_tree(tree, PlanConfig())
