"""In any order of submit, step, abort and stop, the scheduler loses and repeats nothing."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import EventBus, SequenceResumed
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Delivery, FinishReason, Overflow, Request, SamplingParams
from mainstem.engine.engine import Engine
from mainstem.sched.random import noise_keys
from mainstem.sched.truncation import Truncator
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import fake_answer


class SchedulerMachine(RuleBasedStateMachine):
    """Every finished answer is the one its prompt gets alone; without work no page is held."""

    engine: Engine

    @initialize(
        num_pages=st.integers(6, 24),
        page_size=st.sampled_from([1, 2, 4]),
        chunk_tokens=st.sampled_from([1, 3, 8, 64]),
        share=st.sampled_from(Share),
        can_overlap=st.booleans(),
        span_levels=st.sampled_from([None, 1, 2]),
        max_model_len=st.sampled_from([10_000, 24, 12]),
        truncation_ratio=st.sampled_from([0.2, 0.5, 0.8]),
        num_states=st.sampled_from([0, 0, 1, 2, 3, 4, 16]),
        num_rows=st.sampled_from([0, 2, 3, 5, 9]),
        rows_per_state=st.sampled_from([1, 2]),
        window=st.sampled_from([None, 1, 2, 3, 5, 9]),
        spare_parts=st.integers(0, 12),
    )
    def start(
        self,
        *,
        num_pages: int,
        page_size: int,
        chunk_tokens: int,
        share: Share,
        can_overlap: bool,
        span_levels: int | None,
        max_model_len: int,
        truncation_ratio: float,
        num_states: int,
        num_rows: int,
        rows_per_state: int,
        window: int | None,
        spare_parts: int,
    ) -> None:
        config = SchedConfig(
            chunk_tokens=chunk_tokens,
            share=share,
            span_levels=span_levels,
            truncation_ratio=truncation_ratio,
        )
        if num_states:
            window = None
        num_parts = 0 if window is None else -(-(window - 1) // page_size) + 3 + spare_parts
        self.engine = an_engine(
            num_pages,
            page_size,
            config,
            can_overlap,
            max_model_len,
            num_states=num_states,
            num_rows=num_rows,
            rows_per_state=rows_per_state,
            window=window,
            num_parts=num_parts,
        )
        self.has_states = num_states > 0
        self.truncator = Truncator(config, self.engine.max_model_len, page_size)
        self.said: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.cut: set[str] = set()
        self.collector = Collector()
        self.weighed: dict[str, Request] = {}  # requests whose cut depends on attention

    @rule(
        branches=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 2),
        has_stop_string=st.booleans(),
        delivery=st.sampled_from(Delivery),
        priority=st.integers(0, 2),
        expected=st.sampled_from([None, 1, 4, 100]),
    )
    def submit(
        self,
        branches: list[int],
        max_tokens: int,
        n: int,
        has_stop_string: bool,
        delivery: Delivery,
        priority: int,
        expected: int | None,
    ) -> None:
        limit = self.engine.max_model_len
        prompt = branches[: max(1, limit - 1)]
        name = f"r{len(self.prompts)}"
        sampling = SamplingParams(
            n=n, temperature=0.0, max_tokens=max_tokens, stop="x" if has_stop_string else ()
        )
        self.engine.submit(
            a_request(
                prompt,
                name=name,
                sampling=sampling,
                delivery=delivery,
                priority=priority,
                expected_tokens=expected,
            )
        )
        self.prompts[name] = prompt
        self.limits[name] = min(max_tokens, limit - len(prompt))

    @rule(
        session=st.sampled_from("ab"),
        new=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 4),
        n=st.integers(1, 2),
        overflow=st.sampled_from([None, Overflow.KV, Overflow.IMPORTANT, Overflow.RECOMPUTE]),
    )
    def take_turn(
        self, session: str, new: list[int], max_tokens: int, n: int, overflow: Overflow | None
    ) -> None:
        """A conversation continues beyond the window, with the answers so far."""
        name = f"r{len(self.prompts)}"
        prompt = [*self.said.get(session, ()), *new]
        sampling = SamplingParams(n=n, temperature=0.0, max_tokens=max_tokens)
        request = a_request(
            prompt, name=name, sampling=sampling, session=session, overflow=overflow
        )
        try:
            kept, _ = self.truncator.fit(request)
        except InvalidRequest:
            return  # the window does not hold the sink and two pages
        if self.has_states and overflow is Overflow.IMPORTANT:
            with pytest.raises(InvalidRequest, match="recurrent layers"):
                self.engine.submit(request)
            return
        self.engine.submit(request)
        if overflow is Overflow.IMPORTANT:
            self.weighed[name] = request
        self.prompts[name] = kept.prompt_ids.tolist()
        self.limits[name] = min(max_tokens, self.engine.max_model_len - len(kept.prompt_ids))
        self.said[session] = prompt + fake_answer(self.prompts[name], 2, VOCAB)[:max_tokens]

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.collector.add(self.engine.step())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.prompts:
            name = data.draw(st.sampled_from(sorted(self.prompts)))
            self.engine.abort(a_request([0], name=name).request_id)
            self.cut.add(name)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if self.prompts:
            name = data.draw(st.sampled_from(sorted(self.prompts)))
            self.engine.stop(a_request([0], name=name).request_id, 0)
            self.cut.add(name)

    @rule()
    def clear_cache(self) -> None:
        self.engine.clear_cache()

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.collector.add(self.engine.step())
        assert not self.engine.has_work, "the engine is stuck"
        self.engine.check()
        for (name, _), reason in self.collector.reasons.items():
            assert reason is FinishReason.LENGTH or name in self.cut
        answers = {name for name, _ in self.collector.reasons}
        assert answers == set(self.prompts), "an answer is missing"
        for name, request in self.weighed.items():  # the choice of pages is known by now
            kept, _ = self.engine._scheduler._intake._truncator.fit(request)
            self.prompts[name] = kept.prompt_ids.tolist()
        for (name, index), tokens in self.collector.tokens.items():
            full = fake_answer(self.prompts[name], self.limits[name], VOCAB)
            assert tokens == full[: len(tokens)], "a wrong token"
            if self.collector.reasons[name, index] is FinishReason.LENGTH:
                assert len(tokens) == len(full), "an answer is too short"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class LongMachine(SchedulerMachine):
    """The same test over many more orders."""


TestSchedulerLong = pytest.mark.slow(LongMachine.TestCase)
TestSchedulerLong.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_noise_keys_depend_on_seed_and_index_only() -> None:
    seeds, zeros = np.arange(1000, dtype=np.int64), np.zeros(1000, np.int32)
    by_seed = noise_keys(seeds, zeros)
    assert (by_seed == noise_keys(seeds[::-1].copy(), zeros)[::-1]).all()
    by_index = noise_keys(np.zeros(1000, np.int64), np.arange(1000, dtype=np.int32))
    assert len(np.unique(np.concatenate((by_seed, by_index[1:])))) == 1999
    for keys in (by_seed, by_index):
        bits = np.unpackbits(keys.view(np.uint8)).reshape(1000, 64)
        # each of 64 bits is set about 500 of 1,000 times; 110 more or fewer is one case of 10^9
        assert np.abs(bits.sum(axis=0, dtype=np.int64) - 500).max() < 110


def test_wrong_expected_lengths_do_not_cause_thrashing() -> None:
    """The first answers are short; later ones are 20 times longer than the length learned from
    them.

    Recomputed tokens stay a small part of all computed ones, and everything finishes.
    """
    bus = EventBus()
    counters = Counters().attach(bus)
    resumed: list[SequenceResumed] = []
    bus.subscribe(SequenceResumed, resumed.append)
    engine = an_engine(num_pages=100, page_size=4, config=SchedConfig(chunk_tokens=64), bus=bus)
    rng = np.random.default_rng(0)
    short = [a_request(rng.integers(0, VOCAB, 12).tolist(), max_tokens=3) for _ in range(40)]
    for request in short:
        engine.submit(request)
    run_all(engine, [])
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    long = [a_request(rng.integers(0, VOCAB, 12).tolist(), sampling=sampling) for _ in range(60)]
    got = run_all(engine, long)
    assert len(got.reasons) == 60
    needed = sum(12 + 60 for _ in long) + sum(12 + 3 for _ in short)
    again = sum(event.computed_tokens for event in resumed)
    assert counters.preemptions > 0, "the learned lengths should have been wrong"
    assert again < 0.25 * needed, f"{again} of {needed} tokens were computed again"


def test_pages_of_a_finished_group_are_evicted_first() -> None:
    """Group a has ended, b has members left: a's pages are evicted, though b's are older."""
    engine = an_engine(num_pages=20, page_size=4, config=SchedConfig(chunk_tokens=512))
    a, b = list(range(16)), list(range(20, 36))
    first = engine.expect(np.array([16, 0, 16, 0], np.int32))  # b-1, b-2 | a-1, a-2
    run_all(engine, [a_request([*b, 1], max_tokens=2, plan_place=first)])
    run_all(engine, [a_request([*a, i], 2, plan_place=first + 2 + i) for i in range(2)])
    # 12 pages: some must be evicted
    run_all(engine, [a_request(list(range(40, 84)), max_tokens=2)])
    got = run_all(engine, [a_request([*b, 2], max_tokens=2, plan_place=first + 1, name="b")])
    assert got.outputs[0].num_cached_tokens == 16


def test_pages_that_other_answers_to_a_prompt_wait_for_are_not_evicted_first() -> None:
    engine = an_engine(num_pages=14, page_size=4, config=SchedConfig(chunk_tokens=16))
    run_all(engine, [a_request(list(range(20)), max_tokens=1)])  # 5 pages, older than all others
    first = engine.expect(np.array([0], np.int32))
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=12)
    engine.submit(a_request(list(range(20, 36)), sampling=sampling, name="two", plan_place=first))
    engine.step()
    engine.stop(RequestId("two"), 0)  # its pages are idle, and the other answer has not started
    urgent = a_request(list(range(40, 68)), max_tokens=1, priority=-1)  # 7 pages, 5 are free
    got = run_all(engine, [urgent])
    assert {o.num_cached_tokens for o in got.outputs if o.index == 1} == {15}
