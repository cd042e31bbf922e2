"""The token budget of steps shrinks at once and grows back slowly; it also keeps to a time."""

import pytest

from mainstem.core.config import SchedConfig
from mainstem.sched.step_size import SMALLEST_PART_TOKENS, UNKNOWN_PART_TOKENS, StepSize
from tests.builders import VOCAB, Collector, a_request, an_engine
from tests.fakes import FakeRunner, fake_answer

DECODE_S, TOKEN_S = 0.1, 0.003  # of a small model on two cores


def good_steps_until_larger(size: StepSize) -> int:
    for count in range(1, 1000):
        if size.note_good():
            return count
    raise AssertionError("steps never grow")


def test_the_wait_doubles_once_for_each_growth_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mainstem.sched.step_size.GROW_STEPS", 4)
    size = StepSize(1024, 1024)
    assert size.shrink()
    assert size.shrink()
    assert size.tokens == 256
    assert good_steps_until_larger(size) == 4
    assert size.shrink()  # 512 did not fit
    assert size.shrink()  # nor did 256: nothing has grown since
    assert size.tokens == 128
    assert good_steps_until_larger(size) == 8


def long_steps(size: StepSize, num_steps: int, token_s: float = TOKEN_S) -> list[float]:
    """The seconds of steps of a long prompt beside an answer."""
    taken = []
    for _ in range(num_steps):
        tokens = size.prompt_tokens(1, is_awaited=True)
        taken.append(DECODE_S + tokens * token_s)
        size.note_time(tokens, taken[-1])
    return taken


def a_limited_size(step_s: float = 0.25) -> StepSize:
    size = StepSize(512, None, step_s)
    size.note_time(200, DECODE_S + 200 * TOKEN_S)  # the first prompt
    for _ in range(20):
        size.note_time(0, DECODE_S)
    return size


def test_prompts_get_the_time_that_is_left_beside_answers() -> None:
    taken = long_steps(a_limited_size(), 30)
    assert max(taken) <= 0.25
    assert min(taken[10:]) >= 0.25 - 17 * TOKEN_S


def test_steps_that_become_slower_become_smaller_at_once() -> None:
    """Tokens late in a long prompt take longer, since they see more keys."""
    size = a_limited_size()
    taken = [long_steps(size, 1, TOKEN_S * (1 + number / 80))[0] for number in range(40)]
    assert max(taken) < 0.27


def test_prompts_advance_however_slow_decodes_are() -> None:
    size = a_limited_size(step_s=0.01)
    assert size.prompt_tokens(1, is_awaited=True) == SMALLEST_PART_TOKENS


def test_nobody_waits_so_prompts_get_the_whole_step() -> None:
    assert a_limited_size().prompt_tokens(0) == 512
    unlimited = StepSize(512, None)
    unlimited.note_time(200, 60.0)
    assert unlimited.prompt_tokens(1, is_awaited=True) == 511


def test_a_device_of_unknown_speed_gets_small_prompts_first() -> None:
    size = StepSize(4096, None, 0.25)
    assert size.prompt_tokens(1, is_awaited=True) == UNKNOWN_PART_TOKENS
    size = StepSize(16, None, 0.25)
    assert size.prompt_tokens(0, is_awaited=True) == 16


def test_a_device_that_takes_no_time_gets_whole_steps() -> None:
    size = StepSize(512, None, 0.25)
    for _ in range(3000):
        size.note_time(64, 1e-9)
        size.note_time(0, 1e-9)
    assert size.prompt_tokens(0, is_awaited=True) == 512


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("num_states", [0, 64])
def test_a_long_prompt_does_not_stop_a_stream(num_states: int, can_overlap: bool) -> None:
    """Issue 51: with 512 tokens a step, a prompt of another client stopped all streams for
    seconds."""
    runner = FakeRunner(512, 4, VOCAB, can_overlap=can_overlap, num_states=num_states)
    runner.seconds = lambda step: DECODE_S + TOKEN_S * (step.num_tokens - step.num_decodes)
    config = SchedConfig(step_ms=250.0)
    engine = an_engine(512, config=config, runner=runner, num_states=num_states)
    collector = Collector()
    stream, prompt = a_request([1, 2, 3], max_tokens=60), list(range(90)) * 8
    engine.submit(stream)
    for _ in range(16):
        collector.add(engine.step())
    engine.submit(a_request(prompt, max_tokens=2, name="long"))
    while engine.has_work:
        collector.add(engine.step())
        engine.check()
    shared = [step for step in runner.steps if step.num_decodes]
    assert max(runner.seconds(step) for step in shared) <= 0.25
    sizes = [step.num_tokens - step.num_decodes for step in shared if step.num_decodes]
    assert max(sizes) > SMALLEST_PART_TOKENS
    assert collector.tokens["long", 0] == fake_answer(prompt, 2, VOCAB)
    assert collector.tokens[stream.request_id, 0] == fake_answer([1, 2, 3], 60, VOCAB)


def test_without_a_limit_only_tokens_count() -> None:
    runner = FakeRunner(512, 4, VOCAB)
    runner.seconds = lambda step: 60.0
    engine = an_engine(512, runner=runner)
    engine.submit(a_request([1, 2, 3], max_tokens=4))
    engine.step()
    engine.submit(a_request(list(range(90)) * 8, max_tokens=2))
    engine.step()
    assert runner.steps[-1].num_tokens == 512
