"""The tree, compared with sorted() and with sets of prefixes, which share no code with it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.plan.prefix_tree import PrefixTree, build_tree
from tests.plan.strategies import PromptLists, prompt_lists


def expected_nodes(prompts: PromptLists) -> set[tuple[int, ...]]:
    """Prefixes of two or more prompts at which the prompts diverge or end; and the root."""
    passing: Counter[tuple[int, ...]] = Counter()
    for prompt in prompts:
        passing.update(tuple(prompt[:end]) for end in range(len(prompt) + 1))
    nodes: set[tuple[int, ...]] = {()}
    for prefix, count in passing.items():
        goes_on = any(
            passing[longer] == count for longer in passing if longer[:-1] == prefix and longer
        )
        if count > 1 and not goes_on:
            nodes.add(prefix)
    return nodes


def node_prefix(tree: PrefixTree, prompts: PromptLists, node: int) -> tuple[int, ...]:
    if tree.node_tokens[node] == 0:
        return ()
    return tuple(prompts[tree.order[tree.node_begins[node]]][: tree.node_tokens[node]])


@given(prompt_lists())
@settings(max_examples=100, deadline=None)
def test_prompts_come_out_sorted_and_equal_ones_in_input_order(prompts: PromptLists) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    wanted = sorted(range(len(prompts)), key=lambda index: (prompts[index], index))
    assert tree.order.tolist() == wanted
    assert tree.prompt_tokens.tolist() == [len(prompts[index]) for index in wanted]


@given(prompt_lists())
@settings(max_examples=100, deadline=None)
def test_nodes_are_the_places_where_shared_prefixes_diverge_or_end(prompts: PromptLists) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    found = [node_prefix(tree, prompts, node) for node in range(len(tree.node_tokens))]
    assert sorted(found) == sorted(expected_nodes(prompts))


@given(prompt_lists())
@settings(max_examples=80, deadline=None)
def test_a_node_covers_all_prompts_with_its_prefix_and_its_parent_is_the_next_shorter(
    prompts: PromptLists,
) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    nodes = {node_prefix(tree, prompts, v): v for v in range(len(tree.node_tokens))}
    for prefix, node in nodes.items():
        inside = tree.order[tree.node_begins[node] : tree.node_ends[node]].tolist()
        size = len(prefix)
        assert sorted(inside) == [i for i, p in enumerate(prompts) if tuple(p[:size]) == prefix]
        shorter = [other for other in nodes if other == prefix[: len(other)] and other != prefix]
        assert tree.node_parents[node] == nodes[max(shorter, key=len, default=())]
        assert tree.node_levels[node] == len(shorter)
        below = [v for p, v in nodes.items() if p[:size] == prefix]
        assert sorted(below) == list(range(node, tree.subtree_ends[node]))
        different = {tuple(prompts[i][:end]) for i in inside for end in range(len(prompts[i]) + 1)}
        parent_tokens = tree.node_tokens[tree.node_parents[node]]
        assert tree.subtree_tokens[node] == sum(len(p) > parent_tokens for p in different)
    for position, node in enumerate(tree.prompt_nodes.tolist()):
        prompt = tuple(prompts[tree.order[position]])
        mine = [v for p, v in nodes.items() if p == prompt[: len(p)]]
        assert node == max(mine, key=lambda v: int(tree.node_tokens[v]))


@pytest.mark.parametrize("length", [15, 16, 17, 79, 80, 81, 1400, 3000])
def test_strip_boundaries_do_not_matter(length: int) -> None:
    rng = np.random.default_rng(length)
    head = rng.integers(0, 50_000, length, dtype=np.int32)
    rows = [np.append(head, tail) for tail in (7, 3, 5)] + [head, head[:-1], np.append(head, 7)]
    prompts = Prompts.from_lists([row.tolist() for row in rows])
    tree = build_tree(prompts)
    assert tree.order.tolist() == [4, 3, 1, 2, 0, 5]
    assert tree.node_tokens.tolist() == [0, length - 1, length, length + 1]
    assert tree.prompt_nodes.tolist() == [1, 2, 2, 2, 3, 3]


def test_a_match_does_not_extend_beyond_the_end_of_a_prompt() -> None:
    """The tokens after prompt 0 in memory would make it equal to prompt 2."""
    tree = build_tree(Prompts.from_lists([[5], [6, 7], [5, 6, 7]]))
    assert tree.node_tokens.tolist() == [0, 1]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
@settings(deadline=None)
def test_any_int32_is_a_token(tokens: list[int]) -> None:
    prompts = [[token] for token in tokens] + [[]]
    tree = build_tree(Prompts.from_lists(prompts))
    assert tree.order.tolist() == sorted(range(len(prompts)), key=lambda i: (prompts[i], i))


def test_a_long_chain_of_prefixes_is_sorted() -> None:
    """2,000 turns of one conversation: each prompt is a prefix of the next."""
    tokens = np.arange(2000, dtype=np.int32)
    prompts = Prompts.from_lists([tokens[: n + 1] for n in range(2000)])
    tree = build_tree(prompts)
    assert tree.order.tolist() == list(range(2000))
    assert tree.node_tokens.tolist() == list(range(2000))


@pytest.mark.parametrize(
    ("token_ids", "starts"),
    [
        (np.zeros(3, np.int64), np.array([0, 3])),
        (np.zeros(3, np.int32), np.array([0, 2])),
        (np.zeros(3, np.int32), np.array([0, 3, 2, 3])),
        (np.zeros(3, np.int32), np.array([1, 3])),
        (np.zeros(0, np.int32), np.zeros(0, np.int64)),
        (np.zeros(3, np.int32), np.array([0, 3], np.int32)),
    ],
)
def test_malformed_arrays_are_refused(token_ids: np.ndarray, starts: np.ndarray) -> None:
    with pytest.raises(InvalidRequest):
        Prompts(token_ids, starts)
