"""The paths of OpenAI's Responses API."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from secrets import token_hex

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.json import Json
from mainstem.core.request import Output, Overflow
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.pages import page_of
from mainstem.server.http.stream import PING
from mainstem.server.kept.response_store import Exchanged, Item, KeptResponse
from mainstem.server.kept.turns import SessionTurn
from mainstem.server.link.answering import Answering
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.errors import WireError
from mainstem.wire.responses.bodies import ResponsesBody
from mainstem.wire.responses.parsing import ItemReader, chat_fields, input_items, read_body, renamed
from mainstem.wire.responses.rendering import ResponseStream, input_item


class ResponseRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = gateway.responses

    def listed(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/{response_id}", self.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", self.list_input, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        gateway = self._gateway
        body = read_body(await read_json(request, gateway.limits))
        try:
            return await self._answer(request, body)
        except (ApiError, WireError) as error:
            _rename(error)
            raise

    async def retrieve(self, request: Request) -> Response:
        for name in request.query_params:
            message = f"{name}: a stored response is returned whole; leave this out"
            raise ApiError(400, message, name, "unknown_field")
        return JSONResponse(self._found(request).read().response)

    async def delete(self, request: Request) -> Response:
        """Forget a response, and the token ids of its conversation."""
        kept, owner = self._found(request), request.state.tenant.owner
        self._store.remove(owner, response_id := kept.response_id)
        self._gateway.sessions.remove(owner, kept.session_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def count(self, request: Request) -> Response:
        """Return how many tokens the prompt of a request has."""
        gateway, tenant = self._gateway, request.state.tenant
        body = read_body(await read_json(request, gateway.limits))
        try:
            fields = chat_fields(body, self._conversation(tenant.owner, body)[0].messages)
            call, (prompt,) = gateway.parser.parse(fields, CallKind.CHAT)
            count = await gateway.count(call, prompt, tenant)
        except (ApiError, WireError) as error:
            _rename(error)
            raise
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: Request) -> Response:
        message = "conversations are not compacted; use truncation, or send a shorter input"
        raise ApiError(404, message, code="unknown_url")

    async def list_input(self, request: Request) -> Response:
        """The items that a stored response answered, those of earlier responses included."""
        owner, found = request.state.tenant.owner, self._found(request)
        response_id = found.response_id
        *earlier, last = self._store.chain(owner, response_id) or [found]
        items = [item for each in earlier for item in each.read().items] + last.read().input
        number = response_id.removeprefix("resp_")
        shown = [input_item(item, f"{number}{place:03x}") for place, item in enumerate(items)]
        return page_of(request, [(str(item["id"]), item) for item in reversed(shown)])

    async def cancel(self, request: Request) -> Response:
        self._found(request)
        message = "only responses in the background can be cancelled, and there are none here"
        raise ApiError(400, message, "response_id", "invalid_value")

    def _found(self, request: Request) -> KeptResponse:
        response_id = request.path_params["response_id"]
        found = self._store.find(request.state.tenant.owner, response_id)
        if found is None or found.is_chat:
            message = f"there is no response {response_id!r:.80}; it may not have been stored"
            raise ApiError(404, message, "response_id", "response_not_found")
        return found

    async def _answer(self, request: Request, body: ResponsesBody) -> Response:
        gateway, owner = self._gateway, request.state.tenant.owner
        response_id = f"resp_{token_hex(24)}"  # anyone with this key and id may read the response
        conversation, own_items, earlier = self._conversation(owner, body)
        session_id = earlier[0].session_id if earlier else response_id
        fields = chat_fields(body, conversation.messages)
        call, prompts = gateway.parser.parse(fields, CallKind.CHAT)
        is_kept = body.store is not False
        call = _in_session(call, body, session_id if earlier or is_kept else None)

        def keep(response: Json) -> None:
            exchanged = Exchanged(own_items, response)
            self._store.keep(owner, response_id, body.previous_response_id, session_id, exchanged)

        def writer(
            reply: CompletionReply, prompt_tokens: Sequence[int], turn: SessionTurn | None
        ) -> ResponseWriter:
            stream = ResponseStream(reply.call, reply.heading, body)
            answers = PromptAnswers(prompt_tokens[0], call.sampling)
            if not is_kept:
                return ResponseWriter(stream, answers, None, None)
            return ResponseWriter(stream, answers, turn, keep)

        return await gateway.reply(request, call, prompts, response_id, writer)

    def _conversation(
        self, owner: str, body: ResponsesBody
    ) -> tuple[ItemReader, list[Item], list[KeptResponse]]:
        """Return the conversation of a request, its own items, and the responses before it."""
        earlier = self._earlier(owner, body.previous_response_id)
        own_items = [dict(item) for item in input_items(body)]
        conversation = ItemReader(body.instructions)
        for kept in earlier:
            conversation.add(kept.read().items)
        conversation.add(own_items)
        return conversation, own_items, earlier

    def _earlier(self, owner: str, previous_id: str | None) -> list[KeptResponse]:
        """Return the responses that a request continues, in order."""
        if previous_id is None:
            return []
        earlier = self._store.chain(owner, previous_id)
        if earlier is None or earlier[0].is_chat:
            message = f"previous_response_id: {previous_id!r:.80}, or a response before it, is "
            message += "not kept; send the conversation as input"
            code = "previous_response_not_found"
            raise ApiError(400, message, "previous_response_id", code)
        return earlier


def _in_session(call: Call, body: ResponsesBody, session_id: str | None) -> Call:
    overflow = Overflow.ERROR
    if body.truncation == "auto":
        overflow = Overflow.RECOMPUTE if session_id is None else Overflow.KV
    return replace(call, session_id=session_id, overflow=overflow)


def _rename(error: ApiError | WireError) -> None:
    """Change an error so that it names the wrong field as this API does."""
    error.message, error.param = renamed(error.message, error.param)


class ResponseWriter:
    """Writes one response. `keep` and `turn` get the response before the client does, so that the
    client's next request can continue it."""

    ping = PING

    def __init__(
        self,
        stream: ResponseStream,
        answers: PromptAnswers,
        turn: SessionTurn | None,
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

    def _events(self, output: Output) -> bytes:
        self._answers.add(output)
        events = self._stream.events(output, self._answers)
        if output.finish_reason is not None:
            if self._turn is not None:
                self._turn.end(self._answers.answers[0].token_ids)
            if self._keep is not None:
                self._keep(self._stream.response)
        return events
