"""Drafts, plans and Algorithm 1, compared with slow versions written from the paper."""

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.errors import ConfigError
from mainstem.core.plan import Prompts
from mainstem.plan.groups import Draft, LongRuns, choose_spans, first_level, first_level_enlarged
from mainstem.plan.planner import PlanConfig, plan_prompts
from mainstem.plan.prefix_tree import PrefixTree, build_tree
from mainstem.plan.saving import processed_tokens
from tests.plan.reading import are_equal, group_of, path_to, read_plan
from tests.plan.strategies import PromptLists, prompt_lists

configs = st.builds(
    PlanConfig,
    levels=st.integers(1, 4),
    group_tokens=st.integers(1, 30),
    worth_span=st.builds(LongRuns, st.integers(1, 4)),
)


def different_prefixes(prompts: PromptLists) -> int:
    return len({tuple(p[: end + 1]) for p in prompts for end in range(len(p))})


@given(prompt_lists(), configs)
@settings(max_examples=120, deadline=None)
def test_every_plan_passes_its_own_check(prompts: PromptLists, config: PlanConfig) -> None:
    batch = Prompts.from_lists(prompts)
    plan_prompts(batch, config).check(batch)


@given(prompt_lists(), configs)
@settings(max_examples=80, deadline=None)
def test_prefix_and_distinct_tokens_make_up_the_prompt(
    prompts: PromptLists, config: PlanConfig
) -> None:
    plan = plan_prompts(Prompts.from_lists(prompts), config)
    seen = []
    for index in range(plan.num_groups):
        group = group_of(plan, index)
        prefix = prompts[group.members[0]][: group.prefix_tokens]
        for member in group.members:
            distinct = prompts[member][group.prefix_tokens :]
            assert prefix + distinct == prompts[member]
            seen.append(member)
    assert sorted(seen) == list(range(len(prompts)))


@given(prompt_lists(), configs)
@settings(max_examples=80, deadline=None)
def test_many_levels_compute_every_different_token_once(
    prompts: PromptLists, config: PlanConfig
) -> None:
    plan = plan_prompts(Prompts.from_lists(prompts), config)
    total = sum(map(len, prompts))
    if config.levels > 1:
        assert processed_tokens(plan, total) == different_prefixes(prompts)
    else:
        assert different_prefixes(prompts) <= processed_tokens(plan, total) <= total


@given(prompt_lists(), configs)
@settings(max_examples=100, deadline=None)
def test_a_plan_can_be_written_and_read(prompts: PromptLists, config: PlanConfig) -> None:
    plan = plan_prompts(Prompts.from_lists(prompts), config)
    assert are_equal(read_plan(plan.to_lines()), plan)


