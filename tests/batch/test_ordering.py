"""Order of a window's rows: each row once, equal rows together, rows that share as neighbours."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.batch import ordering
from mainstem.batch.ordering import (
    FEW_ANSWERS,
    LengthEstimate,
    Stretch,
    WindowPlanner,
    group_equals,
)
from mainstem.batch.rows import Row
from mainstem.batch.windows import Window
from mainstem.core.plan import Prompts
from mainstem.core.request import SamplingParams
from mainstem.plan.order import shared_with_next
from mainstem.plan.planner import PlanConfig, plan_prompts
from mainstem.text.parsers.formats import ReasoningFormat
from mainstem.wire.calls import Call, CallKind

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)

workloads = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=30)


def a_row(
    line: int, sampling: SamplingParams = GREEDY, salt: bytes = b"", priority: int = 0
) -> Row:
    call = Call(CallKind.COMPLETION, sampling, cache_salt=salt, priority=priority)
    return Row(line, f"line-{line}", call)


def common(a: list[int], b: list[int]) -> int:
    """How many leading tokens two prompts share."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def a_window(prompts: list[list[int]], rows: list[Row] | None = None) -> Window:
    rows = rows or [a_row(index) for index in range(len(prompts))]
    return Window(rows, Prompts.from_lists(prompts), [], 0, len(rows), 1.0)


def a_planner() -> WindowPlanner:
    return WindowPlanner(PlanConfig(), has_dedupe=False)


def planned(prompts: list[list[int]], rows: list[Row] | None = None) -> list[Stretch]:
    """The stretches of a window if no answers arrive between them."""
    return list(a_planner().plan(a_window(prompts, rows)).stretches(LengthEstimate()))


@settings(deadline=None)
@given(workloads)
def test_shared_with_next_counts_the_common_tokens_of_neighbours(prompts: list[list[int]]) -> None:
    plan = plan_prompts(Prompts.from_lists(prompts))
    order = plan.members.tolist()
    pairs = pairwise(order)
    expected = [common(prompts[a], prompts[b]) for a, b in pairs]
    assert shared_with_next(plan).tolist() == [*expected, 0]


@settings(deadline=None)
@given(workloads, st.data())
def test_every_row_runs_once_and_by_priority(prompts: list[list[int]], data: st.DataObject) -> None:
    """For any number of stretches, whatever answers arrive between them."""
    count = len(prompts)
    priorities = data.draw(st.lists(st.integers(-1, 1), min_size=count, max_size=count))
    rows = [a_row(index, priority=priorities[index]) for index in range(count)]
    estimate = LengthEstimate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "STRETCH_ROWS", 3)
        seen: list[int] = []
        for stretch in a_planner().plan(a_window(prompts, rows)).stretches(estimate):
            members = stretch.row_indices.tolist()
            seen += members
            for template in stretch.templates.tolist() * 8:
                estimate.observe(template, data.draw(st.integers(0, 8)))
            assert stretch.shared_with_next is not None
            shared = stretch.shared_with_next.tolist()
            assert shared[-1] == 0
            for a, b, claimed in zip(members, members[1:], shared, strict=False):
                assert claimed == common(prompts[a], prompts[b])
    assert sorted(seen) == list(range(count))
    ran = [priorities[index] for index in seen]
    assert ran == sorted(ran)


def test_a_large_workload_is_cut_into_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "STRETCH_ROWS", 8)
    prompts = [[doc, doc, doc, question] for question in range(5) for doc in range(20)]
    stretches = planned(prompts)
    sizes = [len(stretch.row_indices) for stretch in stretches]
    assert all(8 <= size <= 16 for size in sizes)
    for stretch in stretches:  # rows of a document stay together
        docs = [prompts[index][0] for index in stretch.row_indices.tolist()]
        assert all(docs.count(doc) == 5 for doc in docs)


