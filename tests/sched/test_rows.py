"""Siblings read one state and keep rows of their own tokens; FakeRunner checks that the state is
never written, and that rows are exactly the tokens after it."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import StateUse, Step
from mainstem.engine.engine import Engine
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer
from tests.runner.steps import num_folds, num_with_rows

PAGE, SHARED = 16, 72  # prompts part in the middle of a page


def a_runner(num_states: int, *, can_overlap: bool = True, per_state: int = 2) -> FakeRunner:
    return FakeRunner(4096, PAGE, VOCAB, can_overlap, num_states, row_slots_per_state=per_state)


def an_engine_with_rows(
    runner: FakeRunner,
    num_states: int,
    num_rows: int = 32,
    bus: EventBus | None = None,
    per_state: int = 2,
) -> Engine:
    return an_engine(
        4096,
        PAGE,
        SchedConfig(chunk_tokens=4096),
        runner=runner,
        num_states=num_states,
        num_rows=num_rows,
        bus=bus,
        rows_per_state=per_state,
    )


def prompts_of_groups(groups: int, each: int, own: tuple[int, int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(groups):
        stem = rng.integers(0, VOCAB, SHARED).tolist()
        for number in range(each):
            count = int(rng.integers(*own))
            prompts.append([*stem, number, *rng.integers(0, VOCAB, count).tolist()])
    rng.shuffle(prompts)
    return prompts


def requests_for(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    return [a_request(p, max_tokens, name=str(i)) for i, p in enumerate(prompts)]


def check_answers(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    found = run_all(engine, requests_for(prompts, max_tokens))
    for index, prompt in enumerate(prompts):
        assert found.tokens[str(index), 0] == fake_answer(prompt, max_tokens, VOCAB)


def most_with_rows(steps: list[Step]) -> int:
    """The most sequences of one step that have rows."""
    uses = [step.states for step in steps]
    return max(
        (int((use.rows >= 0).sum()) for use in uses if use is not None and use.rows is not None),
        default=0,
    )


@pytest.mark.parametrize("can_overlap", [False, True])
def test_siblings_with_few_tokens_of_their_own_keep_rows_and_never_fold(can_overlap: bool) -> None:
    runner = a_runner(100, can_overlap=can_overlap)
    engine = an_engine_with_rows(runner, 100)
    check_answers(engine, prompts_of_groups(8, 8, (5, 20)), 4)
    assert num_folds(runner.steps) == 0
    # the first of each group computes the stem
    assert num_with_rows(runner.steps) == 8 * 7


def test_long_answers_fold_once_and_go_on_with_a_state_of_their_own() -> None:
    runner = a_runner(100)
    engine = an_engine_with_rows(runner, 100)
    prompts = prompts_of_groups(2, 4, (5, 25))
    check_answers(engine, prompts, 70)
    assert num_folds(runner.steps) == 2 * 3
    assert most_with_rows(runner.steps[-1:]) == 0


@pytest.mark.parametrize("can_overlap", [False, True])
def test_if_rows_take_the_slot_of_a_state_folds_hand_their_slots_on(can_overlap: bool) -> None:
    """Sixteen siblings fill their rows at the same time, and two slots are left for that."""
    counters = Counters().attach(bus := EventBus())
    runner = a_runner(19, can_overlap=can_overlap, per_state=1)
    engine = an_engine_with_rows(runner, 19, bus=bus, per_state=1)
    rng = np.random.default_rng(0)
    stem = rng.integers(0, VOCAB, SHARED).tolist()
    run_all(engine, [a_request(stem, 1, name="first")])  # its state is kept
    prompts = [[*stem, number, *rng.integers(0, VOCAB, 4).tolist()] for number in range(16)]
    check_answers(engine, prompts, 40)
    assert most_with_rows(runner.steps) == num_folds(runner.steps) == 16
    folding = [step for step in runner.steps if num_folds([step])]
    assert max(num_folds([step]) for step in folding) == 2
    assert counters.preemptions == 0


def test_more_sequences_with_rows_run_than_there_are_slots_for_states() -> None:
    """8 slots: one has the shared state, one the first prompt's, six the rows of 12 sequences."""
    runner = a_runner(8)
    check_answers(an_engine_with_rows(runner, 8), prompts_of_groups(1, 40, (5, 25)), 4)
    assert most_with_rows(runner.steps) >= 12


