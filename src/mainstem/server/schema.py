"""What a body asks, in OpenAI's words; fields are checked by the parser that batch files use.

Beyond a batch row a request may stream, echo its prompt, bring several prompts and name an app.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mainstem.batch.rows import HARMLESS as HARMLESS_IN_ROWS
from mainstem.batch.rows import Chat, Kind, Prompt, RowError, RowParser
from mainstem.core.errors import InvalidRequest
from mainstem.core.request import Overflow, SamplingParams
from mainstem.server.faults import ApiError, from_invalid, from_row
from mainstem.server.limits import Limits
from mainstem.text.tools import ToolFormat, ToolUse, read_tools

Json = Mapping[str, object]

# accepted and without effect on the answer, beyond what rows accept; docs/serve.md lists them
HARMLESS = (HARMLESS_IN_ROWS | {"prompt_cache_retention"}) - {"model", "stream_options"}
OWN_FIELDS = frozenset(
    [
        "app",
        "context_overflow",
        "echo",
        "session_id",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
    ]
)
SESSION_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
STREAM_OPTIONS = frozenset({"include_obfuscation", "include_usage"})
# values of fields we lack that say what happens anyway
EMPTY_VALUES: dict[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose fields are valid; its prompts are not token ids yet."""

    kind: Kind
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0
    model: str | None = None
    app: str | None = None
    is_streaming: bool = False
    includes_usage: bool = False
    has_echo: bool = False
    is_scoring: bool = False  # echo with max_tokens 0: the prompt's logprobs and no answer
    wants_prompt_logprobs: bool = False  # in vLLM's form, not OpenAI's echo
    tools: ToolUse | None = None
    session_id: str | None = None
    overflow: Overflow = Overflow.ERROR

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.sampling.n


@dataclass(frozen=True, slots=True)
class AskParser:
    """Reads bodies for one model; `tool_format` is how it writes tool calls, if it does."""

    limits: Limits
    tool_format: ToolFormat | None
    rows: RowParser

    def parse(self, body: Json, kind: Kind) -> Ask:
        """Raises ApiError 400 that names the field."""
        ask = _parse_ask(body, kind, self.rows, self.limits)
        try:
            return _in_session(_with_tools(ask, body, self.tool_format), body)
        except InvalidRequest as error:
            raise from_invalid(error) from None


def _in_session(ask: Ask, body: Json) -> Ask:
    session_id, overflow = body.get("session_id"), body.get("context_overflow")
    if session_id is not None:
        if not isinstance(session_id, str) or not SESSION_ID.fullmatch(session_id):
            reason = "1 to 128 letters, digits, '_', '-', ':' or '.'"
            raise InvalidRequest("session_id", reason)
        if ask.num_answers != 1 or ask.is_scoring:
            raise InvalidRequest("session_id", "a session has one prompt and one answer at a time")
    policies = [policy.value for policy in Overflow]
    if overflow is None:
        policy = Overflow.ERROR if session_id is None else Overflow.KV
    elif overflow not in policies:
        raise InvalidRequest("context_overflow", f"must be one of {policies}, got {overflow!r}")
    else:
        policy = Overflow(overflow)
    if policy is Overflow.KV and session_id is None:
        raise InvalidRequest("context_overflow", "kv needs a session_id; recompute does not")
    return replace(ask, session_id=session_id, overflow=policy)


def _with_tools(ask: Ask, body: Json, format: ToolFormat | None) -> Ask:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is None and choice is None:
        return ask
    use = read_tools([] if tools is None else tools, choice, format)
    if use is None:
        return ask
    if ask.kind is not Kind.CHAT:
        raise InvalidRequest("tools", "are for chats")
    sampling = ask.sampling
    if use.form is not None:
        if sampling.grammar is not None:
            raise InvalidRequest("response_format", "cannot be combined with a required tool call")
        sampling = replace(sampling, grammar=use.form)
    chats = [replace(chat, tools=use.tools) for chat in ask.prompts if isinstance(chat, Chat)]
    return replace(ask, prompts=tuple(chats), sampling=sampling, tools=use)


