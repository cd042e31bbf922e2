"""The whole control plane over FakeRunner, whose answers reveal any wrong page or position."""

import numpy as np
import pytest

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.metrics import Counters
from mainstem.core.request import Delivery, FinishReason, SamplingParams
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import fake_answer

PREFIX = list(np.random.default_rng(0).integers(0, VOCAB, 37))


def prompts_over(prefix: list[int], count: int, own: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [prefix + rng.integers(0, VOCAB, own + i % 3).tolist() for i in range(count)]


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [3, 16, 512])
def test_answers_do_not_depend_on_settings(
    can_overlap: bool, share: Share, page_size: int, chunk_tokens: int
) -> None:
    prompts = [*prompts_over(PREFIX, 5, 6), PREFIX[:10], PREFIX, PREFIX]
    config = SchedConfig(chunk_tokens=chunk_tokens, share=share)
    engine = an_engine(600 // page_size, page_size, config, can_overlap)
    requests = [a_request(p, max_tokens=9, name=str(i)) for i, p in enumerate(prompts)]
    got = run_all(engine, requests)
    for i, prompt in enumerate(prompts):
        assert got.tokens[str(i), 0] == fake_answer(prompt, 9, VOCAB)
        assert got.reasons[str(i), 0] is FinishReason.LENGTH


@pytest.mark.parametrize("can_overlap", [False, True])
def test_preempted_sequences_give_the_same_answer(can_overlap: bool) -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    engine = an_engine(num_pages=14, page_size=4, can_overlap=can_overlap, bus=bus)
    prompts = prompts_over(PREFIX[:9], 4, 3)
    requests = [
        a_request(p, max_tokens=25, name=str(i), expected_tokens=1) for i, p in enumerate(prompts)
    ]
    got = run_all(engine, requests)
    assert preempted, "the pool should have been too small"
    for i, prompt in enumerate(prompts):
        assert got.tokens[str(i), 0] == fake_answer(prompt, 25, VOCAB)


def test_a_shared_prefix_is_computed_once_even_if_all_requests_arrive_together() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(num_pages=200, page_size=4, config=SchedConfig(chunk_tokens=8), bus=bus)
    prompts = prompts_over(PREFIX[:32], 6, 5)
    run_all(engine, [a_request(p, max_tokens=2) for p in prompts])
    own = sum(len(p) for p in prompts) - 6 * 32
    # own tokens of two prompts may begin alike by chance; these are computed once, too
    assert 32 + own - 5 <= counters.computed_tokens <= 32 + own
    assert counters.cached_tokens >= 5 * 32
    assert counters.key_tokens_read < counters.key_tokens_seen


@pytest.mark.parametrize("can_overlap", [False, True])
def test_a_shared_run_that_ends_inside_a_page_is_computed_once(can_overlap: bool) -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(num_pages=200, page_size=8, bus=bus, can_overlap=can_overlap)
    prompts = [[*PREFIX[:13], 90 + i, 1, 2, 3, 4] for i in range(4)]
    got = run_all(engine, [a_request(p, 3, name=str(i)) for i, p in enumerate(prompts)])
    assert counters.computed_tokens == 13 + 4 * 5
    assert counters.cached_tokens == 3 * 13
    for i, prompt in enumerate(prompts):
        assert got.tokens[str(i), 0] == fake_answer(prompt, 3, VOCAB)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(num_pages=64, page_size=4, bus=bus)
    first = PREFIX[:10]
    answer = run_all(engine, [a_request(first, max_tokens=7, name="a")]).tokens["a", 0]
    run_all(engine, [a_request([*first, *answer, 5, 6, 7], max_tokens=3)])
    assert counters.cached_tokens == 16  # 10 + 7 tokens, of which 16 are computed: 4 full pages


def test_salted_requests_share_nothing() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(bus=bus)
    run_all(engine, [a_request(PREFIX, salt=b"a"), a_request(PREFIX, salt=b"b")])
    assert counters.cached_tokens == 0


def test_stop_tokens_end_the_answer_and_are_delivered() -> None:
    answer = fake_answer(PREFIX, 20, VOCAB)
    stop = answer[6]
    first = answer.index(stop)
    for can_overlap in (False, True):
        engine = an_engine(can_overlap=can_overlap)
        got = run_all(engine, [a_request(PREFIX, 20, name="a", eos_ids=(stop,))])
        assert got.tokens["a", 0] == answer[: first + 1]
        assert got.reasons["a", 0] is FinishReason.STOP


def test_ignore_eos_lets_the_answer_continue() -> None:
    answer = fake_answer(PREFIX, 20, VOCAB)
    stop = answer[3]
    ignoring = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    got = run_all(an_engine(), [a_request(PREFIX, sampling=ignoring, name="a", eos_ids=(stop,))])
    assert got.tokens["a", 0] == answer


def test_n_answers_share_the_prompt() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=4)
    got = run_all(an_engine(bus=bus), [a_request(PREFIX, sampling=sampling, name="a")])
    for index in range(3):
        assert got.tokens["a", index] == fake_answer(PREFIX, 4, VOCAB)
    assert counters.cached_tokens == 2 * 36  # all but the last token