@given(prompt_lists(), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_spans_are_the_topmost_worthy_nodes_level_by_level(
    prompts: PromptLists, levels: int, min_tokens: int
) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    wanted = [False] * len(tree.node_tokens)
    above = [(0, 0)] * len(wanted)  # number of spans above, and the end of the last one
    for node in range(1, len(wanted)):
        count, tokens = above[tree.node_parents[node]]
        if count < levels and tree.node_tokens[node] - tokens >= min_tokens:
            wanted[node], count, tokens = True, count + 1, int(tree.node_tokens[node])
        above[node] = (count, tokens)
    assert choose_spans(tree, LongRuns(min_tokens), levels).tolist() == wanted


# --- Algorithm 1, word by word -------------------------------------------------------------------


@dataclass
class Node:
    """A node of the paper's tree; a prompt that ends here is a leaf child without tokens."""

    name: int
    tokens: int
    own_prompts: int
    children: list["Node"] = field(default_factory=list)

    def leaves(self) -> int:
        return self.own_prompts + sum(child.leaves() for child in self.children)


def as_nodes(tree: PrefixTree) -> Node:
    own = np.bincount(tree.prompt_nodes, minlength=len(tree.node_tokens)).tolist()
    runs = tree.node_runs.tolist()
    nodes = [Node(name, runs[name], own[name]) for name in range(len(runs))]
    for node in nodes[1:]:
        nodes[tree.node_parents[node.name]].children.append(node)
    return nodes[0]


def maximize_reuse(node: Node) -> None:
    """Lines 2 to 11. Leaves are only counted: since their gain is 0, they are never forked."""
    for child in list(node.children):
        maximize_reuse(child)
        for gchild in list(child.children):
            gain = (gchild.leaves() - 1) * gchild.tokens
            if gain > child.tokens:
                child.children.remove(gchild)
                gchild.tokens += child.tokens
                node.children.append(gchild)


def first_level_saving(root: Node) -> int:
    return sum(max(child.leaves() - 1, 0) * child.tokens for child in root.children)


def draft_saving(draft: Draft) -> int:
    return int(draft.node_tokens[draft.prompt_nodes].sum() - draft.node_tokens.sum())


def best_single_level_saving(prompts: PromptLists) -> int:
    """The best saving over all sets of prefixes, if each prompt uses the longest that fits it."""
    tree = build_tree(Prompts.from_lists(prompts))
    depths, parents = tree.node_tokens.tolist(), tree.node_parents.tolist()
    leaves = tree.prompt_nodes.tolist()
    best = 0
    for size in range(1, len(depths)):
        for chosen in combinations(range(1, len(depths)), size):
            saved = -sum(depths[node] for node in chosen)
            for leaf in leaves:
                node = leaf
                while node and node not in chosen:
                    node = parents[node]
                saved += depths[node]
            best = max(best, saved)
    return best


@given(prompt_lists(max_prompts=16))
@settings(max_examples=120, deadline=None)
def test_enlargement_is_algorithm_1_as_printed(prompts: PromptLists) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    root = as_nodes(tree)
    maximize_reuse(root)
    draft = first_level_enlarged(tree)
    wanted = sorted((c.leaves(), c.tokens) for c in root.children if c.leaves())
    sizes = np.bincount(draft.position_groups)
    is_shared = draft.group_nodes > 0
    tokens = draft.node_tokens[draft.group_nodes]
    found = zip(sizes[is_shared].tolist(), tokens[is_shared].tolist(), strict=True)
    assert sorted(found) == wanted
    assert draft_saving(draft) == first_level_saving(root)


@given(prompt_lists(max_prompts=9))
@settings(max_examples=80, deadline=None)
def test_enlargement_lies_between_the_naive_first_level_and_brute_force(
    prompts: PromptLists,
) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    naive, enlarged = draft_saving(first_level(tree)), draft_saving(first_level_enlarged(tree))
    assert naive <= enlarged <= best_single_level_saving(prompts)


def branch(*runs: int) -> list[int]:
    """A prompt from runs given as (token * 100 + length)."""
    return [run // 100 for run in runs for _ in range(run % 100)]


def test_the_example_of_the_papers_figure_4_is_planned_as_there() -> None:
    """One token shared by five prompts saves 4; eight tokens shared by two of them save 8."""
    prompts = [[1], [2, 3], [2, 4], [2, *[5] * 7, 1], [2, *[5] * 7, 2], [2, 6]]
    tree = build_tree(Prompts.from_lists(prompts))
    assert draft_saving(first_level(tree)) == 4
    assert draft_saving(first_level_enlarged(tree)) == 8 + 2


def test_algorithm_1_charges_the_last_fork_for_a_prefix_that_is_no_longer_needed() -> None:
    """Forking one of the nodes of 8 tokens loses 2 tokens. If both are forked, no prompt needs the
    10 tokens above them any more: that gains 6."""
    prompts = [branch(110, mid, end) for mid in (208, 308) for end in (401, 501)]
    tree = build_tree(Prompts.from_lists(prompts))
    assert draft_saving(first_level_enlarged(tree)) == 3 * 10
    assert best_single_level_saving(prompts) == 2 * 18


def test_algorithm_1_decides_sub_problems_without_the_nodes_above() -> None:
    """After 10 tokens that all share, 4 prompts share 4 tokens, and 2 of these share 5 more. The 2
    are forked first, since 5 > 4. The 2 others then save too little to be forked past the 10
    tokens; all 4 together would have saved enough."""
    lower = [branch(110, 204, 305, 401), branch(110, 204, 305, 501)]
    upper = [branch(110, 204, 601), branch(110, 204, 701)]
    others = [branch(110, 801), branch(110, 901)]
    prompts = lower + upper + others
    tree = build_tree(Prompts.from_lists(prompts))
    assert draft_saving(first_level_enlarged(tree)) == 5 * 10
    assert best_single_level_saving(prompts) == 3 * 14 + 1 * 10


# --- what becomes a group ------------------------------------------------------------------------


def documents(head: int, count: int, degree: int, doc: int, tail: int) -> Prompts:
    """`count` documents of `doc` tokens after a common head, with `degree` questions of `tail`
    tokens."""
    rng = np.random.default_rng(0)
    start = list(range(head))
    prompts = []
    for index in range(count):
        text = [*start, 10_000 + index, *rng.integers(0, 9000, doc - 1).tolist()]
        prompts += [
            [*text, 20_000 + i, *rng.integers(0, 9000, tail).tolist()] for i in range(degree)
        ]
    return Prompts.from_lists(prompts)


def test_a_short_common_head_does_not_join_all_documents_into_one_group() -> None:
    plan = plan_prompts(documents(head=3, count=10, degree=4, doc=100, tail=5))
    assert plan.num_groups == 10
    assert set(plan.node_tokens[plan.group_nodes].tolist()) == {103}
    assert np.count_nonzero(plan.node_is_span) == 10


def test_small_documents_below_a_system_prompt_are_one_group_of_two_levels() -> None:
    plan = plan_prompts(documents(head=200, count=3, degree=4, doc=100, tail=5))
    assert plan.num_groups == 1
    assert plan.node_tokens[plan.node_is_span].tolist() == [200, 300, 300, 300]


def test_a_system_prompt_with_too_much_below_it_is_opened_into_groups() -> None:
    config = PlanConfig(group_tokens=1000)
    plan = plan_prompts(documents(head=200, count=20, degree=4, doc=100, tail=5), config)
    assert plan.num_groups == 20
    assert set(plan.node_tokens[plan.group_nodes].tolist()) == {300}
    assert [len(path_to(plan, node)) for node in plan.group_nodes.tolist()] == [2] * 20


def test_documents_with_the_same_first_words_are_not_one_group() -> None:
    """40 common tokens are a span, but the document of 300 tokens makes the group."""
    plan = plan_prompts(documents(head=40, count=5, degree=4, doc=300, tail=5))
    assert plan.num_groups == 5
    assert plan.node_is_span[plan.node_tokens == 40].all()


def test_the_turns_of_a_conversation_are_one_group() -> None:
    """Each turn repeats the turns before it. Most is saved below the first turn, but in one
    branch."""
    talk = list(range(900))
    others = [[5000 + i] * 40 for i in range(3)]
    plan = plan_prompts(Prompts.from_lists([talk[: 50 * turn] for turn in range(1, 18)] + others))
    assert sorted(np.diff(plan.group_starts).tolist()) == [1, 1, 1, 17]


def test_questions_without_a_document_form_one_group_under_an_opened_system_prompt() -> None:
    batch = documents(head=200, count=20, degree=4, doc=100, tail=5)
    loose = [[*range(200), 30_000 + i, i] for i in range(7)]
    prompts = Prompts.from_lists([*(batch[i].tolist() for i in range(len(batch))), *loose])
    plan = plan_prompts(prompts, PlanConfig(group_tokens=1000))
    plan.check(prompts)
    sizes = dict(zip(plan.node_tokens[plan.group_nodes], np.diff(plan.group_starts), strict=False))
    assert plan.num_groups == 21
    assert sizes[np.int64(200)] == 7


def test_prompts_that_share_nothing_are_groups_of_one() -> None:
    plan = plan_prompts(Prompts.from_lists([[i, 1, 2] for i in range(5)] + [[], []]))
    assert plan.num_groups == 7
    assert group_of(plan, 0).prefix_tokens == 0


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError):
        PlanConfig(levels=0)
    with pytest.raises(ConfigError):
        PlanConfig(group_tokens=0)
