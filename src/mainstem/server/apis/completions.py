"""OpenAI's chats and completions: `/v1/chat/completions` and `/v1/completions`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from time import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainstem.core.ids import unique_ids
from mainstem.core.json import Json
from mainstem.server.apis.stored_chats import keeper
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.stream import PING
from mainstem.server.kept.response_store import CHAT_PREFIX
from mainstem.server.kept.turns import SessionTurn
from mainstem.server.link.answering import Answering
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.calls import CallKind
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.chat.stored import stored_fields
from mainstem.wire.chat.stream import CompletionStream
from mainstem.wire.events import event

Messages = list[dict[str, object]]
Keep = Callable[[Json], None]

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
        gateway = self._gateway
        body = await read_json(request, gateway.limits)
        stored = stored_fields(body)
        call, prompts = gateway.parser.parse(body, CallKind.CHAT)
        keep: Keep | None = None
        if stored.store:
            messages = msgspec.convert(body["messages"], Messages)
            owner, metadata = request.state.tenant.owner, stored.metadata or {}
            keep = keeper(gateway, owner, messages, metadata, time())
        writer = partial(ReplyWriter, keep=keep)
        reply_id = f"{CHAT_PREFIX}{next(self._ids)}"
        return await gateway.reply(request, call, prompts, reply_id, writer)

    async def completions(self, request: Request) -> Response:
        gateway, kind = self._gateway, CallKind.COMPLETION
        call, prompts = gateway.parser.parse(await read_json(request, gateway.limits), kind)
        reply_id = f"cmpl-{next(self._ids)}"
        return await gateway.reply(request, call, prompts, reply_id, ReplyWriter)


class ReplyWriter:
    """Gathers the answers to one request and writes them as they come.

    `turn` and `keep` get the answer before the client, so that the next request finds it.
    """

    ping = PING

    def __init__(
        self,
        reply: CompletionReply,
        prompt_tokens: Sequence[int],
        turn: SessionTurn | None,
        keep: Keep | None = None,
    ) -> None:
        self._reply = reply
        self._turn = turn
        self._keep = keep
        self._answers = [PromptAnswers(count, reply.call.sampling) for count in prompt_tokens]

    async def whole(self, answering: Answering) -> bytes:
        async for news in answering:
            for place, output in news:
                self._answers[place].add(output)
        self._end_turn()
        reply = await self._whole()
        if self._is_small:
            return msgspec.json.encode(reply)
        return await asyncio.to_thread(msgspec.json.encode, reply)

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
            if self._keep is not None and all(each.is_finished for each in self._answers):
                await self._whole()
            if joined := b"".join(events):
                yield joined
        yield stream.usage_event(self._answers) + DONE

    def last_words(self, error: ApiError) -> bytes:
        return event(error.body())

    @property
    def _is_small(self) -> bool:
        """Whether the reply is never many megabytes."""
        return self._reply.call.num_answers == 1 and self._reply.call.sampling.logprobs is None

    async def _whole(self) -> Json:
        """The reply to a finished request, after it was stored, if it is to be."""
        make, answers = self._reply.whole, self._answers
        made = make(answers) if self._is_small else await asyncio.to_thread(make, answers)
        if self._keep is not None:
            self._keep(made)
        return made

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end(self._answers[0].answers[0].token_ids)
