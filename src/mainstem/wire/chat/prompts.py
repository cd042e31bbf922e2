"""The prompts of chats and completions: texts, token ids, and conversations in the form that chat
templates expect."""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json, JsonView
from mainstem.text.encoding import Chat, Message, Prompt
from mainstem.text.parsers.formats import AnswerFormats, ToolUse
from mainstem.text.tools import past_arguments
from mainstem.wire.calls import MAX_TOKEN_ID, BodyLimits
from mainstem.wire.chat import bodies
from mainstem.wire.chat.bodies import ChatBody

T = TypeVar("T")


def prompts_of(given: str | list[int | str | list[int]], limits: BodyLimits) -> Iterator[Prompt]:
    """Read prompts: one text, one list of ids, or a list of these."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        yield _prompt(given)
        return
    if len(given) > limits.max_prompts:
        raise InvalidRequest("prompt", f"at most {limits.max_prompts} prompts in one request")
    for item in given:
        yield _prompt(item)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    reason = f"must be one text or one list of token ids from 0 to {MAX_TOKEN_ID}"
    if not isinstance(value, list):
        raise InvalidRequest("prompt", reason)
    try:
        ids = array("i", value)
    except (TypeError, OverflowError):
        raise InvalidRequest("prompt", reason) from None
    if ids and min(ids) < 0:
        raise InvalidRequest("prompt", reason)
    return ids


def chat_of(body: ChatBody, fields: Json, tools: ToolUse | None, formats: AnswerFormats) -> Chat:
    """The conversation in the form that chat templates expect."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        reason = "cannot be combined with add_generation_prompt=true: a message is continued, or a"
        raise InvalidRequest("continue_final_message", f"{reason} new one begins")
    return Chat(
        messages_of(fields["messages"], body.messages),
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template_args={
            **_effort_args(body.reasoning_effort, formats),
            **(body.chat_template_kwargs or {}),
        },
        tools=None if tools is None else tools.tools,
    )


def _effort_args(effort: str | None, formats: AnswerFormats) -> JsonView:
    """The template variables that ask for an effort."""
    if effort is None:
        return {}
    if effort not in formats.efforts:
        known = f", only {', '.join(formats.efforts)}" if formats.efforts else ""
        reason = f"this model's chat template does not support {effort!r}{known}"
        advice = "leave it out, or use chat_template_kwargs"
        raise InvalidRequest("reasoning_effort", f"{reason}; {advice}")
    return formats.efforts[effort]


def messages_of(given: object, checked: Sequence[bodies.Message]) -> list[Message]:
    """The messages in order, each with a single text."""
    assert isinstance(given, list)
    pairs = zip(given, checked, strict=True)
    return [_message(raw, read) for raw, read in pairs]


def _message(message: Message, checked: bodies.Message) -> Message:
    """Return a message for templates: parts of a content are joined, the arguments of past tool
    calls become objects, and reasoning gets the name that templates read."""
    if checked.reasoning is not None and checked.reasoning_content is None:
        message = message | {"reasoning_content": checked.reasoning}
    if checked.tool_calls is not None:
        given: list[dict[str, Message]] = _listed(message["tool_calls"])  # type: ignore[arg-type]
        calls = [raw | {"function": _called(raw["function"])} for raw in given]
        message = message | {"tool_calls": calls}
    elif checked.function_call is not None:
        called: Message = message["function_call"]  # type: ignore[assignment]
        message = {name: value for name, value in message.items() if name != "function_call"}
        message["tool_calls"] = [{"type": "function", "function": _called(called)}]
    refusal = message.get("refusal") if checked.role == "assistant" else None
    if checked.content is None and isinstance(refusal, str):
        return message | {"content": refusal}
    if checked.content is None or isinstance(checked.content, str):
        return message
    return message | {"content": "\n".join(part.said for part in _listed(checked.content))}


def _called(function: Message) -> Message:
    """Return the function of a past call with its arguments as an object, as chat templates
    expect."""
    arguments = function.get("arguments") or ""  # null is the same as no arguments
    if isinstance(arguments, str):
        arguments = past_arguments(arguments)
    return function | {"arguments": arguments}


def _listed(value: list[T] | T) -> list[T]:
    return value if isinstance(value, list) else [value]
