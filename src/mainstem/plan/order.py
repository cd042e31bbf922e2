"""Makes a Plan: puts groups in order, by the output length that is expected of them.

BatchLLM Eq. 3 and 4: groups with a larger R_group = L_decode / (L_prefix + sum of L_distinct) go
first, so that their long decodes run together with the long prompts that follow. L_decode is the
mean over a group's members, which makes R_group equal to Eq. 4 (up to a constant) when all outputs
are expected to have the same length.

Groups below one trunk node stay together, so that the trunk's pages are held only for one part of
the job. The trunk with all its groups is then ordered among its siblings by its own ratio: the sum
of L_decode of its groups / all tokens of the trunk and its groups.

    root ----+-- group            R 0.30
             +-- trunk node -+--  R 0.21 (all below it together)
             |               +-- group   R 0.40
             |               +-- group   R 0.10
             +-- group            R 0.05
"""

from dataclasses import dataclass

import numpy as np

from mainstem.core.plan import Bools, Float64s, Int32s, Int64s, Plan
from mainstem.plan.groups import Draft
from mainstem.plan.prefix_tree import PrefixTree

LEAST_NEW_TOKENS = 16  # assumed if it is not known what a prompt shares with the one before it


class OutputEstimate:
    """Estimates the tokens of an answer: max_tokens at first, then by the finished answers.

    A template is a number the caller gives to prompts of one kind (see `templates_of`). The mean of
    a template is shrunk towards the mean of the job, and the mean of the job towards max_tokens, as
    if each had been observed `trust` times. So a rare template follows the others. No estimate is
    above max_tokens.
    """

    def __init__(self, trust: float = 4.0) -> None:
        self._trust = trust
        self._counts = np.zeros(1, dtype=np.int64)
        self._sums = np.zeros(1, dtype=np.int64)

    def observe(self, template: int, output_tokens: int) -> None:
        """Learn from one finished answer."""
        if template < 0 or output_tokens < 0:
            raise ValueError(f"template {template} and {output_tokens} tokens must not be negative")
        if template >= len(self._counts):
            room = max(2 * len(self._counts), template + 1) - len(self._counts)
            self._counts = np.pad(self._counts, (0, room))
            self._sums = np.pad(self._sums, (0, room))
        self._counts[template] += 1
        self._sums[template] += output_tokens

    def expect(self, templates: Int64s, max_tokens: Int64s) -> Float64s:
        """[prompts] expected output tokens, for prompts of these templates and limits."""
        total, seen = int(self._sums.sum()), int(self._counts.sum())
        of_job = (self._trust * max_tokens + total) / (self._trust + seen)
        known = np.minimum(templates, len(self._counts) - 1)
        is_known = templates < len(self._counts)
        counts = np.where(is_known, self._counts[known], 0)
        sums = np.where(is_known, self._sums[known], 0)
        expected = (self._trust * of_job + sums) / (self._trust + counts)
        return np.asarray(np.minimum(expected, max_tokens), dtype=np.float64)


def templates_of(tree: PrefixTree) -> Int64s:
    """[prompts] a template number per prompt, by prompt index: its first shared node; 0 if it
    shares nothing."""
    tops = np.flatnonzero((tree.node_parents == 0) & (np.arange(len(tree.node_parents)) > 0))
    above = np.searchsorted(tops, tree.prompt_nodes, side="right")
    templates = np.empty(len(tree.order), dtype=np.int64)
    templates[tree.order] = np.where(tree.prompt_nodes == 0, 0, above)
    return templates


def lay_out(draft: Draft, prompt_tokens: Int64s, expected_tokens: Float64s) -> Plan:
    """Put the draft's groups in order of R_group; equal ratios keep their input order.

    `prompt_tokens` and `expected_tokens` are by prompt index.
    """
    ties = np.full(len(draft.group_nodes), len(draft.order), dtype=np.int64)
    np.minimum.at(ties, draft.position_groups, draft.order)
    is_started = np.zeros(len(ties), dtype=np.bool_)
    return _arrange(draft, prompt_tokens, expected_tokens, ties, is_started)


def reorder(plan: Plan, prompt_tokens: Int64s, expected_tokens: Float64s, num_started: int) -> Plan:
    """Order the same groups by newer expectations; the first `num_started` stay where they are.

    If a group of a trunk node has started, the trunk node stays in front, too.
    """
    draft = _draft_of(plan)
    ties = np.full(plan.num_groups, len(plan.members), dtype=np.int64)
    np.minimum.at(ties, draft.position_groups, plan.members)
    is_started = np.arange(plan.num_groups) < num_started
    ties[:num_started] = np.arange(-num_started, 0)  # before all others, in their present order
    return _arrange(draft, prompt_tokens, expected_tokens, ties, is_started)