@pytest.mark.parametrize("num_states", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [4, 30, pytest.param(60, marks=pytest.mark.slow)])
def test_few_slots_for_states_lose_no_answer(num_states: int, max_tokens: int) -> None:
    runner = a_runner(num_states)
    engine = an_engine_with_rows(runner, num_states, num_rows=16)
    check_answers(engine, prompts_of_groups(3, 6, (2, 20)), max_tokens)


def test_sequences_that_cannot_fold_are_preempted() -> None:
    """Two siblings run, and somebody takes all free slots. When the rows of the first are full, the
    other one is preempted. The first is the only reader then, and folds in place."""
    bus, preempted = EventBus(), list[SequencePreempted]()
    bus.subscribe(SequencePreempted, preempted.append)
    runner = a_runner(6)
    engine, stem = an_engine_with_rows(runner, 6, num_rows=16, bus=bus), list(range(SHARED))
    run_all(engine, [a_request([*stem, 60, 1], 2, keep_tokens=SHARED)])
    prompts = [[*stem, 90 + i, 1, 2] for i in range(2)]
    for request in requests_for(prompts, 40):
        engine.submit(request)
    engine.step()
    assert most_with_rows(runner.steps) == 2
    states = engine._store.states
    assert states is not None
    taken = []
    while (slot := states.take()) is not None:
        taken.append(slot)
    collector = Collector()
    while not collector.reasons:
        collector.add(engine.step())
        engine.check()
    assert len(preempted) == 1
    assert num_folds(runner.steps) == 1
    for slot in taken:
        states.give_back(slot)
    while engine.has_work:
        collector.add(engine.step())
    for index, prompt in enumerate(prompts):
        assert collector.tokens[str(index), 0] == fake_answer(prompt, 40, VOCAB)


def test_answers_to_one_prompt_keep_rows() -> None:
    runner = a_runner(20)
    engine, prompt = an_engine_with_rows(runner, 20), list(range(50))
    sampling = SamplingParams(n=6, temperature=0.0, max_tokens=8)
    found = run_all(engine, [a_request(prompt, name="r", sampling=sampling)])
    assert all(found.tokens["r", i] == fake_answer(prompt, 8, VOCAB) for i in range(6))
    assert most_with_rows(runner.steps) == 5


def test_a_state_that_is_wanted_among_the_own_tokens_is_kept_instead_of_rows() -> None:
    """A session's next turn starts where this one ended, though siblings read the first state."""
    runner = a_runner(20)
    engine, stem = an_engine_with_rows(runner, 20), list(range(SHARED))
    run_all(engine, [a_request([*stem, 90 + i, 1, 2], 4, keep_tokens=SHARED) for i in range(3)])
    assert most_with_rows(runner.steps) == 2
    said = [*stem, 80, 1, 2]
    engine.submit(a_request([*stem, 85, 1, 2], 30))  # a sibling
    engine.step()
    run_all(engine, [a_request(said, 4, name="turn", session="s")])
    said = said + fake_answer(said, 4, VOCAB) + [5, 6, 7]
    found = run_all(engine, [a_request(said, 4, name="next", session="s")])
    assert found.tokens["next", 0] == fake_answer(said, 4, VOCAB)
    assert found.outputs[0].num_cached_tokens >= SHARED + 6


def test_a_plan_wants_no_states_but_its_forks() -> None:
    """The ends of messages are no reason to cut the prompts of a plan."""
    runner = a_runner(30)
    engine, stem = an_engine_with_rows(runner, 30), list(range(SHARED))
    prompts = [[*stem, 30 + i, *range(1, 21)] for i in range(10)]
    first = engine.expect(np.array([SHARED] * 9 + [0], np.int32))
    requests = [
        a_request(prompt, 4, name=str(i), plan_place=first + i) for i, prompt in enumerate(prompts)
    ]
    found = run_all(engine, requests)
    for i, prompt in enumerate(prompts):
        assert found.tokens[str(i), 0] == fake_answer(prompt, 4, VOCAB)
    assert most_with_rows(runner.steps) == 9


def test_a_prompt_with_rows_is_cut_for_another_answer_that_waits_for_it() -> None:
    """The forks of a plan do not tell of several answers to one prompt."""
    runner = a_runner(30)
    engine, stem = an_engine_with_rows(runner, 30), list(range(SHARED))
    first = engine.expect(np.array([SHARED, SHARED, 0], np.int32))
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=4)
    prompts = [[*stem, 30 + i, *range(1, 25)] for i in range(3)]
    requests = [
        a_request(prompt, name=str(i), sampling=sampling, plan_place=first + i)
        for i, prompt in enumerate(prompts)
    ]
    found = run_all(engine, requests)
    for i, prompt in enumerate(prompts):
        for index in range(2):
            assert found.tokens[str(i), index] == fake_answer(prompt, 4, VOCAB)
    starts = {(o.request_id, o.index): o.num_cached_tokens for o in found.outputs}
    assert sorted(starts.values()) == [0, SHARED, SHARED, 96, 96, 96]


