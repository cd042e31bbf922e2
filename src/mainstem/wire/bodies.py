"""The JSON objects that clients send, field by field.

Bodies are checked against these classes, and `/openapi.json` is made from them. Ranges of sampling
fields are in `core.request`, since they also apply to Python callers. `null` is the same as leaving
a field out, as in OpenAI's API.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mainstem.core.spelling import did_you_mean
from mainstem.core.vllm_names import OnlyAt
from mainstem.wire.errors import WireError

# `(?!\n)`: in Python `$` also matches before a newline at the end of the text
SESSION_ID = r"^[A-Za-z0-9_.:-]{1,128}(?!\n)$"
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}(?!\n)$"
MAX_TOOLS = 128
# limits of `metadata`, as in OpenAI's API
MAX_METADATA = 16  # pairs of a name and a text
MAX_METADATA_NAME = 64  # characters of a name
MAX_METADATA_TEXT = 512  # characters of a text

Json = Mapping[str, object]
Anything = Annotated[object, Meta(extra_json_schema={"description": "any JSON value"})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
T = TypeVar("T", bound=Struct)

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


class AnswerBody(Struct, frozen=True, kw_only=True):
    """Fields that chats and completions have in common."""

    model: Annotated[str, Meta(description="the model's name, or NAME:APP")] | None = None
    app: Annotated[str, Meta(description="name of a system prompt on the server")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # how tokens are chosen
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(description="token id: bias")] | None = None
    # when an answer ends
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
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
    # which pages the request shares, and when it runs
    cache_salt: str | None = None
    priority: Annotated[int, Meta(description="lower goes first")] | None = None
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


class TokenizeOptions(Struct, frozen=True):
    """Fields of `POST /tokenize` in addition to those of a chat or completion."""

    # whether to add the tokens that tokenizer.json puts around a prompt
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: Anything = None


class AppBody(Struct, frozen=True):
    """`PUT /admin/apps/NAME`."""

    prompt: str


class BatchBody(Struct, frozen=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/score"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=MAX_METADATA_NAME)],
                Annotated[str, Meta(max_length=MAX_METADATA_TEXT)],
            ],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None


class RowEnvelope(Struct, frozen=True):
    """A line of a batch file, around the body of its request."""

    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/score"]
    body: dict[str, object]
    custom_id: Anything = None
    method: Literal["POST"] = "POST"


# accepted, but without effect on the answer; docs/serve.md lists them
HARMLESS = frozenset(
    [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    ]
)
# fields accepted only with values that change nothing; any other value is refused
_BOTH = {
    "allowed_token_ids": OnlyAt((), "use structured_outputs with a choice or a regex"),
    "bad_words": OnlyAt(([],), "use logit_bias with -100 for their tokens"),
    "best_of": OnlyAt((1,), "ask for n answers with logprobs and keep the best"),
    "early_stopping": OnlyAt((False,), "there is no beam search"),
    "function_call": OnlyAt(("auto", "none"), "use tools and tool_choice"),
    "functions": OnlyAt(([],), "use tools"),
    "include_reasoning": OnlyAt((True,), "reasoning is always included; leave it out"),
    "length_penalty": OnlyAt((1, 1.0), "there is no beam search"),
    "logits_processors": OnlyAt(([],), "use logit_bias or structured_outputs"),
    "modalities": OnlyAt((["text"],), "only text is supported"),
    "return_tokens_as_token_ids": OnlyAt((False,), "use return_token_ids"),
    "spaces_between_special_tokens": OnlyAt((True,), "leave it out"),
    "truncation_side": OnlyAt(("left",), "the end of a prompt is kept"),
    "use_beam_search": OnlyAt((False,), "there is no beam search; use n"),
}
NEUTRAL: Mapping[type[Struct], Mapping[str, OnlyAt]] = {
    ChatBody: _BOTH
    | {
        "add_special_tokens": OnlyAt((False,), "the chat template writes them"),
        "echo": OnlyAt((False,), "only in /v1/completions"),
        "suffix": OnlyAt(("",), "not in a chat"),
    },
    CompletionBody: _BOTH
    | {
        "add_generation_prompt": OnlyAt((True, False), "only in a chat"),
        "add_special_tokens": OnlyAt((True,), "send token ids of /tokenize, which supports it"),
        "continue_final_message": OnlyAt((False,), "only in a chat"),
        "parallel_tool_calls": OnlyAt((True, False), "only in a chat"),
        "reasoning_effort": OnlyAt((), "only in a chat"),
        "suffix": OnlyAt(("",), "text can only be continued"),
        "tool_choice": OnlyAt(("auto", "none"), "there are no tools to choose from; use a chat"),
        "tools": OnlyAt(([],), "use a chat"),
        "top_logprobs": OnlyAt((0,), "set their number with logprobs"),
    },
}
_VLLM_FORM_FLAGS = ("disable_additional_properties", "disable_any_whitespace", "disable_fallback")


# --- checking ------------------------------------------------------------------------------------

_PLACE = re.compile(r"^(?P<reason>.*?) - at (?:`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`$")
_PART = re.compile(r"^(messages\[\d+\]\.content(?:\[\d+\])?)\.type$")
_ENUM = re.compile(r"^Invalid enum value '(.*)'$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(.*)`$", re.DOTALL)
_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def read_fields(fields: Json, kind: type[T]) -> T:
    """Convert a JSON object to a record; raises WireError that names the unknown or invalid
    field."""
    given = {name: value for name, value in fields.items() if value is not None}
    known = kind.__struct_fields__
    for name, value in given.items():
        if name not in known:
            rule = NEUTRAL.get(kind, {}).get(name)
            meant = did_you_mean(name, known)
            reason = f"the field {name!r} is not supported{'.' + meant if meant else ''}"
            if rule is not None:
                reason = f"{name}: {value!r:.80} is not supported: {rule.instead}"
            raise WireError("unknown_field", reason, name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None


def tokenize_options(body: Json) -> tuple[TokenizeOptions, dict[str, object]]:
    """Split a body of /tokenize into its own fields and those of a chat or completion."""
    own = TokenizeOptions.__struct_fields__
    options = read_fields({name: body[name] for name in own if name in body}, TokenizeOptions)
    return options, {name: value for name, value in body.items() if name not in own}


def without_harmless(fields: Json, kind: type[Struct]) -> dict[str, object]:
    """Return a body without the fields that have no effect."""
    rules = NEUTRAL[kind]
    left = {
        name: value
        for name, value in fields.items()
        if name not in HARMLESS and (name not in rules or not rules[name].takes(value))
    }
    if "best_of" in left and left["best_of"] == left.get("n"):
        del left["best_of"]  # the best n of n are all answers
    form = left.get("structured_outputs")
    if isinstance(form, dict):  # clients of vLLM also send default values
        left["structured_outputs"] = {
            name: value
            for name, value in form.items()
            if value is not None and not (name in _VLLM_FORM_FLAGS and value is False)
        }
    return left


def _explained(text: str, kind: type[Struct]) -> WireError:
    """Convert msgspec's message to an error that names the field, for example n in "Expected ... -
    at `$.n`"."""
    found = _PLACE.match(text)
    reason, place = (found["reason"], found["path"].lstrip(".")) if found else (text, "")
    if not place and (missing := _MISSING.search(reason)):
        return WireError("invalid_value", f"{missing[1]}: is required", missing[1])
    if unknown := _UNKNOWN.search(reason):
        name = f"{place}.{unknown[1]}"
        return WireError("unknown_field", f"the field {name!r} is not supported", name)
    param = re.split(r"[.\[]", place, maxsplit=1)[0]
    if param in ("stream_options", "structured_outputs"):
        param = place
    if (part := _PART.match(place)) and (named := _ENUM.match(reason)):
        message = f"{part[1]}: {named[1]} parts are not supported: the model reads text"
        if meant := did_you_mean(named[1], ["text"]):
            message += f".{meant}"
        return WireError("invalid_value", message, param)
    if reason.startswith("Invalid enum value") and param == place:
        allowed = ", ".join(map(str, _choices(kind, param)))
        return WireError("invalid_value", f"{place}: must be one of {allowed}", param)
    plain = _TYPES.sub(_in_words, reason)
    return WireError("invalid_value", f"{place}: {plain[0].lower()}{plain[1:]}", param or None)


def _in_words(types: re.Match[str]) -> str:
    """Convert a type to words: `int | null` becomes "a whole number"."""
    names = [name for name in types[1].split(" | ") if name != "null"]
    return " or ".join(_WORDS.get(name, name) for name in names) or "null"


def _choices(kind: type[Struct], name: str) -> list[object]:
    """Return the values that a field of literals can have."""
    hint = get_type_hints(kind)[name]
    return [
        value
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for value in get_args(part)
    ]