def _draft_of(plan: Plan) -> Draft:
    sizes = np.diff(plan.group_starts)
    nodes = plan.group_nodes
    is_whole_node = plan.node_ends[nodes] - plan.node_begins[nodes] == sizes
    trunks = np.where(is_whole_node, plan.node_parents[nodes], nodes)
    is_trunk = np.zeros(len(plan.node_tokens), dtype=np.bool_)
    is_trunk[0] = True
    while len(trunks_above := trunks[~is_trunk[trunks]]):
        is_trunk[trunks_above] = True
        trunks = plan.node_parents[np.unique(trunks_above)]
    return Draft(
        order=plan.members,
        prompt_nodes=plan.member_nodes,
        position_groups=np.repeat(np.arange(plan.num_groups), sizes),
        group_nodes=nodes,
        group_trunks=np.where(is_whole_node, plan.node_parents[nodes], nodes),
        node_parents=plan.node_parents,
        node_tokens=plan.node_tokens,
        node_begins=plan.node_begins,
        node_ends=plan.node_ends,
        node_is_trunk=is_trunk,
        node_is_span=plan.node_is_span,
    )


@dataclass(slots=True)
class _Units:
    """The units to put in order: the groups, then the trunk nodes other than the root."""

    trunks: Int64s  # the trunk node above each unit
    sizes: Int64s  # members
    ratios: Float64s  # R, infinite for groups that have started
    ties: Int64s


def _arrange(
    draft: Draft,
    prompt_tokens: Int64s,
    expected_tokens: Float64s,
    ties: Int64s,
    is_started: Bools,
) -> Plan:
    trunk_nodes = np.flatnonzero(draft.node_is_trunk)
    groups = _group_units(draft, prompt_tokens, expected_tokens, ties, is_started)
    units = _with_trunks(draft, trunk_nodes, groups)
    num_groups = len(draft.group_nodes)

    # the first member of a unit: its trunk's first member, plus the number of members of the
    # siblings before it
    by_rank = np.lexsort((units.ties, -units.ratios, units.trunks))
    sizes, trunks = units.sizes[by_rank], units.trunks[by_rank]
    before = np.cumsum(sizes) - sizes
    is_first = np.diff(trunks, prepend=-1) > 0
    before -= np.repeat(before[is_first], np.diff(np.flatnonzero(is_first), append=len(trunks)))
    offsets = np.empty(len(sizes), dtype=np.int64)
    offsets[by_rank] = before
    trunk_begins = np.zeros(len(draft.node_tokens), dtype=np.int64)
    trunk_begins[trunk_nodes[1:]] = offsets[num_groups:]
    _add_ancestors(trunk_begins, np.where(draft.node_is_trunk, draft.node_parents, 0))
    group_begins = offsets[:num_groups] + trunk_begins[units.trunks[:num_groups]]

    # members keep their order within the group
    group_sizes = units.sizes[:num_groups]
    by_group = np.argsort(draft.position_groups, kind="stable")
    within = np.arange(len(by_group)) - np.repeat(np.cumsum(group_sizes) - group_sizes, group_sizes)
    places = np.empty(len(by_group), dtype=np.int64)
    places[by_group] = np.repeat(group_begins, group_sizes) + within
    return _renumber(draft, places, group_begins, trunk_begins)


def _group_units(
    draft: Draft,
    prompt_tokens: Int64s,
    expected_tokens: Float64s,
    ties: Int64s,
    is_started: Bools,
) -> tuple[_Units, Float64s, Float64s]:
    """Return the groups as units, and for each group its mean output and its tokens below the
    trunk.

    A group without a token to prefill counts as having one.
    """
    count = len(draft.group_nodes)
    own = prompt_tokens[draft.order] - draft.node_tokens[draft.prompt_nodes]
    runs = draft.node_tokens - draft.node_tokens[draft.node_parents]
    inner = np.flatnonzero(~draft.node_is_trunk)
    inner_groups = draft.position_groups[draft.node_begins[inner]]
    tokens = _sum_by(draft.position_groups, own, count)
    tokens += _sum_by(inner_groups, runs[inner], count)
    outputs = _sum_by(draft.position_groups, expected_tokens[draft.order], count)
    sizes = np.bincount(draft.position_groups, minlength=count)
    # one division of whole numbers, so that equal ratios are equal floats and keep input order
    ratios = outputs / (sizes * np.maximum(tokens, 1))
    ratios[is_started] = np.inf
    return _Units(draft.group_trunks, sizes, ratios, ties), outputs / sizes, tokens