@pytest.mark.parametrize("failing", [2, 3, 5, 9])
def test_rows_are_forgotten_after_a_failed_step(failing: int) -> None:
    runner = a_runner(30)
    engine = an_engine_with_rows(runner, 30, num_rows=16)
    launched = []

    def fail(step: Step) -> None:
        launched.append(step)
        if len(launched) == failing:
            raise RuntimeError("the device")

    runner.at_launch = fail
    check_answers(engine, prompts_of_groups(2, 5, (3, 12)), 20)


@pytest.mark.parametrize("late", [1, 3])
def test_aborted_and_stopped_siblings_give_their_rows_back(late: int) -> None:
    runner = a_runner(30)
    engine = an_engine_with_rows(runner, 30, num_rows=16)
    prompts = prompts_of_groups(1, 6, (3, 9))
    for request in requests_for(prompts, 40):
        engine.submit(request)
    for _ in range(2 + late):
        engine.step()
        engine.check()
    for index in range(3):
        engine.abort(RequestId(str(index)))
    engine.stop(RequestId("3"), 0)
    engine.check()
    run_all(engine, [])
    assert engine._store.states is not None
    assert engine._store.states.num_owned == 0
    check_answers(engine, prompts, 9)


def test_slots_that_folds_need_are_not_given_to_a_sequence_that_can_have_rows() -> None:
    """One slot has the stem's state, two have rows, and the last is for the fold of "long". A turn
    of a session would like to keep its state, but there is none left."""
    bus, preempted = EventBus(), list[SequencePreempted]()
    bus.subscribe(SequencePreempted, preempted.append)
    runner, stem = a_runner(4), list(range(SHARED))
    engine = an_engine_with_rows(runner, 4, num_rows=16, bus=bus)
    run_all(engine, [a_request([*stem, 60, 1], 2, keep_tokens=SHARED)])
    own = {"long": [7, 6, 5, 4, 3], "first": [81], "second": [82], "turn": [83]}
    lengths = {"long": 30, "first": 7, "second": 7, "turn": 6}
    for name, tokens in own.items():
        session = "s" if name == "turn" else None
        engine.submit(a_request([*stem, *tokens], lengths[name], name=name, session=session))
    found = run_all(engine, [])
    for name, tokens in own.items():
        assert found.tokens[name, 0] == fake_answer([*stem, *tokens], lengths[name], VOCAB)
    assert most_with_rows(runner.steps) == 4
    assert num_folds(runner.steps) == 1
    assert not preempted


@pytest.mark.parametrize("has_sessions", [True, False])
@pytest.mark.parametrize("num_states", [100, 10])
def test_turns_of_conversations_have_no_rows(has_sessions: bool, num_states: int) -> None:
    """They begin with one prompt, but nobody shares what a turn continues from."""
    rng, runner = np.random.default_rng(0), a_runner(num_states)
    engine, stem = an_engine_with_rows(runner, num_states, 64), list(range(SHARED))
    said = [[*stem, 90 + i, *rng.integers(0, VOCAB, 20).tolist()] for i in range(6)]
    for turn in range(4):
        num_steps = len(runner.steps)
        requests = [
            a_request(said[i], 6, name=f"{turn}-{i}", session=f"s{i}" if has_sessions else None)
            for i in range(6)
        ]
        found = run_all(engine, requests)
        for i in range(6):
            answer = found.tokens[f"{turn}-{i}", 0]
            assert answer == fake_answer(said[i], 6, VOCAB)
            said[i] += answer + rng.integers(0, VOCAB, 20).tolist()
        is_shared = turn == 0 and not has_sessions
        assert num_with_rows(runner.steps[num_steps:]) == (5 if is_shared else 0)


