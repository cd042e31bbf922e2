"""Turns the body of a chat or completion into a Call and its prompts, for server, batch and plan.
The other APIs translate their bodies to chats first.

    body (JSON object) -- bodies.py: names and types                --> AnswerBody
                       -- prompts.py, forms.py, settings.py: meanings --> Call, [Prompt, ...]

A field that would change the answer and is not supported is refused; the error names it.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Annotated

import msgspec

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json, JsonView
from mainstem.core.request import SamplingParams
from mainstem.text.encoding import Chat, Prompt
from mainstem.text.parsers.formats import AnswerFormats, ToolUse
from mainstem.wire import neutral
from mainstem.wire.calls import MAX_TOKEN_ID, BodyLimits, Call, CallKind
from mainstem.wire.chat import settings
from mainstem.wire.chat.bodies import AnswerBody, ChatBody, CompletionBody, Message
from mainstem.wire.chat.forms import offered_tools
from mainstem.wire.chat.prompts import chat_of, messages_of, prompts_of
from mainstem.wire.errors import WireError, from_invalid
from mainstem.wire.fields import read_fields

SAMPLINGS_KEPT = 1024  # distinct settings; calls with equal settings share an object
CALLS_KEPT = 1024  # distinct bodies without their prompts; equal ones are read once
MAX_KEPT_CHARS = 4096  # larger settings and bodies are not kept

Messages = Annotated[list[Message], msgspec.Meta(min_length=1)]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]

_HARMLESS = frozenset(neutral.harmless(neutral.CHAT))  # the same as in completions
_VLLM_FORM_FLAGS = ("disable_additional_properties", "disable_any_whitespace", "disable_fallback")


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

    def parse(self, body: JsonView, kind: CallKind) -> tuple[Call, tuple[Prompt, ...]]:
        """Return the call and the prompts of a body; raises WireError that names the field.

        Bodies that differ only in their prompt, as in a batch, are checked once.
        """
        name = kind.prompt_field
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

    def _read(self, body: JsonView, kind: CallKind) -> tuple[Call, tuple[Prompt, ...]]:
        """Read a body completely, without the results of earlier bodies."""
        is_chat = kind is CallKind.CHAT
        fields = _meant(body, neutral.CHAT if is_chat else neutral.COMPLETION)
        read: AnswerBody = read_fields(fields, ChatBody if is_chat else CompletionBody)
        try:
            return self._parse(read, kind, fields)
        except InvalidRequest as error:
            if error.field == "max_tokens" and read.max_completion_tokens is not None:
                error = InvalidRequest("max_completion_tokens", error.reason)
            raise from_invalid(error) from None
        except RecursionError:
            raise WireError("invalid_value", "a field of the body is nested too deeply") from None

    def _parse(
        self, body: AnswerBody, kind: CallKind, fields: Json
    ) -> tuple[Call, tuple[Prompt, ...]]:
        tools: ToolUse | None = None
        formats = AnswerFormats()
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest("stream_options", "only with stream=true")
        prompts: tuple[Prompt, ...]
        if isinstance(body, ChatBody):
            formats = self.find_formats()
            tools = offered_tools(body, fields, formats)
            prompts = (chat_of(body, fields, tools, formats),)
        else:
            assert isinstance(body, CompletionBody)
            prompts = tuple(prompts_of(body.prompt, self.limits))
        values = settings.sampling_fields(body, tools, self.defaults, self.limits)
        call = Call(
            kind=kind,
            sampling=self._sampling(values),
            num_prompts=len(prompts),
            cache_salt=settings.salt(body.cache_salt or ""),
            priority=settings.priority(body.priority or 0),
            model=body.model,
            app=body.app,
            is_streaming=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            has_running_usage=options is not None and bool(options.continuous_usage_stats),
            returns_token_ids=bool(body.return_token_ids),
            kept_prompt_tokens=settings.kept_prompt_tokens(body.truncate_prompt_tokens),
            has_echo=settings.has_echo(body),
            is_scoring=settings.is_scoring(body),
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
        return settings.in_session(call, body), prompts

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


def _meant(body: JsonView, rules: neutral.Rules) -> Json:
    """Return a body without the fields that have no effect."""
    if "best_of" in body and body["best_of"] == body.get("n"):  # the best n of n are all answers
        body = {name: value for name, value in body.items() if name != "best_of"}
    left = neutral.without_neutral(body, rules)
    form = left.get("structured_outputs")
    if isinstance(form, dict):  # clients of vLLM also send default values
        left["structured_outputs"] = {
            name: value
            for name, value in form.items()
            if value is not None and not (name in _VLLM_FORM_FLAGS and value is False)
        }
    return left


# --- bodies that differ only in their prompt -----------------------------------------------------


def _key_of(body: JsonView, prompt_field: str) -> str:
    """Return a key that is equal for bodies that differ only in their prompt; empty for a body that
    is too large or nested too deeply."""
    rest = {
        name: value
        for name, value in body.items()
        if name != prompt_field and name not in _HARMLESS
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
            messages = messages_of(given, msgspec.convert(given, Messages))
            return replace(known.chat, messages=messages)
        ids: list[int] = msgspec.convert(given, TokenIds)
        return array("i", ids)
    except (msgspec.ValidationError, InvalidRequest, TypeError):
        return None
