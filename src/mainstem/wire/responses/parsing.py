"""Translates a body of /v1/responses to a chat: its fields and its conversation.

input items, and those of earlier responses  --  ItemReader   -->  messages
body, messages                               --  chat_fields  -->  a ChatBody, for CallParser
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from mainstem.core.json import Json, JsonView
from mainstem.text.encoding import Message
from mainstem.text.tools import past_arguments
from mainstem.wire.chat.bodies import ChatBody
from mainstem.wire.errors import WireError
from mainstem.wire.fields import read_fields
from mainstem.wire.neutral import RESPONSES, without_neutral
from mainstem.wire.responses.bodies import (
    ChosenFunctionTool,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextConfig,
    TextItemPart,
)

Item = JsonView
T = TypeVar("T", bound=Struct)

# fields that a chat has under the same name mean the same there, or are translated below
SAME_IN_CHATS = [*set(ResponsesBody.__struct_fields__) & set(ChatBody.__struct_fields__)]
# a field of the chat -> the field of this API that it came from
ORIGINS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


RESPONSES_URL = "/v1/responses"


def in_responses_terms(error: WireError) -> WireError:
    """Return an error about a field of a chat, with the name that the field has in this API."""
    return WireError(error.code, *renamed(error.message, error.param))


def renamed(message: str, param: str | None) -> tuple[str, str | None]:
    """The message and the field of an error about a chat, with the names of this API."""
    if (param or "").startswith("tools["):
        return message.replace(".function", "", 1), (param or "").replace(".function", "", 1)
    if param not in ORIGINS:
        return message, param
    name = ORIGINS[param]
    return (name + message.removeprefix(param) if message.startswith(param) else message), name


def read_body(fields: JsonView) -> ResponsesBody:
    """Read a body; raises WireError that names the unsupported or invalid field."""
    left = without_neutral(fields, RESPONSES)
    _check_tools(left.get("tools"), left.get("tool_choice"))
    body = read_fields(left, ResponsesBody)
    if body.stream_options is not None and not body.stream:
        message = "stream_options: only with stream=true"
        raise WireError("invalid_value", message, "stream_options")
    return body


def _check_tools(tools: object, choice: object) -> None:
    """Refuse tools that are built into OpenAI's service; the error names their type."""
    instead = "is not supported: only tools of type 'function' are"
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise WireError("unsupported_tool", f"tools[{index}]: {kind!r:.80} {instead}", "tools")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise WireError("unsupported_tool", f"tool_choice: {kind!r:.80} {instead}", "tool_choice")


