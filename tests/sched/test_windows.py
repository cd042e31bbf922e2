"""Layers with a window keep only what somebody can read: more sequences run, and answers and shared
prefixes stay the same.

FakeRunner keeps a second copy of the tokens in windowed parts, and checks that each token sees
exactly its last `window` ones.
"""

from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import CacheConfig, Fetch, SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Step
from mainstem.engine.engine import Engine
from mainstem.kv.parts import SPARE_PARTS, span_of
from mainstem.runner.division import Division, KvCosts, divide
from mainstem_bench.shapes import SHAPES
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer
from tests.kv.tiered import a_tiered_engine

PAGE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def least_parts(window: int, page_size: int) -> int:
    return span_of(window, page_size) + SPARE_PARTS


def an_engine_with_windows(num_parts: int = 200, window: int = 100, **kwargs: object) -> Engine:
    return an_engine(
        4096, PAGE, SchedConfig(chunk_tokens=256), can_overlap=True, window=window,
        num_parts=num_parts, **kwargs,  # type: ignore[arg-type]
    )  # fmt: skip


def starts(engine: Engine, requests: list[Request]) -> list[int]:
    """Where each request starts; answers must be right."""
    found = run_all(engine, requests)
    cached: dict[str, int] = {}
    for output in found.outputs:
        cached.setdefault(str(output.request_id), output.num_cached_tokens)
    for request in requests:
        wanted = fake_answer(request.prompt_ids.tolist(), 4, VOCAB)
        assert found.tokens[str(request.request_id), 0] == wanted
    return [cached[str(request.request_id)] for request in requests]


# --- how many sequences fit ---------------------------------------------------------------------

LENGTH, CHUNK = 8000, 2048
CARDS = [("gemma3-27b", 16 << 30, 3.0), ("gpt-oss-20b", 2 << 30, 1.7)]


def division_of(name: str, num_bytes: int) -> Division:
    return divide(KvCosts.of(SHAPES[name], 2), CacheConfig(), num_bytes, 32_768, CHUNK)


@pytest.mark.parametrize(("name", "num_bytes", "gain"), CARDS)
def test_more_sequences_fit_and_run_at_once(name: str, num_bytes: int, gain: float) -> None:
    """As many sequences of 8,000 tokens as the division has room for run at once, without a
    preemption."""
    token_bytes = KvCosts.of(SHAPES[name], 2).bytes_per_token
    before = num_bytes // (token_bytes * LENGTH)
    kv = division_of(name, num_bytes)
    assert kv.num_bytes <= num_bytes
    assert kv.window is not None
    after = kv.num_pages * PAGE // (LENGTH + PAGE)
    assert after >= gain * before, f"{after} instead of {before}"
    bus, rng = EventBus(), np.random.default_rng(0)
    counters = Counters().attach(bus)
    engine = an_engine(
        kv.num_pages, PAGE, SchedConfig(chunk_tokens=CHUNK), can_overlap=True, bus=bus,
        window=kv.window, num_parts=kv.num_parts,
    )  # fmt: skip
    num_output = 5 * after  # so that the first one runs until the last one has started
    for _ in range(after):
        prompt = rng.integers(0, VOCAB, LENGTH - num_output).tolist()
        engine.submit(a_request(prompt, num_output, expected_tokens=num_output))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.num_running)
    engine.check()
    assert most == after
    assert counters.preemptions == 0


def test_memory_is_not_divided_without_need() -> None:
    mistral = KvCosts.of(SHAPES["mistral-7b"], 2)
    assert divide(mistral, CacheConfig(), 1 << 30, 32_768, CHUNK).num_parts == 0
    gemma = KvCosts.of(SHAPES["gemma3-27b"], 2)
    little = divide(gemma, CacheConfig(), 1 << 30, 32_768, CHUNK)
    assert little.num_parts == 0, "a part for each page takes less than a window and a chunk"
    assert little.page_bytes == gemma.bytes_per_token * PAGE