def test_outputs_at_end_come_in_one_piece_with_logprobs() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, prompt_logprobs=0)
    request = a_request(PREFIX, sampling=sampling, delivery=Delivery.AT_END)
    got = run_all(an_engine(config=SchedConfig(chunk_tokens=5)), [request])
    (output,) = got.outputs
    assert len(output.token_ids) == len(output.logprobs) == 5
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [p.token_id for p in output.prompt_logprobs[1:] if p] == PREFIX[1:]


def test_prompt_logprobs_are_complete_after_preemption() -> None:
    bus = EventBus()
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)
    engine = an_engine(num_pages=14, page_size=4, bus=bus)
    sampling = SamplingParams(temperature=0.0, max_tokens=25, prompt_logprobs=0)
    prompts = prompts_over(PREFIX[:9], 4, 3)
    requests = [
        a_request(p, sampling=sampling, name=str(i), expected_tokens=1)
        for i, p in enumerate(prompts)
    ]
    got = run_all(engine, requests)
    assert preempted
    for i, prompt in enumerate(prompts):
        told = [o.prompt_logprobs for o in got.outputs if o.request_id == str(i)]
        assert [len(p) for p in told if p is not None] == [len(prompt)]


@pytest.mark.parametrize("can_overlap", [False, True])
def test_abort_at_any_step_frees_everything(can_overlap: bool) -> None:
    prompts = prompts_over(PREFIX, 4, 6)
    for when in range(14):
        engine = an_engine(60, 4, SchedConfig(chunk_tokens=8), can_overlap)
        requests = [a_request(p, max_tokens=9, name=str(i)) for i, p in enumerate(prompts)]
        for request in requests:
            engine.submit(request)
        for step in range(200):
            if step == when:
                engine.abort(requests[0].request_id)  # the one that computes the prefix
            engine.step()
            engine.check()
            if not engine.has_work:
                break
        assert not engine.has_work


@pytest.mark.parametrize("can_overlap", [False, True])
def test_the_callers_stop_ends_one_answer_at_its_last_delivered_token(can_overlap: bool) -> None:
    """With a stop string, no token may be scheduled before the caller has seen the one before
    it."""
    engine = an_engine(can_overlap=can_overlap)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, stop="x")
    request = a_request(PREFIX, sampling=sampling)
    engine.submit(request)
    seen: list[int] = []
    reasons = []
    while engine.has_work:
        for output in engine.step():
            seen += output.token_ids
            reasons.append(output.finish_reason)
            if len(seen) == 5 and output.finish_reason is None:
                engine.stop(request.request_id, 0)
    assert seen == fake_answer(PREFIX, 5, VOCAB)
    assert reasons[-1] is FinishReason.STOP
    engine.check()


def test_more_urgent_requests_run_first() -> None:
    engine = an_engine(num_pages=8, page_size=4)
    late = a_request(PREFIX[:20], max_tokens=4, name="late", priority=5)
    urgent = a_request(PREFIX[5:25], max_tokens=4, name="urgent", priority=0)
    got = run_all(engine, [late, urgent])
    ends = [o.request_id for o in got.outputs if o.finish_reason]
    assert ends == ["urgent", "late"]


def test_a_single_long_sequence_may_fill_every_page() -> None:
    engine = an_engine(num_pages=8, page_size=4)
    assert engine.max_model_len == 32
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    got = run_all(engine, [a_request(PREFIX[:10], sampling=sampling, name="a")])
    assert got.tokens["a", 0] == fake_answer(PREFIX[:10], 22, VOCAB)


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([VOCAB], SamplingParams(), "prompt"),
        ([1] * 300, SamplingParams(), "prompt"),
        ([1], SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
    ],
)
def test_the_error_for_an_impossible_request_names_the_field(
    prompt: list[int], sampling: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        an_engine().submit(a_request(prompt, sampling=sampling))
    assert caught.value.field == field


def test_the_same_request_id_twice_is_refused() -> None:
    engine = an_engine()
    engine.submit(a_request([1, 2], name="a"))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.submit(a_request([1, 2], name="a"))


def test_a_snapshot_shows_what_is_shared() -> None:
    engine = an_engine(num_pages=200, page_size=4)
    for prompt in [*prompts_over(PREFIX[:32], 3, 9), *prompts_over(PREFIX[:16], 2, 9)]:
        engine.submit(a_request(prompt, max_tokens=20))
    for _ in range(3):
        engine.step()
    snapshot = engine.snapshot()
    assert snapshot.num_running == 5
    first, *others = snapshot.stems
    assert (first.parent_id, first.num_tokens, first.num_sequences) == (None, 16, 5)
    assert (16, 3) in [(stem.num_tokens, stem.num_sequences) for stem in others]
    run_all(engine, [])
    assert engine.snapshot().stems == ()
