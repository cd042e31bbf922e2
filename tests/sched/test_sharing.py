"""SharingTree keeps each sequence's pages, and through spans each query sees its context once."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.ragged import ragged_arange, starts_of
from mainstem.core.step import Int32s, Spans
from mainstem.sched.sharing import ROOT, SharingTree
from mainstem.sched.spans import SpanBuilder, share_all


def page_chain(branches: list[int]) -> Int32s:
    """Pages such that chains with the same first branches have the same first pages."""
    numbers, node = [], 1
    for branch in branches:
        node = node * 3 + branch
        numbers.append(node)
    return np.array(numbers, np.int32)


chains = st.lists(st.integers(0, 2), max_size=7).map(page_chain)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = SharingTree()
        self.chains: dict[int, Int32s] = {}

    @rule(slot=st.integers(0, 99), pages=chains)
    def attach(self, slot: int, pages: Int32s) -> None:
        if slot not in self.chains:
            self.tree.attach(slot, pages)
            self.chains[slot] = pages

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        if self.chains:
            slot = data.draw(st.sampled_from(sorted(self.chains)))
            self.tree.detach(slot)
            del self.chains[slot]

    @invariant()
    def every_path_spells_the_chain(self) -> None:
        self.tree.check()
        for slot, pages in self.chains.items():
            stem = int(self.tree.stems_of(np.array([slot], np.int32))[0])
            if len(pages) == 0:
                assert stem == ROOT
            else:
                assert self.tree.pages(stem, 0).tolist() == pages.tolist()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(chains, st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
)
def test_through_spans_each_sequence_sees_its_context_once(
    seqs: list[tuple[Int32s, int, int]], page_size: int, align_pages: int
) -> None:
    """Each query sees every key of its own context up to itself, once, and no other."""
    tree = SharingTree()
    table = np.zeros((len(seqs), 64), np.int32)
    firsts, counts = [], []
    for slot, (pages, count, back) in enumerate(seqs):
        before = max(0, len(pages) * page_size - back)
        total_pages = -(-(before + count) // page_size)
        own = 100_000 + slot * 1000 + np.arange(64)
        row = np.concatenate([pages, own])[: max(total_pages, len(pages))]
        table[slot, : len(row)] = row
        tree.attach(slot, pages)
        firsts.append(before)
        counts.append(count)
    starts = starts_of(np.array(counts, np.int32))
    slots = np.arange(len(seqs), dtype=np.int32)
    num_before = np.array(firsts, np.int32)
    builder = SpanBuilder(page_size, share_all, align_tokens=align_pages * page_size)
    spans = builder.build(tree, slots, starts, num_before, table)
    seen: dict[int, list[tuple[int, int]]] = {row: [] for row in range(int(starts[-1]))}
    for i in range(len(spans)):
        rows = spans.query_rows[spans.query_starts[i] : spans.query_starts[i + 1]]
        pages = spans.page_ids[spans.page_starts[i] : spans.page_starts[i + 1]]
        num_keys = int(spans.key_tokens[i])
        slots_ = (pages[:, None].astype(np.int64) * 10 + np.arange(page_size)).ravel()[:num_keys]
        for place, row in enumerate(rows.tolist()):
            visible = num_keys - len(rows) + place + 1 if spans.is_causal[i] else num_keys
            seen[row] += [(i, int(key)) for key in slots_[:visible]]
    for slot in range(len(seqs)):
        for j in range(counts[slot]):
            length = firsts[slot] + j + 1
            expected = (table[slot][:, None].astype(np.int64) * 10 + np.arange(page_size)).ravel()
            got = [key for _, key in seen[int(starts[slot]) + j]]
            assert sorted(got) == sorted(expected[:length].tolist())


def test_a_system_prompt_is_one_span_for_all() -> None:
    tree = SharingTree()
    table = np.zeros((3, 8), np.int32)
    for slot in range(3):
        pages = np.array([7, 8, 9, 20 + slot], np.int32)
        table[slot, :4] = pages
        tree.attach(slot, pages[:3])
    slots = np.arange(3, dtype=np.int32)
    before = np.array([13, 14, 15], np.int32)
    spans = SpanBuilder(4, share_all).build(
        tree, slots, starts_of(np.ones(3, np.int32)), before, table
    )
    assert len(spans) == 4
    assert spans.page_ids[: spans.page_starts[1]].tolist() == [7, 8, 9]
    assert spans.key_tokens.tolist() == [12, 2, 3, 4]


def test_a_run_not_worth_a_span_is_joined_to_the_runs_below() -> None:
    tree = SharingTree()
    table = np.zeros((4, 8), np.int32)
    for slot in range(4):
        pages = np.array([1, 2 + slot // 2, 10 + slot], np.int32)
        table[slot, :3] = pages
        tree.attach(slot, pages[:2])
    builder = SpanBuilder(4, lambda readers, tokens: readers == 2)
    ones = np.ones(4, np.int32)
    slots = np.arange(4, dtype=np.int32)
    spans = builder.build(tree, slots, starts_of(ones), ones * 8, table)
    assert spans.page_ids.tolist() == [1, 2, 1, 3, 10, 11, 12, 13]
    assert spans.key_tokens.tolist() == [8, 8, 1, 1, 1, 1]


def test_the_number_of_levels_can_be_limited() -> None:
    """One of two levels of sharing is allowed: the topmost stays."""
    tree = SharingTree()
    table = np.zeros((4, 8), np.int32)
    for slot in range(4):
        pages = np.array([1, 2 + slot // 2, 10 + slot], np.int32)
        table[slot, :3] = pages
        tree.attach(slot, pages[:2])
    ones = np.ones(4, np.int32)
    slots = np.arange(4, dtype=np.int32)
    both = SpanBuilder(4, share_all).build(tree, slots, starts_of(ones), ones * 8, table)
    one = SpanBuilder(4, share_all, 1).build(tree, slots, starts_of(ones), ones * 8, table)
    assert both.key_tokens.tolist() == [4, 4, 4, 1, 1, 1, 1]
    assert one.key_tokens.tolist() == [4, 5, 5, 5, 5]
    assert one.page_ids.tolist() == [1, 2, 10, 2, 11, 3, 12, 3, 13]


def test_ragged_arange_counts_each_run_from_zero() -> None:
    assert ragged_arange(np.array([2, 0, 3], np.int32)).tolist() == [0, 1, 0, 1, 2]


def test_aligned_spans_begin_at_multiples_only() -> None:
    """Two sequences share 7 pages of 4 tokens; spans may begin at multiples of 16 tokens."""
    tree = SharingTree()
    table = np.zeros((2, 9), np.int32)
    table[:, :7] = np.arange(7)
    table[0, 7:], table[1, 7:] = (10, 11), (20, 21)
    for slot in range(2):
        tree.attach(slot, table[slot])
    ones = np.ones(2, np.int32)
    builder = SpanBuilder(4, share_all, align_tokens=16)
    spans = builder.build(tree, np.arange(2, dtype=np.int32), starts_of(ones), ones * 33, table)
    assert spans.key_tokens.tolist() == [16, 18, 18]
    assert spans.page_ids[:4].tolist() == [0, 1, 2, 3]
    assert spans.page_ids[4:9].tolist() == [4, 5, 6, 10, 11]


@pytest.mark.parametrize("seed", range(4))
def test_spans_of_a_step_like_the_last_one_equal_those_made_anew(seed: int) -> None:
    """Sequences grow by one token, or by a chunk; some steps begin a page, and one starts later."""
    rng, page_size, num_seqs = np.random.default_rng(seed), 4, 5
    tree = SharingTree()
    table = rng.permutation(num_seqs * 40).reshape(num_seqs, 40).astype(np.int32)
    table[1:3, :3] = table[0, :3]  # three sequences share three pages
    before = rng.integers(12, 20, num_seqs).astype(np.int32)
    for slot in range(num_seqs - 1):
        tree.attach(slot, table[slot, : before[slot] // page_size])
    kept = SpanBuilder(page_size, share_all)
    for step in range(30):
        if step == 10:
            tree.attach(num_seqs - 1, table[num_seqs - 1, :3])
        slots = np.arange(num_seqs - (step < 10), dtype=np.int32)
        counts = np.ones(len(slots), np.int32)
        counts[0] = 7 if step in {5, 6} else 1
        arguments = (tree, slots, starts_of(counts), before[slots], table)
        found = kept.build(*arguments)
        right = SpanBuilder(page_size, share_all).build(*arguments)
        for field in fields(Spans):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(right, field.name))
        before[slots] += counts
