"""Decides the order in which a window's rows run, and which rows can copy another row's answer.

The reading thread works ahead: it first finds rows that must get the same answer, then plans the
others, each priority separately. The engine's thread takes one stretch of the plan at a time, so
that the remaining rows can be reordered by the output lengths seen so far:

    plan      | group | group | group |   group   | group | ...
    stretches | 4,096 to 8,192 rows   | the rest, reordered
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import perf_counter

import numpy as np

from mainstem.batch.rows import Row
from mainstem.batch.windows import Window
from mainstem.core.plan import Int32s, Int64s, Plan, Prompts
from mainstem.core.request import SamplingParams
from mainstem.plan.order import (
    OutputEstimate,
    new_tokens,
    reorder,
    shared_with_next,
    templates_of,
)
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import PrefixTree, build_tree

# a stretch has one to two times this many rows; more if one group is larger, fewer at the end
STRETCH_ROWS = 4096
TEMPLATE_TOKENS = 64  # this many first tokens of a shared prefix identify a kind of prompt
MAX_TEMPLATES = 1 << 16
FEW_ANSWERS = 16  # with fewer answers, output lengths are not estimated
UNLIMITED_TOKENS = 512  # assumed as the limit of a row without max_tokens


# --- rows that get the same answer ---------------------------------------------------------------


def group_equals(rows: Sequence[Row], prompts: Prompts) -> dict[int, list[int]]:
    """Return which rows must run and, for each of them, the later rows that get its answer: those
    with the same prompt, salt, choices and settings that are greedy or have the same seed."""
    leaders: dict[bytes, int] = {}
    groups: dict[int, list[int]] = {}
    settings: dict[int, bytes] = {}  # by id(): rows with equal settings share one SamplingParams
    for index, row in enumerate(rows):
        if not row.call.sampling.is_greedy and row.call.sampling.seed is None:
            groups[index] = []
            continue
        setting = settings.get(id(row.call.sampling))
        if setting is None:
            setting = settings[id(row.call.sampling)] = _setting(row.call.sampling)
        digest = blake2b(prompts[index].tobytes(), digest_size=16, key=setting)
        digest.update(row.call.cache_salt)
        if row.choices:
            digest.update(b"\0choices" + repr(row.choices).encode())
        if row.call.is_parsed:
            digest.update(b"\0parsed")  # the text of a parsed answer may show special tokens
        leader = leaders.setdefault(digest.digest(), index)
        if leader == index:
            groups[index] = []
        else:
            groups[leader].append(index)
    return groups


def _setting(sampling: SamplingParams) -> bytes:
    # greedy answers do not depend on the seed
    same = replace(sampling, seed=None) if sampling.is_greedy else sampling
    return blake2b(repr(same).encode(), digest_size=32).digest()


# --- output lengths ------------------------------------------------------------------------------


def certain_output(sampling: SamplingParams) -> int | None:
    """The exact number of output tokens of a request with one answer; None if it is not certain."""
    may_stop = sampling.stop_strings or sampling.stop_token_ids or sampling.grammar is not None
    if sampling.n > 1 or may_stop or not sampling.ignore_eos:
        return None
    return sampling.max_tokens


class LengthEstimate:
    """Output lengths by template, learned from answers; owned by the engine's thread."""

    def __init__(self) -> None:
        self.outputs = OutputEstimate()
        self.num_seen = 0

    def observe(self, template: int, output_tokens: int) -> None:
        """Learn from one finished answer."""
        self.outputs.observe(template, output_tokens)
        self.num_seen += 1

    def expect(self, template: int, max_tokens: int | None) -> int | None:
        """Expected output tokens of a row; None while too few answers were seen."""
        if self.num_seen < FEW_ANSWERS:
            return None
        limit = np.array([max_tokens or UNLIMITED_TOKENS])
        return max(1, round(float(self.outputs.expect(np.array([template]), limit)[0])))