def test_answer_lengths_of_one_window_order_the_next() -> None:
    """Groups with longer answers go first (BatchLLM Eq. 3). Before any answer, and without
    reordering, the input order is kept."""
    prompts = [[kind, kind, question, question] for kind in (5, 6) for question in range(4)]
    estimate, planner = LengthEstimate(), a_planner()
    (first,) = planner.plan(a_window(prompts)).stretches(estimate)
    assert first.row_indices.tolist() == list(range(8))
    for _ in range(FEW_ANSWERS):
        pairs = zip(first.row_indices.tolist(), first.templates.tolist(), strict=True)
        for index, template in pairs:
            estimate.observe(template, 1 if prompts[index][0] == 5 else 8)
    (second,) = planner.plan(a_window(prompts)).stretches(estimate)
    assert second.row_indices.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    kept = WindowPlanner(PlanConfig(reorders=False), has_dedupe=False)
    (third,) = kept.plan(a_window(prompts)).stretches(estimate)
    assert third.row_indices.tolist() == list(range(8))


def test_templates_keep_their_number_from_window_to_window() -> None:
    planner = a_planner()
    found: list[dict[int, int]] = []
    for prompts in (
        [[1, 2, 3], [1, 2, 4], [9, 9, 3], [9, 9, 4], [7]],
        [[9, 9, 6], [9, 9, 7], [8, 8, 8], [8, 8, 9]],
    ):
        (stretch,) = planner.plan(a_window(prompts)).stretches(LengthEstimate())
        pairs = zip(stretch.row_indices.tolist(), stretch.templates.tolist(), strict=True)
        found.append(dict(pairs))
    first, second = found
    assert first[0] == first[1] != first[2] == first[3]
    assert first[4] == 0, "shares nothing"
    assert second[0] == first[2]
    assert second[2] not in first.values()


def test_rows_of_different_salts_share_nothing() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5]]
    salted = [a_row(0, salt=b"a"), a_row(1, salt=b"b")]
    (stretch,) = planned(prompts, salted)
    assert stretch.shared_with_next is not None
    assert stretch.shared_with_next.tolist() == [0, 0]


def test_input_order_is_kept_without_a_plan() -> None:
    planner = WindowPlanner(None, has_dedupe=True)
    prompts = [[1, 5], [2], [1, 5], [1]]
    (stretch,) = planner.plan(a_window(prompts)).stretches(LengthEstimate())
    assert stretch.row_indices.tolist() == [0, 1, 3], "row 2 is equal to row 0"
    assert stretch.shared_with_next is None


def test_a_window_without_rows_has_no_stretch() -> None:
    for config in (None, PlanConfig()):
        found = WindowPlanner(config, has_dedupe=True).plan(a_window([]))
        assert list(found.stretches(LengthEstimate())) == []


def test_rows_that_must_get_the_same_answer_are_found() -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=8)
    seeded = SamplingParams(temperature=0.0, max_tokens=8, seed=4)
    longer = SamplingParams(temperature=0.0, max_tokens=9)
    prompt, other = [1, 2], [1, 3]
    cases = [
        (prompt, GREEDY, b""),
        (prompt, SamplingParams(temperature=0.0, max_tokens=8), b""),  # 1: equal to 0
        (other, GREEDY, b""),
        (prompt, sampled, b""),
        (prompt, sampled, b""),  # 4: not equal to 3, since both are sampled
        (prompt, seeded, b""),  # 5: equal to 0, since greedy answers use no seed
        (prompt, longer, b""),
        (prompt, GREEDY, b"salt"),
    ]
    rows = [a_row(index, sampling, salt) for index, (_, sampling, salt) in enumerate(cases)]
    found = group_equals(rows, Prompts.from_lists([prompt for prompt, _, _ in cases]))
    assert found == {0: [1, 5], 2: [], 3: [], 4: [], 6: [], 7: []}


def test_a_chat_answer_is_not_copied_from_a_completion() -> None:
    """A prompt may equal a rendered chat, but only the chat's answer may show special tokens."""
    plain, chat = a_row(0, GREEDY), a_row(1, GREEDY)
    chat = replace(chat, call=replace(chat.call, reasoning=ReasoningFormat.THINK))
    assert group_equals([plain, chat], Prompts.from_lists([[1, 2], [1, 2]])) == {0: [], 1: []}


def test_lengths_are_expected_only_after_enough_answers() -> None:
    estimate = LengthEstimate()
    assert estimate.expect(0, 100) is None
    for _ in range(200):
        estimate.observe(3, 10)
    assert estimate.expect(3, 100) in range(10, 14)
    assert estimate.expect(3, 5) == 5
    assert isinstance(estimate.expect(3, None), int)
    assert np.isfinite(float(estimate.expect(99, 100) or 0))
