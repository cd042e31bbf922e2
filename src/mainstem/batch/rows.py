"""Reads the lines of a batch file, and renders the lines of the output.

    {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}, ...}     OpenAI batch
    {"custom_id": ..., "url": "/v1/messages", "body": {...}, ...}             Anthropic's messages
    {"custom_id": ..., "messages": [...], "temperature": 0, ...}              plain chat
    {"prompt": text or token ids, "max_tokens": 8, ...}                       plain prompt
    {"prompt": ... or "messages": [...], "choices": [text, ...]}              choices to be scored

Bodies are read by the parser that the server uses (wire/chat/parsing.py).
"""

import json
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from mainstem.batch.files import MAX_LINE_BYTES, Line
from mainstem.core.json import JsonView
from mainstem.text.encoding import Prompt
from mainstem.text.scoring import ChoiceTokens, ScoreOutput
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.answers import Heading, PromptAnswers
from mainstem.wire.bodies import RowEnvelope
from mainstem.wire.calls import SCORE_URL, Call, CallKind
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.errors import WireError
from mainstem.wire.fields import read_fields
from mainstem.wire.messages.bodies import MessagesBody
from mainstem.wire.messages.parsing import MESSAGES_URL, MessagesAsked, read_call
from mainstem.wire.messages.rendering import MessageReply
from mainstem.wire.responses.bodies import ResponsesBody
from mainstem.wire.responses.parsing import (
    RESPONSES_URL,
    ItemReader,
    chat_fields,
    in_responses_terms,
    input_items,
    read_body,
)
from mainstem.wire.responses.rendering import ResponseStream
from mainstem.wire.scores import choices_reply, read_scores

