"""Makes a response of /v1/responses, whole or as server-sent events, from the news of an answer."""

from collections.abc import AsyncGenerator, Callable

import msgspec

from mainstem.core.json import Json
from mainstem.server.answering import Answering
from mainstem.server.faults import ApiError
from mainstem.server.replies import PING
from mainstem.server.turns import Turn
from mainstem.text.text_engine import TextOutput
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.responses.rendering import ResponseStream


class ResponseWriter:
    """Writes one response. `keep` and `turn` get the response before the client does, so that the
    client's next request can continue it."""

    ping = PING

    def __init__(
        self,
        stream: ResponseStream,
        answers: PromptAnswers,
        turn: Turn | None,
        keep: Callable[[Json], None] | None,
    ) -> None:
        self._stream = stream
        self._answers = answers
        self._turn = turn
        self._keep = keep

    async def whole(self, answering: Answering) -> bytes:
        async for news in answering:
            for _, output in news:
                self._events(output)
        return msgspec.json.encode(self._stream.response)

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        yield self._stream.opening()
        async for news in answering:
            if joined := b"".join([self._events(output) for _, output in news]):
                yield joined

    def last_words(self, error: ApiError) -> bytes:
        return self._stream.failure(error.message, is_callers_fault=error.status < 500)

    def _events(self, output: TextOutput) -> bytes:
        self._answers.add(output)
        events = self._stream.events(output, self._answers)
        if output.finish_reason is not None:
            if self._turn is not None:
                self._turn.end(self._answers.answers[0].token_ids)
            if self._keep is not None:
                self._keep(self._stream.response)
        return events