def input_items(body: ResponsesBody) -> list[Item]:
    """The input as items; a text is a message of the user."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if not body.input and body.previous_response_id is None:
        raise WireError("invalid_value", "input: must not be empty", "input")
    return [*body.input]


# --- the conversation ----------------------------------------------------------------------------


class ItemReader:
    """Turns items into the messages of a chat, in order.

    Instructions and the system and developer messages at the beginning become one system message,
    because many chat templates do not accept a second one.
    """

    def __init__(self, instructions: str | None) -> None:
        self._system = [] if instructions is None else [instructions]
        self._messages: list[Message] = []
        self._functions: dict[str, str] = {}  # name of the function by call id
        self._reasoning = ""  # reasoning of the assistant's next message

    @property
    def messages(self) -> list[Message]:
        if not self._system:
            return self._messages
        return [{"role": "system", "content": "\n\n".join(self._system)}, *self._messages]

    def add(self, items: Sequence[Item]) -> None:
        """Add items; raises WireError that names the place in the input."""
        adders: dict[object, Callable[[str, Item], None]] = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }
        for index, item in enumerate(items):
            place, kind = f"input[{index}]", item.get("type", "message")
            add = adders.get(kind) if isinstance(kind, str) else None
            if add is None:
                known = ", ".join(map(str, adders))
                message = f"{place}: items of type {kind!r:.80} are not supported, only {known}"
                raise WireError("unsupported_item", message, "input")
            add(place, item)

    def _add_message(self, place: str, item: Item) -> None:
        read = _read(item, MessageItem, place)
        text = _text(read.content, f"{place}.content")
        if read.role in ("system", "developer") and not self._messages:
            self._system.append(text)
            return
        thoughts = self._thoughts()
        message: Message = {"role": read.role, "content": text}
        if read.role == "assistant":
            message |= thoughts
        elif thoughts:  # from an answer that was cut off before its text
            self._messages.append({"role": "assistant", "content": "", **thoughts})
        self._messages.append(message)

    def _add_call(self, place: str, item: Item) -> None:
        """Add a call. The calls of one answer are one message, together with the text before
        them."""
        read = _read(item, FunctionCallItem, place)
        self._functions[read.call_id] = read.name
        function = {"name": read.name, "arguments": past_arguments(read.arguments)}
        call = {"id": read.call_id, "type": "function", "function": function}
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant":
            calls = last.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(call)
            return
        said: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
        self._messages.append(said | self._thoughts())

    def _add_output(self, place: str, item: Item) -> None:
        read = _read(item, FunctionOutputItem, place)
        name = self._functions.get(read.call_id)
        if name is None:
            reason = f"no function_call before it has the call_id {read.call_id!r:.80}"
            raise _wrong(place, reason)
        text = _text(read.output, f"{place}.output")
        self._messages.append(
            {"role": "tool", "tool_call_id": read.call_id, "name": name, "content": text}
        )

    def _add_reasoning(self, place: str, item: Item) -> None:
        if item.get("encrypted_content") is not None:
            reason = "is not supported: reasoning is sent as text in content"
            raise _wrong(f"{place}.encrypted_content", reason)
        left = {name: value for name, value in item.items() if name != "encrypted_content"}
        read = _read(left, ReasoningItem, place)
        self._reasoning += "".join(part.text for part in read.content or read.summary or ())

    def _thoughts(self) -> Message:
        """The reasoning that belongs to a message, under the name that chat templates read."""
        text, self._reasoning = self._reasoning, ""
        return {"reasoning_content": text} if text else {}


def _text(content: str | Sequence[Item], place: str) -> str:
    """Return the text of a content, with parts joined as in a chat."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in ("input_text", "output_text"):
            reason = (
                f"parts of type {kind!r:.80} are not supported, only input_text and output_text"
            )
            raise _wrong(f"{place}[{index}]", reason)
        texts.append(_read(part, TextItemPart, f"{place}[{index}]").text)
    return "\n".join(texts)


def _read(item: Item, kind: type[T], place: str) -> T:
    """Read an item as a record; errors name its place."""
    try:
        return read_fields(item, kind)
    except WireError as error:
        raise WireError(error.code, f"{place}: {error.message}", "input") from None


def _wrong(place: str, reason: str) -> WireError:
    return WireError("invalid_value", f"{place}: {reason}", "input")


# --- the other fields ----------------------------------------------------------------------------


def chat_fields(body: ResponsesBody, messages: list[Message]) -> Json:
    """Return the fields of a ChatBody that asks for the same."""
    fields: Json = {name: getattr(body, name) for name in SAME_IN_CHATS}
    fields |= {
        "stream_options": None,  # they concern the stream of this API
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body.text),
        "tools": None if body.tools is None else [chat_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return {name: value for name, value in fields.items() if value is not None}


def chat_tool(tool: FunctionTool) -> Json:
    given = {"description": tool.description, "parameters": tool.parameters}
    function = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name} | function}


def _tool_choice(choice: str | ChosenFunctionTool | None) -> object:
    if isinstance(choice, ChosenFunctionTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(text: TextConfig | None) -> Json | None:
    if text is None or text.format is None:
        return None
    format = text.format
    if format.type != "json_schema":
        return {"type": format.type}
    described = {"schema": format.schema, "strict": format.strict}
    return {"type": "json_schema", "json_schema": described}
