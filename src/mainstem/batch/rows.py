"""One line of a batch file -> what it asks, or a RowError that says what is wrong with it.

    {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}, ...}     OpenAI batch
    {"custom_id": ..., "messages": [...], "temperature": 0, ...}              plain chat
    {"prompt": text or token ids, "max_tokens": 8, ...}                       plain prompt

A field that would change the answer and is not supported is refused by name; HARMLESS ones are
accepted. `null` is the same as leaving a field out, as in OpenAI's API.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

from mainstem.batch.files import MAX_LINE_BYTES, Line
from mainstem.core.errors import InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.text.grammar import choice_form, json_form, regex_form

MAX_CUSTOM_ID_CHARS = 512
MAX_TOKEN_ID = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has no limit
SAMPLINGS_KEPT = 1024  # different settings whose objects are shared between rows
MAX_KEPT_CHARS = 4096  # of such settings

Json = Mapping[str, object]
Message = dict[str, object]
T = TypeVar("T")

# accepted and without effect on the answer
HARMLESS = frozenset(
    [
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    ]
)
# SamplingParams takes these under the same name and checks them
SAMPLING = frozenset(
    [
        "frequency_penalty",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop_token_ids",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    ]
)
BOOLEANS = frozenset({"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})
LISTS = frozenset({"stop_token_ids"})
# need code of their own; the two kinds of answer differ in them
TRANSLATED = frozenset(
    [
        "best_of",
        "cache_salt",
        "guided_choice",
        "guided_json",
        "guided_regex",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "priority",
        "response_format",
        "stream",
    ]
)
CHAT_ONLY = frozenset({"add_generation_prompt", "chat_template_kwargs", "messages", "top_logprobs"})
# fields that are refused unless they say what happens anyway
ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "stream": (False,),
}


class RowError(Exception):
    """Why a line cannot be answered; becomes its error row."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param  # the field, where one is to blame


class Kind(Enum):
    """What an answer looks like; the value is the url."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Row:
    """What a line asks, apart from its prompt; kept until the answer is written."""

    line: int
    custom_id: str
    kind: Kind
    sampling: SamplingParams
    salt: bytes = b""
    priority: int = 0
    model: str | None = None  # the name the line gives; the job's model answers whatever it is


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is not rendered yet."""

    messages: list[Message]
    add_generation_prompt: bool = True
    template_args: Json = field(default_factory=dict)
    tools: Sequence[Json] | None = None


Prompt: TypeAlias = "str | array[int] | Chat"


# --- the outside of a line -----------------------------------------------------------------------


def parse_json(line: Line) -> dict[str, object]:
    """The JSON object on a line."""
    if line.data is None:
        raise RowError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line.data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise RowError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RowError("invalid_row", "the line must be a JSON object")
    return value


def custom_id_of(row: Json, line_number: int) -> str:
    """The row's own id, or one made of its line number."""
    custom_id = row.get("custom_id")
    if custom_id is None:
        return f"line-{line_number}"
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        reason = f"must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise RowError("invalid_value", f"custom_id: {reason}", "custom_id")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        reason = "is not valid Unicode (lone surrogates)"
        raise RowError("invalid_value", f"custom_id: {reason}", "custom_id") from None
    return custom_id


# --- the inside ----------------------------------------------------------------------------------


