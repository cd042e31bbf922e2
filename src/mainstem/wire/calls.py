"""Turns the body of a chat or completion into a Call and its prompts, for server, batch and plan.

    body (JSON object) -- bodies.py: names and types -->  AnswerBody
                       -- here: OpenAI's meanings    -->  Call, [Prompt, ...]

A field that would change the answer and is not supported is refused; the error names it.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import repeat
from typing import Annotated, TypeVar

import msgspec

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import MAX_LOGPROBS, Overflow, Rendering, SamplingParams
from mainstem.core.step import Int32s
from mainstem.text.encoding import Chat, Message, Prompt
from mainstem.text.grammar import (
    StructuredOutputsParams,
    choice_form,
    json_form,
    regex_form,
)
from mainstem.text.parsers.formats import (
    AnswerFormats,
    ReasoningFormat,
    ToolUse,
    make_parser,
    offer_tools,
    opening_of,
)
from mainstem.text.parsers.parser import AnswerParser
from mainstem.text.schemas import closed
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import past_arguments
from mainstem.wire import bodies
from mainstem.wire.bodies import (
    HARMLESS,
    AnswerBody,
    ChatBody,
    ChosenTool,
    CompletionBody,
    Json,
    ResponseFormat,
    StructuredOutputs,
    read_fields,
    without_harmless,
)
from mainstem.wire.errors import WireError, from_invalid

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has no limit
MAX_TOKEN_ID = 2**31 - 1
SAMPLINGS_KEPT = 1024  # distinct settings; calls with equal settings share an object
CALLS_KEPT = 1024  # distinct bodies without their prompts; equal ones are read once
MAX_KEPT_CHARS = 4096  # larger settings and bodies are not kept
# reasoning may begin within this many last tokens of a prompt
END_TOKENS = 16
CONTINUED_TOKENS = 4096  # if the prompt ends with a message to continue

T = TypeVar("T")
Messages = Annotated[list[bodies.Message], msgspec.Meta(min_length=1)]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]

REASONING_NAMES = ("reasoning_content", "reasoning")  # in messages: DeepSeek's name, vLLM's name

# SamplingParams has these fields under the same names and checks their values
SAMPLING_FIELDS = (
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)


class Kind(Enum):
    """The kind of an answer; the value is the url."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def prompt_field(self) -> str:
        return PROMPT_FIELDS[self]


