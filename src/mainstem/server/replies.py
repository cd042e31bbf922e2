"""Makes the bytes of a reply, whole or as server-sent events, from the news of a request's
answers."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from mainstem.server.answering import Answering
from mainstem.server.faults import ApiError
from mainstem.server.turns import Turn
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.chat.stream import CompletionStream
from mainstem.wire.events import event

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients ignore


class Writer(Protocol):
    """Writes the reply to one request in the format of one API."""

    ping: bytes  # sent in a stream that would be silent for long

    async def whole(self, answering: Answering) -> bytes:
        """The reply as JSON when every answer is finished; raises what ended an answer early."""

    def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; raises the error that ended it early."""

    def last_words(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot continue."""


# makes a writer from a reply's call and heading, each prompt's number of tokens, and the turn of a
# session
MakeWriter = Callable[[CompletionReply, Sequence[int], Turn | None], Writer]


class ReplyWriter:
    """Gathers the answers to one request and writes them as they come.

    `turn` gets the answer before the client, so that the next turn finds it.
    """

    ping = PING

    def __init__(
        self, reply: CompletionReply, prompt_tokens: Sequence[int], turn: Turn | None
    ) -> None:
        self._reply = reply
        self._turn = turn
        self._answers = [PromptAnswers(count, reply.call.sampling) for count in prompt_tokens]

    async def whole(self, answering: Answering) -> bytes:
        """The reply as JSON when every answer is finished; raises what ended an answer early."""
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
