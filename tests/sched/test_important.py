"""Truncation by attention: which pages are dropped, and the sequence that weighs them."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus, SequenceAdmitted, SequenceFinished
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.metrics import Counters
from mainstem.core.request import FinishReason, Overflow, Request, SamplingParams
from mainstem.core.step import Step
from mainstem.sched import important
from mainstem.sched.cut import PromptCut, sink_only
from mainstem.sched.truncation import Truncator
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer, fake_masses
from tests.kv.tiered import a_tiered_engine
from tests.sched.test_truncation import PAGE, WINDOW, Chat, a_truncator, tokens


def kept_ids(truncator: Truncator, request: Request) -> list[int]:
    """The part of a prompt that a FakeRunner's attention keeps."""
    kept, truncation = truncator.fit(request)
    if truncation is not None and truncation.weighing is not None:
        weighing = truncation.weighing
        weighing.add(fake_masses(weighing.prompt_ids, weighing.num_queries, truncator._page_size))
        truncator.settle(weighing)
        length = len(kept.prompt_ids)
        kept, truncation = truncator.fit(request)
        assert truncation is not None
        assert truncation.weighing is None
        assert len(kept.prompt_ids) == length, "the cut must have the length that was announced"
    return [int(token) for token in kept.prompt_ids]


def important_request(prompt: list[int], **given: object) -> Request:
    return a_request(prompt, session="s", overflow=Overflow.IMPORTANT, **given)  # type: ignore[arg-type]


# --- cuts -----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(sink=st.integers(0, 3), drops=st.lists(st.sets(st.integers(0, 12), min_size=1), max_size=4))
def test_repeated_cuts_drop_exactly_the_given_pages(sink: int, drops: list[set[int]]) -> None:
    cut, left = sink_only(sink), list(range(80))
    assert cut.is_whole
    for numbers in drops:
        gone = {sink + number for number in numbers}
        cut = cut.without(gone)
        left = [page for number, page in enumerate(left) if number not in gone]
        assert not cut.is_whole
    assert [cut.place_before(number) for number in range(len(left))] == left
    places = {page: number for number, page in enumerate(left)}
    assert [cut.place_after(page) for page in range(80)] == [places.get(page) for page in range(80)]
    ids = np.arange(160, dtype=np.int32)
    assert cut.token_ids(ids, 2).tolist() == [2 * page + at for page in left for at in (0, 1)]


def test_the_pages_with_the_least_attention_are_dropped() -> None:
    truncator = a_truncator(window=80)
    request = important_request(list(range(76)), max_tokens=10)
    plain, truncation = truncator.fit(request)
    assert truncation is not None
    weighing = truncation.weighing
    assert weighing is not None
    assert weighing.num_dropped == (80 - PAGE) // 2 // PAGE
    masses = np.ones(19, np.float32)
    masses[[2, 5]] = 3.0
    masses[[16, 17, 18]] = 0.0  # recent pages stay whatever their attention is
    weighing.add(masses)
    truncator.settle(weighing)
    kept, truncation = truncator.fit(request)
    assert truncation is not None
    assert truncation.cut == PromptCut((0, 2, 5), 1, 12)
    assert len(kept.prompt_ids) == len(plain.prompt_ids)
    # a later turn drops the same pages
    later, _ = truncator.fit(important_request(list(range(80)), max_tokens=10))
    assert later.prompt_ids[: len(kept.prompt_ids)].tolist() == kept.prompt_ids.tolist()


def test_the_weighing_prompt_ends_with_the_last_tokens_and_fits_the_window() -> None:
    truncator = a_truncator(window=1000)
    for length in (990, 1000, 1300):
        _, truncation = truncator.fit(important_request(list(range(length)), max_tokens=100))
        assert truncation is not None
        weighing = truncation.weighing
        assert weighing is not None
        ids = weighing.prompt_ids.tolist()
        assert weighing.num_queries == important.QUERY_TOKENS
        assert ids[-64:] == list(range(length - 64, length))
        assert ids[: weighing.num_reused] == list(range(weighing.num_reused))
        assert len(ids) == min(length, 999)


def test_choices_of_other_sessions_salts_and_pasts_are_not_used() -> None:
    truncator = a_truncator(window=80)
    prompt = list(range(76))
    kept_ids(truncator, important_request(prompt, max_tokens=10))
    for other in (
        replace(important_request(prompt, max_tokens=10), session=SessionId("t")),
        replace(important_request(prompt, max_tokens=10), salt=b"x"),
        important_request([*prompt[:10], 99, *prompt[11:]], max_tokens=10),
    ):
        _, truncation = truncator.fit(other)
        assert truncation is not None
        assert truncation.weighing is not None


