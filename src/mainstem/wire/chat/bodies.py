"""The bodies of chats and completions in OpenAI's API, field by field.

Ranges of sampling fields are in `core.request`, since they also apply to Python callers.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mainstem.wire.fields import MAX_TOOLS, TOOL_NAME, Anything, DrawnBody, Effort

# `(?!\n)`: in Python `$` also matches before a newline at the end of the text
SESSION_ID = r"^[A-Za-z0-9_.:-]{1,128}(?!\n)$"

# --- conversations and tools ---------------------------------------------------------------------


class TextPart(Struct, frozen=True):
    """A part of a message's content; only text is supported. A refusal is text of an earlier
    answer."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise ValueError(f"Object missing required field `{self.type}`")

    @property
    def said(self) -> str:
        """The text itself."""
        return (self.text if self.type == "text" else self.refusal) or ""


class CalledFunction(Struct, frozen=True):
    """The function that an earlier answer called."""

    name: Anything = None
    arguments: Anything = None  # JSON as text, or the object itself


class PastCall(Struct, frozen=True):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: Anything = None
    type: Anything = None


class Message(Struct, frozen=True):
    """One message. Fields that are not listed here are passed to the chat template unchanged."""

    role: Annotated[
        str,
        Meta(
            description="one of the examples; with --allow-special-tokens, any text",
            examples=["system", "developer", "user", "assistant", "tool", "function"],
        ),
    ]
    content: str | list[TextPart] | TextPart | None = None
    name: Anything = None
    tool_calls: list[PastCall] | PastCall | None = None
    function_call: CalledFunction | None = None  # the old form of a single call
    tool_call_id: Anything = None
    reasoning_content: Anything = None  # of an earlier answer; `reasoning` is another name for it
    reasoning: Anything = None


class Function(Struct, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    description: Anything = None
    parameters: Annotated[
        dict[str, Anything] | None, Meta(description="JSON schema of its arguments")
    ] = None


class Tool(Struct, frozen=True):
    """A tool that a request offers to the model."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Struct, frozen=True):
    """The function that must be called."""

    name: str


class AllowedTool(Struct, frozen=True):
    """A tool that may be called."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class ChosenTool(Struct, frozen=True):
    """A `tool_choice` that names the tool to call, or those that may be called."""

    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
    type: Literal["function", "allowed_tools"] | None = None


class SchemaFormat(Struct, frozen=True):
    """The JSON schema that answers must match."""

    schema: Anything = None
    # true: objects have no other properties than those that the schema declares
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form that answers must have, in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that answers must have, in vLLM's format: exactly one of these fields."""

    json: Anything = None  # a JSON schema, as object or text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="in llguidance's dialect of Lark")] | None = None
    json_object: bool | None = None


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream reports besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # from vLLM: each chunk has the usage so far
    include_obfuscation: Anything = None  # accepted, but without effect


# --- bodies --------------------------------------------------------------------------------------


class AnswerBody(DrawnBody, frozen=True, kw_only=True):
    """Fields that chats and completions have in common."""

    stream_options: StreamOptions | None = None
    # how tokens are chosen
    n: int | None = None
    logit_bias: Annotated[dict[str, float], Meta(description="token id: bias")] | None = None
    # when an answer ends
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    # what the answer looks like
    response_format: ResponseFormat | None = None
    guided_json: Anything = None  # a JSON schema, as object or text
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    # how many of a prompt's last tokens are read; -1: as many as leave room for the answer
    truncate_prompt_tokens: int | None = None
    session_id: Annotated[str, Meta(pattern=SESSION_ID)] | None = None
    context_overflow: Literal["error", "recompute", "kv", "important"] | None = None


class ChatBody(AnswerBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Anything] | None = None
    # how much the model reasons; only efforts that its chat template supports
    reasoning_effort: Effort | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call is returned
    tool_choice: Annotated[str, Meta(examples=["none", "auto", "required"])] | ChosenTool | None = (
        None
    )


class CompletionBody(AnswerBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | list[int | str | list[int]],
        Meta(description="a text, a list of token ids, or several of these"),
    ]
    echo: bool | None = None
    logprobs: int | None = None