class RowParser:
    """Reads what rows ask, with a job's defaults for what they do not say."""

    def __init__(self, defaults: Json) -> None:
        """`defaults`: fields of SamplingParams. Raises InvalidRequest if they are not valid."""
        self._defaults = dict(defaults)
        self._samplings: dict[str, SamplingParams] = {}
        self._sampling(self._defaults)

    def parse(self, row: Json, line_number: int, custom_id: str) -> tuple[Row, Prompt]:
        """What a row asks; raises RowError."""
        body, kind = _body(row)
        try:
            _check_names(body, kind)
            sampling = self._sampling(_sampling_fields(body, kind, self._defaults))
            prompt = _chat(body) if kind is Kind.CHAT else _prompt(body["prompt"])
            salt = _typed(body, "cache_salt", str, "") or ""
            priority = _typed(body, "priority", int, 0) or 0
            model = _typed(body, "model", str, None)
            found = Row(line_number, custom_id, kind, sampling, salt.encode(), priority, model)
        except InvalidRequest as error:
            raise RowError("invalid_value", str(error), error.field) from None
        return found, prompt

    def _sampling(self, values: Json) -> SamplingParams:
        """The settings as an object, the same one for rows that say the same."""
        key = repr(values)
        sampling = self._samplings.get(key)
        if sampling is None:
            if len(self._samplings) == SAMPLINGS_KEPT:
                self._samplings.clear()
            sampling = SamplingParams(**values)  # type: ignore[arg-type]  # it checks them itself
            if len(key) <= MAX_KEPT_CHARS:
                self._samplings[key] = sampling
        return sampling


def _body(row: Json) -> tuple[Json, Kind]:
    """The object with the prompt and the kind of answer: OpenAI's outer row is taken off."""
    if "body" in row or "url" in row:
        for name in row:
            if name not in ("custom_id", "method", "url", "body"):
                raise RowError("unknown_field", f"{name!r} is not a field of a batch row", name)
        if row.get("method", "POST") != "POST":
            raise RowError("invalid_value", "method: must be POST", "method")
        urls = [kind.value for kind in Kind]
        if row.get("url") not in urls:
            raise RowError("invalid_value", f"url: must be one of {', '.join(urls)}", "url")
        body, kind = row.get("body"), Kind(row["url"])
        if not isinstance(body, dict):
            raise RowError("invalid_value", "body: must be an object", "body")
        wanted = "messages" if kind is Kind.CHAT else "prompt"
        if body.get(wanted) is None:
            raise RowError("invalid_row", f"body: has no {wanted}", wanted)
        return body, kind
    body = {name: value for name, value in row.items() if name != "custom_id"}
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        raise RowError("invalid_row", "the line must have a body, a prompt or messages")
    return body, Kind.CHAT if given[0] == "messages" else Kind.COMPLETION


def _check_names(body: Json, kind: Kind) -> None:
    known = HARMLESS | SAMPLING | TRANSLATED | (CHAT_ONLY if kind is Kind.CHAT else {"prompt"})
    for name, value in body.items():
        if value is None:
            continue
        if name not in known:
            raise RowError("unknown_field", f"the field {name!r} is not supported", name)
        if name in ONLY_VALUES and value not in ONLY_VALUES[name]:
            allowed = json.dumps(ONLY_VALUES[name][0])
            reason = f"{name}: only {allowed} is supported, got {value!r}"
            raise RowError("unknown_field", reason, name)


def _sampling_fields(body: Json, kind: Kind, defaults: Json) -> dict[str, object]:
    """Arguments of SamplingParams."""
    values: dict[str, object] = {}
    if kind is Kind.COMPLETION:
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    else:
        values["max_tokens"] = None
    values |= defaults
    for name in sorted(SAMPLING & body.keys()):
        if body[name] is not None:
            values[name] = _checked(name, body[name])
    if (limit := _max_tokens(body)) is not None:
        values["max_tokens"] = limit
    if body.get("logit_bias") is not None:
        values["logit_bias"] = _logit_bias(body["logit_bias"])
    if (form := _answer_form(body)) is not None:
        values["grammar"] = form
    logprobs = _chat_logprobs(body) if kind is Kind.CHAT else body.get("logprobs")
    if logprobs is not None:
        values["logprobs"] = logprobs
    return values


def _checked(name: str, value: object) -> object:
    """Types that SamplingParams takes for granted."""
    if name in BOOLEANS and not isinstance(value, bool):
        raise InvalidRequest(name, f"must be true or false, got {value!r}")
    if name in LISTS and not isinstance(value, list):
        raise InvalidRequest(name, f"must be a list, got {value!r}")
    if name == "stop" and not isinstance(value, str | list):
        raise InvalidRequest(name, f"must be a text or a list of texts, got {value!r}")
    return value