def test_a_conversation_continued_from_an_earlier_turn_is_weighed_again() -> None:
    truncator = a_truncator(window=80)
    _, truncation = truncator.fit(important_request(list(range(79)), max_tokens=10))
    assert truncation is not None
    weighing = truncation.weighing
    assert weighing is not None
    truncator._choices.keep(weighing.name, PromptCut((0,), 1, 30))
    kept_ids(truncator, important_request(list(range(79)), max_tokens=10))  # weighed once more
    _, truncation = truncator.fit(important_request(list(range(79)), max_tokens=10))
    assert truncation is not None
    assert truncation.weighing is None


def test_the_first_of_two_turns_makes_the_choice() -> None:
    truncator = a_truncator(window=80)
    requests = [important_request(list(range(length)), max_tokens=10) for length in (76, 79)]
    cuts = [truncator.fit(request)[1] for request in requests]
    for truncation, heavy in zip(cuts, (2, 5), strict=True):
        assert truncation is not None
        assert truncation.weighing is not None
        masses = np.ones(20, np.float32)
        masses[heavy] = 3.0
        truncation.weighing.add(masses)
        truncator.settle(truncation.weighing)
    for request in requests:
        _, truncation = truncator.fit(request)
        assert truncation is not None
        assert truncation.cut.head == (0, 2)


def test_the_least_recently_used_choices_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(important, "MAX_CHOICES", 3)
    choices, cut = important.Choices(), sink_only(1)
    for name in (b"a", b"b", b"c"):
        choices.keep(name, cut)
    assert choices.chosen(b"a", 9) == cut
    choices.keep(b"d", cut)
    assert [choices.chosen(name, 9) is None for name in (b"a", b"b", b"c", b"d")] == [
        False, True, False, False,
    ]  # fmt: skip


def test_important_is_refused_without_a_session() -> None:
    with pytest.raises(InvalidRequest, match="important needs a session"):
        a_request([1], overflow=Overflow.IMPORTANT)


# --- sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [WINDOW, 80])
@pytest.mark.parametrize(
    ("ratio", "share"),
    [(0.2, Share.READS), (0.5, Share.READS), (0.8, Share.READS), (0.5, Share.NONE)],
)
def test_every_answer_of_a_long_conversation_is_that_of_the_kept_tokens(
    window: int, ratio: float, share: Share
) -> None:
    config = SchedConfig(truncation_ratio=ratio, share=share)
    engine = an_engine(128, PAGE, config, max_model_len=window)
    truncator = Truncator(config, window, PAGE)
    chat = Chat(engine, "s", Overflow.IMPORTANT)
    num_chosen = 0
    for turn in range(30):
        new = tokens(1 + turn % 9, seed=turn)
        request = important_request([*chat.said, *new], max_tokens=3)
        wanted = fake_answer(kept_ids(truncator, request), 3, VOCAB)
        _, truncation = truncator.fit(request)
        num_chosen += truncation is not None and len(truncation.cut.head) > 1
        assert chat.say(new, max_tokens=3) == wanted
    engine.check()
    assert num_chosen or ratio == 0.8, "every cut was a plain one"


def test_weighing_computes_few_tokens_and_later_turns_do_not_weigh_again() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    admitted: list[SequenceAdmitted] = []
    ended: list[SequenceFinished] = []
    bus.subscribe(SequenceAdmitted, admitted.append)
    bus.subscribe(SequenceFinished, ended.append)
    engine = an_engine(256, PAGE, max_model_len=400, bus=bus)
    steps: list[Step] = engine._runner.steps  # type: ignore[attr-defined]
    chat = Chat(engine, "s", Overflow.IMPORTANT)
    chat.say(tokens(380), max_tokens=8)
    before = counters.computed_tokens
    chat.say(tokens(20, seed=1), max_tokens=8)
    assert sum(len(step.weighings) for step in steps) == 1
    computed = counters.computed_tokens - before
    assert computed <= important.QUERY_TOKENS + 20 + 3 * PAGE, (
        "more than the queries and the new turn were computed"
    )
    assert counters.moved_pages > 0
    chat.say(tokens(20, seed=2), max_tokens=8)
    assert sum(len(step.weighings) for step in steps) == 1, "pages were weighed again"
    assert len(admitted) == len(ended) == 3, "a sequence that weighs counts as an answer"


@pytest.mark.parametrize("chunk_tokens", [3, 7, 50])
def test_queries_of_several_steps_add_up(chunk_tokens: int) -> None:
    config = SchedConfig(chunk_tokens=chunk_tokens)
    engine = an_engine(128, PAGE, config, max_model_len=100)
    truncator = Truncator(config, 100, PAGE)
    prompt = tokens(130)
    request = important_request(prompt, max_tokens=4)
    wanted = fake_answer(kept_ids(truncator, request), 4, VOCAB)
    assert list(run_all(engine, [request]).tokens.values()) == [wanted]


