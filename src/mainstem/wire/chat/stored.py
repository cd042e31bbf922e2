"""Stored chats of OpenAI's API: the fields that ask for one, and how its parts are shown."""

from msgspec import Struct, field

from mainstem.core.json import Json, JsonView
from mainstem.wire.errors import WireError
from mainstem.wire.fields import Metadata, read_fields

CHATS_URL = "/v1/chat/completions"


class StoredChatFields(Struct, frozen=True):
    """Fields of a chat that say whether it is stored, and under which words it is found."""

    store: bool | None = None  # default: false
    metadata: Metadata | None = None  # has an effect only on stored chats


class ChatUpdate(Struct, frozen=True):
    """`POST /v1/chat/completions/ID`."""

    metadata: Metadata | None  # null removes all


class StoredChat(Struct, frozen=True):
    """What a list of chats is filtered by."""

    model: str
    metadata: dict[str, str] = field(default_factory=dict)


def stored_fields(body: JsonView) -> StoredChatFields:
    """Read them from the body of a chat; raises WireError."""
    names = StoredChatFields.__struct_fields__
    return read_fields({name: body[name] for name in names if name in body}, StoredChatFields)


def read_update(body: JsonView) -> dict[str, str]:
    """The metadata that replaces those of a stored chat; raises WireError."""
    if body == {"metadata": None}:
        return {}
    update = read_fields(body, ChatUpdate)
    return update.metadata or {}


def stored_message(message: JsonView, message_id: str) -> Json:
    """A message of a stored chat, as it is listed."""
    content = message.get("content")
    parts = [content] if isinstance(content, dict) else content
    is_text = isinstance(parts, str) or parts is None
    return {
        **message,
        "id": message_id,
        "content": content if is_text else None,
        "content_parts": None if is_text else parts,
        "name": message.get("name"),
    }


def metadata_filter(params: list[tuple[str, str]]) -> dict[str, str]:
    """The values that `metadata[NAME]=VALUE` asks for; raises WireError for another parameter."""
    wanted: dict[str, str] = {}
    for name, value in params:
        if name.startswith("metadata[") and name.endswith("]"):
            wanted[name[len("metadata[") : -1]] = value
        elif name not in ("after", "limit", "model", "order"):
            message = f"the parameter {name!r:.80} is not supported"
            raise WireError("unknown_field", message, name[:80])
    return wanted