def _with_trunks(
    draft: Draft, trunk_nodes: Int64s, groups: tuple[_Units, Float64s, Float64s]
) -> _Units:
    """Return groups and trunk nodes as units; a trunk is the sum of the units below it."""
    units, outputs, tokens = groups
    count = len(draft.node_tokens)
    runs = (draft.node_tokens - draft.node_tokens[draft.node_parents])[trunk_nodes]
    sums = np.zeros((count, 2))
    sums[trunk_nodes, 1] = runs
    np.add.at(sums, units.trunks, np.stack([outputs, tokens], axis=1))
    is_started = np.zeros(count, dtype=np.bool_)
    is_started[units.trunks[np.isinf(units.ratios)]] = True
    ties = np.full(count, len(draft.order), dtype=np.int64)
    np.minimum.at(ties, units.trunks, units.ties)
    for nodes in _levels_upwards(trunk_nodes, draft.node_parents):
        parents = draft.node_parents[nodes]
        np.add.at(sums, parents, sums[nodes])
        np.logical_or.at(is_started, parents, is_started[nodes])
        np.minimum.at(ties, parents, ties[nodes])
    below = trunk_nodes[1:]
    ratios = sums[below, 0] / np.maximum(sums[below, 1], 1)
    ratios[is_started[below]] = np.inf
    return _Units(
        trunks=np.concatenate([units.trunks, draft.node_parents[below]]),
        sizes=np.concatenate([units.sizes, (draft.node_ends - draft.node_begins)[below]]),
        ratios=np.concatenate([units.ratios, ratios]),
        ties=np.concatenate([units.ties, ties[below]]),
    )


def _levels_upwards(nodes: Int64s, parents: Int64s) -> list[Int64s]:
    """Return the nodes other than the root, level by level from the deepest level up.

    There are at most sqrt(2 * tokens) levels, since each needs a longer prompt than the one above.
    """
    levels = np.zeros(len(parents), dtype=np.int64)
    levels[nodes[1:]] = 1
    _add_ancestors(levels, np.where(levels > 0, parents, 0))
    by_level = nodes[np.argsort(levels[nodes], kind="stable")]
    bounds = np.flatnonzero(np.diff(levels[by_level])) + 1
    return np.split(by_level, bounds)[:0:-1]


def _sum_by(groups: Int64s, values: Int64s | Float64s, count: int) -> Float64s:
    sums = np.bincount(groups, weights=values, minlength=count)
    return np.asarray(sums, dtype=np.float64)


def _add_ancestors(values: Int64s, parents: Int64s) -> None:
    """Add to every node's value, in place, the values of all its ancestors. The root's value is
    0."""
    while parents.any():
        values += values[parents]
        parents = parents[parents]


def _renumber(draft: Draft, places: Int64s, group_begins: Int64s, trunk_begins: Int64s) -> Plan:
    """Return the Plan with its members at `places`: groups in order, nodes in preorder again."""
    count = len(places)
    sizes = draft.node_ends - draft.node_begins
    inner = np.flatnonzero(~draft.node_is_trunk)
    begins = trunk_begins.copy()
    begins[inner] = places[draft.node_begins[inner]]
    preorder = np.lexsort((draft.node_tokens, begins))
    rank = np.empty(len(preorder), dtype=np.int64)
    rank[preorder] = np.arange(len(preorder))
    members = np.empty(count, dtype=np.int64)
    members[places] = draft.order
    member_nodes = np.empty(count, dtype=np.int64)
    member_nodes[places] = rank[draft.prompt_nodes]
    in_order = np.argsort(group_begins)
    return Plan(
        members=members,
        member_nodes=member_nodes,
        group_starts=np.append(group_begins[in_order], count),
        group_nodes=rank[draft.group_nodes[in_order]],
        node_parents=rank[draft.node_parents[preorder]],
        node_tokens=draft.node_tokens[preorder],
        node_begins=begins[preorder],
        node_ends=(begins + sizes)[preorder],
        node_is_span=draft.node_is_span[preorder],
    )


def shared_with_next(plan: Plan) -> Int32s:
    """Return [members] how many leading tokens each member shares with the next one; 0 for the
    last."""
    after = np.arange(1, len(plan.members) + 1)
    nodes = plan.member_nodes.copy()
    nodes[-1:] = 0
    low = np.flatnonzero((plan.node_ends[nodes] <= after) & (nodes > 0))
    while len(low):  # up to the deepest node that covers both
        nodes[low] = plan.node_parents[nodes[low]]
        low = low[(plan.node_ends[nodes[low]] <= after[low]) & (nodes[low] > 0)]
    return plan.node_tokens[nodes].astype(np.int32)


def new_tokens(lengths: Int64s, shared_with_next: Int32s | None) -> Int64s:
    """Return [prompts] how many tokens of each prompt are not shared with the one before it;
    LEAST_NEW_TOKENS if that is not known."""
    if shared_with_next is None:
        return np.minimum(lengths, LEAST_NEW_TOKENS)
    new = lengths.copy()
    new[1:] -= shared_with_next[:-1]
    return new