def test_reads_of_states_are_counted() -> None:
    """Decodes: three siblings of state 3 and one of 5, a fold of 30 rows, one without rows. Then a
    prompt with rows, and one that begins with its first token."""
    reads, writes = np.array([(3, 3, 3, 5, 3, 7, 3, -1), (-1, -1, -1, -1, 8, 7, -1, 9)], np.int32)
    rows, counts = np.array([(0, 1, 2, 3, 4, -1, 5, -1), (4, 0, 9, 2, 30, 0, 0, 0)], np.int32)
    ends = np.arange(9, dtype=np.int32)
    use = StateUse(reads, ends, writes, ends, rows, counts)
    assert use.count_reads(num_decodes=6) == (5, 2, 30)
    assert StateUse(reads, ends, writes, ends).count_reads(6) == (7, 0, 0)


def test_counters_say_what_siblings_saved() -> None:
    """The last of eight prompts starts in the step of the first decodes of the others."""
    bus = EventBus()
    counters, runner = Counters().attach(bus), a_runner(100)
    engine = an_engine_with_rows(runner, 100, bus=bus)
    check_answers(engine, prompts_of_groups(1, 8, (5, 12)), 30)
    uses = [(step.states, step.num_decodes) for step in runner.steps]
    reads = sum(int((use.reads >= 0).sum()) for use, _ in uses if use is not None)
    assert counters.states_read + counters.states_saved == reads
    assert counters.states_saved > 6 * 15  # of seven siblings, six; an own state comes later
    assert counters.rows_folded == 7 * 32 - num_folds(runner.steps)


@pytest.mark.parametrize(("num_states", "num_short"), [(6, 2), (6, 1), (5, 1)])
def test_a_turn_leaves_folds_the_slots_that_they_need(num_states: int, num_short: int) -> None:
    """Three slots have what siblings read and keep. One has the state from which a turn continues,
    and would read it for as long as it had rows. Two siblings fold while the others run."""
    bus, preempted = EventBus(), list[SequencePreempted]()
    bus.subscribe(SequencePreempted, preempted.append)
    runner, stem = a_runner(num_states), list(range(4 * PAGE))
    engine = an_engine_with_rows(runner, num_states, num_rows=16, bus=bus)
    run_all(engine, [a_request([*stem, 60, 1], 2, keep_tokens=4 * PAGE)])
    engine.pin("stem", [np.array(stem, np.int32)])
    said = [*range(90, 0, -1)]
    said += run_all(engine, [a_request(said, 3, name="turn", session="s")]).tokens["turn", 0]
    engine.pin("said", [np.array(said, np.int32)])
    asked = {f"long {i}": ([*stem, 90 + i, *range(8)], 30) for i in range(2)}
    asked |= {f"short {i}": ([*stem, 80 + i], 14) for i in range(num_short)}
    for name, (prompt, length) in asked.items():
        engine.submit(a_request(prompt, length, name=name))
    collector = Collector()
    collector.add(engine.step())
    assert most_with_rows(runner.steps[-1:]) == 2 + num_short
    asked["next"] = [*said, 5], 9
    engine.submit(a_request(*asked["next"], name="next", session="s"))
    while engine.has_work:
        collector.add(engine.step())
        engine.check()
    assert not preempted
    for name, (prompt, length) in asked.items():
        assert collector.tokens[name, 0] == fake_answer(prompt, length, VOCAB)


def test_a_prompt_with_rows_is_not_cut_if_that_takes_the_slot_of_a_fold() -> None:
    """Three of five slots have what three siblings read and keep, and two of these will fold. The
    first of two answers has rows because there is no slot, and the second would like its state."""
    bus, preempted = EventBus(), list[SequencePreempted]()
    bus.subscribe(SequencePreempted, preempted.append)
    runner, stem = a_runner(5), list(range(4 * PAGE))
    engine = an_engine_with_rows(runner, 5, num_rows=32, bus=bus)
    run_all(engine, [a_request([*stem, 60, 1], 2, keep_tokens=4 * PAGE)])
    asked = {f"long {i}": ([*stem, 90 + i, *range(24)], 30) for i in range(2)}
    asked["short"] = [*stem, 80], 30
    collector = Collector()
    for name, (prompt, length) in asked.items():
        engine.submit(a_request(prompt, length, name=name))
    collector.add(engine.step())
    assert most_with_rows(runner.steps[-1:]) == 3
    asked["two"] = [*stem, 70, *range(20)], 11
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=11)
    engine.submit(a_request(asked["two"][0], name="two", sampling=sampling))
    while engine.has_work:
        collector.add(engine.step())
        engine.check()
    assert not preempted
    for (name, _), tokens in collector.tokens.items():
        assert tokens == fake_answer(*asked[name], VOCAB)
