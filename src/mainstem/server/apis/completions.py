"""OpenAI's chats and completions: `/v1/chat/completions` and `/v1/completions`."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainstem.core.ids import unique_ids
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.stream import PING
from mainstem.server.kept.turns import SessionTurn
from mainstem.server.link.answering import Answering
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.calls import CallKind
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.chat.stream import CompletionStream
from mainstem.wire.events import event

DONE = b"data: [DONE]\n\n"


class CompletionRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ids = unique_ids()

    def listed(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, CallKind.CHAT, f"chatcmpl-{next(self._ids)}")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CallKind.COMPLETION, f"cmpl-{next(self._ids)}")

    async def _answer(self, request: Request, kind: CallKind, reply_id: str) -> Response:
        gateway = self._gateway
        call, prompts = gateway.parser.parse(await read_json(request, gateway.limits), kind)
        return await gateway.reply(request, call, prompts, reply_id, ReplyWriter)


class ReplyWriter:
    """Gathers the answers to one request and writes them as they come.

    `turn` gets the answer before the client, so that the next turn finds it.
    """

    ping = PING

    def __init__(
        self, reply: CompletionReply, prompt_tokens: Sequence[int], turn: SessionTurn | None
    ) -> None:
        self._reply = reply
        self._turn = turn
        self._answers = [PromptAnswers(count, reply.call.sampling) for count in prompt_tokens]

    async def whole(self, answering: Answering) -> bytes:
        async for news in answering:
            for place, output in news:
                self._answers[place].add(output)
        self._end_turn()
        call = self._reply.call
        if call.num_answers == 1 and call.sampling.logprobs is None:
            return self._render()
        return await asyncio.to_thread(self._render)  # may be many megabytes

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Server-sent events: chunks, usage if it was asked for, and the end mark."""
        stream = CompletionStream(self._reply)
        if opening := stream.opening(self._answers):
            yield opening
        async for news in answering:
            events: list[bytes] = []
            for place, output in news:
                answers = self._answers[place]
                answers.add(output)
                if output.finish_reason is not None:
                    self._end_turn()
                events.append(stream.events(place, output, answers))
            if joined := b"".join(events):
                yield joined
        yield stream.usage_event(self._answers) + DONE

    def last_words(self, error: ApiError) -> bytes:
        return event(error.body())

    def _render(self) -> bytes:
        return msgspec.json.encode(self._reply.whole(self._answers))

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end(self._answers[0].answers[0].token_ids)
