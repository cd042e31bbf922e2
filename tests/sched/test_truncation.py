"""Conversations that outgrow the window: which tokens are kept, where their KV comes from, and
which requests may use moved pages."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.config import SchedConfig, Share
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.events import EventBus, PagesMoved, PromptTruncated
from mainstem.core.metrics import Counters
from mainstem.core.request import FinishReason, Overflow, SamplingParams
from mainstem.sched.truncation import Truncator
from tests.builders import VOCAB, Collector, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer
from tests.kv.tiered import a_tiered_engine

PAGE = 4
WINDOW = 40


def a_truncator(window: int = WINDOW, **config: object):  # type: ignore[no-untyped-def]
    sched = SchedConfig(**config)  # type: ignore[arg-type]
    return Truncator(sched, window, PAGE)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


class Chat:
    """A conversation: each turn sends the whole conversation, as a client does."""

    def __init__(self, engine, session: str, overflow: Overflow | None = None) -> None:  # type: ignore[no-untyped-def]
        self.engine = engine
        self.session = session
        self.overflow = overflow
        self.said: list[int] = []
        self.outputs = []  # type: ignore[var-annotated]

    def say(self, new: list[int], max_tokens: int = 4) -> list[int]:
        self.said += new
        request = a_request(
            self.said, max_tokens=max_tokens, session=self.session, overflow=self.overflow
        )
        got = run_all(self.engine, [request])
        self.outputs = got.outputs
        answer = got.tokens[str(request.request_id), 0]
        self.said += answer
        return answer


# --- what is kept ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    num_prompt=st.integers(1, 300),
    window=st.integers(2, 100),
    max_tokens=st.one_of(st.none(), st.integers(1, 200)),
    ratio=st.floats(0.05, 0.95),
    sink_tokens=st.one_of(st.none(), st.integers(0, 30)),
    keep_tokens=st.integers(0, 40),
)
def test_every_cut_fits_the_window_and_keeps_the_required_tokens(
    num_prompt: int,
    window: int,
    max_tokens: int | None,
    ratio: float,
    sink_tokens: int | None,
    keep_tokens: int,
) -> None:
    truncator = a_truncator(window, truncation_ratio=ratio, sink_tokens=sink_tokens)
    prompt = list(range(num_prompt))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request = a_request(prompt, sampling=sampling, session="s", keep_tokens=keep_tokens)
    fixed = max(keep_tokens, PAGE if sink_tokens is None else sink_tokens)
    free = window - -(-fixed // PAGE) * PAGE
    if free < 2 * PAGE and num_prompt >= window:
        with pytest.raises(InvalidRequest, match="keep_tokens"):
            truncator.fit(request)
        return
    kept, truncation = truncator.fit(request)
    ids = kept.prompt_ids.tolist()
    assert len(ids) < window
    assert ids[-1] == prompt[-1], "the question itself was dropped"
    assert ids == sorted(ids)
    if truncation is None:
        assert ids == prompt
        return
    assert truncation.num_dropped == num_prompt - len(ids) > 0
    assert ids[:fixed] == prompt[:fixed]
    dropped = sorted(set(prompt) - set(ids))
    assert all(page % PAGE == 0 for page in dropped[::PAGE]), "a part of a page was dropped"
    assert len(dropped) % PAGE == 0
    assert dropped == list(range(dropped[0], dropped[0] + len(dropped))), (
        "other tokens than the oldest were dropped"
    )


def test_the_cut_moves_only_after_the_conversation_grew_by_half_a_window() -> None:
    truncator = a_truncator()
    places: list[int] = []
    for length in range(WINDOW, 4 * WINDOW):
        _, truncation = truncator.fit(a_request(list(range(length)), max_tokens=4, session="s"))
        assert truncation is not None
        places.append(truncation.cut.rest)
    assert places == sorted(places)
    step = (WINDOW - PAGE) // 2 // PAGE
    assert set(np.diff(sorted(set(places)))) == {step}
    assert len(places) / len(set(places)) > step * PAGE - PAGE


def test_without_a_session_an_overlong_prompt_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="40 tokens leave no room"):
        a_truncator().fit(a_request(list(range(WINDOW))))
    long = a_request(list(range(WINDOW)), overflow=Overflow.ERROR, session="s")
    with pytest.raises(InvalidRequest, match="context of 40"):
        a_truncator().fit(long)


def test_kv_without_a_session_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs a session"):
        a_request([1], overflow=Overflow.KV)


def test_prompt_logprobs_of_a_prompt_that_must_be_cut_are_refused() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        a_truncator().fit(a_request(list(range(50)), sampling=sampling, session="s"))


@pytest.mark.parametrize("ratio", [0.0, 1.0, -1.0, float("nan")])
def test_a_ratio_that_drops_nothing_or_everything_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="truncation_ratio"):
        SchedConfig(truncation_ratio=ratio)


# --- where the KV of kept tokens comes from -------------------------------------------------------


def test_kept_pages_are_moved_and_the_answer_is_that_of_the_kept_tokens() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    truncated: list[PromptTruncated] = []
    moved: list[PagesMoved] = []
    bus.subscribe(PromptTruncated, truncated.append)
    bus.subscribe(PagesMoved, moved.append)
    engine = an_engine(num_pages=64, page_size=PAGE, max_model_len=WINDOW, bus=bus)
    chat = Chat(engine, "s")
    chat.say(tokens(28))
    assert not truncated
    computed = counters.computed_tokens
    said = [*chat.said, *tokens(5, seed=1)]
    answer = chat.say(tokens(5, seed=1))
    # 37 tokens and 4 to come: 16 are dropped after the first page
    kept = said[:PAGE] + said[PAGE + 16 :]
    assert answer == fake_answer(kept, 4, VOCAB)
    assert chat.outputs[-1].num_dropped_tokens == 16
    assert (truncated[0].dropped_tokens, truncated[0].kept_tokens) == (16, len(kept))
    assert moved[0].num_pages == 2, "31 tokens fill 7 pages: 1 is the sink, 4 are dropped"
    assert counters.computed_tokens - computed == len(kept) - 3 * PAGE


def test_a_later_turn_finds_the_moved_pages_again() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(num_pages=64, page_size=PAGE, max_model_len=WINDOW, bus=bus)
    chat = Chat(engine, "s")
    chat.say(tokens(28))
    chat.say(tokens(5, seed=1))
    num_moved, computed = counters.moved_pages, counters.computed_tokens
    chat.say(tokens(3, seed=2), max_tokens=2)
    assert counters.moved_pages == num_moved, "pages were moved again"
    assert counters.computed_tokens - computed <= 3 + 1 + PAGE
    assert chat.outputs[-1].num_cached_tokens >= 20


@pytest.mark.parametrize("overflow", [Overflow.KV, Overflow.RECOMPUTE])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_every_answer_of_a_long_conversation_is_that_of_the_kept_tokens(
    overflow: Overflow, ratio: float
) -> None:
    config = SchedConfig(truncation_ratio=ratio)
    engine = an_engine(128, PAGE, config, max_model_len=WINDOW)
    truncator = Truncator(config, WINDOW, PAGE)
    chat = Chat(engine, "s", overflow)
    for turn in range(40):
        new = tokens(1 + turn % 9, seed=turn)
        request = a_request([*chat.said, *new], max_tokens=3, session="s")
        kept, _ = truncator.fit(request)
        assert chat.say(new, max_tokens=3) == fake_answer(kept.prompt_ids.tolist(), 3, VOCAB)


def test_kv_computes_less_than_recompute() -> None:
    computed: dict[Overflow, int] = {}
    for overflow in (Overflow.KV, Overflow.RECOMPUTE):
        bus = EventBus()
        counters = Counters().attach(bus)
        engine = an_engine(256, PAGE, max_model_len=80, bus=bus)
        chat = Chat(engine, "s", overflow)
        for turn in range(60):
            chat.say(tokens(5, seed=turn))
        computed[overflow] = counters.computed_tokens
        assert (counters.moved_pages > 0) is (overflow is Overflow.KV)
    assert computed[Overflow.KV] < 0.7 * computed[Overflow.RECOMPUTE]


def test_keys_are_moved_from_the_original_page_while_it_exists() -> None:
    """At a small ratio a page survives several cuts; each time it is moved from its original."""
    engine = an_engine(256, PAGE, SchedConfig(truncation_ratio=0.2), max_model_len=WINDOW)
    chat = Chat(engine, "s")
    chat.say(tokens(28))
    runner = engine._runner  # it records the launched steps
    by: set[int] = set()
    for turn in range(4):
        chat.say(tokens(4, seed=turn), max_tokens=2)
        by |= {distance for step in runner.steps for distance in step.move_by.tolist()}  # type: ignore[attr-defined]
    assert len(by) > 1, "every move was from the last copy, not from the original"


def test_without_sharing_no_page_is_moved() -> None:
    engine = an_engine(64, PAGE, SchedConfig(share=Share.NONE), max_model_len=WINDOW)
    chat = Chat(engine, "s")
    chat.say(tokens(28))
    said = [*chat.said, *tokens(9)]
    assert chat.say(tokens(9)) == fake_answer(said[:PAGE] + said[PAGE + 16 :], 4, VOCAB)


@pytest.mark.parametrize("public", [2, PAGE, 3 * PAGE, 30])
@pytest.mark.parametrize("overflow", [Overflow.KV, Overflow.RECOMPUTE])
def test_a_public_prefix_can_be_cut_like_any_other(public: int, overflow: Overflow) -> None:
    engine = an_engine(128, PAGE, max_model_len=WINDOW)
    prompt = tokens(60)
    request = a_request(prompt, max_tokens=4, session="s", salt=b"tenant", overflow=overflow)
    got = run_all(engine, [replace(request, public_tokens=public)])
    kept, _ = a_truncator().fit(request)
    assert list(got.tokens.values()) == [fake_answer(kept.prompt_ids.tolist(), 4, VOCAB)]


@pytest.mark.parametrize("preload", ["auto", "all", "0"])
@pytest.mark.parametrize("num_turns_before", [1, 2, 3])
def test_pages_in_lower_tiers_are_loaded_and_moved(
    preload: str, num_turns_before: int, tmp_path: Path
) -> None:
    """The idle session was evicted from the device; sink and originals are loaded from lower
    tiers."""
    bus = EventBus()
    counters = Counters().attach(bus)
    tiered = a_tiered_engine(64, PAGE, 64, tmp_path, bus=bus, preload=preload, max_model_len=WINDOW)
    chat = Chat(tiered.engine, "s")
    for turn in range(num_turns_before):
        chat.say(tokens(28 if turn == 0 else 5, seed=turn))
    tiered.store.flush()
    tiered.store._forget_idle()
    computed, loaded = counters.computed_tokens, counters.loaded_pages["host"]
    request = a_request([*chat.said, *tokens(9, seed=9)], max_tokens=4, session="s")
    kept, truncation = a_truncator().fit(request)
    assert truncation is not None
    assert chat.say(tokens(9, seed=9)) == fake_answer(kept.prompt_ids.tolist(), 4, VOCAB)
    assert counters.loaded_pages["host"] > loaded
    assert counters.computed_tokens - computed < 9 + 4 + PAGE
    tiered.engine.close()


def test_a_long_conversation_over_tiers_is_right_in_every_turn(tmp_path: Path) -> None:
    tiered = a_tiered_engine(14, PAGE, 20, tmp_path, num_records=40, max_model_len=WINDOW)
    chats = [Chat(tiered.engine, name) for name in "abc"]
    for turn in range(12):
        for number, chat in enumerate(chats):
            new = tokens(2 + (turn + number) % 7, seed=turn * 3 + number)
            request = a_request([*chat.said, *new], max_tokens=3, session=chat.session)
            kept, _ = a_truncator().fit(request)
            assert chat.say(new, max_tokens=3) == fake_answer(kept.prompt_ids.tolist(), 3, VOCAB)
    tiered.engine.close()


@pytest.mark.parametrize("seed", [0, 40, 42, 44])
def test_sessions_that_overlap_over_small_tiers_are_right(seed: int, tmp_path: Path) -> None:
    """Turns arrive before the session's previous turn is answered, and some are aborted. There are
    few pages and slots, so pages loaded for one sequence are evicted for the next."""
    rng = Random(seed)
    window = rng.choice([16, 24, 40])
    page_size = rng.choice([2, 4])
    tiered = a_tiered_engine(
        rng.choice([12, 20, 40]),
        page_size,
        rng.choice([8, 30]),
        tmp_path if rng.random() < 0.5 else None,
        can_overlap=rng.random() < 0.5,
        preload=rng.choice(["auto", "all", "0"]),
        max_model_len=window,
        chunk_tokens=rng.choice([4, 16, 64]),
    )
    tiered.copier.patience = rng.choice([0, 2])
    engine = tiered.engine
    truncator = Truncator(SchedConfig(), engine.max_model_len, page_size)
    said: dict[str, list[int]] = {}
    wanted: dict[str, list[int]] = {}
    got, given_up = Collector(), set()
    for turn in range(40):
        session = rng.choice("abc")
        prompt = [*said.get(session, ()), *(rng.randrange(2) for _ in range(rng.randint(1, 8)))]
        sampling = SamplingParams(n=rng.choice([1, 2]), temperature=0.0, max_tokens=3)
        request = a_request(prompt, name=f"turn-{turn}", sampling=sampling, session=session)
        kept = truncator.fit(request)[0].prompt_ids.tolist()
        engine.submit(request)
        answer = fake_answer(kept, min(3, engine.max_model_len - len(kept)), VOCAB)
        wanted[f"turn-{turn}"] = answer
        said[session] = prompt + answer
        for _ in range(rng.randint(0, 6)):
            got.add(engine.step())
        engine.check()
        if rng.random() < 0.1:
            engine.abort(request.request_id)
            given_up.add(f"turn-{turn}")
    for _ in range(3000):
        if not engine.has_work:
            break
        got.add(engine.step())
    assert not engine.has_work, "the engine is stuck"
    engine.check()
    for (name, _), answer in got.tokens.items():
        length = len(answer) if name in given_up else len(wanted[name])
        assert answer == wanted[name][:length]
    engine.close()


# --- which requests may use moved pages -----------------------------------------------------------


@pytest.mark.parametrize(
    ("salt", "session", "shared"), [(b"", None, PAGE), (b"", "b", PAGE), (b"other", "a", 0)]
)
def test_moved_pages_serve_neither_other_sessions_nor_plain_prompts(
    salt: bytes, session: str | None, shared: int
) -> None:
    """The sink has not moved, so any request with the same salt may use it; tokens of the page
    after it may be copied."""
    engine = an_engine(num_pages=128, page_size=PAGE, max_model_len=WINDOW)
    chat = Chat(engine, "a")
    chat.say(tokens(28))
    chat.say(tokens(9, seed=1), max_tokens=2)
    kept = chat.said[:PAGE] + chat.said[PAGE + 16 :]
    request = a_request([*kept, 1], max_tokens=1, salt=salt, session=session)
    got = run_all(engine, [request])
    assert got.outputs[-1].num_cached_tokens < shared + PAGE


def test_another_session_with_the_same_words_has_its_own_truncated_pages() -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    engine = an_engine(num_pages=128, page_size=PAGE, max_model_len=WINDOW, bus=bus)
    for session in ("a", "b"):
        moved = counters.moved_pages
        chat = Chat(engine, session)
        chat.say(tokens(28))
        chat.say(tokens(9, seed=1), max_tokens=2)
        assert counters.moved_pages > moved, "pages of the other session were used"


def test_a_session_with_a_changed_past_does_not_use_its_old_pages() -> None:
    """The session and the kept tokens are the same, the dropped tokens are not. Moved pages depend
    on the dropped tokens, too."""
    engine = an_engine(num_pages=128, page_size=PAGE, max_model_len=WINDOW)
    chat = Chat(engine, "a")
    chat.say(tokens(28))
    chat.say(tokens(9, seed=1), max_tokens=2)
    other = list(chat.said)
    other[6] = (other[6] + 1) % VOCAB
    got = run_all(engine, [a_request([*other, 1], max_tokens=1, session="a")])
    assert got.outputs[-1].num_dropped_tokens == 16
    assert got.outputs[-1].num_cached_tokens < 2 * PAGE


def test_an_answer_that_reaches_the_window_ends_there() -> None:
    engine = an_engine(num_pages=64, page_size=PAGE, max_model_len=WINDOW)
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    request = a_request(tokens(60), sampling=sampling, session="s", name="r")
    got = run_all(engine, [request])
    assert got.reasons["r", 0] is FinishReason.LENGTH
    dropped = got.outputs[-1].num_dropped_tokens
    assert 60 - dropped + len(got.tokens["r", 0]) == WINDOW


def test_many_answers_of_one_truncated_prompt_move_its_pages_once() -> None:
    engine = an_engine(num_pages=64, page_size=PAGE, max_model_len=WINDOW)
    chat = Chat(engine, "s")
    chat.say(tokens(28))
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=4)
    prompt = [*chat.said, *tokens(9, seed=1)]
    got = run_all(engine, [a_request(prompt, sampling=sampling, session="s", name="r")])
    kept = prompt[:PAGE] + prompt[PAGE + 16 :]
    assert [got.tokens["r", i] for i in range(3)] == [fake_answer(kept, 4, VOCAB)] * 3
    assert isinstance(engine._runner, FakeRunner)
    moves = sum(len(step.move_to) for step in engine._runner.steps)
    assert moves == 2


def test_answers_are_right_if_too_few_pages_are_free_to_move_all() -> None:
    """Window and memory have the same size, so originals and copies do not both fit."""
    config = SchedConfig(truncation_ratio=0.2)
    engine = an_engine(WINDOW // PAGE, PAGE, config, max_model_len=WINDOW)
    truncator = Truncator(config, WINDOW, PAGE)
    chat = Chat(engine, "s")
    for turn in range(20):
        new = tokens(4, seed=turn)
        kept, _ = truncator.fit(a_request([*chat.said, *new], max_tokens=3, session="s"))
        assert chat.say(new, max_tokens=3) == fake_answer(kept.prompt_ids.tolist(), 3, VOCAB)
