"""Answers in the format of Anthropic's Messages API: whole, as events of a stream, and errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from mainstem.core.request import FinishReason, Output
from mainstem.text.tools import Part, Reasoning, ToolCall
from mainstem.wire.calls import Call
from mainstem.wire.replies import AnswerSoFar, Heading, PromptAnswers

Json = dict[str, object]

_encode = msgspec.json.Encoder().encode
_HALF = re.compile("[\ud800-\udfff]")  # lone surrogates, which a reply cannot contain


@dataclass(frozen=True, slots=True)
class Kept:
    """How many leading tokens of a prompt are pinned, and how many of them for an hour."""

    num_tokens: int = 0
    num_hour_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MessageReply:
    """Renders the answer to one call."""

    call: Call
    heading: Heading
    kept: Kept = Kept()
    shows_thinking: bool = True

    def whole(self, answers: PromptAnswers) -> Json:
        """The reply when the answer is finished."""
        [answer] = answers.answers
        reader = AnswerParts(self.call)
        blocks: list[Json] = []
        for part in [*reader.push(answer.text), *reader.finish()]:
            name = _field(part)
            if name != "input" and blocks and name in blocks[-1]:
                blocks[-1][name] = f"{blocks[-1][name]}{self.text(part)}"
            else:
                blocks.append(self.block(part))
        message = self.message(blocks, self.usage(answers))
        return message | self.ending(answer, reader.num_calls)

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
        num_read, kept = answers.cached_tokens, self.kept
        num_created = max(0, kept.num_tokens - num_read)
        num_hour = max(0, kept.num_hour_tokens - num_read)
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


class AnswerParts:
    """Parses an answer as its text arrives: turns pieces of text into parts."""

    def __init__(self, call: Call) -> None:
        self._parser = call.parser()
        self._has_one_call = call.has_one_tool_call
        self.num_calls = 0  # number of calls returned so far

    def push(self, text: str) -> list[Part]:
        """Add text; returns the parts that are now certain."""
        if self._parser is None:
            return [text] if text else []
        return self._told(self._parser.push(text))

    def finish(self) -> list[Part]:
        """The answer has ended: return everything that is left."""
        return [] if self._parser is None else self._told(self._parser.finish())

    def _told(self, parts: list[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall):
                if self._has_one_call and self.num_calls:
                    continue
                self.num_calls += 1
            if part != "":
                told.append(part)
        return told


_MARK = "mark"  # placeholder for the text in an event that is rendered as a pattern


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
        return event({"type": "message_start", "message": message}) + PING

    def events(self, output: Output, answers: PromptAnswers) -> bytes:
        """The events for news of the answer, which was already added to `answers`."""
        parts = self._parts.push(output.text)
        if output.finish_reason is not None:
            parts += self._parts.finish()
        told = [made for part in parts for made in self._part(part)]
        if output.finish_reason is not None:
            told += self._end_block()
            [answer] = answers.answers
            ending = self.reply.ending(answer, self._parts.num_calls)
            usage = self.reply.usage(answers)
            told.append(event({"type": "message_delta", "delta": ending, "usage": usage}))
            told.append(event({"type": "message_stop"}))
        return b"".join(told)

    def _part(self, part: Part) -> Iterator[bytes]:
        name = _field(part)
        if self._open != name or name == "input":
            yield from self._end_block()
            yield self._begin_block(part, name)
        text = _input(part) if isinstance(part, ToolCall) else self.reply.text(part)
        if text:
            yield self._around[0] + _encode(text) + self._around[1]

    def _begin_block(self, part: Part, name: str) -> bytes:
        index = self._num_blocks
        self._open = name
        kind, told = ("input_json", "partial_json") if name == "input" else (name, name)
        delta = {"type": f"{kind}_delta", told: _MARK}
        example = event({"type": "content_block_delta", "index": index, "delta": delta})
        self._around = example.split(_encode(_MARK))
        empty: Json = {name: {} if name == "input" else ""}
        block = self.reply.block(part) | empty
        return event({"type": "content_block_start", "index": index, "content_block": block})

    def _end_block(self) -> Iterator[bytes]:
        if self._open is not None:
            yield event({"type": "content_block_stop", "index": self._num_blocks})
            self._num_blocks += 1
            self._open = None


def event(value: Json) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), _encode(value))


PING = event({"type": "ping"})

_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, code: str | None, request_id: str) -> Json:
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
