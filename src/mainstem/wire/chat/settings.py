"""The settings of a chat or completion, field by field: how tokens are chosen, which pages a
request shares, and its session. Invalid values raise InvalidRequest."""

from collections.abc import Mapping
from dataclasses import fields, replace

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json, JsonView
from mainstem.core.request import MAX_LOGPROBS, Overflow, SamplingParams
from mainstem.text.parsers.formats import ToolUse
from mainstem.wire.calls import MAX_TOKEN_ID, BodyLimits, Call
from mainstem.wire.chat.bodies import AnswerBody, ChatBody, CompletionBody
from mainstem.wire.chat.forms import answer_form

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has no limit

# a body has these fields of SamplingParams under the same names; SamplingParams checks the values
SAMPLING_FIELDS = [
    each.name for each in fields(SamplingParams) if each.name in AnswerBody.__struct_fields__
]


def sampling_fields(
    body: AnswerBody, tools: ToolUse | None, defaults: JsonView, limits: BodyLimits
) -> Json:
    """Return the arguments of SamplingParams."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    if sum(map(len, stops)) > limits.max_stop_chars:
        raise InvalidRequest("stop", f"at most {limits.max_stop_chars} characters together")
    is_chat = isinstance(body, ChatBody)
    values: Json = {"max_tokens": None if is_chat else DEFAULT_COMPLETION_TOKENS, **defaults}
    for name in SAMPLING_FIELDS:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if (limit := _max_tokens(body)) is not None:
        # 1 is the smallest value that SamplingParams allows
        values["max_tokens"] = 1 if is_scoring(body) else limit
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if (form := answer_form(body, tools)) is not None:
        values["grammar"] = form
    if (logprobs := _logprobs(body)) is not None:
        values["logprobs"] = logprobs
        if has_echo(body):
            values["prompt_logprobs"] = logprobs
    return values


def salt(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        reason = "is not valid Unicode (lone surrogates)"
        raise InvalidRequest("cache_salt", reason) from None


def priority(given: int) -> int:
    if not -MAX_TOKEN_ID <= given <= MAX_TOKEN_ID:
        reason = f"must be between {-MAX_TOKEN_ID:,} and {MAX_TOKEN_ID:,}, got {given!r}"
        raise InvalidRequest("priority", reason)
    return given


def _max_tokens(body: AnswerBody) -> int | None:
    """Return the limit; the newer name of the field wins."""
    new = body.max_completion_tokens
    return body.max_tokens if new is None else new


def kept_prompt_tokens(given: int | None) -> int | None:
    if given is not None and given != -1 and not 1 <= given <= MAX_TOKEN_ID:
        reason = f"must be -1 or between 1 and {MAX_TOKEN_ID:,}, got {given!r}"
        raise InvalidRequest("truncate_prompt_tokens", reason)
    return given


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Token ids -> biases; in JSON, keys are texts."""
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "its keys must be token ids") from None


def has_echo(body: AnswerBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def is_scoring(body: AnswerBody) -> bool:
    return has_echo(body) and _max_tokens(body) == 0


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


def in_session(call: Call, body: AnswerBody) -> Call:
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