MAX_CUSTOM_ID_CHARS = 512
# fields that only the server supports
SERVER_ONLY = frozenset(
    [
        "context_overflow", "echo", "return_token_ids", "session_id", "store", "stream",
        "truncate_prompt_tokens",
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A line that can be answered, without its prompt; kept until the answer is written."""

    line: int
    custom_id: str
    call: Call
    digest: str = ""  # hash of what the row asks for; empty if it is not needed
    choices: tuple[ChoiceTokens, ...] = ()  # the call's choices, as tokens
    response: ResponsesBody | None = None  # the body of a row for /v1/responses
    message: MessagesAsked | None = None  # what a row for /v1/messages asks, without its fields

    @property
    def url(self) -> str:
        """The path to which the row would be sent on a server."""
        if self.message is not None:
            return MESSAGES_URL
        return self.call.url if self.response is None else RESPONSES_URL


# --- in ------------------------------------------------------------------------------------------


def parse_json(line: Line) -> dict[str, object]:
    """The JSON object on a line; raises WireError."""
    if line.fault is not None:
        raise WireError("invalid_row", line.fault)
    if line.data is None:
        raise WireError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = msgspec.json.decode(line.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = _explained_json(line.data)
    if not isinstance(value, dict):
        raise WireError("invalid_row", "the line must be a JSON object")
    return value


def _explained_json(data: bytes) -> object:
    """Parse a line with Python's parser after the fast parser has refused it: Python's errors name
    the place. NaN and lone surrogates are accepted; the checks of fields refuse them later."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start + 1} of the line"
        raise WireError("invalid_json", f"not UTF-8: {place}; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise WireError("invalid_json", f"not JSON: {error}") from None


def custom_id_of(row: JsonView, line_number: int) -> str:
    """The row's own id, or one made from its line number."""
    custom_id = row.get("custom_id")
    if custom_id is None:
        return f"line-{line_number}"
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        reason = f"must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise WireError("invalid_value", f"custom_id: {reason}", "custom_id")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        reason = "is not valid Unicode (lone surrogates)"
        raise WireError("invalid_value", f"custom_id: {reason}", "custom_id") from None
    return custom_id


def parse_row(
    parser: CallParser, row: JsonView, line_number: int, custom_id: str, digest: str = ""
) -> tuple[Row, Prompt]:
    """The call and prompt of a row; raises WireError."""
    body, url = _body(row)
    for name in sorted(SERVER_ONLY & body.keys()):
        if body[name] not in (None, False):
            raise WireError("unknown_field", f"the field {name!r} is not supported in rows", name)
    if "stream_options" in body:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    if url == RESPONSES_URL:
        call, prompt, response = _read_response(parser, body)
        return Row(line_number, custom_id, call, digest, response=response), prompt
    if url == MESSAGES_URL:
        message, call, chat = read_call(parser, body, MessagesBody)
        message = replace(message, fields={}, marks=[])
        return Row(line_number, custom_id, call, digest, message=message), chat
    if url == SCORE_URL:
        asked = read_scores(parser, body)
        if asked.label_ids:
            reason = "items: are not supported in rows; send prompt and choices"
            raise WireError("unknown_field", reason, "items")
        return Row(line_number, custom_id, asked.call, digest), asked.prompts[0]
    call, prompts = parser.parse(body, CallKind(url))
    if len(prompts) != 1:
        reason = "prompt: must be one text or one list of token ids; a row has one prompt"
        raise WireError("invalid_value", reason, "prompt")
    return Row(line_number, custom_id, call, digest), prompts[0]


def _read_response(parser: CallParser, body: JsonView) -> tuple[Call, Prompt, ResponsesBody]:
    """Read a body of /v1/responses. Its response is not stored, so nothing can continue it."""
    read = read_body(body)
    if read.previous_response_id is not None:
        reason = "previous_response_id: not supported in rows; send the conversation as input"
        raise WireError("unknown_field", reason, "previous_response_id")
    conversation = ItemReader(read.instructions)
    conversation.add(input_items(read))
    try:
        fields = chat_fields(read, conversation.messages)
        call, [prompt] = parser.parse(fields, CallKind.CHAT)
    except WireError as error:
        raise in_responses_terms(error) from None
    return call, prompt, read


def _body(row: JsonView) -> tuple[JsonView, str]:
    """Return the object with the prompt, without OpenAI's envelope, and the URL it is meant for."""
    if "body" in row or "url" in row:
        envelope = read_fields(row, RowEnvelope)
        return envelope.body, envelope.url
    has_chat, has_prompt = row.get("messages") is not None, row.get("prompt") is not None
    if has_chat is has_prompt:
        raise WireError("invalid_row", "the line must have a body, or either a prompt or messages")
    body = {name: value for name, value in row.items() if name != "custom_id"}
    if row.get("choices") is not None:
        return body, SCORE_URL
    return body, (CallKind.CHAT if has_chat else CallKind.COMPLETION).value


# --- out -----------------------------------------------------------------------------------------


def answer_row(
    row: Row, answers: PromptAnswers, model: str, tokenizer: Tokenizer, now: int
) -> dict[str, object]:
    """The output line of a row that was answered; `now` is in seconds since 1970."""
    heading = Heading(_answer_id(row), model, now)
    if row.response is not None:
        stream = ResponseStream(row.call, heading, row.response)
        return _answered(row, stream.whole(answers, tokenizer))
    if row.message is not None:
        made = MessageReply(row.call, heading, shows_thinking=row.message.shows_thinking)
        return _answered(row, json.loads(msgspec.json.encode(made.whole(answers))))
    return _answered(row, CompletionReply(row.call, heading, tokenizer).whole([answers]))


def score_row(row: Row, result: ScoreOutput, model: str, now: int) -> dict[str, object]:
    """The output line of a row whose choices were scored."""
    return _answered(row, choices_reply(Heading(_answer_id(row), model, now), result))


def _answer_id(row: Row) -> str:
    if row.response is not None:
        return f"resp_{_name(row.custom_id)}"
    if row.message is not None:
        return f"msg_{_name(row.custom_id)}"
    prefix = "chatcmpl" if row.call.kind is CallKind.CHAT else "cmpl"
    return f"{'score' if row.call.choices else prefix}-{_name(row.custom_id)}"


def _answered(row: Row, body: dict[str, object]) -> dict[str, object]:
    name = _name(row.custom_id)
    return {
        "id": f"batch_req_{name}",
        "custom_id": row.custom_id,
        "response": {"status_code": 200, "request_id": f"req-{name}", "body": body},
        "error": None,
    }


def served_row(row: Row, body: JsonView, model: str, is_copy: bool) -> dict[str, object]:
    """The output line of a row that a worker answered with `body`; a copy counts no computed
    tokens."""
    body = {**body, "id": _answer_id(row), "model": model}
    usage = body.get("usage")
    if is_copy and isinstance(usage, dict) and "prompt_tokens" in usage:
        details = {"cached_tokens": usage.get("prompt_tokens")}
        body["usage"] = {**usage, "prompt_tokens_details": details}
    return _answered(row, body)


def row_body(line: Line) -> dict[str, object]:
    """The body of a row for a server, without streaming fields; raises WireError."""
    body, _ = _body(parse_json(line))
    left_out = ("stream", "stream_options")
    return {name: value for name, value in body.items() if name not in left_out}


def error_row(line: int, custom_id: str | None, error: WireError) -> dict[str, object]:
    """The output line of a row that cannot be answered."""
    return {
        "id": f"batch_req_{_name(f'error on line {line}')}",
        "custom_id": custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "line": line,
        },
    }


def _name(text: str) -> str:
    """An id that is the same in every run of a job."""
    return blake2b(text.encode(), digest_size=12).hexdigest()
