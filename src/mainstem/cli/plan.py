"""`mainstem plan`: what a batch of prompts shares, what planning saves, and the best order.

Reads JSON lines: OpenAI batch rows (/v1/chat/completions, /v1/completions), {"prompt": text or
token ids} or {"messages": [...]}. Works for other engines too: --emit-order writes the same lines
in the planned order.
"""

import argparse
import gzip
import io
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol, TextIO

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.plan import Int64s, Plan, Prompts
from mainstem.core.tables import table
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import PrefixTree, build_tree
from mainstem.plan.saving import LruCache, Savings, compare
from mainstem.text import tokenizer as text

TEXTS_AT_ONCE = 1024  # tokenised together
DEFAULT_MAX_TOKENS = 128  # where a row names none; only ratios between rows matter
GROUPS_DRAWN = 12
GROUPS_PLOTTED = 40
BAR_CHARS = 40
MAX_TOKEN_ID = 2**31 - 1

Json = Mapping[str, object]


class Tokenizer(Protocol):
    """What reading prompts needs of a tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each prompt."""
        ...

    def encode_chat(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> list[int]:
        """Ids of a conversation, up to where the answer begins."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line of a batch file; exactly one of the three prompts is there."""

    line: int
    max_tokens: int
    token_ids: "array[int] | None" = None
    text: str | None = None
    messages: Sequence[Json] | None = None
    tools: Sequence[Json] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch file as arrays, and what reading it took."""

    prompts: Prompts
    max_tokens: Int64s
    read_s: float
    tokenize_s: float


# --- reading -------------------------------------------------------------------------------------


def parse_row(line: str, number: int) -> PromptRow:
    """One JSON line; raises InvalidRequest, naming the line, for anything that is not a prompt."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _bad(number, f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _bad(number, "must be a JSON object")
    body, wanted = _body(row, number)
    max_tokens = _max_tokens(body, number)
    if wanted == "messages":
        tools = body.get("tools")
        return PromptRow(
            number,
            max_tokens,
            messages=_objects(body["messages"], "messages", number),
            tools=_objects(tools, "tools", number) if tools is not None else None,
        )
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return PromptRow(number, max_tokens, text=prompt)
    return PromptRow(number, max_tokens, token_ids=_token_ids(prompt, number))


def _bad(line: int, reason: str) -> InvalidRequest:
    return InvalidRequest(f"line {line}", reason)


def _body(row: Json, number: int) -> tuple[Json, str]:
    """The object that holds the prompt, and its field: messages or prompt."""
    if "body" not in row:
        for name in ("messages", "prompt"):
            if name in row:
                return row, name
        raise _bad(number, 'has neither "prompt" nor "messages" nor "body"')
    body, url = row["body"], row.get("url")
    names = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
    if not isinstance(url, str) or url not in names:
        raise _bad(number, f"url must be one of {', '.join(names)}, got {url!r}")
    if not isinstance(body, dict) or names[url] not in body:
        raise _bad(number, f'body must be an object with "{names[url]}"')
    return body, names[url]


def _max_tokens(body: Json, number: int) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _bad(number, f"{name} must be a positive whole number, got {value!r}")
        return value
    return DEFAULT_MAX_TOKENS


def _objects(value: object, name: str, number: int) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _bad(number, f"{name} must be a list of objects")
    if name == "messages" and not value:
        raise _bad(number, "messages must not be empty")
    return value


def _token_ids(prompt: object, number: int) -> "array[int]":
    reason = f"prompt must be text or a list of token ids from 0 to {MAX_TOKEN_ID}"
    if not isinstance(prompt, list):
        raise _bad(number, reason)
    try:
        ids = array("i", prompt)
    except (TypeError, OverflowError):
        raise _bad(number, reason) from None
    if ids and min(ids) < 0:
        raise _bad(number, reason)
    return ids


def read_batch(lines: Iterable[str], load_tokenizer: Callable[[], Tokenizer]) -> Batch:
    """All prompts of a batch file; the tokenizer is loaded at the first line that needs it."""
    reader = _Reader(load_tokenizer)
    began_s = perf_counter()
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            reader.add(parse_row(line, number))
    reader.flush()
    starts = np.concatenate([[0], np.cumsum(reader.sizes, dtype=np.int64)]).astype(np.int64)
    prompts = Prompts(np.frombuffer(reader.token_ids, dtype=np.int32), starts)
    max_tokens = np.array(reader.max_tokens, dtype=np.int64)
    read_s = perf_counter() - began_s - reader.tokenize_s
    return Batch(prompts, max_tokens, read_s, reader.tokenize_s)


class _Reader:
    """Gathers rows in order; texts wait until there are enough to be tokenised together."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._load = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._waiting: list[PromptRow] = []
        self.token_ids = array("i")
        self.sizes: list[int] = []
        self.max_tokens: list[int] = []
        self.tokenize_s = 0.0

    def add(self, row: PromptRow) -> None:
        self._waiting.append(row)
        if len(self._waiting) == TEXTS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        began_s = perf_counter()
        rows, self._waiting = self._waiting, []
        if self._tokenizer is None and any(row.token_ids is None for row in rows):
            self._tokenizer = self._load()
        texts = iter(self._encode([row for row in rows if row.text is not None]))
        for row in rows:
            if row.token_ids is not None:
                ids = row.token_ids
            else:
                ids = array("i", next(texts) if row.text is not None else self._encode_chat(row))
            self.token_ids += ids
            self.sizes.append(len(ids))
            self.max_tokens.append(row.max_tokens)
        self.tokenize_s += perf_counter() - began_s

    def _encode(self, rows: list[PromptRow]) -> list[list[int]]:
        if self._tokenizer is None or not rows:
            return []
        try:
            return self._tokenizer.encode_batch([row.text or "" for row in rows])
        except InvalidRequest as error:
            if len(rows) == 1:
                raise _bad(rows[0].line, str(error)) from None
            return [ids for row in rows for ids in self._encode([row])]

    def _encode_chat(self, row: PromptRow) -> list[int]:
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode_chat(row.messages or [], row.tools)
        except InvalidRequest as error:
            raise _bad(row.line, str(error)) from None


@contextmanager
def _opened(name: str) -> Iterator[TextIO]:
    """A file of lines, gzip by its name, or standard input for -."""
    opener = gzip.open if name.endswith(".gz") else open
    try:
        if name == "-":
            yield io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="\n")
            return
        with opener(name, "rt", encoding="utf-8", newline="\n") as lines:
            yield lines
    except OSError as error:  # not there, or not gzip
        raise InvalidRequest(name, error.strerror or str(error)) from None
    except (UnicodeDecodeError, EOFError) as error:
        raise InvalidRequest(name, str(error)) from None


# --- showing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Tokens of one group, as the pictures show them."""

    num_members: int
    prefix: int
    computed: int  # what the members share, once
    saved: int  # what they share, as often as it need not be computed again
    own: int


def biggest_groups(plan: Plan, prompts: Prompts, limit: int) -> list[GroupSizes]:
    """The groups with the most prompt tokens, largest first.

    What groups share with each other counts as computed in the first of them.
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


def _report(batch: Batch, plan: Plan, savings: Savings, plan_s: float, lru: LruCache) -> str:
    ways = {
        "no sharing": 0.0,
        "first level": savings.first_level,
        "first level, enlarged (Algorithm 1)": savings.first_level_enlarged,
        "multi-level": savings.multi_level,
        "upper bound": savings.upper_bound,
        f"LRU cache of {lru.capacity_tokens:,} tokens, input order": savings.lru,
    }
    count, total = len(batch.prompts), len(batch.prompts.token_ids)
    biggest = biggest_groups(plan, batch.prompts, GROUPS_DRAWN)
    return "\n".join(
        [
            f"{count:,} requests, {total:,} prompt tokens, {plan.num_groups:,} groups",
            f"read {batch.read_s:.2f} s, tokenized {batch.tokenize_s:.2f} s, "
            f"planned {plan_s:.3f} s",
            "",
            table(
                ["sharing", "tokens saved"],
                [[way, f"{100 * ratio:.2f} %"] for way, ratio in ways.items()],
            ),
            "",
            f"the {len(biggest)} biggest groups",
            _bars(biggest),
        ]
    )


def _save_plot(path: Path, plan: Plan, batch: Batch, savings: Savings) -> None:
    """Saving ratios and the biggest groups as a picture."""
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
    groups = biggest_groups(plan, batch.prompts, GROUPS_PLOTTED)
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


def _write_lines(name: str, lines: Iterable[str]) -> None:
    """Write lines to a file, which appears when it is complete, or to standard output for -."""
    if name == "-":
        sys.stdout.writelines(lines)
        return
    part = f"{name}.part"
    try:
        if name.endswith(".gz"):
            with gzip.open(part, "wt", encoding="utf-8", newline="\n") as packed:
                packed.writelines(lines)
        else:
            with open(part, "w", encoding="utf-8", newline="\n") as plain:
                plain.writelines(lines)
        os.replace(part, name)
    except OSError as error:
        raise InvalidRequest(name, error.strerror or str(error)) from None


# --- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "mainstem plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("file", metavar="FILE", help="JSON lines, also .gz; - reads standard input")
    made.add_argument("--model", default="smollm2", help="whose tokenizer reads text (smollm2)")
    made.add_argument(
        "--chat-template",
        metavar="FILE.jinja",
        help="what chats go through instead of the model's own",
    )
    made.add_argument(
        "--levels", type=int, default=PlanConfig().levels, metavar="N",
        help="spans on one path; 1: the paper's single level (%(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--group-tokens", type=int, default=PlanConfig().group_tokens, metavar="N",
        help="size above which a group is split where it can be (%(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--lru-tokens", type=int, default=450_000, metavar="N",
        help="size of the LRU cache to compare with (%(default)s)",
    )  # fmt: skip
    made.add_argument("--page-size", type=int, default=16, metavar="N", help="of that cache (16)")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the biggest groups")
    made.add_argument("--emit-order", metavar="OUT", help="write the lines in planned order, - too")
    made.add_argument("--emit-plan", metavar="OUT", help="write the plan as JSON lines, - too")
    return made


Load = Callable[[str, str | None], Tokenizer]


def load_tokenizer(model: str, template: str | None) -> Tokenizer:
    """The tokenizer of a model folder, hub id or smollm2; `template` as in Tokenizer.load."""
    return text.Tokenizer.load(resolve_model(model), template)


def main(args: list[str], load: Load = load_tokenizer) -> int:
    """Exit status 0; what is wrong with the call or the file is raised as a MainstemError."""
    flags = parser().parse_args(args)
    config = PlanConfig(levels=flags.levels, group_tokens=flags.group_tokens)
    if flags.lru_tokens < 0 or flags.page_size < 1:
        raise ConfigError("--lru-tokens must not be negative, and --page-size must be positive")
    lru = LruCache(flags.lru_tokens, flags.page_size)
    kept: list[str] = []
    with _opened(flags.file) as lines:
        wanted = _keep(lines, kept) if flags.emit_order is not None else lines
        batch = read_batch(wanted, lambda: load(flags.model, flags.chat_template))

    began_s = perf_counter()
    tree = build_tree(batch.prompts)
    plan = plan_tree(tree, config, batch.max_tokens)
    plan_s = perf_counter() - began_s
    savings = compare(tree, _multi_level(tree, plan, config), lru)

    if flags.emit_order is not None:
        ordered = (_ended(kept[index]) for index in plan.members.tolist())
        _write_lines(flags.emit_order, ordered)
    if flags.emit_plan is not None:
        _write_lines(flags.emit_plan, (_ended(line) for line in plan.to_lines()))
    if flags.plot is not None:
        _save_plot(flags.plot, plan, batch, savings)
    report = _report(batch, plan, savings, plan_s, lru)
    if flags.json:
        report = json.dumps(
            {
                "requests": len(batch.prompts),
                "prompt_tokens": len(batch.prompts.token_ids),
                "groups": plan.num_groups,
                "plan_seconds": round(plan_s, 6),
                "read_seconds": round(batch.read_s, 6),
                "tokenize_seconds": round(batch.tokenize_s, 6),
                "saving": asdict(savings),
            }
        )
    takes_stdout = "-" in (flags.emit_order, flags.emit_plan)
    print(report, file=sys.stderr if takes_stdout else sys.stdout)
    return 0


def _multi_level(tree: PrefixTree, plan: Plan, config: PlanConfig) -> Plan:
    """The multi-level plan to report on, also where a single level was asked for."""
    return plan if config.levels > 1 else plan_tree(tree, PlanConfig())


def _keep(lines: Iterable[str], kept: list[str]) -> Iterator[str]:
    """The same lines, those that hold a prompt also put aside."""
    for line in lines:
        if not line.isspace():
            kept.append(line)
        yield line


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n"
