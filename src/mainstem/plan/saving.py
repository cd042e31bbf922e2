"""Counts the prompt tokens that a plan, or an LRU cache, need not compute (BatchLLM Eq. 2)."""

from dataclasses import dataclass

import numpy as np

from mainstem.core.plan import Plan
from mainstem.plan.groups import Draft, first_level, first_level_enlarged
from mainstem.plan.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Savings:
    """Shares of all prompt tokens, 0 to 1, that are not computed."""

    first_level: float
    first_level_enlarged: float
    multi_level: float
    upper_bound: float
    lru: float


@dataclass(frozen=True, slots=True)
class LruCache:
    """The prefix cache to compare with: whole pages, least recently used evicted first.

    Prompts arrive in input order, one at a time; each adds its `output_tokens` after its prompt.
    Within a prompt, the last page is evicted first. Real engines run many prompts at once and find
    less than this.
    """

    capacity_tokens: int
    page_size: int = 16
    output_tokens: int = 0

    def __post_init__(self) -> None:
        if self.capacity_tokens < 0 or self.output_tokens < 0:
            raise ValueError("sizes of a cache must not be negative")
        if self.page_size < 1:
            raise ValueError(f"page_size must be positive, got {self.page_size}")


def compare(tree: PrefixTree, plan: Plan, cache: LruCache) -> Savings:
    """Return what each way of sharing saves; `plan` is used for multi_level."""
    total = int(tree.prompt_tokens.sum())
    return Savings(
        first_level=_ratio(_draft_tokens(tree, first_level(tree)), total),
        first_level_enlarged=_ratio(_draft_tokens(tree, first_level_enlarged(tree)), total),
        multi_level=_ratio(processed_tokens(plan, total), total),
        upper_bound=_ratio(int(tree.subtree_tokens[0]), total),
        lru=_ratio(total - lru_hit_tokens(tree, cache), total),
    )


def processed_tokens(plan: Plan, total_tokens: int, page_size: int = 1) -> int:
    """Return how many of the prompts' `total_tokens` a plan computes: every node once, and all
    tokens outside nodes. With a page_size, return how many an engine computes if it shares only
    whole pages.
    """
    tokens = plan.node_tokens // page_size * page_size
    shared = int(tokens[plan.member_nodes].sum())
    return total_tokens - shared + int((tokens - tokens[plan.node_parents]).sum())


def _draft_tokens(tree: PrefixTree, draft: Draft) -> int:
    shared = int(draft.node_tokens[draft.prompt_nodes].sum())
    return int(tree.prompt_tokens.sum()) - shared + int(draft.node_tokens.sum())


def _ratio(processed: int, total: int) -> float:
    return 1 - processed / total if total else 0.0


def lru_hit_tokens(tree: PrefixTree, cache: LruCache) -> int:
    """Return how many prompt tokens are found in the cache if all prompts arrive in input order.

    A prompt passes through whole nodes, so all pages of a node have the same last use. Time is the
    number of the prompt. The cache holds the pages that were last used after a horizon, which only
    moves forward, and as many first pages of the prompt at the horizon as fit. So a prompt costs
    one step per node on its path, not one per page.
    """
    pages = tree.node_tokens // cache.page_size
    node_pages = (pages - pages[tree.node_parents]).tolist()
    count = len(tree.order)
    by_input = np.empty(count, dtype=np.int64)
    by_input[tree.order] = np.arange(count)
    all_pages = (tree.prompt_tokens + cache.output_tokens) // cache.page_size
    own_pages = (all_pages - pages[tree.prompt_nodes])[by_input].tolist()
    nodes, parents = tree.prompt_nodes[by_input].tolist(), tree.node_parents.tolist()

    capacity = cache.capacity_tokens // cache.page_size
    last_use = [-1] * len(parents)  # for each node, the prompt that used its pages last
    used_at = [0] * count  # for each prompt, the number of pages whose last use it was
    horizon, newer = -1, 0  # newer: pages used after the horizon; prompt -1 has no pages
    hit_pages, room = 0, capacity  # room: pages used at the horizon that still fit
    for now in range(count):
        brought = own_pages[now]
        at_horizon = 0
        node = nodes[now]
        while node:
            size, used = node_pages[node], last_use[node]
            brought += size
            if used > horizon:
                hit_pages += size
                newer -= size
                used_at[used] -= size
            elif used >= 0:
                if used == horizon:
                    at_horizon += size
                used_at[used] -= size
            last_use[node] = now
            node = parents[node]
        if at_horizon:
            # the cache was full, up to the horizon, before this prompt used anything
            hit_pages += min(at_horizon, room)
        used_at[now] = brought
        newer += brought
        while newer > capacity:
            horizon += 1
            newer -= used_at[horizon]
        room = capacity - newer
    return hit_pages * cache.page_size
