"""The bodies of Anthropic's Messages API, field by field."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mainstem.wire.fields import Anything

TTL_S = {"5m": 300, "1h": 3600}

# --- content -------------------------------------------------------------------------------------


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """Pin what was computed up to the end of this block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Anything = None  # accepted and ignored: pages are always kept for the caller's key

    @property
    def ttl_s(self) -> int:
        return TTL_S[self.ttl or "5m"]


class _Block(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    """A text of a message."""

    text: str
    citations: Anything = None  # from an earlier answer; has no effect


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """Reasoning of an earlier answer; the template decides whether the model reads it again."""

    thinking: str
    signature: Anything = None


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call that an earlier answer made."""

    id: str
    name: str
    input: dict[str, Anything]
    caller: Anything = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message; if the last one is the assistant's, the answer continues it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# --- bodies --------------------------------------------------------------------------------------


class InputTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Anything]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None  # has no effect: only a required call follows its schema
    eager_input_streaming: bool | None = None  # has no effect: calls are returned whole
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class InputToolChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether tools are used; with `any` and `tool`, a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # name of the tool
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons before its answer, if it was trained to."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = None  # accepted and ignored: reasoning has no budget here
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Anything]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = (
        None  # passed to the template, if it accepts one
    )
    format: OutputFormat | None = None


class CountBody(Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: Annotated[str, Meta(description="the model's name, or NAME:APP")] | None = None
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None  # the same as on the last block


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
