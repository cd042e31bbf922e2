"""Answers in the format of Anthropic's Messages API: whole, as events of a stream, and errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from mainstem.core.json import Json
from mainstem.core.request import FinishReason, Output
from mainstem.text.tools import Part, Reasoning, ToolCall
from mainstem.wire.answers import AnswerParts, AnswerSoFar, Heading, PromptAnswers
from mainstem.wire.calls import Call
from mainstem.wire.events import MARK, encode, named_event

_HALF = re.compile("[\ud800-\udfff]")  # lone surrogates, which a reply cannot contain


@dataclass(frozen=True, slots=True)
class PinnedTokens:
    """How many leading tokens of a prompt are pinned, and how many of them for an hour."""

    num_tokens: int = 0
    num_hour_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MessageReply:
    """Renders the answer to one call."""

    call: Call
    heading: Heading
    pinned: PinnedTokens = PinnedTokens()
    shows_thinking: bool = True

    def whole(self, answers: PromptAnswers) -> Json:
        """The reply when the answer is finished."""
        [answer] = answers.answers
        parts = AnswerParts(self.call)
        blocks: list[Json] = []
        for part in parts.read(answer.text, is_last=True):
            if part == "":
                continue
            name = _field(part)
            if name != "input" and blocks and name in blocks[-1]:
                blocks[-1][name] = f"{blocks[-1][name]}{self.text(part)}"
            else:
                blocks.append(self.block(part))
        message = self.message(blocks, self.usage(answers))
        return message | self.ending(answer, parts.num_calls)

    def message(self, blocks: list[Json], usage: Json) -> Json:
        """Return the reply while the answer has not ended; `ending` returns the fields that change
        at the end."""
        return {
            "id": self.heading.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def ending(self, answer: AnswerSoFar, num_calls: int) -> Json:
        """Return why the answer has ended."""
        stop = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        if answer.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def usage(self, answers: PromptAnswers) -> Json:
        """Return the tokens so far. Each prompt token is counted in one of three ways: read from
        the cache, computed and pinned, or only computed."""
        num_read, pinned = answers.cached_tokens, self.pinned
        num_created = max(0, pinned.num_tokens - num_read)
        num_hour = max(0, pinned.num_hour_tokens - num_read)
        return {
            "input_tokens": answers.prompt_tokens - num_read - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": num_created - num_hour,
                "ephemeral_1h_input_tokens": num_hour,
            },
            "output_tokens": len(answers.answers[0].token_ids),
            "service_tier": "standard",
        }

    def block(self, part: Part) -> Json:
        """Return a part of an answer as a content block."""
        if isinstance(part, ToolCall):
            tool_id = f"toolu_{part.call_id.removeprefix('call_')}"
            return {
                "type": "tool_use",
                "id": tool_id,
                "name": part.name,
                "input": msgspec.Raw(_input(part)),
            }
        if isinstance(part, Reasoning):
            return {"type": "thinking", "thinking": self.text(part), "signature": ""}
        return {"type": "text", "text": part}

    def text(self, part: Part) -> str:
        """The text of a part, if the caller wants to see it."""
        if isinstance(part, Reasoning):
            return part.text if self.shows_thinking else ""
        return part if isinstance(part, str) else ""


class MessageStream:
    """The server-sent events of a reply, as news of its answer comes."""

    def __init__(self, reply: MessageReply) -> None:
        self.reply = reply
        self._parts = AnswerParts(reply.call)
        self._num_blocks = 0
        self._open: str | None = None  # the field of the open block, to which further text belongs
        self._around: list[bytes] = []  # the bytes of an event before and after such text

    def opening(self, answers: PromptAnswers) -> bytes:
        """The first events. They are sent while the prompt is still computed; cached tokens are
        reported at the end."""
        message = self.reply.message([], self.reply.usage(answers))
        return named_event({"type": "message_start", "message": message}) + PING

    def events(self, output: Output, answers: PromptAnswers) -> bytes:
        """The events for news of the answer, which was already added to `answers`."""
        is_last = output.finish_reason is not None
        parts = self._parts.read(output.text, is_last=is_last)
        told = [made for part in parts if part != "" for made in self._part(part)]
        if is_last:
            told += self._end_block()
            [answer] = answers.answers
            ending = self.reply.ending(answer, self._parts.num_calls)
            usage = self.reply.usage(answers)
            told.append(named_event({"type": "message_delta", "delta": ending, "usage": usage}))
            told.append(named_event({"type": "message_stop"}))
        return b"".join(told)

    def _part(self, part: Part) -> Iterator[bytes]:
        name = _field(part)
        if self._open != name or name == "input":
            yield from self._end_block()
            yield self._begin_block(part, name)
        text = _input(part) if isinstance(part, ToolCall) else self.reply.text(part)
        if text:
            yield self._around[0] + encode(text) + self._around[1]

    def _begin_block(self, part: Part, name: str) -> bytes:
        index = self._num_blocks
        self._open = name
        kind, told = ("input_json", "partial_json") if name == "input" else (name, name)
        delta = {"type": f"{kind}_delta", told: MARK}
        example = named_event({"type": "content_block_delta", "index": index, "delta": delta})
        self._around = example.split(encode(MARK))
        empty: Json = {name: {} if name == "input" else ""}
        block = self.reply.block(part) | empty
        return named_event({"type": "content_block_start", "index": index, "content_block": block})

    def _end_block(self) -> Iterator[bytes]:
        if self._open is not None:
            yield named_event({"type": "content_block_stop", "index": self._num_blocks})
            self._num_blocks += 1
            self._open = None


PING = named_event({"type": "ping"})

_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def moment(seconds: int) -> str:
    """A time, in seconds since 1970, as this API writes it (RFC 3339)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def error_body(status: int, message: str, code: str | None, request_id: str | None) -> Json:
    """The error object for an HTTP status."""
    kind = _ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == "context_length_exceeded":
        # if clients find these words, they shorten the prompt
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def _field(part: Part) -> str:
    if isinstance(part, ToolCall):
        return "input"
    return "thinking" if isinstance(part, Reasoning) else "text"


def _input(call: ToolCall) -> str:
    """Return the arguments of a call as JSON; this API requires an object."""
    try:
        value = json.loads(call.arguments, parse_constant=lambda _: None)  # JSON has no NaN
    except (ValueError, RecursionError):
        value = call.arguments
    if not isinstance(value, dict):
        value = {"arguments": value}
    return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False))
