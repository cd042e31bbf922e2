"""Decides which shared prefixes become groups and spans: on many levels, or on one as in the paper.

A Draft says which prompts form a group and under which node; `order.py` sorts the groups and makes
the Draft a Plan. Three ways to draft:

    multi_level            every shared node is computed once; what remains to decide is what to
                           schedule as a unit and which nodes to read as spans
    first_level            where the paper starts: a group per child of the root
    first_level_enlarged   BatchLLM Algorithm 1: children of the root, made longer if that pays
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mainstem.core.plan import Bools, Int64s
from mainstem.plan.prefix_tree import PrefixTree


class SpanChoice(Protocol):
    """Chooses which of many shared runs attention reads as spans."""

    def __call__(self, run_tokens: Int64s, num_members: Int64s) -> Bools:
        """Return whether each run is a span. `run_tokens` count from the end of the span above, or
        from the start of the prompt."""


@dataclass(frozen=True, slots=True)
class LongRuns:
    """Chooses, without a cost model, every run of at least `min_tokens`."""

    min_tokens: int = 32  # two pages of 16; shorter runs are read with the members' own tokens

    def __call__(self, run_tokens: Int64s, num_members: Int64s) -> Bools:
        return (run_tokens >= self.min_tokens) & (num_members > 1)


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Groups over a tree, not yet in order.

    Positions are places in `order`. A group's members stay in this order. Several groups share a
    trunk node; everything below any other node lies within one group. `group_trunks` names the
    trunk node directly above a group. The group's prefix is `group_nodes`: that trunk node or a
    child of it.
    """

    order: Int64s  # [prompts] prompt indices
    prompt_nodes: Int64s  # [prompts] the deepest node of each prompt, in this order
    position_groups: Int64s  # [prompts] the group of each prompt, in this order
    group_nodes: Int64s
    group_trunks: Int64s
    node_parents: Int64s
    node_tokens: Int64s
    node_begins: Int64s
    node_ends: Int64s
    node_is_trunk: Bools
    node_is_span: Bools


def multi_level(tree: PrefixTree, worth: SpanChoice, levels: int, group_tokens: int) -> Draft:
    """Groups below the trunk of the tree, with at most `levels` spans on a path.

    Branches of a trunk node that contain no span form one group if there is a span at or above the
    trunk node. Otherwise each prompt is its own group: nothing worth waiting for is shared.
    """
    is_span = choose_spans(tree, worth, levels)
    num_nodes, count = len(is_span), len(tree.order)
    spans_within = _count_within(tree, is_span)
    is_under_span = _is_within(tree, is_span)
    may_split = _is_better_split(tree, spans_within, group_tokens) & (spans_within > is_span)
    is_trunk = ~is_under_span | may_split
    is_trunk &= ~_is_within(tree, ~is_trunk)  # nodes within a group are not trunk

    # label of a position: itself (a group of one), its trunk node, or its branch
    labels = num_nodes + np.arange(count)
    labels = np.where(is_under_span[tree.prompt_nodes], tree.prompt_nodes, labels)
    branches = np.flatnonzero(is_trunk[tree.node_parents] & ~is_trunk)
    branch_of = np.searchsorted(tree.node_begins[branches], np.arange(count), side="right") - 1
    in_branch = ~is_trunk[tree.prompt_nodes]
    has_spans = spans_within[branches] > 0  # always true if there is no span above
    branch_labels = np.where(has_spans, branches, tree.node_parents[branches])
    labels[in_branch] = branch_labels[branch_of[in_branch]]

    found, firsts, position_groups = np.unique(labels, return_index=True, return_inverse=True)
    group_nodes = np.where(found < num_nodes, found, tree.prompt_nodes[firsts])
    group_trunks = np.where(is_trunk[group_nodes], group_nodes, tree.node_parents[group_nodes])
    return Draft(
        order=tree.order,
        prompt_nodes=tree.prompt_nodes,
        position_groups=position_groups,
        group_nodes=group_nodes,
        group_trunks=group_trunks,
        node_parents=tree.node_parents,
        node_tokens=tree.node_tokens,
        node_begins=tree.node_begins,
        node_ends=tree.node_ends,
        node_is_trunk=is_trunk,
        node_is_span=is_span,
    )


def _is_better_split(tree: PrefixTree, spans_within: Int64s, group_tokens: int) -> Bools:
    """Return [nodes] whether to make each branch of a node a group, instead of one group of all
    prompts that share the node. True if the node is too large for one group, or if sharing below it
    saves more than the node itself and is spread over several branches. For example, 26 documents
    that happen to begin with the same words are split; the turns of one conversation are not.
    """
    members = tree.node_ends - tree.node_begins
    saved = np.concatenate([[0], np.cumsum((members - 1) * tree.node_runs)])
    saved_below = saved[tree.subtree_ends] - saved[1:]
    saves_more_below = saved_below > (members - 1) * tree.node_tokens
    parents_of_spans = tree.node_parents[1:][spans_within[1:] > 0]
    num_branches = np.bincount(parents_of_spans, minlength=len(members))
    is_fork = saves_more_below & (num_branches > 1)
    is_split = saves_more_below & (_count_within(tree, is_fork) > 0)
    return np.asarray(is_split | (tree.subtree_tokens > group_tokens))


