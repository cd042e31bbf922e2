"""Answers piece by piece, on the caller's thread and on an event loop. Without a model."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import zip_longest
from threading import Event, current_thread
from typing import Any

import pytest

from mainstem import SamplingParams
from mainstem.async_llm import AsyncLLM
from mainstem.core.errors import AnswerFailed, EngineLost, InvalidRequest
from mainstem.core.request import Request
from mainstem.core.step import Step
from mainstem.llm import LLM
from mainstem.text.grammar import StructuredOutputsParams
from mainstem.text.results import AnswerPiece
from tests.fake_engines import FakeEngines, expected_text
from tests.fake_llm import a_fake_async_llm, a_fake_llm
from tests.waiting import LIMIT_S

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=9)
FIVE = SamplingParams(temperature=0, max_tokens=5)  # ends before the end token of the answer
NINE = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
USER = [{"role": "user", "content": "one"}]


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def llm(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    made = a_fake_llm(engines, monkeypatch)
    yield made
    made.close()


def joined(pieces: list[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def at_rest(llm: LLM) -> bool:
    llm.text_engine.engine.check()
    return llm._steps.is_idle


# --- on the caller's thread ----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["one", {"prompt": "one"}, "ids", USER])
def test_the_pieces_of_a_stream_make_the_answer(llm: LLM, prompt: Any) -> None:
    prompt = llm.tokenizer.encode("one") if prompt == "ids" else prompt
    call = llm.chat if prompt is USER else llm.generate
    (whole,) = call(prompt, NINE, use_tqdm=False)
    pieces = list(llm.stream(prompt, NINE))
    assert len(pieces) == 9
    assert joined(pieces) == whole.outputs[0].text
    assert [i for piece in pieces for i in piece.token_ids] == whole.outputs[0].token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * 8 + ["length"]
    assert at_rest(llm)


def test_a_stream_has_logprobs_and_several_answers(llm: LLM) -> None:
    sampling = SamplingParams(n=2, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    pieces = list(llm.stream("one", sampling))
    for index in (0, 1):
        own = [piece for piece in pieces if piece.index == index]
        for piece in own:
            assert piece.logprobs is not None
            assert [list(place) for place in piece.logprobs] == [[i] for i in piece.token_ids]
        assert own[-1].finish_reason == "length"
    (told,) = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
    assert len(told) == 3


def test_a_stream_that_is_no_longer_read_ends_its_answer(llm: LLM, engines: FakeEngines) -> None:
    for piece in llm.stream("one", LONG):
        assert piece.text
        break
    assert at_rest(llm)
    launched: list[Step] = []
    engines.at_launch = launched.append
    stream = llm.stream("two", LONG)
    assert not launched, "a prompt is queued only when the first piece is read"
    next(stream)
    del stream
    gc.collect()
    assert at_rest(llm)
    assert len(launched) < 4


def test_streams_that_are_read_in_turn_share_steps(llm: LLM, engines: FakeEngines) -> None:
    launched: list[Step] = []
    engines.at_launch = launched.append
    streams = [llm.stream(prompt, SHORT) for prompt in ("one", "two", "three")]
    texts = ["", "", ""]
    for pieces in zip_longest(*streams):
        texts = [
            text + (piece.text if piece else "") for text, piece in zip(texts, pieces, strict=True)
        ]
    assert texts == [expected_text(prompt, 9) for prompt in ("one", "two", "three")]
    assert len(launched) <= 9 + 3
    assert at_rest(llm)


def test_other_calls_may_come_between_two_pieces(llm: LLM) -> None:
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=20))
    pieces = [next(stream)]
    (other,) = llm.generate("two", SHORT, use_tqdm=False)
    assert other.outputs[0].text == expected_text("two", 9)
    assert llm.text_engine.has_work, "the call does not wait for the stream"
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([[1, 2], [10**6]], SHORT, use_tqdm=False)
    pieces += stream
    assert joined(pieces) == expected_text("one", 20)
    assert at_rest(llm)


def test_several_threads_may_read_streams(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda prompt: joined(list(llm.stream(prompt, SHORT))), prompts)
    assert list(found) == [expected_text(prompt, 9) for prompt in prompts]
    next(llm.stream("one", SHORT))  # the next step handles streams that threads have closed
    assert at_rest(llm)


def test_a_stream_that_is_deleted_within_a_step_ends_after_it(
    llm: LLM, engines: FakeEngines
) -> None:
    streams = [llm.stream("one", LONG)]
    next(streams[0])
    engines.at_launch = lambda _: streams.clear()
    llm.generate("two", SHORT, use_tqdm=False)
    assert at_rest(llm)


def test_errors_of_a_stream_give_the_reason(llm: LLM, engines: FakeEngines) -> None:
    with pytest.raises(InvalidRequest, match="must be one prompt here"):
        llm.stream(["one", "two"], SHORT)  # type: ignore[arg-type]  # as a script may
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        next(llm.stream([10**6], SHORT))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(InvalidRequest, match="structured_outputs: "):
        llm.stream("one", bad)

    def fail(_: Step) -> None:
        raise RuntimeError("no such kernel")

    engines.at_launch = fail
    with pytest.raises((AnswerFailed, EngineLost), match="no such kernel"):
        list(llm.stream("one", SHORT))
    engines.at_launch = None
    assert joined(list(llm.stream("one", SHORT))) == expected_text("one", 9)


def test_closing_ends_a_stream_with_an_error(llm: LLM) -> None:
    stream = llm.stream("one", LONG)
    next(stream)
    llm.close()
    with pytest.raises(InvalidRequest, match="LLM: is closed"):
        list(stream)


def test_ctrl_c_ends_a_stream_and_the_llm_can_be_used_again(llm: LLM, engines: FakeEngines) -> None:
    # a shell may have turned interrupts off
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stream = llm.stream("one", LONG)
        next(stream)
        engines.at_step = lambda _: signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        engines.at_step = None
    finally:
        signal.signal(signal.SIGINT, before)
    assert joined(list(llm.stream("one", SHORT))) == expected_text("one", 9)
    assert at_rest(llm)


def test_a_streamed_turn_is_remembered(llm: LLM) -> None:
    pieces = []
    for piece in llm.stream(USER, FIVE, session="alice"):
        pieces.append(piece)
        if piece.finish_reason is not None:
            break  # the last piece was read; nothing is missing
    kept = llm._sessions.find("", "alice")
    assert kept is not None
    assert kept.text.endswith(joined(pieces))


# --- on an event loop ----------------------------------------------------------------------------


class Loop:
    """Runs coroutines over an AsyncLLM that is closed and checked at the end."""

    def __init__(self, engines: FakeEngines, patch: pytest.MonkeyPatch) -> None:
        self._engines = engines
        self._patch = patch

    def run(self, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(self._run(body), LIMIT_S))

    async def _run(self, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        async with a_fake_async_llm(self._engines, self._patch) as llm:
            await body(llm)
        assert not llm._listeners
        assert not llm._thread._num_open


@pytest.fixture
def loop(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(engines, monkeypatch)


async def comes_to_rest(llm: AsyncLLM) -> None:
    while llm.text_engine.has_work:  # the thread handles the remaining work
        await asyncio.sleep(0.01)


def test_async_streams_run_side_by_side(loop: Loop, engines: FakeEngines) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    threads: set[str] = set()
    launched: list[Step] = []

    def note(step: Step) -> None:
        threads.add(current_thread().name)
        launched.append(step)

    engines.at_launch = note

    async def body(llm: AsyncLLM) -> None:
        async def read(prompt: str) -> str:
            return "".join([piece.text async for piece in llm.stream(prompt, SHORT)])

        texts = await asyncio.gather(*map(read, prompts))
        assert texts == [expected_text(prompt, 9) for prompt in prompts]

    loop.run(body)
    assert threads == {"engine"}
    assert len(launched) < 9 * 20


def test_an_async_llm_gives_whole_answers_and_chats(loop: Loop) -> None:
    async def body(llm: AsyncLLM) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=9, logprobs=0)
        one, chat = await asyncio.gather(
            llm.generate("one", sampling), llm.generate(USER, FIVE, session="alice")
        )
        assert one.finished
        assert one.outputs[0].text == expected_text("one", 9)
        assert len(one.outputs[0].logprobs or []) == len(one.outputs[0].token_ids)
        assert chat.prompt == "<user>one\n<assistant>"
        messages = [*USER, {"role": "assistant", "content": chat.outputs[0].text}]
        messages.append({"role": "user", "content": "more"})
        more = await llm.generate(messages, SHORT, session="alice")
        said = [*chat.prompt_token_ids, *chat.outputs[0].token_ids]
        assert more.prompt_token_ids[: len(said)] == said
        assert llm.get_tokenizer() is llm.tokenizer

    loop.run(body)


def test_an_async_stream_ends_when_its_caller_stops_reading(
    loop: Loop, engines: FakeEngines
) -> None:
    async def body(llm: AsyncLLM) -> None:
        async for piece in llm.stream("one", LONG):
            assert piece.text
            break
        await comes_to_rest(llm)

        async def read() -> None:
            async for _ in llm.stream("two", LONG):
                is_reading.set()
                await asyncio.sleep(3600)

        is_reading = asyncio.Event()
        task = asyncio.create_task(read())
        await is_reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await comes_to_rest(llm)
        assert await asyncio.wait_for(llm.generate("one", SHORT), LIMIT_S)

    num_steps = 0

    def slow(_: Step) -> None:
        nonlocal num_steps
        num_steps += 1
        Event().wait(0.05)  # the whole of an answer would take 15 s

    engines.at_launch = slow
    loop.run(body)
    assert num_steps < 200


def test_closing_ends_async_streams_with_an_error(loop: Loop, engines: FakeEngines) -> None:
    def slow(_: Step) -> None:
        Event().wait(0.05)  # the whole of an answer would take 15 s

    engines.at_launch = slow

    async def body(llm: AsyncLLM) -> None:
        async def read(prompt: str) -> None:
            async for _ in llm.stream(prompt, LONG):
                begun.release()

        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(read(prompt)) for prompt in ("one", "two")]
        await begun.acquire()
        await begun.acquire()
        await llm.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, InvalidRequest)
            assert str(error) == "LLM: is closed"
        with pytest.raises(InvalidRequest, match="LLM: is closed"):
            await llm.generate("three", SHORT)

    loop.run(body)


def test_errors_of_an_async_request_do_not_affect_others(loop: Loop, engines: FakeEngines) -> None:
    def fail(step: Step) -> None:
        if any(ids in str(step.token_ids.tolist()) for ids in bad):
            raise RuntimeError("no such kernel")

    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            await llm.generate([10**6], SHORT)
        bad.append(str(llm.tokenizer.encode("bad")).strip("[]"))
        good, failed = await asyncio.gather(
            llm.generate("xyz", SHORT), llm.generate("bad", SHORT), return_exceptions=True
        )
        assert not isinstance(good, BaseException)
        assert good.outputs[0].text == expected_text("xyz", 9)
        assert isinstance(failed, AnswerFailed)
        assert "no such kernel" in str(failed)

    bad: list[str] = []
    engines.at_launch = fail
    loop.run(body)


def test_every_request_to_a_lost_engine_raises(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        def lost() -> None:
            raise EngineLost("step after step failed")

        monkeypatch.setattr(llm.text_engine, "step", lost)
        for _ in range(2):
            with pytest.raises(EngineLost, match="step after step failed"):
                await llm.generate("one", SHORT)

    loop.run(body)


def test_a_closed_event_loop_leaves_nothing_running(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def opened(llm: AsyncLLM) -> AsyncIterator[None]:
        stream = llm.stream("one", LONG)
        await anext(stream)
        yield
        kept.append(stream)

    async def first(llm: AsyncLLM) -> None:
        async with opened(llm):
            pass

    async def second(llm: AsyncLLM) -> None:
        answer = await llm.generate("one", SHORT)
        assert answer.outputs[0].text == expected_text("one", 9)
        await comes_to_rest(llm)
        await llm.close()

    kept: list[object] = []
    llm = a_fake_async_llm(engines, monkeypatch)
    asyncio.run(first(llm))
    asyncio.run(asyncio.wait_for(second(llm), LIMIT_S))


def test_a_prompt_that_cannot_be_queued_ends_alone(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a callback raises while a prompt is queued, that prompt ends and the others are
    answered."""
    llm = a_fake_async_llm(engines, monkeypatch)
    submit = llm.text_engine.submit

    def queue(request: Request) -> None:
        if request.sampling.max_tokens == 5:
            raise ValueError("a callback failed")
        submit(request)

    monkeypatch.setattr(llm.text_engine, "submit", queue)

    async def ask() -> str:
        other = asyncio.ensure_future(llm.generate("one", NINE))
        with pytest.raises(AnswerFailed, match="a callback failed"):
            await asyncio.wait_for(llm.generate("one", FIVE), LIMIT_S)
        answer = await other
        await llm.close()
        return answer.outputs[0].text

    assert len(asyncio.run(ask())) == 9


def test_closing_does_not_hang_if_the_engine_fails(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = a_fake_async_llm(engines, monkeypatch)

    async def ask() -> None:
        stream = llm.stream("one", LONG)
        await anext(stream)
        monkeypatch.setattr(llm.text_engine, "abort", lambda _: fail())
        await asyncio.wait_for(llm.close(), LIMIT_S)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    asyncio.run(ask())
