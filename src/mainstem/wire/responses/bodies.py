"""The bodies of OpenAI's Responses API, field by field."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mainstem.wire.fields import MAX_TOOLS, TOOL_NAME, Anything, DrawnBody, Effort, Metadata

Items = list[dict[str, Anything]]

# --- items of the input --------------------------------------------------------------------------


class MessageItem(Struct, frozen=True):
    """A message, of the caller or of an earlier answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items
    type: Literal["message"] = "message"
    id: Anything = None
    status: Anything = None
    phase: Anything = None


class TextItemPart(Struct, frozen=True):
    """A part of a message or of a tool's output; only text is supported."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Anything = None
    logprobs: Anything = None


class FunctionCallItem(Struct, frozen=True):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: Anything = None
    status: Anything = None


class FunctionOutputItem(Struct, frozen=True):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items
    id: Anything = None
    status: Anything = None


class ReasoningText(Struct, frozen=True):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Struct, frozen=True):
    """Reasoning before an earlier answer; the chat template may show it to the model again."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    id: Anything = None
    status: Anything = None


# --- the rest of a body --------------------------------------------------------------------------


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: Annotated[
        dict[str, Anything] | None, Meta(description="JSON schema of its arguments")
    ] = None
    strict: bool | None = None  # has no effect: only a required call follows its schema


class ChosenFunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Anything = None
    name: Anything = None
    description: Anything = None
    # true: objects have no other properties than those that the schema declares
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of an answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model reasons; only efforts that its chat template supports.

    Reasoning is returned as it is and never summarized."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Anything = None  # accepted, but without effect


class ResponsesBody(DrawnBody, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: Annotated[
        str | Items,
        Meta(
            description="a text, or items: messages with input_text and output_text parts, "
            "function_call, function_call_output, reasoning"
        ),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # default: true
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = None
    user: str | None = None
    # when the answer ends
    max_output_tokens: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # what the answer looks like
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[str, Meta(examples=["none", "auto", "required"])] | ChosenFunctionTool | None
    ) = None
    parallel_tool_calls: bool | None = None  # false: only the first call is returned
    reasoning: ReasoningConfig | None = None
    # accepted; nothing is encrypted
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    chat_template_kwargs: dict[str, Anything] | None = None  # as in /v1/chat/completions
