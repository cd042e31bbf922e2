"""Everything at once, by seed: requests, failures, aborts and evictions in any order. Each answer
is the one that its prompt gets alone, and no page is held at the end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from mainstem.core.config import Fetch, SchedConfig, Share, StoreConfig
from mainstem.core.errors import EngineLost, InvalidRequest, OutOfDeviceMemory
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.request import (
    Delivery,
    FinishReason,
    Output,
    Overflow,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenMask,
)
from mainstem.core.step import Step
from mainstem.engine.engine import Engine
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.loading import PageLoader
from mainstem.kv.stack import TierStack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import LowerTier
from mainstem.sched.fetching import Fetching
from mainstem.sched.scheduler import Scheduler
from mainstem.sched.step_times import StepTimes
from mainstem.sched.truncation import Truncator
from tests.builders import VOCAB
from tests.fakes import fake_next_token
from tests.kv.faulty import FaultyFiles
from tests.kv.mirror import Mirror, Recorder
from tests.kv.tiered import FakeCopier, TieredRunner

NUM_ACTIONS = 80


@dataclass
class _Mask:
    """Allows some ids at each position."""

    ids: list[list[int]]
    fault: str | None = None

    def allowed(self, output_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        bits = np.zeros(VOCAB, np.uint8)
        bits[self.ids[len(output_ids) % len(self.ids)]] = 1
        return np.packbits(bits, bitorder="little")


@dataclass
class _Form:
    ids: list[list[int]]

    def start(self) -> TokenMask:
        return _Mask(self.ids)


@dataclass
class _Asked:
    """A request while it runs, and what was received of its answers."""

    request: Request
    max_tokens: int
    is_cut_short: bool = False
    weighed: Request | None = None  # the request before its cut, if attention decides the cut
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[tuple[TokenLogprobs | None, ...]] = field(default_factory=list)
    ends: dict[int, FinishReason] = field(default_factory=dict)

    def alone(self, length: int | None = None) -> tuple[list[int], FinishReason]:
        """The expected answer, as if no other request were running."""
        request, form = self.request, self.request.grammar
        known, output = request.prompt_ids.tolist(), list[int]()
        while len(output) < (length or self.max_tokens):
            token = fake_next_token(known, VOCAB)
            if isinstance(form, _Form):
                ids = sorted(set(form.ids[len(output) % len(form.ids)]))
                token = ids[token % len(ids)]
            known.append(token)
            output.append(token)
            if token in request.stop_ids and len(output) > request.sampling.min_tokens:
                return output, FinishReason.STOP
        return output, FinishReason.LENGTH

    def take(self, news: Output) -> None:
        index = news.index
        assert index not in self.ends, "an output came after the last one"
        assert news.num_cached_tokens < len(self.request.prompt_ids)
        self.tokens.setdefault(index, []).extend(news.token_ids)
        self.logprobs.setdefault(index, []).extend(news.logprobs)
        if news.prompt_logprobs is not None:
            assert index == 0
            self.prompt_logprobs.append(news.prompt_logprobs)
        if news.finish_reason is not None:
            self.ends[index] = news.finish_reason

    def compare(self) -> None:
        sampling, (output, reason) = self.request.sampling, self.alone()
        for index in range(sampling.n):
            if self.ends[index] is FinishReason.ERROR:
                continue
            told = self.tokens[index]
            assert told == output[: len(told)], "a wrong token"
            if not self.is_cut_short:
                assert (told, self.ends[index]) == (output, reason)
            wanted = [] if sampling.logprobs is None else told
            assert [logprobs.token_id for logprobs in self.logprobs[index]] == wanted
        if sampling.prompt_logprobs is None or self.is_cut_short:
            return
        if self.ends[0] is not FinishReason.ERROR:
            (first, *others) = self.prompt_logprobs[0]
            told = [logprobs.token_id for logprobs in others if logprobs is not None]
            assert (first, told) == (None, self.request.prompt_ids[1:].tolist())
            assert len(self.prompt_logprobs) == 1, "prompt logprobs were delivered twice"


class _Stress:
    """An engine with random settings, with or without tiers, and random requests to it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = Random(seed)
        self.page_size, num_pages = rng.choice([1, 2, 4]), rng.randint(8, 40)
        self.fault_rate = rng.choice([0.0, 0.03])
        self.runner = TieredRunner(num_pages, self.page_size, can_overlap=rng.random() < 0.5)
        self.runner.at_launch = self._at_launch
        self.copier = self.runner.copier = FakeCopier(self.runner, rng.randint(2, 40))
        self.copier.patience = rng.randint(0, 4)
        bus = EventBus()
        self.recorder, self.mirror = Recorder(bus), Mirror(self.page_size)
        stack = self._make_tiers(folder, bus) if rng.random() < 0.6 else None
        self.store = KVStore(num_pages, self.page_size, b"fake", bus, stack)
        config = SchedConfig(
            chunk_tokens=rng.choice([1, 3, 8, 64]),
            share=rng.choices(list(Share), [1, 1, 6])[0],
            span_levels=rng.choice([None, 1, 2]),
            truncation_ratio=rng.choice([0.2, 0.5, 0.8]),
            sink_tokens=rng.choice([None, 0, 5]),
        )
        scheduler = Scheduler(
            config,
            self.store,
            VOCAB,
            rng.choice([10_000, 40, 24]),
            bus,
            fetching=None if stack is None else self._make_fetching(self.store.loader),
            max_step_tokens=rng.choice([None, 64]),
        )
        self.engine = Engine(scheduler, self.runner, bus)
        window = self.engine.max_model_len
        self.truncator = Truncator(config, window, self.page_size)
        self.asked: dict[str, _Asked] = {}
        self.said: dict[str, list[int]] = {}
        self.places: list[int] = []
        self.heads = [[rng.randint(0, 1) for _ in range(rng.randint(1, 20))] for _ in range(4)]

    def _make_tiers(self, folder: Path, bus: EventBus) -> TierStack:
        rng, below = self.rng, list[LowerTier]()
        if rng.random() < 0.6:
            record_bytes = FaultyFiles(folder, self.copier.page_bytes).record_bytes
            room = rng.randint(2, 60) * record_bytes
            below.append(DiskTier(folder, self.copier.page_bytes, room, "fake", FaultyFiles))
        kind = rng.choice(["lookahead", "lru", "fifo"])
        return TierStack(bus, self.copier, below, kind, rng.choice([None, 0.01]))

    def _make_fetching(self, loader: PageLoader) -> Fetching:
        fetch, preload = self.rng.choice(list(Fetch)), self.rng.choice(["auto", "all", "0", "1"])
        config = StoreConfig(host_gb=1.0, fetch=fetch, preload=preload)
        return Fetching(config, loader, self.page_size, StepTimes(token_s=1e-3))

    def _at_launch(self, step: Step) -> None:
        chance = self.rng.random()
        for error in (RuntimeError("no device"), OutOfDeviceMemory("full"), KeyboardInterrupt()):
            chance -= self.fault_rate / 2
            if chance < 0:
                raise error

    def act(self) -> None:
        rng, engine = self.rng, self.engine
        name = RequestId(rng.choice(sorted(self.asked) or [""]))
        match rng.choices(range(9), [35, 40, 5, 5, 3, 3, 3, 4, 2])[0]:
            case 0:
                self._ask()
            case 1:
                for _ in range(rng.randint(1, 5)):
                    self.step()
            case 2 if name:
                engine.abort(name)
                self.asked[name].is_cut_short = True
            case 3 if name:
                engine.stop(name, rng.randint(0, 1))
                self.asked[name].is_cut_short = True
            case 4:
                rng.choice([engine.clear_cache, engine.clear_device])()
            case 5:
                engine.pin(rng.choice("abc"), [np.array(rng.choice(self.heads), np.int32)])
            case 6:
                engine.pin(rng.choice("abc"), ())
            case 7:
                self.copier.save_faults.extend(rng.choices([None, "early", "late"], k=2))
                self.copier.load_faults.extend(rng.choices([None, "early"], k=2))
                FaultyFiles.reads.extend(rng.choices(["eio", "flip", "short", "gone"], k=2))
                FaultyFiles.writes.extend(rng.choices(["eio", "full", "flip"], k=2))
            case _:
                first = engine.expect(np.array([rng.randint(0, 8) for _ in range(4)], np.int32))
                self.places = list(range(first, first + 4))
        engine.check()
        self.compare_mirror()

    def _ask(self) -> None:
        rng, window = self.rng, self.engine.max_model_len
        request = self._request(f"r{len(self.asked)}")
        try:
            kept, _ = self.truncator.fit(request)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                self.engine.submit(request)
            return
        self.engine.submit(request)
        room, wanted = window - len(kept.prompt_ids), request.sampling.max_tokens
        asked = _Asked(kept, room if wanted is None else min(room, wanted))
        if request.overflow is Overflow.IMPORTANT:
            asked.weighed = request
        self.asked[request.request_id] = asked
        if request.session is not None:
            said = [*request.prompt_ids.tolist(), *asked.alone(rng.randint(1, 3))[0]]
            self.said[request.session] = said if len(said) < 150 else []

    def _request(self, name: str) -> Request:
        rng = self.rng
        session = rng.choice("ab") if rng.random() < 0.3 else None
        if session is None:
            prompt = rng.choice(self.heads)[: rng.randint(1, 20)]
            prompt = [*prompt, *(rng.randint(0, 1) for _ in range(rng.randint(0, 6)))]
            prompt = prompt[: max(1, self.engine.max_model_len - 1)]
        else:
            new = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            prompt = [*self.said.get(session, ()), *new]
        form = None
        if rng.random() < 0.15:
            form = _Form([[rng.randrange(VOCAB) for _ in range(3)] for _ in range(3)])
        has_place = self.places and rng.random() < 0.5
        request = Request(
            RequestId(name),
            np.array(prompt, np.int32),
            self._sampling(has_form=form is not None),
            grammar=form,
            salt=rng.choice([b"", b"", b"x"]),
            public_tokens=rng.choice([0, min(5, len(prompt))]),
            priority=rng.choice([0, 0, rng.randint(-2, 2)]),
            delivery=rng.choice(list(Delivery)),
            plan_place=self.places.pop(0) if has_place else None,
            expected_tokens=rng.choice([None, 1, 4, 100]),
            keep_tokens=rng.choice([0, 0, 4]),
        )
        if session is None:
            return request
        overflow = rng.choice([None, Overflow.KV, Overflow.IMPORTANT, Overflow.RECOMPUTE])
        return replace(request, session=SessionId(session), overflow=overflow)

    def _sampling(self, has_form: bool) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.randint(1, 12)
        return SamplingParams(
            n=rng.choice([1, 1, 2, 3]),
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=0 if has_form else rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop="x" if rng.random() < 0.15 else (),
            stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 1, 30])),
            logprobs=rng.choice([None, None, 1]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            presence_penalty=rng.choice([0.0, 0.5]),  # FakeRunner ignores it
            grammar="form" if has_form else None,
        )

    def step(self) -> None:
        try:
            outputs = self.engine.step()
        except (KeyboardInterrupt, EngineLost):
            return
        for output in outputs:
            self.asked[output.request_id].take(output)

    def finish(self) -> None:
        """Let everything end, and check all answers."""
        self.fault_rate = 0.0
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine still has work"
        self.engine.check()
        # the engine's truncator knows which pages attention chose
        truncator = self.engine._scheduler._intake._truncator
        for asked in self.asked.values():
            if asked.weighed is not None:
                asked.request, _ = truncator.fit(asked.weighed)
            asked.compare()
        self.engine.clear_cache()
        self.engine.flush()
        self.engine.check()
        self.compare_mirror()
        assert self.store.num_held() == 0

    def compare_mirror(self) -> None:
        """Check that a reader of KV events knows which pages can be found, and where."""
        if (payload := self.recorder.take()) is not None:
            self.mirror.apply(payload)
        stored = self.store.stored_keys()
        assert self.mirror.known(stored) == stored


@contextmanager
def _quiet() -> Iterator[None]:
    """Do not log the failures that this test causes."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run(seed: int, folder: Path) -> None:
    FaultyFiles.reset()
    with _quiet():
        stress = _Stress(seed, folder)
        for _ in range(NUM_ACTIONS):
            stress.act()
        stress.finish()
        stress.engine.close()
    FaultyFiles.reset()


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_give_right_answers(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_many_random_operations_give_right_answers(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)
