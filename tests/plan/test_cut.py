"""A cut assigns every row once, in even shares, and charges prefixes to the workers that compute
them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.errors import ConfigError
from mainstem.core.plan import Plan, Prompts
from mainstem.plan.cost import TokenCosts
from mainstem.plan.cut import Cut, cut_plan
from mainstem.plan.groups import LongRuns
from mainstem.plan.planner import PlanConfig, plan_prompts
from mainstem_bench.shares import lengths_only
from tests.plan.strategies import PromptLists, prompt_lists
from tests.plan.test_datasets import SETS, load

HASHED = {"traces/mooncake": 512, "traces/weka": 64}  # tokens per hash in the trace
TOKENS_ONLY = TokenCosts(prompt_s=1.0, pair_s=0.0, output_s=0.0, key_s=0.0)
PROMPTS_50 = Path(__file__).parents[1] / "data" / "prompts50.jsonl"


def cut_of(
    prompts: PromptLists, num_workers: int, costs: TokenCosts | None = None, outputs: float = 1.0
) -> tuple[Cut, Plan]:
    batch = Prompts.from_lists(prompts)
    plan = plan_prompts(batch, PlanConfig(worth_span=LongRuns(1)))
    expected = np.full(len(prompts), outputs)
    cut = cut_plan(plan, batch.num_tokens, expected, num_workers, costs)
    cut.check(plan)
    return cut, plan


def share_prefixes(cut: Cut, plan: Plan, prompts: PromptLists, worker: int) -> set[tuple[int, ...]]:
    """Every prefix of a prompt that a worker has to compute."""
    found: set[tuple[int, ...]] = set()
    for bundle in np.flatnonzero(cut.workers == worker).tolist():
        for member in plan.members[cut.begins[bundle] : cut.ends[bundle]].tolist():
            prompt = tuple(prompts[member])
            found |= {prompt[: end + 1] for end in range(len(prompt))}
    return found


@given(prompt_lists(max_prompts=30), st.integers(1, 6))
@settings(max_examples=120, deadline=None)
def test_the_cost_of_a_share_is_its_number_of_different_prefixes(
    prompts: PromptLists, num_workers: int
) -> None:
    cut, plan = cut_of(prompts, num_workers, TOKENS_ONLY)
    sizes = [len(share_prefixes(cut, plan, prompts, at)) for at in range(num_workers)]
    assert cut.share_s.tolist() == pytest.approx(sizes)
    assert cut.computed_tokens + cut.repeated_tokens == sum(sizes)
    assert cut.whole_s == pytest.approx(cut.computed_tokens)
    assert max(sizes, default=0) <= cut.computed_tokens, "a share exceeds the whole"
    assert np.bincount(cut.workers, cut.seconds, num_workers) == pytest.approx(cut.share_s)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_rows_that_share_nothing_are_cut_as_evenly_as_the_longest_allows(
    lengths: list[int], num_workers: int
) -> None:
    """When a worker gets the last range of the longest share, its share is the smallest."""
    prompts = [[1000 * row + place for place in range(size)] for row, size in enumerate(lengths)]
    cut, _ = cut_of(prompts, num_workers, TOKENS_ONLY)
    mean = sum(lengths) / num_workers  # small rows are assigned together, up to mean / 16
    assert cut.share_s.max() <= mean + max(mean / 16, *lengths)
    assert cut.repeated_tokens == 0


def test_a_group_that_exceeds_the_average_share_is_split_and_its_prefix_charged_again() -> None:
    prompts = [[1] * 100 + [1000 + row] * 50 for row in range(40)]
    cut, _ = cut_of(prompts, 4, TOKENS_ONLY)
    assert cut.repeated_tokens == 3 * 100, "once for each part but the first"
    assert cut.share_s.tolist() == [600.0] * 4
    assert cut.balance == 1.0
    assert cut.lost_saving == 300 / 6000


def test_groups_below_the_average_share_stay_whole_if_shares_are_even() -> None:
    prompts = [[group] * 100 + [1000 + row] for group in range(32) for row in range(20)]
    cut, _ = cut_of(prompts, 8)
    assert cut.repeated_tokens == 0
    assert cut.balance == pytest.approx(1.0)


def test_groups_are_split_if_shares_would_be_uneven() -> None:
    """Nine equal groups for eight workers: unsplit, one worker would get 1.8 times the mean."""
    prompts = [
        [group] * 20 + [1000 * (group + 1) + row] * 30 for group in range(9) for row in range(50)
    ]
    cut, _ = cut_of(prompts, 8)
    assert cut.balance <= 1.05
    assert 0 < cut.repeated_tokens <= 8 * 20


def test_there_may_be_more_workers_than_rows() -> None:
    cut, _ = cut_of([[1, 2], [1, 3]], 5)
    assert np.bincount(cut.workers, cut.ends - cut.begins).sum() == 2
    assert cut.num_workers == 5


def test_an_empty_plan_can_be_cut() -> None:
    cut, _ = cut_of([], 3)
    assert len(cut.begins) == 0
    assert (cut.balance, cut.saving, cut.lost_saving) == (1.0, 0.0, 0.0)


def test_zero_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        cut_of([[1]], 0)


def test_many_rows_are_cut_evenly() -> None:
    plan, lengths = lengths_only(20_000)
    cut = cut_plan(plan, lengths, np.full(20_000, 64.0), 50)
    cut.check(plan)
    assert cut.balance <= 1.05
    assert cut.lost_saving <= 0.011
    assert len(cut.begins) <= 50 * 64


def test_real_prompts_are_cut_evenly() -> None:
    """Prompts of a real mix, as bytes; there is no tokenizer here."""
    rows = [json.loads(line) for line in PROMPTS_50.read_text().splitlines()]
    prompts = [list(json.dumps(row.get("messages", row.get("prompt"))).encode()) for row in rows]
    cut, _ = cut_of(prompts, 4, outputs=64.0)
    assert cut.share_s.max() <= 1.05 * max(cut.share_s.mean(), cut.dearest_s)


@pytest.mark.slow
@pytest.mark.skipif(not SETS, reason="the data sets are not here")
@pytest.mark.parametrize("name", sorted(SETS))
def test_data_sets_are_cut_evenly(name: str) -> None:
    """Eight workers, answers of 64 tokens; `-s` prints the row for docs/log/plan.md."""
    prompts = load(name, SETS[name])
    plan = plan_prompts(prompts)
    unit = next((tokens for trace, tokens in HASHED.items() if name.startswith(trace)), 1)
    plan = replace(plan, node_tokens=plan.node_tokens * unit)
    cut = cut_plan(plan, prompts.num_tokens * unit, np.full(len(prompts), 64.0), 8)
    cut.check(plan)
    prefix = int(plan.node_tokens[plan.group_nodes].max()) / (cut.computed_tokens / 8)
    evenness = float(cut.share_s.max()) / max(float(cut.share_s.mean()), cut.dearest_s)
    saved, lost = 100 * cut.saving, 100 * cut.lost_saving
    shown = f"{cut.balance:.3f} | {evenness:.3f} | {saved:.2f} | {lost:.2f} | {prefix:.3f}"
    print(f"| {name.partition('.')[0]} | {len(prompts):,} | {shown} |")
    assert evenness <= 1.05
    if prefix < 0.1:
        assert lost <= 1.1