@pytest.mark.parametrize("kv_tokens", [64, 4096, 40_000, 1_000_000])
@pytest.mark.parametrize("expected", [None, 500])
def test_a_division_has_room_for_a_window_and_a_chunk(kv_tokens: int, expected: int | None) -> None:
    gemma = KvCosts.of(SHAPES["gemma3-27b"], 2)
    cache = CacheConfig(kv_tokens=kv_tokens, expected_tokens=expected)
    kv = divide(gemma, cache, 0, 32_768, CHUNK)
    assert kv.num_pages == kv_tokens // PAGE
    if kv.num_parts:
        assert least_parts(1024, PAGE) + CHUNK // PAGE <= kv.num_parts < kv.num_pages


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("spare", [0, 4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [1, 4, 9, 50])
def test_few_parts_lose_no_answer(window: int, spare: int, *, can_overlap: bool) -> None:
    rng = np.random.default_rng(window + spare)
    engine = an_engine(
        120, 4, SchedConfig(chunk_tokens=24), can_overlap, window=window,
        num_parts=least_parts(window, 4) + spare,
    )  # fmt: skip
    stems = [rng.integers(0, VOCAB, rng.integers(5, 80)).tolist() for _ in range(3)]
    prompts = [
        stems[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for i in range(18)
    ]
    lengths = rng.integers(1, 30, 18).tolist()
    requests = [
        a_request(prompt, length, name=str(i), expected_tokens=1)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    found = run_all(engine, requests)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert found.tokens[str(i), 0] == fake_answer(prompt, length, VOCAB)


def test_sequences_that_outgrow_the_forecast_are_preempted() -> None:
    """Four sequences are expected to end soon, and their windows grow beyond all parts."""
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(
        400, 4, SchedConfig(chunk_tokens=64), can_overlap=True, bus=bus, window=60, num_parts=40
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 20).tolist() for _ in range(4)]
    requests = [a_request(p, 80, name=str(i), expected_tokens=1) for i, p in enumerate(prompts)]
    found = run_all(engine, requests)
    assert counters.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert found.tokens[str(i), 0] == fake_answer(prompt, 80, VOCAB)


def test_after_a_failed_step_nobody_needs_parts_of_the_past() -> None:
    engine = an_engine_with_windows(num_parts=24)
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    steps: list[Step] = []

    def fail_once(step: Step) -> None:
        steps.append(step)
        if len(steps) == 5:
            raise RuntimeError("the device failed")

    runner.at_launch = fail_once
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 300).tolist() for _ in range(4)]
    starts(engine, [a_request(p, name=str(i), sampling=GREEDY) for i, p in enumerate(prompts)])
    parts = engine._store.parts
    assert parts is not None
    assert parts.num_needed == 0


def test_truncated_conversations_move_their_windows() -> None:
    rng = np.random.default_rng(3)
    engine = an_engine(
        200, 4, SchedConfig(chunk_tokens=16), max_model_len=64, window=10, num_parts=20
    )
    said = rng.integers(0, VOCAB, 20).tolist()
    counters = Counters().attach(engine.bus)
    for turn in range(12):
        request = a_request(said, 4, name=str(turn), session="s", overflow=None)
        kept, _ = engine._scheduler._intake._truncator.fit(request)
        found = run_all(engine, [request])
        answer = found.tokens[str(turn), 0]
        assert answer == fake_answer(kept.prompt_ids.tolist(), 4, VOCAB)
        said = said + answer + rng.integers(0, VOCAB, 9).tolist()
    assert counters.moved_pages > 0


# --- windows that are kept ----------------------------------------------------------------------


def test_requests_start_after_their_system_prompt_although_parts_are_short() -> None:
    """Each request needs more parts than half of all, and leaves windows of its own."""
    rng = np.random.default_rng(1)
    system = rng.integers(0, VOCAB, 40 * PAGE).tolist()
    engine, found = an_engine_with_windows(num_parts=60), []
    for index in range(20):
        prompt = system + rng.integers(0, VOCAB, 450).tolist()
        request = a_request(prompt, name=str(index), sampling=GREEDY, keep_tokens=len(system))
        found += starts(engine, [request])
    assert found[0] == 0
    assert all(start >= len(system) for start in found[1:])


def test_a_shared_beginning_that_nobody_named_is_found() -> None:
    rng = np.random.default_rng(2)
    document = rng.integers(0, VOCAB, 908).tolist()
    engine, found = an_engine_with_windows(num_parts=120), []
    for index in range(12):
        prompt = document + rng.integers(0, VOCAB, 300).tolist()
        found += starts(engine, [a_request(prompt, name=str(index), sampling=GREEDY)])
    # the first pages are found at once, and the window where prompts part is computed again once
    assert found[0] == 0
    assert all(start >= 896 for start in found[2:])