def _count_within(tree: PrefixTree, is_counted: Bools) -> Int64s:
    """Return [nodes] how many nodes of each subtree, including its root, are counted."""
    before = np.concatenate([[0], np.cumsum(is_counted)])
    return np.asarray(before[tree.subtree_ends] - before[:-1], dtype=np.int64)


def _is_within(tree: PrefixTree, is_top: Bools) -> Bools:
    """[nodes] whether a node or one above it is one of `is_top`."""
    reach = np.maximum.accumulate(np.where(is_top, tree.subtree_ends, 0))
    return np.asarray(reach > np.arange(len(reach)))


def choose_spans(tree: PrefixTree, worth: SpanChoice, levels: int) -> Bools:
    """Return the nodes to read as spans: on each path, the topmost node that `worth` accepts, then
    the next one below it, for up to `levels` levels.

    Runs are counted from the span above, so that a chain of short nodes can still make a long span.
    """
    count = len(tree.node_tokens)
    nodes = np.arange(count)
    subtree_ends = tree.subtree_ends
    members = tree.node_ends - tree.node_begins
    is_span = np.zeros(count, dtype=np.bool_)
    above_tokens = np.zeros(count, dtype=np.int64)  # where the nearest span above ends
    may_be = np.ones(count, dtype=np.bool_)  # whether a node is below a span of the previous level
    may_be[0] = False
    for _ in range(levels):
        is_worthy = np.asarray(worth(tree.node_tokens - above_tokens, members)) & may_be
        reach = np.maximum.accumulate(np.where(is_worthy, subtree_ends, 0))
        is_covered = np.concatenate([[False], reach[:-1] > nodes[1:]])
        chosen = np.flatnonzero(is_worthy & ~is_covered)
        if len(chosen) == 0:
            break
        is_span[chosen] = True
        # the subtrees of the chosen nodes are disjoint ranges of nodes
        sizes = subtree_ends[chosen] - chosen
        below = np.repeat(chosen - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        above_tokens[below] = np.repeat(tree.node_tokens[chosen], sizes)
        may_be[:] = False
        may_be[below] = True
        may_be[chosen] = False
    return is_span


def first_level(tree: PrefixTree) -> Draft:
    """One group per child of the root; deeper sharing is not used."""
    nodes = np.arange(len(tree.node_tokens))
    owners = np.where(tree.node_parents == 0, nodes, tree.node_parents)
    return _single_level(tree, owners)


def first_level_enlarged(tree: PrefixTree) -> Draft:
    """Make one group per first-level prefix that BatchLLM's Algorithm 1 (section 4.2) gives, as
    printed.

    A prefix node u that hangs on c, a child of D, is forked up to D if
    (leaves(u) - 1) * tokens(u) > tokens(c). Here tokens(v) are those that v adds to its parent.
    Sub-problems come first, so levels are processed from the deepest up; a fork depends on nothing
    else at its level.
    """
    levels = tree.node_levels
    by_level = np.argsort(levels, kind="stable")
    level_starts = np.searchsorted(levels[by_level], np.arange(levels.max() + 2))
    leaves = tree.node_ends - tree.node_begins
    parents = tree.node_parents.copy()  # parents after the forks so far
    runs = tree.node_runs
    forked = np.empty(0, dtype=np.int64)  # nodes that hang on this level's nodes by a fork
    for level in range(int(levels.max()) - 1, 0, -1):
        below = by_level[level_starts[level + 1] : level_starts[level + 2]]
        gchildren = np.concatenate([below, forked])
        children = parents[gchildren]
        gain = (leaves[gchildren] - 1) * (tree.node_tokens[gchildren] - tree.node_tokens[children])
        wins = gain > runs[children]
        forked, children = gchildren[wins], children[wins]
        parents[forked] = tree.node_parents[children]
        np.subtract.at(leaves, children, leaves[forked])
    return _single_level(tree, np.where(parents == 0, np.arange(len(parents)), parents))


def _single_level(tree: PrefixTree, owners: Int64s) -> Draft:
    """Group prompts by the owner of their deepest node, on a new tree with one level.

    `owners` points from a node to itself or to a node nearer to its owner.
    """
    while True:
        further = owners[owners]
        if np.array_equal(further, owners):
            break
        owners = further
    count = len(tree.order)
    labels = owners[tree.prompt_nodes]
    labels = np.where(labels == 0, len(owners) + np.arange(count), labels)
    order = np.argsort(labels, kind="stable")  # a forked group may be several ranges of the tree
    found, firsts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    is_alone = found >= len(owners)
    num_nodes = 1 + int(np.count_nonzero(~is_alone))
    group_nodes = np.where(is_alone, 0, 1 + np.arange(len(found)))
    position_groups = np.repeat(np.arange(len(found)), sizes)
    shared = found[~is_alone]
    zero, is_root = np.zeros(1, dtype=np.int64), np.arange(num_nodes) == 0
    return Draft(
        order=tree.order[order],
        prompt_nodes=group_nodes[position_groups],
        position_groups=position_groups,
        group_nodes=group_nodes,
        group_trunks=np.zeros(len(found), dtype=np.int64),
        node_parents=np.zeros(num_nodes, dtype=np.int64),
        node_tokens=np.concatenate([zero, tree.node_tokens[shared]]),
        node_begins=np.concatenate([zero, firsts[~is_alone]]),
        node_ends=np.concatenate([zero + count, (firsts + sizes)[~is_alone]]),
        node_is_trunk=is_root,
        node_is_span=~is_root,
    )
