"""Saving ratios on the paper's workloads, and the LRU cache compared with a page-by-page
version."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.plan import Prompts
from mainstem.plan.planner import PlanConfig, plan_prompts, plan_tree
from mainstem.plan.prefix_tree import build_tree
from mainstem.plan.saving import LruCache, compare, lru_hit_tokens, processed_tokens
from tests.plan.strategies import PromptLists, prompt_lists


def shared_prompts(groups: int, degree: int, prefix: int, distinct: int) -> Prompts:
    """The paper's micro benchmark, shuffled. First tokens differ, so the bound is exact."""
    rng = np.random.default_rng(0)
    heads = rng.integers(10, 30_000, (groups, 1, prefix), dtype=np.int32)
    heads[:, 0, 0] = 30_000 + np.arange(groups)
    tails = rng.integers(10, 30_000, (groups, degree, distinct), dtype=np.int32)
    tails[:, :, 0] = 30_000 + np.arange(degree)
    rows = np.concatenate([np.broadcast_to(heads, (groups, degree, prefix)), tails], axis=2)
    rows = rng.permutation(rows.reshape(groups * degree, prefix + distinct))
    return Prompts(rows.ravel(), np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1])


@pytest.mark.parametrize(
    ("prefix", "distinct", "degree", "percent"),
    [
        (2000, 200, 16, 85.2),
        (16000, 200, 16, 92.6),
        (2000, 200, 4, 68.2),
        (2000, 1000, 16, 62.5),
        (1000, 1000, 4, 37.5),
    ],
)
def test_the_papers_micro_benchmarks_reach_the_upper_bound(
    prefix: int, distinct: int, degree: int, percent: float
) -> None:
    prompts = shared_prompts(groups=4, degree=degree, prefix=prefix, distinct=distinct)
    tree = build_tree(prompts)
    savings = compare(tree, plan_tree(tree), LruCache(3000))
    bound = prefix * (degree - 1) / (degree * (prefix + distinct))
    assert savings.upper_bound == pytest.approx(bound)
    assert savings.first_level == savings.multi_level == savings.upper_bound
    assert savings.first_level_enlarged == savings.upper_bound
    assert round(100 * bound, 1) == percent
    assert savings.lru < savings.upper_bound


def lru_page_by_page(prompts: PromptLists, cache: LruCache) -> int:
    """An engine's prefix cache, as a dictionary of pages."""
    pages: OrderedDict[tuple[int, ...], None] = OrderedDict()
    size, hits = cache.page_size, 0
    for index, prompt in enumerate(prompts):
        whole = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        for page in whole:
            if page not in pages:
                break
            hits += size
        output = [*prompt, *[-index - 1] * cache.output_tokens]
        for end in range(len(output) // size * size, 0, -size):
            pages[tuple(output[:end])] = None
            pages.move_to_end(tuple(output[:end]))
        while len(pages) > cache.capacity_tokens // size:
            pages.popitem(last=False)
    return hits


@given(prompt_lists(max_prompts=20), st.integers(0, 60), st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_the_lru_cache_finds_as_many_tokens_as_a_cache_of_pages(
    prompts: PromptLists, capacity_tokens: int, page_size: int, output_tokens: int
) -> None:
    cache = LruCache(capacity_tokens, page_size, output_tokens)
    tree = build_tree(Prompts.from_lists(prompts))
    assert lru_hit_tokens(tree, cache) == lru_page_by_page(prompts, cache)


@given(prompt_lists())
@settings(max_examples=100, deadline=None)
def test_an_unbounded_cache_of_single_tokens_reaches_the_upper_bound(prompts: PromptLists) -> None:
    batch = Prompts.from_lists(prompts)
    tree = build_tree(batch)
    savings = compare(tree, plan_tree(tree), LruCache(10**9, page_size=1))
    assert savings.lru == savings.upper_bound == savings.multi_level
    assert savings.first_level <= savings.first_level_enlarged <= savings.upper_bound


def test_no_prompts_save_nothing() -> None:
    batch = Prompts.from_lists([])
    tree = build_tree(batch)
    savings = compare(tree, plan_tree(tree), LruCache(100))
    assert savings.upper_bound == savings.lru == 0.0


@given(prompt_lists(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_plan_in_whole_pages_saves_as_much_as_an_unbounded_cache_of_pages(
    prompts: PromptLists, page_size: int
) -> None:
    tree = build_tree(Prompts.from_lists(prompts))
    total = sum(map(len, prompts))
    found = lru_hit_tokens(tree, LruCache(10**9, page_size))
    assert processed_tokens(plan_tree(tree), total, page_size) == total - found


def test_a_plan_without_sharing_computes_every_token() -> None:
    batch = Prompts.from_lists([[1, 2], [3, 4, 5]])
    assert processed_tokens(plan_prompts(batch, PlanConfig(levels=1)), 5) == 5


def test_a_cache_of_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LruCache(-1)
    with pytest.raises(ValueError, match="page_size"):
        LruCache(1, page_size=0)
