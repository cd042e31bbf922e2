"""Renders answers in OpenAI's format, whole or as chunks of a stream, for server and batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from mainstem.core.request import FinishReason, Output, SamplingParams, TokenLogprobs
from mainstem.text.parsers.counting import count_reasoning
from mainstem.text.parsers.parser import AnswerParser
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import Part, Reasoning, ToolCall
from mainstem.wire.calls import REASONING_NAMES, Call, Kind
from mainstem.wire.logprobs import (
    Offsets,
    Place,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

Json = dict[str, object]

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class AnswerSoFar:
    """One answer so far."""

    pieces: list[str] = field(default_factory=list)  # pieces of its text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class PromptAnswers:
    """All answers to one prompt."""

    prompt_tokens: int
    sampling: SamplingParams
    answers: list[AnswerSoFar] = field(init=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = (None,)  # None for the first token
    cached_tokens: int = 0
    dropped_tokens: int = 0  # tokens dropped from a prompt that was longer than the context window

    def __post_init__(self) -> None:
        self.answers = [AnswerSoFar() for _ in range(self.sampling.n)]

    @property
    def is_finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def add(self, output: Output) -> None:
        """Add news of an answer."""
        answer = self.answers[output.index]
        answer.pieces.append(output.text)
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs
        answer.finish_reason = output.finish_reason
        answer.stop_reason = output.stop_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.index == 0:
            self.cached_tokens = output.num_cached_tokens
            self.dropped_tokens = output.num_dropped_tokens


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every object of a reply has."""

    reply_id: str
    model: str
    created: int  # seconds since 1970
    fingerprint: str | None = None  # fingerprint of version, model and settings


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is returned with its answer."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reply:
    """Renders the answers to one call. Answer i of prompt p is choice p * n + i.

    If the call has echo, `echoes` has an entry for each prompt. If the call returns token ids,
    `prompt_ids` has an entry for each prompt.
    """

    call: Call
    heading: Heading
    tokenizer: Tokenizer
    echoes: Sequence[Echo] = ()
    prompt_ids: Sequence[list[int]] = ()

    @property
    def is_chat(self) -> bool:
        return self.call.kind is Kind.CHAT

    def whole(self, answers: Sequence[PromptAnswers]) -> Json:
        """The reply when every answer is finished."""
        choices = [
            self._choice(place, index, answers[place])
            for place in range(len(answers))
            for index in range(self.call.sampling.n)
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        whole = self.object(kind, choices) | {"usage": self.usage(answers)}
        if self.is_chat and self.call.wants_prompt_logprobs:
            whole["prompt_logprobs"] = prompt_logprobs(answers[0].prompt_logprobs, self.tokenizer)
        if self.is_chat and self.call.returns_token_ids:
            whole["prompt_token_ids"] = self.prompt_ids[0]
        return whole

    def usage(self, answers: Sequence[PromptAnswers]) -> Json:
        """Return the tokens so far, of all prompts and answers."""
        num_prompt = sum(prompt.prompt_tokens for prompt in answers)
        num_output = sum(len(one.token_ids) for prompt in answers for one in prompt.answers)
        if self.call.is_scoring:
            num_output = 0
        details = {"cached_tokens": sum(prompt.cached_tokens for prompt in answers)}
        if num_dropped := sum(prompt.dropped_tokens for prompt in answers):
            details["dropped_tokens"] = num_dropped
        usage: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": details,
        }
        num_reasoning = self._reasoning_tokens(answers)
        if num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _reasoning_tokens(self, answers: Sequence[PromptAnswers]) -> int | None:
        """Return the number of reasoning tokens; None if the model does not reason, or its tokens
        do not show where reasoning ends."""
        reasoning = self.call.reasoning
        if reasoning is None:
            return None
        counts = [
            count_reasoning(reasoning, one.text, one.token_ids, self.tokenizer)
            for prompt in answers
            for one in prompt.answers
        ]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def object(self, kind: str, choices: list[Json]) -> Json:
        """The fields that every reply and chunk has."""
        heading = self.heading
        fields: Json = {
            "id": heading.reply_id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
        }
        if heading.fingerprint is not None:
            fields["system_fingerprint"] = heading.fingerprint
        return fields

    def _choice(self, place: int, index: int, answers: PromptAnswers) -> Json:
        answer, call = answers.answers[index], self.call
        choice: Json = {"index": place * call.sampling.n + index}
        has_logprobs = call.sampling.logprobs is not None
        logprobs: Json | None = None
        reason = reason_text(answer.finish_reason)
        if self.is_chat:
            choice["message"], has_calls = self._message(answer.text)
            reason = "tool_calls" if has_calls and reason == "stop" else reason
            if has_logprobs:
                logprobs = chat_logprobs(answer.logprobs, self.tokenizer)
        else:
            text = self.echoed_text(place) + ("" if call.is_scoring else answer.text)
            choice["text"] = text
            if has_logprobs:
                entries = () if call.is_scoring else answer.logprobs
                places = [*self.echoed_places(place, answers), *token_places(entries)]
                starts = self.offsets().starts(places)
                logprobs = completion_logprobs(places, starts, len(text), self.tokenizer)
            if call.wants_prompt_logprobs:
                entries_of_prompt = prompt_logprobs(answers.prompt_logprobs, self.tokenizer)
                choice["prompt_logprobs"] = entries_of_prompt
        choice["logprobs"] = logprobs
        choice["finish_reason"] = reason
        choice["stop_reason"] = answer.stop_reason  # like vLLM: the stop string or token id
        if call.is_scoring:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if call.returns_token_ids:
            choice["token_ids"] = [] if call.is_scoring else answer.token_ids
            if not self.is_chat:
                choice["prompt_token_ids"] = self.prompt_ids[place]
        return choice

    def _message(self, text: str) -> tuple[Json, bool]:
        """Return a chat's answer, and whether it calls tools."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        parser = self.call.parser()
        if parser is None:
            return message, False
        parts = [*parser.push(text), *parser.finish()]
        said = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [part.to_json() for part in parts if isinstance(part, ToolCall)]
        if self.call.has_one_tool_call:
            del calls[1:]
        message["content"] = said
        if thought:
            message |= {"content": said or None, **dict.fromkeys(REASONING_NAMES, thought)}
        if calls:
            message |= {"content": said.strip() or None, "tool_calls": calls}
        return message, bool(calls)

    def echoed_text(self, place: int) -> str:
        return self.echoes[place].text if self.echoes else ""

    def echoed_places(self, place: int, answers: PromptAnswers) -> list[Place]:
        if not self.echoes:
            return []
        return [*zip(self.echoes[place].token_ids, answers.prompt_logprobs, strict=True)]

    def offsets(self) -> Offsets:
        return Offsets(self.tokenizer, self.call.sampling.skip_special_tokens)


@dataclass(slots=True)
class _StreamedChoice:
    """The progress of a stream in one answer."""

    offsets: Offsets
    parser: AnswerParser | None
    has_begun: bool = False  # whether a completion's first chunk, with its echo, was made
    num_chars: int = 0
    # logprobs of a completion that wait for the text of their tokens, which a stop string may cut;
    # each with the place where its token begins
    held: list[tuple[Place, int]] = field(default_factory=list)
    plain: list[bytes] | None = None  # the bytes of a plain event around its text and usage


_MARK = "mark"  # placeholder for the text in a chunk that is rendered as a pattern


class ReplyStream:
    """The server-sent events of a reply, as news of its answers comes."""

    def __init__(self, reply: Reply) -> None:
        call = reply.call
        self._reply = reply
        self._kind = "chat.completion.chunk" if reply.is_chat else "text_completion"
        self._choices = [
            _StreamedChoice(reply.offsets(), call.parser() if reply.is_chat else None)
            for _ in range(call.num_answers)
        ]
        self._n = call.sampling.n
        self._has_usage = call.has_running_usage
        self._is_plain = call.sampling.logprobs is None and not call.returns_token_ids

    def opening(self, answers: Sequence[PromptAnswers]) -> bytes:
        """The first events of a chat, with the role. Sent while the prompt is still computed, so
        that a client knows that its request was accepted."""
        if not self._reply.is_chat:
            return b""
        delta: Json = {"role": "assistant", "content": ""}
        events = []
        for number in range(len(self._choices)):
            place, index = divmod(number, self._n)
            part = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            usage = self._usage_so_far(answers[place], index) if self._has_usage else None
            chunk = self._chunk([part], usage)
            if self._reply.call.returns_token_ids:
                chunk["prompt_token_ids"] = self._reply.prompt_ids[place]
            events.append(event(chunk))
        return b"".join(events)

    def events(self, place: int, output: Output, answers: PromptAnswers) -> bytes:
        """The events for news of an answer to prompt `place`, which was already added to `answers`.
        Almost all news is only text: then only the text of the event is encoded.
        """
        number = place * self._n + output.index
        plain = self._choices[number].plain
        if plain is None or output.finish_reason is not None:
            return self._rendered(place, output, answers)
        if not output.text:
            return b""
        if self._has_usage:
            usage = _encode(self._usage_so_far(answers, output.index))
            return plain[0] + _encode(output.text) + plain[1] + usage + plain[2]
        return plain[0] + _encode(output.text) + plain[1]

    def usage_event(self, answers: Sequence[PromptAnswers]) -> bytes:
        """The event before the end, if the caller wants usage."""
        if not self._reply.call.includes_usage:
            return b""
        return event(self._chunk([], self._reply.usage(answers)))

    def _rendered(self, place: int, output: Output, answers: PromptAnswers) -> bytes:
        number = place * self._n + output.index
        choice = self._choices[number]
        parts = (
            self._chat_parts(output, choice)
            if self._reply.is_chat
            else self._completion_parts(place, output, answers, choice)
        )
        usage = self._usage_so_far(answers, output.index) if self._has_usage else None
        chunks = [self._chunk([{"index": number} | part], usage) for part in parts]
        is_plain = self._is_plain and (choice.parser is None or choice.parser.is_plain)
        if is_plain and output.finish_reason is None:
            choice.plain = self._around_text(number)
        return b"".join(map(event, chunks))

    def _usage_so_far(self, answers: PromptAnswers, index: int) -> Json:
        """The usage of one choice so far, as vLLM reports it in each chunk."""
        count = 0 if self._reply.call.is_scoring else len(answers.answers[index].token_ids)
        return {
            "prompt_tokens": answers.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": answers.prompt_tokens + count,
        }

    def _around_text(self, number: int) -> list[bytes]:
        """The bytes of a plain event around its text and, if it has one, its usage."""
        part: Json = {"index": number} | self._text_part(_MARK, None)
        example = event(self._chunk([part], _MARK if self._has_usage else None))
        return example.rsplit(_encode(_MARK), 2 if self._has_usage else 1)

    def _chunk(self, choices: list[Json], usage: Json | str | None) -> Json:
        chunk = self._reply.object(self._kind, choices)
        if self._reply.call.includes_usage or usage is not None:
            chunk["usage"] = usage
        return chunk

    def _text_part(
        self, text: str, logprobs: Json | None, token_ids: Sequence[int] | None = None
    ) -> Json:
        """Return a choice that has more text and has not ended."""
        part: Json = {"delta": {"content": text}} if self._reply.is_chat else {"text": text}
        part |= {"logprobs": logprobs, "finish_reason": None}
        if not self._reply.is_chat:
            part["stop_reason"] = None
        if token_ids is not None:
            part["token_ids"] = token_ids
        return part

    def _completion_parts(
        self, place: int, output: Output, answers: PromptAnswers, choice: _StreamedChoice
    ) -> Iterator[Json]:
        reply, is_scoring = self._reply, self._reply.call.is_scoring
        text = "" if is_scoring else output.text
        places = [] if is_scoring else token_places(output.logprobs)
        ids = self._told_ids(output)
        prompt_ids: Json = {}
        if not choice.has_begun:
            choice.has_begun = True
            if ids is not None:
                prompt_ids = {"prompt_token_ids": reply.prompt_ids[place]}
            text = reply.echoed_text(place) + text
            if reply.call.sampling.logprobs is not None:
                places = [*reply.echoed_places(place, answers), *places]
        choice.num_chars += len(text)
        choice.held += zip(places, choice.offsets.starts(places), strict=True)
        reason = reason_text(output.finish_reason)
        ready = [each for each in choice.held if reason is not None or each[1] < choice.num_chars]
        del choice.held[: len(ready)]  # starts never decrease
        if text or ready or ids or reason is not None:
            logprobs = None
            if ready:
                places, starts = [each[0] for each in ready], [each[1] for each in ready]
                logprobs = completion_logprobs(places, starts, choice.num_chars, reply.tokenizer)
            ending = {"finish_reason": reason, "stop_reason": output.stop_reason}
            yield self._text_part(text, logprobs, ids) | ending | prompt_ids

    def _chat_parts(self, output: Output, choice: _StreamedChoice) -> Iterator[Json]:
        reason = reason_text(output.finish_reason)
        if output.text or output.logprobs or self._told_ids(output) or reason is not None:
            yield from self._deltas(output, choice)
        if reason is not None:
            if reason == "stop" and choice.parser is not None and choice.parser.num_calls:
                reason = "tool_calls"
            ending = {"finish_reason": reason, "stop_reason": output.stop_reason}
            yield {"delta": {}, "logprobs": None, **ending}

    def _deltas(self, output: Output, choice: _StreamedChoice) -> Iterator[Json]:
        """Return chunks with the parts that are now certain. Logprobs and ids are in the first
        chunk."""
        tokenizer = self._reply.tokenizer
        ids = self._told_ids(output)
        logprobs = chat_logprobs(output.logprobs, tokenizer) if output.logprobs else None
        parts: list[Part] = [output.text] if output.text else []
        first_call = 0
        if choice.parser is not None:
            first_call = choice.parser.num_calls
            parts = choice.parser.push(output.text)
            if output.finish_reason is not None:
                parts += choice.parser.finish()
            if self._reply.call.has_one_tool_call:
                parts = _with_one_call(parts, first_call)
        if not parts and (logprobs is not None or ids):
            parts = [""]
        for part in parts:
            if isinstance(part, str):
                yield self._text_part(part, logprobs, ids)
            elif isinstance(part, Reasoning):
                thought = dict.fromkeys(REASONING_NAMES, part.text)
                yield self._text_part("", logprobs, ids) | {"delta": thought}
            else:
                delta = {"tool_calls": [{"index": first_call} | part.to_json()]}
                yield self._text_part("", logprobs, ids) | {"delta": delta}
                first_call += 1
            logprobs, ids = None, None

    def _told_ids(self, output: Output) -> tuple[int, ...] | None:
        """The token ids of some news, if the caller wants them."""
        call = self._reply.call
        if not call.returns_token_ids:
            return None
        return () if call.is_scoring else output.token_ids


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encode(value)


def _with_one_call(parts: Sequence[Part], num_before: int) -> list[Part]:
    """Return the parts of an answer with only the first call; `num_before` is the number of earlier
    calls."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    told = calls[: max(0, 1 - num_before)]
    return [part for part in parts if not isinstance(part, ToolCall) or part in told]


def token_places(entries: Sequence[TokenLogprobs]) -> list[Place]:
    return [(entry.token_id, entry) for entry in entries]


def reason_text(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