def test_prompts_in_the_queue_share_up_to_where_they_part() -> None:
    rng = np.random.default_rng(5)
    prompts = []
    for _ in range(6):
        shared = rng.integers(0, VOCAB, 40 * PAGE).tolist()
        prompts += [[*shared, *rng.integers(0, VOCAB, 300).tolist()] for _ in range(6)]
    rng.shuffle(prompts)
    engine = an_engine_with_windows(num_parts=150)
    found = starts(
        engine, [a_request(p, name=str(i), sampling=GREEDY) for i, p in enumerate(prompts)]
    )
    assert sorted(found)[:6] == [0] * 6
    assert sum(start >= 40 * PAGE for start in found) == 30


def test_a_turn_starts_where_the_last_one_ended() -> None:
    rng = np.random.default_rng(3)
    engine, found = an_engine_with_windows(num_parts=40), []
    said, lengths = rng.integers(0, VOCAB, 333).tolist(), []
    for turn in range(6):
        lengths.append(len(said))
        found += starts(engine, [a_request(said, name=str(turn), sampling=GREEDY)])
        said = said + fake_answer(said, 4, VOCAB) + rng.integers(0, VOCAB, 90).tolist()
    for turn in range(1, 6):
        assert found[turn] >= (lengths[turn - 1] + 3) // PAGE * PAGE


def test_a_lost_window_is_computed_once_and_shared_again() -> None:
    rng = np.random.default_rng(4)
    document = rng.integers(0, VOCAB, 20 * PAGE).tolist()
    engine = an_engine_with_windows(num_parts=80)
    counters = Counters().attach(engine.bus)
    parts, found = engine._store.parts, []
    assert parts is not None
    for index in range(4):
        prompt = document + rng.integers(0, VOCAB, 50).tolist()
        found += starts(engine, [a_request(prompt, name=str(index), sampling=GREEDY)])
        if index == 1:  # other requests take all parts
            parts._push(np.unique(parts.part_of[parts.part_of < parts.num_parts]))
    assert found == [0, 20 * PAGE, 0, 20 * PAGE]
    assert counters.lost_window_tokens == 20 * PAGE
    engine.check()


# --- tiers --------------------------------------------------------------------------------------


def test_of_pages_without_windowed_parts_only_the_last_window_is_loaded() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(num_pages=90, num_slots=200, bus=bus, window=10, num_parts=40)
    prompt = list(range(80))
    run_all(tiered.engine, [a_request(prompt, 1)])
    tiered.store.flush()
    parts = tiered.store.parts
    assert parts is not None
    parts._push(np.unique(parts.part_of[parts.part_of < parts.num_parts]))
    found = run_all(tiered.engine, [a_request([*prompt, 1], 4, name="r")])
    assert found.tokens["r", 0] == fake_answer([*prompt, 1], 4, VOCAB)
    assert found.outputs[0].num_cached_tokens == 80
    assert sum(counters.loaded_pages.values()) == span_of(10, 4)


@pytest.mark.parametrize("window", [3, 14])
def test_conversations_continue_from_host_memory_and_from_disk(window: int, tmp_path: Path) -> None:
    """A history is loaded with the windowed parts of its last window only."""
    rng = np.random.default_rng(window)
    said = [rng.integers(0, VOCAB, 60).tolist() for _ in range(3)]
    for turn in range(4):
        bus = EventBus()
        counters = Counters().attach(bus)
        tiered = a_tiered_engine(
            num_pages=90, num_slots=200, disk_dir=tmp_path, num_records=300, bus=bus,
            can_overlap=True, chunk_tokens=16, fetch=Fetch.ALWAYS, window=window, num_parts=30,
        )  # fmt: skip
        for _again in range(2):
            for number, prompt in enumerate(said):
                found = run_all(tiered.engine, [a_request(prompt, 5, name="r")])
                answer = fake_answer(prompt, 5, VOCAB)
                assert found.tokens["r", 0] == answer
                if turn:
                    # the last token of the answer before was not computed
                    assert found.outputs[0].num_cached_tokens >= len(prompt) - 3 - 2 * 4
                said[number] = [*prompt, *answer, *rng.integers(0, VOCAB, 2).tolist()]
        assert bool(counters.loaded_pages) == bool(turn)
        tiered.store.flush()
        tiered.engine.close()