def _max_tokens(body: Json) -> object:
    new, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise InvalidRequest("max_completion_tokens", f"is {new!r}, but max_tokens is {old!r}")
    return old if new is None else new


def _answer_form(body: Json) -> str | None:
    """The form that answers must have: OpenAI's `response_format`, vLLM's `guided_...`."""
    forms = [read(body[name]) for name, read in FORM_FIELDS.items() if body.get(name) is not None]
    wanted = [form for form in forms if form is not None]
    if len(wanted) > 1:
        raise InvalidRequest("response_format", "the answer can have one form only")
    return wanted[0] if wanted else None


def _response_form(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return json_form({"type": "object"})
        case "json_schema":
            assert isinstance(value, dict)
            described = value.get("json_schema")
            if not isinstance(described, dict) or described.get("schema") is None:
                raise InvalidRequest("response_format", "json_schema: must hold a schema")
            return json_form(described["schema"])
    reason = "type must be text, json_object or json_schema"
    raise InvalidRequest("response_format", f"{reason}, got {kind!r}")


def _json_form(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest("guided_json", "is not JSON") from None
    return json_form(value)


def _regex_form(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("guided_regex", f"must be a text, got {value!r}")
    return regex_form(value)


def _choice_form(value: object) -> str:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest("guided_choice", f"must be a list of texts, got {value!r}")
    return choice_form(value)


FORM_FIELDS: dict[str, Callable[[object], str | None]] = {
    "response_format": _response_form,
    "guided_json": _json_form,
    "guided_regex": _regex_form,
    "guided_choice": _choice_form,
}


def _logit_bias(value: object) -> dict[int, object]:
    """OpenAI's form has token ids as texts, since JSON has no other keys."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", f"must be an object, got {value!r}")
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "its keys must be token ids") from None


def _chat_logprobs(body: Json) -> object:
    """The chat API asks with a boolean and counts the others apart."""
    wanted = _typed(body, "logprobs", bool, False)
    top = body.get("top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    if not wanted:
        return None
    return 0 if top is None else top


def _typed(body: Json, name: str, kind: type[T], default: T | None) -> T | None:
    """A field of a given type; absent and null give the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {str: "a text", int: "a whole number", bool: "true or false", dict: "an object"}
        raise InvalidRequest(name, f"must be {words[kind]}, got {value!r}")
    return value


# --- prompts -------------------------------------------------------------------------------------


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    reason = f"must be one text or one list of token ids from 0 to {MAX_TOKEN_ID}"
    if not isinstance(value, list) or bool in set(map(type, value)):
        raise InvalidRequest("prompt", reason)
    try:
        ids = array("i", value)
    except (TypeError, OverflowError):
        raise InvalidRequest("prompt", reason) from None
    if ids and min(ids) < 0:
        raise InvalidRequest("prompt", reason)
    return ids


def _chat(body: Json) -> Chat:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a list with at least one message")
    add_prompt = _typed(body, "add_generation_prompt", bool, True)
    template_args = _typed(body, "chat_template_kwargs", dict, None)
    checked = [_message(index, message) for index, message in enumerate(messages)]
    return Chat(checked, bool(add_prompt), template_args or {})


def _message(index: int, message: object) -> Message:
    """A message whose content is one text: parts are joined, other parts than text refused."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest("messages", f"message {index} must be an object with a role")
    if message.get("tool_calls") is not None:
        message = message | {"tool_calls": _past_calls(index, message["tool_calls"])}
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            reason = f"the content of message {index} must be a text or text parts"
            raise InvalidRequest("messages", reason)
        texts.append(part["text"])
    return message | {"content": "\n".join(texts)}


def _past_calls(index: int, calls: object) -> list[Json]:
    """Tool calls of an earlier answer, their arguments as objects: what chat templates expect."""
    reason = f"tool_calls of message {index} must be functions whose arguments are JSON"
    found: list[Json] = []
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise InvalidRequest("messages", reason)
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise InvalidRequest("messages", reason) from None
        found.append(call | {"function": function | {"arguments": arguments}})
    return found
