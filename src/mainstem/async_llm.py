"""AsyncLLM: the engine for programs that run an event loop (docs/python.md)."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from mainstem.core.config import EngineConfig
from mainstem.core.request import Delivery, Output, Overflow, Request, SamplingParams
from mainstem.core.weights import Tag, UpdateMode
from mainstem.llm.loaded import LoadedModel, ReadyPrompt, Weights, read_mode, read_tags, read_update
from mainstem.llm.rollouts import RolloutGroup, RolloutPart
from mainstem.text.control_tokens import without_marks
from mainstem.text.engine_thread import BeginChange, Ended, EngineThread, News
from mainstem.text.prompts import (
    Context,
    Conversation,
    ScriptPrompt,
    listed_choices,
    listed_contexts,
)
from mainstem.text.results import AnswerPiece, RequestOutput, add_piece, empty_result, piece_of
from mainstem.text.scoring import ContextScoring, ScoreOutput


class AsyncLLM(LoadedModel):
    """A model loaded once, answering prompts as they come, piece by piece.

        async with AsyncLLM("smollm2") as llm:
            async for piece in llm.stream("The capital of France is", SamplingParams(max_tokens=9)):
                print(piece.text, end="")

    The engine runs on a separate thread; requests that are open at the same time share its
    steps. Loading takes seconds and blocks: create the AsyncLLM before the loop has other work.
    Coroutines of one or several event loops may call its methods.
    """

    def _connect(self, config: EngineConfig) -> None:
        super()._connect(config)
        self._listeners: dict[str, _Listener] = {}  # by request
        self._thread = EngineThread(self.text_engine, self._hand_over)

    async def stream(
        self,
        prompt: ScriptPrompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        session: str | None = None,
        overflow: Overflow | str | None = None,
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the answer to one prompt, or to a list of messages, piece by piece as it is made.

        The answer ends when the caller stops reading or its task is cancelled. `session` and
        `overflow` are as in LLM.generate. Raises InvalidRequest for a prompt that cannot be
        answered and after `close`, AnswerFailed if steps failed on it repeatedly, EngineLost if
        every step fails.
        """
        args = (prompt, sampling_params, session, overflow)
        turn = await self._prepared(args, Delivery.EACH_STEP)
        async with aclosing(self._pieces(turn)) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(
        self,
        prompt: ScriptPrompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        session: str | None = None,
        overflow: Overflow | str | None = None,
    ) -> RequestOutput:
        """Return the whole answer to one prompt, or to a list of messages; otherwise like `stream`.
        Use `asyncio.gather` for many prompts at once."""
        args = (prompt, sampling_params, session, overflow)
        turn = await self._prepared(args, Delivery.AT_END)
        request = turn.request
        shown = None if turn.text is None else without_marks(turn.text)
        result = empty_result(request.request_id, shown, turn.prompt_ids, request.sampling)
        async with aclosing(self._pieces(turn)) as pieces:
            async for piece in pieces:
                add_piece(result, piece)
        return result

    async def score(self, context: Context, choices: Iterable[str]) -> ScoreOutput:
        """Return how likely each choice is to follow one context; otherwise like LLM.score."""
        self._check_open()
        (read,), _ = listed_contexts([context])
        (texts,) = listed_choices([list(choices)], 1)
        assert read is not None
        scoring = await asyncio.to_thread(self._scoring, read, texts)
        requests = enumerate(self._score_requests(scoring))
        asked = [asyncio.ensure_future(self._weigh(scoring, *each)) for each in requests]
        try:
            await asyncio.gather(*asked)
        finally:
            for each in asked:
                each.cancel()
        return scoring.result()

    async def _weigh(self, scoring: ContextScoring, place: int, request: Request) -> None:
        async with aclosing(self._news(request)) as outputs:
            async for output in outputs:
                scoring.take(place, output)

    async def rollouts(
        self,
        prompts: Iterable[ScriptPrompt | RolloutGroup],
        n: int = 8,
        sampling_params: SamplingParams | None = None,
        *,
        budget: int | None = None,
    ) -> AsyncGenerator[RolloutGroup, None]:
        """Yield groups of sampled answers as LLM.rollouts does. Steps run on the engine's thread
        while the caller works on a group."""
        self._check_open()
        args = (list(prompts), n, sampling_params, budget)
        groups = await asyncio.to_thread(self._rollout_parts, *args)
        running = [asyncio.ensure_future(self._whole(parts)) for parts in groups]
        try:
            for group in asyncio.as_completed(running):
                yield await group
        finally:
            for each in running:
                each.cancel()

    async def _whole(self, parts: list[tuple[Request, RolloutPart]]) -> RolloutGroup:
        async def run(request: Request, part: RolloutPart) -> None:
            async with aclosing(self._news(request)) as outputs:
                async for output in outputs:
                    part.add(piece_of(output, self.tokenizer))

        await asyncio.gather(*(run(*each) for each in parts))
        return parts[0][1].group

    async def update_weights(
        self, weights: Weights, *, mode: UpdateMode | str = UpdateMode.FINISH
    ) -> str:
        """Bring other weights into force, as LLM.update_weights does. An iterator is read on the
        engine's thread. `mode` is for the requests that are open: with "finish", they are answered
        first, and those that come meanwhile wait."""
        update, how = read_update(weights, mode)
        return await self._change(lambda engine: engine.update_weights(update, how))

    async def sleep(self, level: int = 1, *, mode: UpdateMode | str = UpdateMode.FINISH) -> None:
        """Give memory back until `wake_up`, as LLM.sleep does; `mode` may be "abort"."""
        how = read_mode(mode)
        await self._change(lambda engine: engine.sleep(level, how))

    async def wake_up(self, tags: Iterable[Tag | str] | None = None) -> None:
        """Undo `sleep`, as LLM.wake_up does."""
        wanted = read_tags(tags)
        await self._change(lambda engine: engine.wake(wanted))

    async def _change(self, begin: BeginChange) -> str:
        self._check_open()
        return await asyncio.wrap_future(self._thread.change(begin))

    async def close(self) -> None:
        """Stop the engine; open requests end with an error."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _prepared(self, args: "_Args", delivery: Delivery) -> ReadyPrompt:
        """Encode the prompt and compile the form on another thread, since both may take a while."""
        self._check_open()
        return await asyncio.to_thread(self._turn, *args, delivery)

    async def _pieces(self, turn: ReadyPrompt) -> AsyncGenerator[AnswerPiece, None]:
        num_open, output_ids = turn.request.sampling.n, list[int]()
        async with aclosing(self._news(turn.request)) as outputs:
            async for news in outputs:
                num_open -= news.finish_reason is not None
                if news.index == 0:
                    output_ids += news.token_ids
                if not num_open:
                    self._keep(turn, output_ids)
                yield piece_of(news, self.tokenizer)

    async def _news(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the news of a request. The request is aborted if the caller stops reading."""
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        num_open = request.sampling.n
        self._listeners[request.request_id] = listener
        try:
            self._thread.submit(request)
            while num_open:
                news = await listener.queue.get()
                if isinstance(news, Ended):
                    num_open = 0
                    raise news.error
                num_open -= news.finish_reason is not None
                yield news
        finally:
            self._listeners.pop(request.request_id, None)
            if num_open:
                self._thread.abort(request.request_id)

    def _hand_over(self, news: list[News]) -> None:
        """On the engine's thread: wake each event loop once, with the news for all its
        coroutines."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, News]]] = {}
        for each in news:
            listener = self._listeners.get(each.request_id)
            if listener is not None:
                by_loop.setdefault(listener.loop, []).append((listener, each))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop is closed, so no coroutine is left to read
                for _, each in items:
                    self._listeners.pop(each.request_id, None)
                    self._thread.abort(each.request_id)


_Args = tuple[ScriptPrompt | Conversation, SamplingParams | None, str | None, Overflow | str | None]


@dataclass(frozen=True, slots=True)
class _Listener:
    """A coroutine that waits for news of a request."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[News]


def _put(items: Iterable[tuple[_Listener, News]]) -> None:
    for listener, news in items:
        listener.queue.put_nowait(news)
