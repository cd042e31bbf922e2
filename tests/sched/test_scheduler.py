"""The scheduler under any order of submit, step, abort and stop: nothing lost, nothing twice."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mainstem.core.config import SchedConfig, Share
from mainstem.core.request import Delivery, FinishReason, SamplingParams
from mainstem.engine.engine import Engine
from mainstem.sched.random import uniforms
from tests.builders import VOCAB, Collector, a_request, an_engine
from tests.fakes import fake_answer


class SchedulerMachine(RuleBasedStateMachine):
    """Every finished answer is the one its prompt gets alone; at rest no page is held."""

    engine: Engine

    @initialize(
        num_pages=st.integers(6, 24),
        page_size=st.sampled_from([1, 2, 4]),
        chunk_tokens=st.sampled_from([1, 3, 8, 64]),
        share=st.sampled_from(Share),
        can_overlap=st.booleans(),
    )
    def start(
        self, num_pages: int, page_size: int, chunk_tokens: int, share: Share, can_overlap: bool
    ) -> None:
        config = SchedConfig(chunk_tokens=chunk_tokens, share=share)
        self.engine = an_engine(num_pages, page_size, config, can_overlap)
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.cut: set[str] = set()
        self.collector = Collector()

    @rule(
        branches=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 2),
        has_stop_string=st.booleans(),
        delivery=st.sampled_from(Delivery),
        priority=st.integers(0, 2),
    )
    def submit(
        self,
        branches: list[int],
        max_tokens: int,
        n: int,
        has_stop_string: bool,
        delivery: Delivery,
        priority: int,
    ) -> None:
        limit = self.engine.max_model_len
        prompt = branches[: max(1, limit - 1)]
        name = f"r{len(self.prompts)}"
        sampling = SamplingParams(
            n=n, temperature=0.0, max_tokens=max_tokens, stop="x" if has_stop_string else ()
        )
        self.engine.submit(
            a_request(prompt, name=name, sampling=sampling, delivery=delivery, priority=priority)
        )
        self.prompts[name] = prompt
        self.limits[name] = min(max_tokens, limit - len(prompt))

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
        for (name, index), tokens in self.collector.tokens.items():
            full = fake_answer(self.prompts[name], self.limits[name], VOCAB)
            assert tokens == full[: len(tokens)], "a wrong token"
            if self.collector.reasons[name, index] is FinishReason.LENGTH:
                assert len(tokens) == len(full), "an answer came short"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    seeds = np.arange(1000, dtype=np.int64)
    a = uniforms(seeds, np.zeros(1000, np.int32))
    b = uniforms(seeds[::-1].copy(), np.zeros(1000, np.int32))[::-1]
    assert (a == b).all()
    assert a.min() >= 0.0
    assert a.max() < 1.0
    # 1,000 draws: the mean of uniforms is within 0.5 +- 0.05 but for one case in 10^7
    assert abs(float(a.mean()) - 0.5) < 0.05
    c = uniforms(np.zeros(1000, np.int64), np.arange(1000, dtype=np.int32))
    assert abs(float(c.mean()) - 0.5) < 0.05
    assert len(np.unique(c)) > 990