class Templates:
    """Gives each kind of prompt a number, which is the same in every window.

    A template is the first shared node of a prompt, identified by its first TEMPLATE_TOKENS tokens.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def of(self, tree: PrefixTree, prompts: Prompts) -> Int64s:
        """[prompts] the template of each prompt; 0 if it shares nothing, or after MAX_TEMPLATES."""
        tops = np.flatnonzero((tree.node_parents == 0) & (np.arange(len(tree.node_parents)) > 0))
        numbers = np.zeros(len(tops) + 1, dtype=np.int64)
        for place, node in enumerate(tops.tolist(), start=1):
            first = int(tree.order[tree.node_begins[node]])
            tokens = min(int(tree.node_tokens[node]), TEMPLATE_TOKENS)
            name = blake2b(prompts[first][:tokens].tobytes(), digest_size=16).digest()
            if name not in self._numbers and len(self._numbers) < MAX_TEMPLATES:
                self._numbers[name] = len(self._numbers) + 1
            numbers[place] = self._numbers.get(name, 0)
        return numbers[templates_of(tree)]


# --- the order -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows to run one after the other."""

    row_indices: Int64s
    templates: Int64s
    shared_with_next: Int32s | None  # leading tokens in common with the next row; None: no plan
    new_tokens: Int64s  # prompt tokens expected to be computed, because no cached page has them


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRows:
    """The plan for some rows of a window. Entry i of each array is about row `row_indices[i]`."""

    row_indices: Int64s
    lengths: Int64s
    limits: Int64s  # most output tokens
    templates: Int64s
    salts: Int64s  # equal numbers for equal salts
    plan: Plan
    reorders: bool = True  # whether lengths of finished answers may change the order

    def stretches(self, estimate: LengthEstimate) -> Iterator[Stretch]:
        """Yield stretches in the plan's order. The remaining rows are reordered whenever the number
        of finished answers has doubled."""
        plan, shared = self.plan, self._shared(self.plan)
        num_learned, num_started = FEW_ANSWERS, 0
        while num_started < plan.num_groups:
            if self.reorders and estimate.num_seen >= num_learned:
                expected = estimate.outputs.expect(self.templates, self.limits)
                plan = reorder(plan, self.lengths, expected, num_started)
                shared = self._shared(plan)
                num_learned = 2 * estimate.num_seen
            end_group = _stretch_end(plan, shared, num_started)
            begin, end = plan.group_starts[[num_started, end_group]].tolist()
            members = plan.members[begin:end]
            announced = shared[begin:end].copy()
            announced[-1] = 0
            to_compute = new_tokens(self.lengths[members], announced)
            yield Stretch(self.row_indices[members], self.templates[members], announced, to_compute)
            num_started = end_group

    def _shared(self, plan: Plan) -> Int32s:
        shared = shared_with_next(plan)
        shared[:-1][np.diff(self.salts[plan.members]) != 0] = 0
        return shared


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWindow:
    """A window, which of its rows are run, and in which order."""

    window: Window
    copies: dict[int, list[int]]  # row that is run -> rows that get the same answer
    parts: list[PlannedRows] | None  # by priority; None: in input order
    plan_s: float

    def stretches(self, estimate: LengthEstimate) -> Iterator[Stretch]:
        """Yield all rows that are run, in stretches."""
        if self.parts is None:
            yield from _in_input_order(list(self.copies), self.window.prompts)
            return
        for part in self.parts:
            yield from part.stretches(estimate)


class WindowPlanner:
    """Makes PlannedWindows; owned by the reading thread."""

    def __init__(self, config: PlanConfig | None, has_dedupe: bool) -> None:
        """`config` None: rows keep their order."""
        self._config = config
        self._has_dedupe = has_dedupe
        self._templates = Templates()
        self.num_planning = 0  # rows being planned now; read by other threads

    def plan(self, window: Window) -> PlannedWindow:
        """Find equal rows and put the others in order."""
        rows = window.rows
        self.num_planning = len(rows)
        began_s = perf_counter()
        if self._has_dedupe:
            copies = group_equals(rows, window.prompts)
        else:
            copies = {index: [] for index in range(len(rows))}
        parts: list[PlannedRows] | None = None
        if self._config is not None:
            chosen = np.array(list(copies), dtype=np.int64)
            priorities = np.array([rows[index].call.priority for index in copies], dtype=np.int64)
            parts = [
                self._plan_rows(window, chosen[priorities == priority], self._config)
                for priority in np.unique(priorities)
            ]
        self.num_planning = 0
        return PlannedWindow(window, copies, parts, perf_counter() - began_s)

    def _plan_rows(self, window: Window, indices: Int64s, config: PlanConfig) -> PlannedRows:
        rows = [window.rows[index] for index in indices.tolist()]
        prompts = _subset(window.prompts, indices)
        tree = build_tree(prompts)
        limits = output_limits(rows)
        return PlannedRows(
            row_indices=indices,
            lengths=prompts.num_tokens,
            limits=limits,
            templates=self._templates.of(tree, prompts),
            salts=_salt_numbers([row.call.cache_salt for row in rows]),
            plan=plan_tree(tree, config, limits),
            reorders=config.reorders,
        )


def _in_input_order(row_indices: Sequence[int], prompts: Prompts) -> Iterator[Stretch]:
    rows = np.array(row_indices, dtype=np.int64)
    for begin in range(0, len(rows), STRETCH_ROWS):
        part = rows[begin : begin + STRETCH_ROWS]
        to_compute = new_tokens(prompts.num_tokens[part], None)
        yield Stretch(part, np.zeros(len(part), dtype=np.int64), None, to_compute)


def output_limits(rows: Sequence[Row]) -> Int64s:
    """[rows] most output tokens of each."""
    limits = [row.call.sampling.max_tokens or UNLIMITED_TOKENS for row in rows]
    return np.array(limits, dtype=np.int64)


def _salt_numbers(salts: Sequence[bytes]) -> Int64s:
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(salt, len(numbers)) for salt in salts], dtype=np.int64)


def _subset(prompts: Prompts, indices: Int64s) -> Prompts:
    if len(indices) == len(prompts):
        return prompts
    starts = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(prompts.num_tokens[indices], out=starts[1:])
    return Prompts(np.concatenate([prompts[index] for index in indices.tolist()]), starts)


def _stretch_end(plan: Plan, shared: Int32s, begin_group: int) -> int:
    """Return the first group after a stretch: of the groups at which the stretch could end, the one
    that shares least with the group before it."""
    begin = int(plan.group_starts[begin_group])
    if len(plan.members) - begin <= 2 * STRETCH_ROWS:
        return plan.num_groups
    low = int(np.searchsorted(plan.group_starts, begin + STRETCH_ROWS))
    high = int(np.searchsorted(plan.group_starts, begin + 2 * STRETCH_ROWS, side="right"))
    if high <= low:
        return low  # one large group
    ends = plan.group_starts[low:high]
    return low + int(np.argmin(shared[ends - 1]))