def _parse_ask(body: Json, kind: Kind, parser: RowParser, limits: Limits) -> Ask:
    options = {name: body[name] for name in OWN_FIELDS if body.get(name) is not None}
    rest = {
        name: value
        for name, value in body.items()
        if name not in OWN_FIELDS and not _is_harmless(name, value)
    }
    is_streaming = _boolean(options, "stream")
    includes_usage = _stream_options(options.get("stream_options"), is_streaming)
    has_echo = _boolean(options, "echo")
    app = options.get("app")
    if app is not None and not isinstance(app, str):
        raise ApiError(400, "app: must be a text", "app", "invalid_value")
    is_scoring = has_echo and rest.get("max_tokens") == 0 and rest["max_tokens"] is not False
    if kind is Kind.CHAT and has_echo:
        raise ApiError(400, "the field 'echo' is not supported in a chat", "echo", "unknown_field")
    if is_scoring:
        rest["max_tokens"] = 1  # runs as the least there is, and is dropped
    wants_prompt_logprobs = rest.get("prompt_logprobs") is not None
    if wants_prompt_logprobs and (is_streaming or has_echo):
        message = "prompt_logprobs: cannot be combined with stream or echo"
        raise ApiError(400, message, "prompt_logprobs", "invalid_value")
    if has_echo and rest.get("logprobs") is not None:
        rest["prompt_logprobs"] = rest["logprobs"]
    _check_stop(rest.get("stop"), limits)
    prompts = _listed_prompts(rest.get("prompt"), limits) if kind is Kind.COMPLETION else []
    if prompts:
        rest["prompt"] = prompts[0]
    try:
        row, prompt = parser.parse({"url": kind.value, "body": rest}, 0, "")
        more = [_further_prompt(parser, kind, item) for item in prompts[1:]]
    except RowError as error:
        raise from_row(error) from None
    ask = Ask(kind, (prompt, *more), row.sampling, row.salt, row.priority, row.model)
    if ask.num_answers > limits.max_answers:
        message = f"n: at most {limits.max_answers} answers in one request"
        raise ApiError(400, message, "n", "invalid_value")
    return replace(
        ask,
        app=app,
        is_streaming=is_streaming,
        includes_usage=includes_usage,
        has_echo=has_echo,
        is_scoring=is_scoring,
        wants_prompt_logprobs=wants_prompt_logprobs,
    )


def _is_harmless(name: str, value: object) -> bool:
    return name in HARMLESS or value in EMPTY_VALUES.get(name, ())


def _boolean(options: Json, name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name}: must be true or false", name, "invalid_value")
    return value


def _stream_options(value: object, is_streaming: bool) -> bool:
    """Whether usage is wanted at a stream's end."""
    if value is None:
        return False
    if not isinstance(value, dict) or not is_streaming:
        message = "stream_options: must be an object, and only with stream=true"
        raise ApiError(400, message, "stream_options", "invalid_value")
    for name in value:
        if name not in STREAM_OPTIONS:
            message = f"the stream option {name!r} is not supported"
            raise ApiError(400, message, f"stream_options.{name}", "unknown_field")
    includes_usage = value.get("include_usage", False)
    if not isinstance(includes_usage, bool | None):
        name = "stream_options.include_usage"
        raise ApiError(400, f"{name}: must be true or false", name, "invalid_value")
    return bool(includes_usage)


def _check_stop(value: object, limits: Limits) -> None:
    """Stop strings become an automaton with a state per character."""
    stops = value if isinstance(value, list) else [value]
    if sum(len(stop) for stop in stops if isinstance(stop, str)) > limits.max_stop_chars:
        message = f"stop: at most {limits.max_stop_chars} characters together"
        raise ApiError(400, message, "stop", "invalid_value")


def _listed_prompts(value: object, limits: Limits) -> list[object]:
    """The prompts of a completion: one text, one list of ids, or a list of these."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return [] if value is None else [value]
    if len(value) > limits.max_prompts:
        message = f"prompt: at most {limits.max_prompts} prompts in one request"
        raise ApiError(400, message, "prompt", "invalid_value")
    return value


def _further_prompt(parser: RowParser, kind: Kind, value: object) -> Prompt:
    _, prompt = parser.parse({"url": kind.value, "body": {"prompt": value}}, 0, "")
    return prompt