SCORE_URL = "/v1/score"  # its prompts are those of chats and completions
PROMPT_FIELDS = {Kind.CHAT: "messages", Kind.COMPLETION: "prompt"}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much one body may ask for."""

    max_prompts: int = 128
    max_answers: int = 128  # prompts times n
    max_stop_chars: int = 4096  # of all stop strings; each character is a state of an automaton


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for, without its prompts; kept until the answer is written."""

    kind: Kind
    sampling: SamplingParams
    num_prompts: int = 1
    cache_salt: bytes = b""
    priority: int = 0
    model: str | None = None
    app: str | None = None
    is_streaming: bool = False
    includes_usage: bool = False
    has_running_usage: bool = False  # each chunk has the usage of its choice so far
    returns_token_ids: bool = False
    # how many last tokens to keep; -1: as many as leave room for the answer
    kept_prompt_tokens: int | None = None
    has_echo: bool = False
    is_scoring: bool = False  # echo with max_tokens 0: the prompt's logprobs and no answer
    wants_prompt_logprobs: bool = False  # in vLLM's format, not as OpenAI's echo
    tools: ToolUse | None = None
    has_one_tool_call: bool = False  # further calls are not returned
    # the format of reasoning in the answer; None: it is part of the text
    reasoning: ReasoningFormat | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that `parser` must see
    continues_message: bool = False  # the prompt ends within an answer
    session_id: str | None = None
    overflow: Overflow = Overflow.ERROR
    choices: tuple[str, ...] = ()  # texts that are scored after the prompt; there is no answer

    @property
    def num_answers(self) -> int:
        return self.num_prompts * self.sampling.n

    @property
    def url(self) -> str:
        """The path to which the call would be sent on a server."""
        return SCORE_URL if self.choices else self.kind.value

    def kept_prompt(self, token_ids: list[int], context_tokens: int) -> list[int]:
        """Return a prompt cut to its last tokens, as many as the call asks for."""
        count = self.kept_prompt_tokens
        if count is None:
            return token_ids
        if count < 0:
            count = max(1, context_tokens - (self.sampling.max_tokens or 1))
        return token_ids[-count:]

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may be more than plain text."""
        return self.tools is not None or self.reasoning is not None

    def parser(self) -> AnswerParser | None:
        """Return the parser of one answer of a chat; None if the answer is plain text."""
        return make_parser(self.tools, self.reasoning)

    def rendering(self, prompt_ids: Sequence[int] | Int32s, tokenizer: Tokenizer) -> Rendering:
        """Return how answers to a prompt become the text that `parser` reads.

        A form applies from the first token on, so an answer with a form never begins inside
        reasoning.
        """
        opening = ""
        if self.reasoning is not None and self.sampling.grammar is None:
            count = CONTINUED_TOKENS if self.continues_message else END_TOKENS
            last_ids = [int(each) for each in prompt_ids[-count:]]
            if self.continues_message:  # earlier messages may contain the mark
                borders = tokenizer.special_ids - self.shown_ids
                places = [place for place, each in enumerate(last_ids) if each in borders]
                last_ids = last_ids[places[-1] + 1 if places else 0 :]
            end = tokenizer.decode_all(last_ids)
            opening = opening_of(self.reasoning, end, self.continues_message)
        return Rendering(self.shown_ids, opening) if opening or self.shown_ids else _PLAIN


_PLAIN = Rendering()


@dataclass(frozen=True, slots=True)
class _Known:
    """A body that was read before, without its prompt."""

    call: Call
    chat: Chat | None  # without its messages; None: a completion


@dataclass(slots=True)
class CallParser:
    """Reads bodies.

    `defaults` has values for fields of SamplingParams that a body leaves out; invalid ones make the
    constructor raise InvalidRequest.
    `find_formats` returns how the model writes tool calls and reasoning; it is called for chats.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    limits: BodyLimits = field(default_factory=BodyLimits)
    find_formats: Callable[[], AnswerFormats] = AnswerFormats
    _samplings: dict[str, SamplingParams] = field(default_factory=dict)
    _known: dict[str, _Known] = field(default_factory=dict)  # by the body without its prompt

    def __post_init__(self) -> None:
        self._sampling(self.defaults)

    def parse(self, body: Json, kind: Kind) -> tuple[Call, tuple[Prompt, ...]]:
        """Return the call and the prompts of a body; raises WireError that names the field.

        Bodies that differ only in their prompt, as in a batch, are checked once.
        """
        name = PROMPT_FIELDS[kind]
        prompt = body.get(name)
        if prompt is None:
            raise WireError("invalid_row", f"{name}: is required", name)
        key = _key_of(body, name)
        known = self._known.get(key)
        if known is not None:
            read = _known_prompt(prompt, known)
            if read is not None:
                return known.call, (read,)
        call, prompts = self._read(body, kind)
        if len(prompts) == 1 and 0 < len(key) <= MAX_KEPT_CHARS:
            if len(self._known) == CALLS_KEPT:
                self._known.clear()
            chat = prompts[0] if isinstance(prompts[0], Chat) else None
            self._known[key] = _Known(call, None if chat is None else replace(chat, messages=[]))
        return call, prompts

    def _read(self, body: Json, kind: Kind) -> tuple[Call, tuple[Prompt, ...]]:
        """Read a body completely, without the results of earlier bodies."""
        record = ChatBody if kind is Kind.CHAT else CompletionBody
        fields = without_harmless(body, record)
        read: AnswerBody = read_fields(fields, record)
        try:
            return self._parse(read, kind, fields)
        except InvalidRequest as error:
            raise from_invalid(error) from None
        except RecursionError:
            raise WireError("invalid_value", "a field of the body is nested too deeply") from None

    def _parse(self, body: AnswerBody, kind: Kind, fields: Json) -> tuple[Call, tuple[Prompt, ...]]:
        tools: ToolUse | None = None
        formats = AnswerFormats()
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest("stream_options", "only with stream=true")
        prompts: tuple[Prompt, ...]
        if isinstance(body, ChatBody):
            formats = self.find_formats()
            tools = self._tools(body, fields, formats)
            prompts = (_chat(body, fields, tools, formats),)
        else:
            assert isinstance(body, CompletionBody)
            prompts = tuple(_prompts(body.prompt, self.limits))
        call = Call(
            kind=kind,
            sampling=self._sampling(self._sampling_fields(body, tools)),
            num_prompts=len(prompts),
            cache_salt=_salt(body.cache_salt or ""),
            priority=_priority(body.priority or 0),
            model=body.model,
            app=body.app,
            is_streaming=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            has_running_usage=options is not None and bool(options.continuous_usage_stats),
            returns_token_ids=bool(body.return_token_ids),
            kept_prompt_tokens=_kept_prompt_tokens(body.truncate_prompt_tokens),
            has_echo=_has_echo(body),
            is_scoring=_is_scoring(body),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            tools=tools,
            has_one_tool_call=isinstance(body, ChatBody) and body.parallel_tool_calls is False,
            reasoning=formats.reasoning,
            shown_ids=formats.shown_ids(formats.reasoning, None if tools is None else tools.format),
            continues_message=isinstance(body, ChatBody) and bool(body.continue_final_message),
        )
        if call.wants_prompt_logprobs and (call.is_streaming or call.has_echo):
            raise InvalidRequest("prompt_logprobs", "cannot be combined with stream or echo")
        if call.num_answers > self.limits.max_answers:
            raise InvalidRequest("n", f"at most {self.limits.max_answers} answers in one request")
        return _in_session(call, body), prompts

    # --- sampling -------------------------------------------------------------------------------

    def _sampling_fields(self, body: AnswerBody, tools: ToolUse | None) -> dict[str, object]:
        """Return the arguments of SamplingParams."""
        _check_stop(body.stop, self.limits)
        is_chat = isinstance(body, ChatBody)
        values: dict[str, object] = {
            "max_tokens": None if is_chat else DEFAULT_COMPLETION_TOKENS,
            **self.defaults,
        }
        for name in SAMPLING_FIELDS:
            if (value := getattr(body, name)) is not None:
                values[name] = value
        if (limit := _max_tokens(body)) is not None:
            # 1 is the smallest value that SamplingParams allows
            values["max_tokens"] = 1 if _is_scoring(body) else limit
        if body.logit_bias is not None:
            values["logit_bias"] = _logit_bias(body.logit_bias)
        if (form := _answer_form(body, tools)) is not None:
            values["grammar"] = form
        if (logprobs := _logprobs(body)) is not None:
            values["logprobs"] = logprobs
            if _has_echo(body):
                values["prompt_logprobs"] = logprobs
        return values

    def _sampling(self, values: Mapping[str, object]) -> SamplingParams:
        """The settings as an object, shared by calls with equal settings."""
        key = repr(values)
        sampling = self._samplings.get(key)
        if sampling is None:
            if len(self._samplings) == SAMPLINGS_KEPT:
                self._samplings.clear()
            sampling = SamplingParams(**values)  # type: ignore[arg-type]  # it checks them itself
            if len(key) <= MAX_KEPT_CHARS:
                self._samplings[key] = sampling
        return sampling

    # --- tools ----------------------------------------------------------------------------------

    def _tools(self, body: ChatBody, fields: Json, formats: AnswerFormats) -> ToolUse | None:
        """The tools of a chat; None when there is nothing to call."""
        names = [tool.function.name for tool in body.tools or ()]
        offered, required = _chosen_tools(body.tool_choice, names)
        if not names or body.tool_choice == "none":
            return None
        listed = fields["tools"]
        assert isinstance(listed, list)
        tools = [tool for name, tool in zip(names, listed, strict=True) if name in offered]
        return offer_tools(tools, required, formats)


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


