"""Anthropic's Messages API: the same chats in another format.

A body becomes a chat that is checked like OpenAI's (`read_call`, in wire),
and `Gateway.encode` makes its token ids (text/encoding.py). Batches are in message_batches.py.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.ids import unique_ids
from mainstem.core.request import Request as EngineRequest
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Tenant
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, messages_error
from mainstem.server.kept.turns import SessionTurn
from mainstem.server.link.answering import Answering
from mainstem.server.pins import Prefix, num_common
from mainstem.text.encoding import Chat
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.calls import Call
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.errors import WireError
from mainstem.wire.events import named_event
from mainstem.wire.messages.bodies import TTL_S, CountBody, MessagesBody
from mainstem.wire.messages.parsing import (
    MESSAGES_URL,
    Mark,
    MessagesAsked,
    in_messages_terms,
    read_call,
)
from mainstem.wire.messages.rendering import PING, MessageReply, MessageStream, PinnedTokens


class MessagesRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ids = unique_ids()

    def listed(self) -> list[Route]:
        return [
            Route(MESSAGES_URL, self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        asked, call, chat = await self._read(request, MessagesBody)
        keeper = PrefixKeeper(self._gateway, request.state.tenant, call, chat, asked.marks)

        def writer(
            reply: CompletionReply, prompt_tokens: Sequence[int], _: SessionTurn | None
        ) -> MessageWriter:
            made = MessageReply(call, reply.heading, shows_thinking=asked.shows_thinking)
            answers = PromptAnswers(prompt_tokens[0], call.sampling)
            return MessageWriter(made, answers, keeper, request.state.request_id)

        reply_id = f"msg_{next(self._ids)}"
        try:
            return await self._gateway.reply(request, call, [chat], reply_id, writer)
        except ApiError as error:
            told = in_messages_terms(WireError(error.code or "", error.message, error.param))
            error.message, error.param = told.message, told.param
            raise

    async def count(self, request: Request) -> Response:
        """Return how many tokens the prompt of a request has."""
        _, call, chat = await self._read(request, CountBody)
        count = await self._gateway.count(call, chat, request.state.tenant)
        return JSONResponse({"input_tokens": count})

    async def _read(
        self, request: Request, kind: type[CountBody]
    ) -> tuple[MessagesAsked, Call, Chat]:
        body = await read_json(request, self._gateway.limits)
        return read_call(self._gateway.parser, body, kind)


class PrefixKeeper:
    """Finds the prefixes of a prompt that should be kept, and pins them once the prompt is
    computed."""

    def __init__(
        self, gateway: Gateway, tenant: Tenant, call: Call, chat: Chat, marks: Sequence[Mark]
    ) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._call = call
        self._chat = chat
        self._marks = marks
        self._lengths: list[int] = []  # length of each mark's prefix in tokens

    async def measure(self, request: EngineRequest) -> PinnedTokens:
        """Return how many tokens will be kept, within the limits of this key."""
        most = self._gateway.pins.max_tokens
        self._lengths = [await self._length(mark, request) for mark in self._marks]
        told = [
            (min(length, most), mark.ttl_s == TTL_S["1h"])
            for length, mark in zip(self._lengths, self._marks, strict=True)
        ]
        hour = [length for length, is_hour in told if is_hour]
        return PinnedTokens(max((length for length, _ in told), default=0), max(hour, default=0))

    def keep(self, request: EngineRequest) -> None:
        """Pin the prefixes, after the prompt was computed."""
        for mark, length in zip(self._marks, self._lengths, strict=True):
            ids = request.prompt_ids[:length]
            prefix = Prefix(ids, request.salt, request.public_tokens)
            self._gateway.pins.keep(self._tenant.owner, prefix, mark.ttl_s)

    async def _length(self, mark: Mark, request: EngineRequest) -> int:
        """The length of the prefix that the whole prompt shares with the conversation up to a
        mark."""
        if mark.is_whole:
            return len(request.prompt_ids)
        gateway, call = self._gateway, self._call
        try:
            _, app = gateway.apps.resolve(call, gateway.model.names)
            chat = _up_to(mark, self._chat)
            [part] = await gateway.encode(call, [chat], app, None, request.salt)
        except (ApiError, WireError):  # the template accepts the whole chat, but not this part
            return 0
        return num_common(request.prompt_ids, np.array(part, np.int32))


def _up_to(mark: Mark, chat: Chat) -> Chat:
    tools = chat.tools
    if tools is not None and mark.num_tools is not None:
        tools = tools[: mark.num_tools]
    return replace(
        chat,
        messages=mark.messages,
        tools=tools,
        add_generation_prompt=False,
        continue_final_message=False,
    )


class MessageWriter:
    """Gathers the answer to one request and writes it as it comes."""

    ping = PING

    def __init__(
        self, reply: MessageReply, answers: PromptAnswers, keeper: PrefixKeeper, request_id: str
    ) -> None:
        self._reply = reply
        self._answers = answers
        self._keeper = keeper
        self._request_id = request_id

    async def whole(self, answering: Answering) -> bytes:
        """The reply as JSON when the answer is finished; raises the error that ended it early."""
        [opened] = answering.requests
        reply = replace(self._reply, pinned=await self._keeper.measure(opened.request))
        async for news in answering:
            for _, output in news:
                self._answers.add(output)
        self._keeper.keep(opened.request)
        return msgspec.json.encode(reply.whole(self._answers))

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events."""
        [opened] = answering.requests
        stream = MessageStream(self._reply)
        yield stream.opening(self._answers)
        stream.reply = replace(self._reply, pinned=await self._keeper.measure(opened.request))
        async for news in answering:
            events: list[bytes] = []
            for _, output in news:
                self._answers.add(output)
                events.append(stream.events(output, self._answers))
            if joined := b"".join(events):
                yield joined
        self._keeper.keep(opened.request)

    def last_words(self, error: ApiError) -> bytes:
        return named_event(messages_error(error, self._request_id))
