"""What would be wrong in silence with states.

FakeRunner asserts that a state is read at exactly its position, and holds exactly the sequence's
tokens."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.request import (
    FinishReason,
    Overflow,
    Request,
    SamplingParams,
    Scoring,
)
from mainstem.core.step import StateUse, Step
from mainstem.engine.engine import Engine
from mainstem.runner.recurrence import DecodeStates
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import fake_answer, fake_logprob
from tests.kv.tiered import Tiered, a_tiered_engine

PAGE = 4
RNG = np.random.default_rng(8)
PROMPT = RNG.integers(0, VOCAB, 37).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def a_hybrid(*, can_overlap: bool = True) -> Tiered:
    return a_tiered_engine(num_pages=200, num_slots=400, num_states=24, can_overlap=can_overlap)


def on_device() -> Engine:
    return an_engine(200, PAGE, can_overlap=True, num_states=24)


def start_of(engine: Engine, prompt: list[int]) -> int:
    """Check the answer to a prompt; returns where it started."""
    found = run_all(engine, [a_request(prompt, name="next", sampling=GREEDY)])
    assert found.tokens["next", 0] == fake_answer(prompt, 6, VOCAB)
    return found.outputs[0].num_cached_tokens


@pytest.mark.parametrize("length", range(17, 21))
@pytest.mark.parametrize("late", [1, 2, 3])
def test_tokens_after_a_stop_string_are_in_no_state_that_is_found(length: int, late: int) -> None:
    """The caller stops an answer some tokens late. The next turn starts from the last page before
    the stop, or, if the answer ran over the page's end, from the prompt's last page."""
    engine = a_hybrid().engine
    sampling = SamplingParams(temperature=0.0, max_tokens=60, stop="x")
    engine.submit(a_request(PROMPT, name="first", sampling=sampling))
    collector = Collector()
    while len(collector.tokens.get(("first", 0), [])) < length + late:
        collector.add(engine.step())
    engine.stop(RequestId("first"), 0)
    run_all(engine, [])
    said = PROMPT + fake_answer(PROMPT, length, VOCAB)
    start = start_of(engine, [*said, (fake_answer(said, 1, VOCAB)[0] + 1) % VOCAB, 1, 2])
    num_computed = len(said) + late - 1  # the last token that was seen is in no page yet
    if late == 1:
        assert start == len(said)
    elif (num_computed - 1) // PAGE * PAGE <= len(said):
        assert start == len(said) // PAGE * PAGE
    else:
        assert start == 36


@pytest.mark.parametrize("failing", range(1, 14))
def test_a_failed_step_spoils_states(failing: int) -> None:
    """Its sequences start again, from the tiers or from the start; the answers are right."""
    tiered = a_hybrid()
    engine, runner = tiered.engine, tiered.runner
    start_of(engine, PROMPT)
    tiered.store.flush()
    launched: list[Step] = []

    def fail(step: Step) -> None:
        launched.append(step)
        if len(launched) == failing:
            assert step.states is not None
            for slot in step.states.writes.tolist():  # the step may have written half of them
                runner.set_state(slot, [-7])
            raise RuntimeError("the device failed")

    runner.at_launch = fail
    prompts = [[*PROMPT, 1], [*PROMPT[:30], 5, 6], PROMPT[:20], [*PROMPT, 3, 4, 5]]
    found = run_all(engine, [a_request(p, name=str(i), sampling=GREEDY)
                             for i, p in enumerate(prompts)])  # fmt: skip
    for index, prompt in enumerate(prompts):
        assert found.tokens[str(index), 0] == fake_answer(prompt, 6, VOCAB)
        assert found.reasons[str(index), 0] is FinishReason.LENGTH
    runner.at_launch = None
    assert start_of(engine, [*PROMPT, 9, 9]) >= 36


@pytest.mark.parametrize("make", [on_device, lambda: a_hybrid().engine])
def test_prompt_logprobs_and_scores_start_where_a_state_is(make: Callable[[], Engine]) -> None:
    engine = make()
    start_of(engine, PROMPT)
    echoed = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for known in (0, 1):  # the second request finds the logprobs of the first
        longer = [*PROMPT, *[known] * 9]
        found = run_all(engine, [a_request(longer, name="echo", sampling=echoed)])
        (output,) = [each for each in found.outputs if each.prompt_logprobs is not None]
        assert output.prompt_logprobs is not None
        wanted = [fake_logprob(longer[:i], longer[i], 1) for i in range(1, len(longer))]
        assert list(output.prompt_logprobs[1:]) == wanted
    context = [*PROMPT, 7]
    for choice in ([1, 2], [3, 4]):
        request = Request(
            RequestId("score"),
            np.array([*context, choice[0]], np.int32),
            SamplingParams(temperature=0.0, max_tokens=1),
            scoring=Scoring(len(context), (choice[1],)),
        )
        found = run_all(engine, [request])
        (output,) = [each for each in found.outputs if each.prompt_logprobs is not None]
        assert output.prompt_logprobs is not None
        assert list(output.prompt_logprobs) == [
            fake_logprob(context, choice[0], 0),
            fake_logprob([*context, choice[0]], choice[1], 0),
        ]
        assert output.num_cached_tokens >= 36


def test_a_truncated_conversation_is_computed_again() -> None:
    """Tokens cannot be taken out of a state: `kv` computes what is left, `important` is refused."""
    engine = an_engine(200, PAGE, can_overlap=True, max_model_len=64, num_states=24)
    start_of(engine, PROMPT)
    said = PROMPT + fake_answer(PROMPT, 6, VOCAB) + RNG.integers(0, VOCAB, 30).tolist()
    request = a_request(said, name="turn", sampling=GREEDY, session="s", overflow=Overflow.KV)
    kept, cut = engine._scheduler._intake._truncator.fit(request)
    assert cut is not None
    found = run_all(engine, [request])
    assert found.tokens["turn", 0] == fake_answer(kept.prompt_ids.tolist(), 6, VOCAB)
    assert found.outputs[0].num_cached_tokens <= PAGE
    important = a_request(said, session="s", sampling=GREEDY, overflow=Overflow.IMPORTANT)
    with pytest.raises(InvalidRequest, match="recurrent layers"):
        engine.submit(important)


def test_a_state_is_read_in_the_step_after_the_one_that_writes_it() -> None:
    """Pages may be read in the step that fills them."""
    tiered = a_hybrid()
    prompts = [[*PROMPT, 1, 2, 3], [*PROMPT, 4, 5, 6]]
    run_all(tiered.engine, [a_request(p, sampling=GREEDY) for p in prompts])
    written: dict[int, int] = {}
    num_read = 0
    for number, step in enumerate(tiered.runner.steps):
        assert step.states is not None
        for slot in step.states.reads[step.states.reads >= 0].tolist():
            assert written[slot] < number
            num_read += 1
        written |= dict.fromkeys(step.states.writes.tolist(), number)
    assert num_read > 2


def test_padding_of_graphs_uses_the_slot_after_the_last() -> None:
    slots = DecodeStates(8, 24, torch.device("cpu"))
    empty = np.empty(0, np.int32)
    use = StateUse(np.array([3, 5], np.int32), empty, np.array([3, 6], np.int32), empty)
    others = run_all  # any object: only the states of the step are read
    step = type("OnlyStates", (), {"states": use, "others": others})()
    slots.send(step, 4)
    segments = slots.segments(4)
    assert segments.reads.tolist() == [3, 5, 24, 24]
    assert segments.writes.tolist() == [3, 6, 24, 24]
