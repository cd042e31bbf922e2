"""Scores and prompt logprobs over FakeRunner: the same whatever is cached, and computed once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Delivery, Output, Request, SamplingParams, Scoring, TokenLogprobs
from mainstem.engine.engine import Engine
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import fake_logprob
from tests.kv.mirror import Mirror, Recorder

RNG = np.random.default_rng(7)
CONTEXT = RNG.integers(0, VOCAB, 37).tolist()
CHOICES = [RNG.integers(0, VOCAB, 3).tolist() for _ in range(5)]
SCORED = SamplingParams(temperature=0.0, max_tokens=1)
ECHOED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


def scored(
    context: Sequence[int], head: Sequence[int], next_ids: tuple[int, ...], name: str
) -> Request:
    return Request(
        RequestId(name),
        np.array([*context, *head], np.int32),
        SCORED,
        delivery=Delivery.AT_END,
        scoring=Scoring(len(context), next_ids),
    )


def scores_of(context: list[int], head: list[int], next_ids: tuple[int, ...]) -> list[object]:
    known = [*context, *head]
    inner = [fake_logprob(known[:i], known[i], 0) for i in range(len(context), len(known))]
    return [*inner, *(fake_logprob(known, each, 0) for each in next_ids)]


def echo_of(prompt: list[int]) -> list[TokenLogprobs | None]:
    return [None, *(fake_logprob(prompt[:i], prompt[i], 1) for i in range(1, len(prompt)))]


def told(outputs: Sequence[Output]) -> dict[str, list[TokenLogprobs | None]]:
    found = [(each.request_id, each.prompt_logprobs) for each in outputs]
    return {str(name): list(each) for name, each in found if each is not None}


def counted(
    num_pages: int, page_size: int, config: SchedConfig | None = None, can_overlap: bool = False
) -> tuple[Engine, Counters]:
    bus = EventBus()
    return an_engine(num_pages, page_size, config, can_overlap, bus=bus), Counters().attach(bus)


def score_all(engine: Engine, context: list[int], run: int = 0) -> None:
    """Score CHOICES, each with two possible last tokens, and compare with the exact scores."""
    asked = [(choice[:-1], (choice[-1], 5)) for choice in CHOICES]
    requests = [scored(context, *each, f"{run}-{i}") for i, each in enumerate(asked)]
    got = told(run_all(engine, requests).outputs)
    for i, each in enumerate(asked):
        assert got[f"{run}-{i}"] == scores_of(context, *each)


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize(("page_size", "chunk_tokens"), [(1, 16), (4, 3), (4, 512), (16, 512)])
@pytest.mark.parametrize("num_context", [1, 32, 37])
def test_scores_do_not_depend_on_settings(
    can_overlap: bool, share: Share, page_size: int, chunk_tokens: int, num_context: int
) -> None:
    config = SchedConfig(chunk_tokens=chunk_tokens, share=share)
    engine = an_engine(600 // page_size, page_size, config, can_overlap)
    score_all(engine, CONTEXT[:num_context])  # cold
    score_all(engine, CONTEXT[:num_context], run=1)  # warm


@pytest.mark.parametrize("num_context", [32, 33, 37])  # the context ends with a page, or inside one
def test_a_context_is_computed_once_for_all_its_choices(num_context: int) -> None:
    engine, counters = counted(200, 16)
    score_all(engine, CONTEXT[:num_context])
    # 3 tokens for each choice: the context's last, whose logits are needed, and all but the
    # choice's last
    assert counters.computed_tokens == num_context - 1 + len(CHOICES) * 3
    score_all(engine, CONTEXT[:num_context], run=1)
    assert counters.computed_tokens == num_context - 1 + 2 * len(CHOICES) * 3


def test_to_score_labels_of_one_token_only_the_context_is_computed() -> None:
    engine, counters = counted(200, 16)
    got = told(run_all(engine, [scored(CONTEXT, [], (1, 2, 3), "a")]).outputs)
    assert got["a"] == scores_of(CONTEXT, [], (1, 2, 3))
    assert counters.computed_tokens == len(CONTEXT)


def test_scores_are_complete_after_preemption() -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    engine = an_engine(14, 4, SchedConfig(chunk_tokens=4), bus=bus)
    first = [a_request(CONTEXT[i : i + 9], 25, expected_tokens=1) for i in range(4)]
    asked = scored(CONTEXT[:20], CHOICES[0], (9,), "a")
    got = told(run_all(engine, [*first, asked, a_request(CONTEXT[9:18], 25)]).outputs)
    assert preempted
    assert got["a"] == scores_of(CONTEXT[:20], CHOICES[0], (9,))


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("num_context", [32, 37])
def test_prompt_logprobs_are_cached_with_pages(can_overlap: bool, num_context: int) -> None:
    """Requests like those of lm-evaluation-harness: context and choice, each with all logprobs."""
    engine, counters = counted(200, 16, can_overlap=can_overlap)
    prompts = [CONTEXT[:num_context] + choice for choice in CHOICES]
    for place, prompt in enumerate([*prompts, *prompts]):
        got = run_all(engine, [a_request(prompt, sampling=ECHOED, name=str(place))])
        assert told(got.outputs)[str(place)] == echo_of(prompt)
    # first run: the token before a choice, and the choice; second run: the last token of each
    # prompt
    most = num_context - 1 + len(CHOICES) * 4 + len(CHOICES)
    assert counters.computed_tokens <= most


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("chunk_tokens", [8, 512])
def test_prompt_logprobs_of_a_shared_context_are_waited_for(
    can_overlap: bool, chunk_tokens: int
) -> None:
    engine, counters = counted(200, 4, SchedConfig(chunk_tokens=chunk_tokens), can_overlap)
    prompts = [CONTEXT + choice for choice in CHOICES]
    requests = [a_request(p, sampling=ECHOED, name=str(i)) for i, p in enumerate(prompts)]
    got = told(run_all(engine, requests).outputs)
    assert got == {str(i): echo_of(prompt) for i, prompt in enumerate(prompts)}
    assert counters.computed_tokens <= len(CONTEXT) - 1 + len(CHOICES) * 4


def test_pages_without_logprobs_are_computed_again() -> None:
    engine, counters = counted(200, 4)
    run_all(engine, [a_request(CONTEXT, 8)])
    before = counters.computed_tokens
    got = told(run_all(engine, [a_request(CONTEXT, sampling=ECHOED, name="a")]).outputs)
    assert got["a"] == echo_of(CONTEXT)
    assert counters.computed_tokens - before == len(CONTEXT)
    got = told(run_all(engine, [a_request(CONTEXT, sampling=ECHOED, name="a")]).outputs)
    assert got["a"] == echo_of(CONTEXT)
    assert counters.computed_tokens - before == len(CONTEXT) + 1


@pytest.mark.parametrize("seed", range(6))
def test_logprobs_are_right_whatever_else_runs(seed: int) -> None:
    """There are few pages, so that they are evicted and reused; some requests are aborted."""
    rng = np.random.default_rng(seed)
    engine = an_engine(24, 4, SchedConfig(chunk_tokens=int(rng.integers(3, 40))), bool(seed % 2))
    stems = [rng.integers(0, VOCAB, 30).tolist() for _ in range(3)]
    expected: dict[str, list[object]] = {}
    got: list[Output] = []
    for number in range(150):
        stem = stems[rng.integers(3)][: rng.integers(4, 30)]
        head, name = rng.integers(0, 3, rng.integers(1, 5)).tolist(), str(number)
        match rng.integers(4):
            case 0:
                engine.submit(scored(stem, head, (1, 2), name))
                expected[name] = scores_of(stem, head, (1, 2))
            case 1 | 2:
                engine.submit(a_request(stem + head, sampling=ECHOED, name=name))
                expected[name] = [*echo_of(stem + head)]
            case _:
                engine.submit(a_request(stem + head, 6, name=name))
        if rng.integers(8) == 0:
            engine.abort(RequestId(name))
            expected.pop(name, None)
        for _ in range(int(rng.integers(0, 4))):
            got += engine.step()
            engine.check()
    while engine.has_work:
        got += engine.step()
        engine.check()
    found = told(got)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("sampling", "scoring"),
    [
        (SCORED, Scoring(0)),
        (SCORED, Scoring(len(CONTEXT) + 1)),
        (SCORED, Scoring(3, (-1,))),
        (SamplingParams(max_tokens=2), Scoring(3)),
        (ECHOED, Scoring(3)),
    ],
)
def test_impossible_scorings_are_refused(sampling: SamplingParams, scoring: Scoring) -> None:
    with pytest.raises(InvalidRequest, match="scoring"):
        Request(RequestId("a"), np.array(CONTEXT), sampling, scoring=scoring)
    engine = an_engine()
    with pytest.raises(InvalidRequest, match=r"scoring.*vocabulary"):
        engine.submit(scored(CONTEXT, [], (VOCAB,), "b"))


@pytest.mark.parametrize("top", [0, 1, 2])
def test_prompts_with_logprobs_do_not_run_one_by_one(top: int) -> None:
    engine = an_engine(num_pages=512, config=SchedConfig(chunk_tokens=512))
    counters = Counters().attach(engine.bus)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=top, ignore_eos=True)
    shared = list(range(40))
    requests = [a_request([*shared, 50 + n], sampling=sampling) for n in range(16)]
    run_all(engine, requests)
    assert counters.steps <= 6


@pytest.mark.parametrize("ends", ["later", "never"])
def test_no_page_is_reported_before_its_predecessor(ends: str) -> None:
    recorder, mirror = Recorder(bus := EventBus()), Mirror(4)
    engine = an_engine(page_size=4, config=SchedConfig(chunk_tokens=3), bus=bus)
    engine.submit(a_request(CONTEXT[:8], 1, "slow", priority=1))
    engine.step()  # its first page is not full; it waits for the more urgent request
    # this one does not wait for the slow request's two pages
    urgent = scored(CONTEXT[:2], CONTEXT[2:16], (), "urgent")
    engine.submit(replace(urgent, priority=0))
    for number in range(20):
        if number == 2 and ends == "never":
            engine.abort(RequestId("slow"))
        engine.step()
        if (payload := recorder.take()) is not None:
            mirror.apply(payload)
    assert not engine.has_work
    engine.check()
    assert len(mirror.pages["device"]) == (2 if ends == "later" else 4)