# --- single fields -------------------------------------------------------------------------------


def _salt(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        reason = "is not valid Unicode (lone surrogates)"
        raise InvalidRequest("cache_salt", reason) from None


def _priority(given: int) -> int:
    if not -MAX_TOKEN_ID <= given <= MAX_TOKEN_ID:
        reason = f"must be between {-MAX_TOKEN_ID:,} and {MAX_TOKEN_ID:,}, got {given!r}"
        raise InvalidRequest("priority", reason)
    return given


def _max_tokens(body: AnswerBody) -> int | None:
    """Return the limit; the newer name of the field wins."""
    new = body.max_completion_tokens
    return body.max_tokens if new is None else new


def _check_stop(stop: str | list[str] | None, limits: BodyLimits) -> None:
    if sum(map(len, [stop] if isinstance(stop, str) else stop or ())) > limits.max_stop_chars:
        raise InvalidRequest("stop", f"at most {limits.max_stop_chars} characters together")


def _kept_prompt_tokens(given: int | None) -> int | None:
    if given is not None and given != -1 and not 1 <= given <= MAX_TOKEN_ID:
        reason = f"must be -1 or between 1 and {MAX_TOKEN_ID:,}, got {given!r}"
        raise InvalidRequest("truncate_prompt_tokens", reason)
    return given


def _answer_form(body: AnswerBody, tools: ToolUse | None) -> str | None:
    """The form that answers must have: OpenAI's `response_format`, vLLM's `structured_outputs` or
    `guided_...`, or a required tool call."""
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
    if tools is not None and tools.form is not None:
        if wanted:
            raise InvalidRequest("response_format", "cannot be combined with a required tool call")
        return tools.form
    return wanted[0] if wanted else None


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


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Token ids -> biases; in JSON, keys are texts."""
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "its keys must be token ids") from None


def _has_echo(body: AnswerBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _is_scoring(body: AnswerBody) -> bool:
    return _has_echo(body) and _max_tokens(body) == 0


def _logprobs(body: AnswerBody) -> int | None:
    """Return how many top tokens to return. The chat API has a boolean and a separate number."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    count = body.top_logprobs or 0
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, got {count}")
    if count and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return count if body.logprobs else None


def _in_session(call: Call, body: AnswerBody) -> Call:
    if body.session_id is None and body.context_overflow is None:
        return call
    if body.session_id is not None and (call.num_answers != 1 or call.is_scoring):
        raise InvalidRequest("session_id", "a session has one prompt and one answer at a time")
    if call.kept_prompt_tokens is not None:
        reason = "cannot be combined with session_id or context_overflow"
        raise InvalidRequest("truncate_prompt_tokens", reason)
    default = Overflow.ERROR if body.session_id is None else Overflow.KV
    overflow = default if body.context_overflow is None else Overflow(body.context_overflow)
    if overflow.moves_kv and body.session_id is None:
        raise InvalidRequest(
            "context_overflow", f"{overflow.value} needs a session_id; recompute does not"
        )
    return replace(call, session_id=body.session_id, overflow=overflow)


# --- prompts -------------------------------------------------------------------------------------


def _key_of(body: Json, prompt_field: str) -> str:
    """Return a key that is equal for bodies that differ only in their prompt; empty for a body that
    is too large or nested too deeply."""
    rest = {
        name: value for name, value in body.items() if name != prompt_field and name not in HARMLESS
    }
    try:
        is_small = _room_left(rest, MAX_KEPT_CHARS) >= 0
        return f"{prompt_field}{rest!r}" if is_small else ""
    except RecursionError:
        return ""


def _room_left(value: object, room: int) -> int:
    """Return `room` minus the approximate size of a value. Stops when the result is below 0, since
    clients choose the size."""
    if isinstance(value, str):
        return room - len(value)
    if not isinstance(value, dict | list):
        return room - 8
    names = value if isinstance(value, dict) else repeat("")
    items = value.values() if isinstance(value, dict) else value
    for name, item in zip(names, items, strict=False):
        room = _room_left(item, room - len(name) - 2)
        if room < 0:
            break
    return room


def _known_prompt(given: object, known: _Known) -> "Prompt | None":
    """Return the prompt of a body whose other fields were checked before; None if the prompt is of
    another kind or invalid. The body must then be read completely."""
    if known.chat is None and isinstance(given, str):
        return given
    try:
        if known.chat is not None:
            messages = _messages(given, msgspec.convert(given, Messages))
            return replace(known.chat, messages=messages)
        ids: list[int] = msgspec.convert(given, TokenIds)
        return array("i", ids)
    except (msgspec.ValidationError, InvalidRequest, TypeError):
        return None


def _prompts(given: str | list[int | str | list[int]], limits: BodyLimits) -> Iterator[Prompt]:
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


def _chat(body: ChatBody, fields: Json, tools: ToolUse | None, formats: AnswerFormats) -> Chat:
    """The conversation in the form that chat templates expect."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        reason = "cannot be combined with add_generation_prompt=true: a message is continued, or a"
        raise InvalidRequest("continue_final_message", f"{reason} new one begins")
    return Chat(
        _messages(fields["messages"], body.messages),
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template_args={
            **_effort_args(body.reasoning_effort, formats),
            **(body.chat_template_kwargs or {}),
        },
        tools=None if tools is None else tools.tools,
    )


def _effort_args(effort: str | None, formats: AnswerFormats) -> Json:
    """The template variables that ask for an effort."""
    if effort is None:
        return {}
    if effort not in formats.efforts:
        known = f", only {', '.join(formats.efforts)}" if formats.efforts else ""
        reason = f"this model's chat template does not support {effort!r}{known}"
        advice = "leave it out, or use chat_template_kwargs"
        raise InvalidRequest("reasoning_effort", f"{reason}; {advice}")
    return formats.efforts[effort]


def _messages(given: object, checked: Sequence[bodies.Message]) -> list[Message]:
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
