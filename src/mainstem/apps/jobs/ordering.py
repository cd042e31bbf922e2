"""The order in which a window's rows are run, and which of them need not be run.

Rows that must get the same answer are found first. The others are planned by priority, and handed
out in stretches, so that the order of what is left can follow what was learned of output lengths:

    plan      | group | group | group |   group   | group | ...
    stretches | 4,096 to 8,192 rows   | the rest, ordered anew
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from mainstem.apps.jobs.rows import Row
from mainstem.core.plan import Int32s, Int64s, Plan, Prompts
from mainstem.core.request import SamplingParams
from mainstem.plan.order import OutputEstimate, reorder, templates_of
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import PrefixTree, build_tree

STRETCH_ROWS = 4096  # at least; whole groups, unless the window ends
TEMPLATE_TOKENS = 64  # of a shared prefix that tell one kind of prompt from another
MAX_TEMPLATES = 1 << 16
FEW_ANSWERS = 16
UNLIMITED_TOKENS = 512  # what a row without max_tokens counts as, until answers were seen


# --- rows that get the same answer ---------------------------------------------------------------


def group_equals(rows: Sequence[Row], prompts: Prompts) -> dict[int, list[int]]:
    """Each row to run -> later rows with the same prompt and the same greedy settings."""
    leaders: dict[bytes, int] = {}
    groups: dict[int, list[int]] = {}
    settings: dict[int, bytes] = {}  # rows that say the same share the object
    for index, row in enumerate(rows):
        if not row.sampling.is_greedy:
            groups[index] = []
            continue
        setting = settings.get(id(row.sampling))
        if setting is None:
            setting = settings[id(row.sampling)] = _setting(row.sampling)
        digest = blake2b(prompts[index].tobytes(), digest_size=16, key=setting)
        digest.update(row.salt)
        leader = leaders.setdefault(digest.digest(), index)
        if leader == index:
            groups[index] = []
        else:
            groups[leader].append(index)
    return groups


def _setting(sampling: SamplingParams) -> bytes:
    same = replace(sampling, seed=None)  # greedy answers do not depend on it
    return blake2b(repr(same).encode(), digest_size=32).digest()


# --- output lengths ------------------------------------------------------------------------------


class LengthEstimate:
    """OutputEstimate with templates that keep their number from window to window.

    A template is the first shared node of a prompt, known by its first TEMPLATE_TOKENS tokens.
    """

    def __init__(self) -> None:
        self.outputs = OutputEstimate()
        self.num_seen = 0
        self._numbers: dict[bytes, int] = {}

    def observe(self, template: int, output_tokens: int) -> None:
        """Learn from one finished answer."""
        self.outputs.observe(template, output_tokens)
        self.num_seen += 1

    def expect(self, template: int, max_tokens: int | None) -> int | None:
        """Output tokens of a row that is about to run; None while little was seen."""
        if self.num_seen < FEW_ANSWERS:
            return None
        limit = np.array([max_tokens or UNLIMITED_TOKENS])
        return max(1, round(float(self.outputs.expect(np.array([template]), limit)[0])))

    def templates(self, tree: PrefixTree, prompts: Prompts) -> Int64s:
        """[prompts] the template of every prompt; 0 for those that share nothing."""
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
    shared_with_next: Int32s | None  # leading tokens; None: in no planned order


def in_input_order(row_indices: Sequence[int]) -> Iterator[Stretch]:
    """Rows as they came."""
    rows = np.array(row_indices, dtype=np.int64)
    for begin in range(0, len(rows), STRETCH_ROWS):
        part = rows[begin : begin + STRETCH_ROWS]
        yield Stretch(part, np.zeros(len(part), dtype=np.int64), None)


def in_planned_order(
    row_indices: Sequence[int],
    rows: Sequence[Row],
    prompts: Prompts,
    estimate: LengthEstimate,
    config: PlanConfig,
) -> Iterator[Stretch]:
    """Rows by priority, within a priority as the planner orders them."""
    chosen = np.array(row_indices, dtype=np.int64)
    priorities = np.array([rows[index].priority for index in row_indices], dtype=np.int64)
    for priority in np.unique(priorities).tolist():
        part = chosen[priorities == priority]
        yield from _planned(part, rows, _subset(prompts, part), estimate, config)


def _planned(
    row_indices: Int64s,
    rows: Sequence[Row],
    prompts: Prompts,
    estimate: LengthEstimate,
    config: PlanConfig,
) -> Iterator[Stretch]:
    """Stretches of one plan; `prompts` are those of `row_indices`."""
    tree = build_tree(prompts)
    templates = estimate.templates(tree, prompts)
    limits = _limits([rows[index] for index in row_indices.tolist()])
    plan = plan_tree(tree, config, limits)
    lengths = prompts.num_tokens
    salts = _salt_numbers([rows[index].salt for index in row_indices.tolist()])
    num_learned = num_started = 0
    while num_started < plan.num_groups:
        if estimate.num_seen > num_learned:
            expected = estimate.outputs.expect(templates, limits)
            plan = reorder(plan, lengths, expected, num_started)
            num_learned = estimate.num_seen
        shared = shared_with_next(plan)
        shared[:-1][np.diff(salts[plan.members]) != 0] = 0
        end_group = _stretch_end(plan, shared, num_started)
        begin, end = plan.group_starts[[num_started, end_group]].tolist()
        members = plan.members[begin:end]
        announced = shared[begin:end].copy()
        announced[-1] = 0
        yield Stretch(row_indices[members], templates[members], announced)
        num_started = end_group


def _limits(rows: Sequence[Row]) -> Int64s:
    """[rows] most output tokens of each."""
    limits = [row.sampling.max_tokens or UNLIMITED_TOKENS for row in rows]
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


def shared_with_next(plan: Plan) -> Int32s:
    """[members] how many leading tokens each member shares with the one after it; 0 at the end."""
    after = np.arange(1, len(plan.members) + 1)
    nodes = plan.member_nodes.copy()
    nodes[-1:] = 0
    low = np.flatnonzero((plan.node_ends[nodes] <= after) & (nodes > 0))
    while len(low):  # up to the deepest node that covers both
        nodes[low] = plan.node_parents[nodes[low]]
        low = low[(plan.node_ends[nodes[low]] <= after[low]) & (nodes[low] > 0)]
    return plan.node_tokens[nodes].astype(np.int32)


def _stretch_end(plan: Plan, shared: Int32s, begin_group: int) -> int:
    """Where a stretch ends that begins at a group: where its neighbours share least."""
    begin = int(plan.group_starts[begin_group])
    if len(plan.members) - begin <= 2 * STRETCH_ROWS:
        return plan.num_groups
    low = int(np.searchsorted(plan.group_starts, begin + STRETCH_ROWS))
    high = int(np.searchsorted(plan.group_starts, begin + 2 * STRETCH_ROWS, side="right"))
    if high <= low:
        return low  # one large group
    ends = plan.group_starts[low:high]
    return low + int(np.argmin(shared[ends - 1]))
