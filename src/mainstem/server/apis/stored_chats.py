"""OpenAI's stored chats: those answered with `store: true`, in the store of responses."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.json import Json
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.pages import page_of
from mainstem.server.kept.response_store import Exchanged, KeptResponse
from mainstem.wire.chat.stored import (
    CHATS_URL,
    StoredChat,
    metadata_filter,
    read_update,
    stored_message,
)


class _Head(msgspec.Struct, frozen=True):
    """The part of a stored chat that says whether, and where, it is listed."""

    response: StoredChat
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Filter:
    """Which chats a list has."""

    model: str | None
    metadata: dict[str, str] = field(default_factory=dict)

    def chosen(self, kept: list[KeptResponse]) -> list[KeptResponse]:
        """The chats to list, latest first. Runs on a thread, as there may be very many bytes."""
        heads = [(msgspec.json.decode(each.data, type=_Head), each) for each in kept]
        found = [(head.at_s, each) for head, each in heads if self._takes(head.response)]
        return [each for _, each in sorted(found, key=lambda one: one[0], reverse=True)]

    def _takes(self, chat: StoredChat) -> bool:
        is_of_model = self.model in (None, chat.model)
        return is_of_model and self.metadata.items() <= chat.metadata.items()


class StoredChatRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = gateway.responses

    def listed(self) -> list[Route]:
        one = f"{CHATS_URL}/{{chat_id}}"
        return [
            Route(CHATS_URL, self.list_chats, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/messages", self.list_messages, methods=["GET"]),
        ]

    async def list_chats(self, request: Request) -> Response:
        params = request.query_params
        wanted = _Filter(params.get("model"), metadata_filter(params.multi_items()))
        kept = self._store.chats(request.state.tenant.owner)
        found = await asyncio.to_thread(wanted.chosen, kept)
        items = [(each.response_id, each) for each in found]
        return page_of(request, items, "asc", lambda each: each.read().response)

    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(self._found(request).read().response)

    async def update(self, request: Request) -> Response:
        """Replace the metadata."""
        metadata = read_update(await read_json(request, self._gateway.limits))
        found = self._found(request)
        old = found.read()
        chat = Exchanged(old.input, old.response | {"metadata": metadata}, old.at_s)
        self._store.keep(request.state.tenant.owner, found.response_id, None, "", chat)
        return JSONResponse(chat.response)

    async def delete(self, request: Request) -> Response:
        chat_id = self._found(request).response_id
        self._store.remove(request.state.tenant.owner, chat_id)
        return JSONResponse({"id": chat_id, "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(self, request: Request) -> Response:
        """The messages that were answered."""
        found = self._found(request)
        items = [
            (name := f"{found.response_id}-{place}", stored_message(message, name))
            for place, message in enumerate(found.read().input)
        ]
        return page_of(request, items[::-1], "asc")

    def _found(self, request: Request) -> KeptResponse:
        chat_id = request.path_params["chat_id"]
        found = self._store.find(request.state.tenant.owner, chat_id)
        if found is None or not found.is_chat:
            message = f"there is no stored chat {chat_id!r:.80}; it needs store=true"
            raise ApiError(404, message, "completion_id", "chat_not_found")
        return found


def keeper(
    gateway: Gateway, owner: str, messages: list[Json], metadata: dict[str, str], now_s: float
) -> Callable[[Json], None]:
    """What stores a chat with these messages when it is answered, and adds `metadata` to the
    reply."""

    def keep(reply: Json) -> None:
        reply["metadata"] = metadata
        gateway.responses.keep(owner, str(reply["id"]), None, "", Exchanged(messages, reply, now_s))

    return keep
