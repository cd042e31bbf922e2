"""Translates bodies of Anthropic's Messages API to chats.

    body (JSON object) -- bodies.py: names and types --> MessagesBody
                       -- here: Anthropic's meanings --> fields of a ChatBody, [Mark, ...]
                       -- CallParser                 --> Call, Chat

Fields that would change the answer and are not supported are refused; the error names them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from mainstem.core.json import Json, JsonView
from mainstem.core.spelling import did_you_mean
from mainstem.text.encoding import Chat, Message
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError
from mainstem.wire.fields import read_fields
from mainstem.wire.messages.bodies import (
    Block,
    CacheControl,
    CountBody,
    InputMessage,
    InputTool,
    InputToolChoice,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mainstem.wire.neutral import MESSAGES, without_neutral

MESSAGES_URL = "/v1/messages"
MAX_MARKS = 4  # maximum number of `cache_control` in one body, as in Anthropic's API
# a line that Claude Code puts before its system prompt; it changes each time and is not needed
BILLING = "x-anthropic-billing-header:"
_ANYBODY: Message = {"role": "user", "content": "?"}  # a placeholder message after a system prompt


@dataclass(frozen=True, slots=True)
class Mark:
    """A prefix of the prompt to pin: what the prompt has in common with this conversation."""

    ttl_s: int
    messages: list[Message] = field(default_factory=list)
    num_tools: int | None = None  # the conversation has only the first `num_tools` tools; None: all
    is_whole: bool = False  # whether to pin the whole prompt


@dataclass(frozen=True, slots=True)
class MessagesAsked:
    """What a body asks for: the fields of a chat, and which prefixes to pin."""

    fields: Json
    marks: list[Mark]
    must_think: bool = False
    shows_thinking: bool = True


def read_call(
    parser: CallParser, body: JsonView, kind: type[CountBody]
) -> tuple[MessagesAsked, Call, Chat]:
    """Read a body as a chat; raises WireError that names the field as this API does."""
    asked = read_messages(body, kind, parser.find_formats().template)
    try:
        call, [chat] = parser.parse(asked.fields, CallKind.CHAT)
    except WireError as error:
        raise in_messages_terms(error) from None
    if asked.must_think and call.reasoning is None:
        reason = "this model has no known format of reasoning"
        message = f"thinking: 'enabled' is not supported: {reason}"
        raise WireError("invalid_value", message, "thinking")
    assert isinstance(chat, Chat)
    return asked, call, chat


def read_messages(body: JsonView, kind: type[CountBody], template: str) -> MessagesAsked:
    """Read a body; raises WireError that names the field. `template` is the model's chat
    template."""
    try:
        read = read_fields(without_neutral(body, MESSAGES), kind)
    except WireError as error:
        raise _by_block(error) from None
    marks = _marks(read)
    if len(marks) > MAX_MARKS:
        message = f"cache_control: at most {MAX_MARKS} blocks may have one, got {len(marks)}"
        raise WireError("invalid_value", message, "cache_control")
    fields = _chat_fields(read, template)
    if (thinking := read.thinking) is None:
        return MessagesAsked(fields, marks)
    is_on, is_shown = thinking.type == "enabled", thinking.display != "omitted"
    return MessagesAsked(fields, marks, is_on, is_shown)


_KIND = re.compile(r"^(?P<place>.+)\.type: invalid value '(?P<kind>[^']*)'$", re.DOTALL)


def _by_block(error: WireError) -> WireError:
    """The error for an unsupported kind of block or tool, which names the kind."""
    found = _KIND.match(error.message)
    if found is None:
        if error.message.startswith("tools[") and ".type: " in error.message:
            reason = "only tools that the client runs are supported (name, input_schema)"
            return WireError(error.code, f"{error.message}: {reason}", error.param)
        return error
    message = f"{found['place']}: {found['kind']} blocks are not supported: the model reads text"
    if meant := did_you_mean(found["kind"], ["text", "thinking", "tool_use", "tool_result"]):
        message += f".{meant}"
    return WireError(error.code, message, error.param)


# chat fields have other names here
_NAMES = {
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


def in_messages_terms(error: WireError) -> WireError:
    """Return an error about a field of a chat, with the name that the field has in this API."""
    if (error.param or "").startswith("tools["):
        return WireError(error.code, *(_as_here(text) for text in (error.message, error.param)))
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    message = error.message.removeprefix(f"{error.param}: ")
    return WireError(error.code, f"{name}: {message}", name)


def _as_here(text: str | None) -> str:
    return (text or "").replace(".function.parameters", ".input_schema", 1)


# --- as a chat -----------------------------------------------------------------------------------


def _chat_fields(body: CountBody, template: str) -> Json:
    """Return the fields of a ChatBody that asks for the same."""
    choice = body.tool_choice
    continues = body.messages[-1].role == "assistant"
    fields: Json = {
        "model": body.model,
        "messages": _messages(body),
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "continue_final_message": True if continues else None,
        "chat_template_kwargs": _template_args(body, template) or None,
    }
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"schema": body.output_config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields["stop"] = body.stop_sequences
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(body, name)
    return {name: value for name, value in fields.items() if value is not None}


def _template_args(body: CountBody, template: str) -> Json:
    """The template variables for thinking."""
    args: Json = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        args["enable_thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None and (effort := body.output_config.effort) is not None:
        args["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
    return {name: value for name, value in args.items() if name in template}


def _tool(tool: InputTool) -> Message:
    function: Message = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _tool_choice(choice: InputToolChoice) -> object:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise WireError("invalid_value", "tool_choice: name: is required", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(body: CountBody) -> list[Message]:
    system = [] if body.system is None else _system(body.system)
    return [*system, *_turns(body.messages)]


def _system(system: str | Sequence[TextBlock]) -> list[Message]:
    if not isinstance(system, str):
        system = _joined([block for block in system if not block.text.startswith(BILLING)])
    return [{"role": "system", "content": system}] if system else []


def _turns(messages: Sequence[InputMessage]) -> list[Message]:
    turns: list[Message] = []
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            turns.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            turns.append(_assistant(message.content, index))
        else:
            turns += _said(message.role, message.content, index)
    return turns


def _assistant(blocks: Sequence[Block], index: int) -> Message:
    """Return an earlier answer as a message: its reasoning, text and calls."""
    _check_kinds(blocks, ToolResultBlock, "assistant", index)
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    said = _joined([block for block in blocks if isinstance(block, TextBlock)])
    message: Message = {"role": "assistant", "content": said}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message |= {"content": said or None, "tool_calls": calls}
    return message


def _said(role: str, blocks: Sequence[Block], index: int) -> Iterator[Message]:
    """Yield tool results and texts in their order; each result is a separate message."""
    _check_kinds(blocks, ToolUseBlock | ThinkingBlock, role, index)
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": _joined(texts)}
                texts = []
            yield _result(block)
    if texts or not blocks:
        yield {"role": role, "content": _joined(texts)}


def _result(block: ToolResultBlock) -> Message:
    content = block.content or ""
    said = content if isinstance(content, str) else _joined(content)
    if block.is_error:
        said = f"Error: {said}"  # chat templates have no other way to mark an error
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}


def _check_kinds(blocks: Sequence[Block], wrong: type | object, role: str, index: int) -> None:
    for place, block in enumerate(blocks):
        if isinstance(block, wrong):  # type: ignore[arg-type]  # a class, or several
            kind = type(block).__struct_config__.tag
            message = (
                f"messages[{index}].content[{place}]: {kind} is not allowed for the role {role}"
            )
            raise WireError("invalid_value", message, "messages")


def _joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


# --- what is to be kept --------------------------------------------------------------------------


def _marks(body: CountBody) -> list[Mark]:
    """Return one mark for each `cache_control` of a tool, a system text, a block of a message or a
    text in a tool result, and the body, in this order."""
    marks: list[Mark] = []
    system = [] if body.system is None else _system(body.system)
    for index, tool in enumerate(body.tools or ()):
        if (control := tool.cache_control) is not None:
            marks.append(Mark(control.ttl_s, [*system, _ANYBODY], index + 1))
    texts = body.system if isinstance(body.system, list) else []
    for index, text in enumerate(texts):
        if (control := text.cache_control) is not None:
            marks.append(Mark(control.ttl_s, [*_system(texts[: index + 1]), _ANYBODY]))
    for index, message in enumerate(body.messages):
        blocks = [] if isinstance(message.content, str) else message.content
        for control, upto in _up_to_controls(blocks):
            if index == len(body.messages) - 1 and upto == blocks:
                marks.append(Mark(control.ttl_s, is_whole=True))
            else:
                turns = _turns([*body.messages[:index], InputMessage(message.role, upto)])
                marks.append(Mark(control.ttl_s, [*system, *turns]))
    if body.cache_control is not None:
        marks.append(Mark(body.cache_control.ttl_s, is_whole=True))
    return marks


def _up_to_controls(blocks: list[Block]) -> Iterator[tuple[CacheControl, list[Block]]]:
    """Yield each `cache_control` with the blocks up to the end of its block. A tool result is cut
    after a text that has one."""
    for place, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            for index, text in enumerate(block.content):
                if text.cache_control is not None:
                    cut = structs.replace(block, content=block.content[: index + 1])
                    yield text.cache_control, [*blocks[:place], cut]
        if block.cache_control is not None:
            yield block.cache_control, blocks[: place + 1]