@pytest.mark.parametrize("can_overlap", [False, True])
def test_pages_are_not_weighed_for_stopped_answers(can_overlap: bool) -> None:
    config = SchedConfig(chunk_tokens=8)
    engine = an_engine(128, PAGE, config, can_overlap, max_model_len=100)
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=4)
    engine.submit(important_request(tokens(130), name="a", sampling=sampling))
    engine.step()
    engine.stop(RequestId("a"), 0)
    assert engine.step(), "the other answer still needs the weights"
    engine.stop(RequestId("a"), 1)
    outputs = [*engine.step(), *engine.step()]
    assert [output.finish_reason for output in outputs] == [FinishReason.STOP]
    assert not engine.has_work
    engine.check()


def test_several_answers_wait_for_one_weighing() -> None:
    engine = an_engine(128, PAGE, max_model_len=100)
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=4)
    request = important_request(tokens(130), sampling=sampling)
    wanted = fake_answer(kept_ids(a_truncator(100), request), 4, VOCAB)
    got = run_all(engine, [request])
    assert sorted(index for _, index in got.tokens) == [0, 1, 2]
    assert list(got.tokens.values()) == [wanted] * 3
    steps: list[Step] = engine._runner.steps  # type: ignore[attr-defined]
    assert sum(len(step.weighings) for step in steps) == 1


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_aborted_request_leaves_nothing(num_steps: int) -> None:
    engine = an_engine(128, PAGE, SchedConfig(chunk_tokens=40), max_model_len=100)
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=4)
    request = important_request(tokens(130), sampling=sampling)
    engine.submit(request)
    for _ in range(num_steps):
        assert not engine.step()
    engine.abort(request.request_id)
    got = Collector()
    while engine.has_work:
        got.add(engine.step())
    assert {each.finish_reason for each in got.outputs} == {FinishReason.ABORT}
    assert sorted(each.index for each in got.outputs) == [0, 1]
    engine.check()


def test_weighing_is_repeated_after_a_failed_step() -> None:
    runner = FakeRunner(128, PAGE)
    engine = an_engine(128, PAGE, SchedConfig(chunk_tokens=10), max_model_len=100, runner=runner)
    request = important_request(tokens(130), max_tokens=4)
    wanted = fake_answer(kept_ids(a_truncator(100), request), 4, VOCAB)
    left = [1]

    def fail(step: Step) -> None:
        if step.weighings and left[0]:
            left[0] -= 1
            raise RuntimeError("the device is gone for a moment")

    runner.at_launch = fail
    assert list(run_all(engine, [request]).tokens.values()) == [wanted]
    assert left == [0]
    engine.check()


def test_if_weighing_always_fails_only_its_request_fails() -> None:
    runner = FakeRunner(128, PAGE)
    engine = an_engine(128, PAGE, max_model_len=100, runner=runner)

    def fail(step: Step) -> None:
        if step.weighings:
            raise RuntimeError("no attention")

    runner.at_launch = fail
    good = a_request(tokens(9, seed=3), max_tokens=3)
    got = run_all(engine, [important_request(tokens(130), max_tokens=4), good])
    ends = {each.request_id: each.finish_reason for each in got.outputs if each.finish_reason}
    assert set(ends.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert ends[good.request_id] is FinishReason.LENGTH
    engine.check()


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_overlap_over_small_tiers_are_right(seed: int) -> None:
    """There are few pages, so pages loaded for one session are evicted for the next."""
    rng = Random(seed)
    tiered = a_tiered_engine(
        rng.choice([26, 40]), PAGE, 30, None,
        can_overlap=rng.random() < 0.5,
        preload=rng.choice(["auto", "all", "0"]),
        max_model_len=60,
        chunk_tokens=rng.choice([8, 64]),
    )  # fmt: skip
    truncator = Truncator(SchedConfig(), 60, PAGE)
    said: dict[str, list[int]] = {}
    for turn in range(20):
        names = rng.sample("abc", rng.randint(1, 3))
        wanted: dict[str, list[int]] = {}
        requests = []
        for name in names:
            prompt = [
                *said.get(name, ()),
                *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))),
            ]
            request = replace(
                important_request(prompt, name=f"{name}{turn}", max_tokens=3),
                session=SessionId(name),
            )
            wanted[f"{name}{turn}"] = fake_answer(kept_ids(truncator, request), 3, VOCAB)
            said[name] = prompt + wanted[f"{name}{turn}"]
            requests.append(request)
        got = run_all(tiered.engine, requests)
        assert {name: answer for (name, _), answer in got.tokens.items()} == wanted
    tiered.engine.check()
    tiered.engine.close()
