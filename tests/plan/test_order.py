"""Order of groups and the estimate of output lengths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.plan import Plan, Prompts
from mainstem.plan.groups import LongRuns
from mainstem.plan.order import OutputEstimate, reorder, templates_of
from mainstem.plan.planner import PlanConfig, plan_prompts
from mainstem.plan.prefix_tree import build_tree
from tests.plan.reading import are_equal, group_of
from tests.plan.strategies import PromptLists, prompt_lists

EVERY_NODE_A_SPAN = PlanConfig(worth_span=LongRuns(1))


def ratio(plan: Plan, index: int, lengths: list[int], outputs: list[float]) -> float:
    """Eq. 4 for a group that shares one prefix, with the mean output length as the numerator."""
    group = group_of(plan, index)
    tokens = group.prefix_tokens + sum(lengths[m] - group.prefix_tokens for m in group.members)
    return sum(outputs[m] for m in group.members) / len(group.members) / max(tokens, 1)


@given(prompt_lists(), st.data())
@settings(max_examples=80, deadline=None)
def test_groups_of_one_level_are_in_descending_r_group_and_ties_keep_input_order(
    prompts: PromptLists, data: st.DataObject
) -> None:
    limits = [data.draw(st.integers(1, 4)) for _ in prompts]
    batch = Prompts.from_lists(prompts)
    plan = plan_prompts(batch, PlanConfig(levels=1), np.array(limits, dtype=np.int64))
    lengths = [len(prompt) for prompt in prompts]
    outputs = [float(limit) for limit in limits]
    ratios = [ratio(plan, index, lengths, outputs) for index in range(plan.num_groups)]
    keys = [(-r, min(group_of(plan, i).members)) for i, r in enumerate(ratios)]
    for (left, left_tie), (right, right_tie) in pairwise(keys):
        assert left < right + 1e-9
        assert left < right - 1e-9 or left_tie < right_tie


def test_constant_outputs_give_equation_4() -> None:
    """Groups with fewer tokens come first."""
    heads = {1: 40, 2: 10, 3: 20}
    prompts = [[token] * size + [token + 10 + i] for token, size in heads.items() for i in range(3)]
    plan = plan_prompts(Prompts.from_lists(prompts), EVERY_NODE_A_SPAN)
    assert [group_of(plan, i).prefix_tokens for i in range(3)] == [10, 20, 40]


def test_groups_keep_the_order_of_their_first_prompts_without_reordering() -> None:
    heads = {1: 40, 2: 10, 3: 20}
    rows = [(token, i) for i in range(3) for token in heads]
    prompts = Prompts.from_lists([[token] * heads[token] + [token + 10 + i] for token, i in rows])
    config = PlanConfig(worth_span=LongRuns(1), reorders=False)
    plan = plan_prompts(prompts, config, np.arange(1, 10))
    assert [group_of(plan, i).prefix_tokens for i in range(3)] == [40, 10, 20]
    assert plan.members.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_groups_of_one_trunk_stay_together() -> None:
    """The documents below prefix 1 have ratios of 1/11 and 1/92, and the trunk has 2/143. Another
    group has a ratio of 1/82 or, in the second case, 1/52: both are between 1/92 and 1/11. It must
    not be placed between the documents, but after or before both: its ratio is compared with the
    trunk's."""
    prompts = [[1] * 40 + [doc] * size + [q] for doc, size in ((5, 9), (6, 90)) for q in (7, 8)]
    config = PlanConfig(worth_span=LongRuns(1), group_tokens=60)
    for tokens, wanted in ((80, [(0, 1), (2, 3), (4, 5)]), (50, [(4, 5), (0, 1), (2, 3)])):
        others = [[2] * tokens + [q] for q in (7, 8)]
        plan = plan_prompts(Prompts.from_lists(prompts + others), config)
        assert [group_of(plan, i).members for i in range(3)] == wanted


@given(prompt_lists(), st.data())
@settings(max_examples=80, deadline=None)
def test_reordering_keeps_started_groups_and_gives_a_valid_plan(
    prompts: PromptLists, data: st.DataObject
) -> None:
    batch = Prompts.from_lists(prompts)
    config = PlanConfig(
        levels=data.draw(st.integers(1, 3)),
        group_tokens=data.draw(st.integers(1, 20)),
        worth_span=LongRuns(data.draw(st.integers(1, 3))),
    )
    plan = plan_prompts(batch, config)
    expected = np.array([data.draw(st.integers(1, 5)) for _ in prompts], dtype=np.float64)
    started = data.draw(st.integers(0, plan.num_groups))
    later = reorder(plan, batch.num_tokens, expected, started)
    later.check(batch)
    groups = [group_of(plan, i).members for i in range(plan.num_groups)]
    again = [group_of(later, i).members for i in range(plan.num_groups)]
    assert again[:started] == groups[:started]
    assert sorted(again) == sorted(groups)


@given(prompt_lists())
@settings(max_examples=100, deadline=None)
def test_reordering_by_the_same_expectations_changes_nothing(prompts: PromptLists) -> None:
    batch = Prompts.from_lists(prompts)
    plan = plan_prompts(batch, EVERY_NODE_A_SPAN)
    expected = np.ones(len(prompts))
    assert are_equal(reorder(plan, batch.num_tokens, expected, 0), plan)


def test_longer_expected_outputs_move_a_group_to_the_front() -> None:
    prompts = Prompts.from_lists([[1] * 40 + [5], [1] * 40 + [6], [2] * 40 + [5], [2] * 40 + [6]])
    plan = plan_prompts(prompts)
    assert plan.members.tolist() == [0, 1, 2, 3]
    later = reorder(plan, prompts.num_tokens, np.array([1.0, 1.0, 9.0, 9.0]), 0)
    assert later.members.tolist() == [2, 3, 0, 1]


def test_an_estimate_starts_from_max_tokens() -> None:
    estimate = OutputEstimate()
    limits = np.array([16, 512])
    assert estimate.expect(np.array([0, 7]), limits).tolist() == [16, 512]


def test_an_estimate_learns_templates_and_expects_their_mean_for_others() -> None:
    estimate = OutputEstimate()
    for _ in range(200):
        estimate.observe(3, 20)
        estimate.observe(5, 100)
    templates, limits = np.array([3, 5, 9]), np.full(3, 1000)
    short, long, unseen = estimate.expect(templates, limits).tolist()
    assert 20 < short < 25
    assert 95 < long < 105
    assert 55 < unseen < 75


def test_an_estimate_never_exceeds_the_limit_of_a_prompt() -> None:
    estimate = OutputEstimate()
    for _ in range(50):
        estimate.observe(0, 100)
    assert estimate.expect(np.array([0]), np.array([8])).tolist() == [8]


def test_impossible_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        OutputEstimate().observe(-1, 5)
    with pytest.raises(ValueError, match="negative"):
        OutputEstimate().observe(0, -5)


def test_templates_are_the_first_shared_prefixes() -> None:
    prompts = [[1, 1, 5], [2, 2], [1, 1, 6], [3], [2, 2, 7], [1, 1, 6, 6]]
    templates = templates_of(build_tree(Prompts.from_lists(prompts))).tolist()
    assert templates[0] == templates[2] == templates[5] > 0
    assert templates[1] == templates[4] > 0
    assert templates[1] != templates[0]
    assert templates[3] == 0
