"""The tools that a chat offers to the model, and the form that an answer must have."""

import json
from collections.abc import Sequence

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json
from mainstem.text.grammar import StructuredOutputsParams, choice_form, json_form, regex_form
from mainstem.text.parsers.formats import AnswerFormats, ToolUse, offer_tools
from mainstem.text.schemas import closed
from mainstem.wire.chat.bodies import (
    AnswerBody,
    ChatBody,
    ChosenTool,
    ResponseFormat,
    StructuredOutputs,
)


def offered_tools(body: ChatBody, fields: Json, formats: AnswerFormats) -> ToolUse | None:
    """The tools of a chat; None when there is nothing to call."""
    names = [tool.function.name for tool in body.tools or ()]
    offered, required = _chosen_tools(body.tool_choice, names)
    if not names or body.tool_choice == "none":
        return None
    listed = fields["tools"]
    assert isinstance(listed, list)
    places = [place for place, name in enumerate(names) if name in offered]
    return offer_tools([listed[place] for place in places], required, formats, places)


def _chosen_tools(
    choice: str | ChosenTool | None, names: Sequence[str]
) -> tuple[Sequence[str], Sequence[str] | None]:
    """Return the tools that are offered, and those of which one must be called; None if the model
    decides."""
    if choice in (None, "auto", "none"):
        return names, None
    if not names:
        raise InvalidRequest("tool_choice", "there are no tools to choose from")
    if choice == "required":
        return names, names
    if isinstance(choice, ChosenTool):
        if (allowed := choice.allowed_tools) is not None and choice.type == "allowed_tools":
            wanted = [tool.function.name for tool in allowed.tools]
            if set(wanted) <= set(names):
                return wanted, wanted if allowed.mode == "required" else None
        elif choice.function is not None and choice.function.name in names:
            return names, [choice.function.name]
    reason = "must be none, auto, required, or name tools of the request"
    raise InvalidRequest("tool_choice", reason)


def answer_form(body: AnswerBody, tools: ToolUse | None) -> str | None:
    """The form that answers must have: OpenAI's `response_format`, vLLM's `structured_outputs` or
    `guided_...`. If there are tools, too, an answer may also be a call; if a call is required, it
    is a call."""
    forms = [
        None if body.response_format is None else _response_form(body.response_format),
        None if body.guided_json is None else json_form(_schema(body.guided_json)),
        None if body.guided_regex is None else regex_form(body.guided_regex),
        None if body.guided_choice is None else choice_form(body.guided_choice),
        None if body.structured_outputs is None else _structured_form(body.structured_outputs),
    ]
    wanted = [form for form in forms if form is not None]
    if len(wanted) > 1:
        raise InvalidRequest("response_format", "the answer can have one form only")
    form = wanted[0] if wanted else None
    if tools is None:
        return form
    if tools.form is not None or form is None:
        return tools.form
    has_one_call = isinstance(body, ChatBody) and body.parallel_tool_calls is False
    return tools.form_beside(form, has_one_call=has_one_call)


def _response_form(described: ResponseFormat) -> str | None:
    if described.type == "text":
        return None
    if described.type == "json_object":
        return json_form({"type": "object"})
    if described.json_schema is None or described.json_schema.schema is None:
        raise InvalidRequest("response_format", "json_schema: must hold a schema")
    schema = described.json_schema.schema
    if described.json_schema.strict and isinstance(schema, dict):
        schema = closed(schema)
    return json_form(schema)


def _structured_form(given: StructuredOutputs) -> str:
    if not isinstance(given.json, dict | str | None):
        raise InvalidRequest("structured_outputs", "json must be a schema, as object or text")
    return StructuredOutputsParams(
        given.json, given.regex, given.choice, given.grammar, given.json_object
    ).form


def _schema(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRequest("guided_json", "is not JSON") from None
