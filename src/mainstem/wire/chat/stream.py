"""The stream of a chat or completion in OpenAI's format, as server-sent events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mainstem.core.json import Json
from mainstem.core.request import Output
from mainstem.text.tools import Reasoning
from mainstem.wire.answers import AnswerParts, PromptAnswers, told_weights
from mainstem.wire.chat.logprobs import Offsets, Place, chat_logprobs, completion_logprobs
from mainstem.wire.chat.rendering import (
    REASONING_NAMES,
    CompletionReply,
    reason_text,
    token_places,
)
from mainstem.wire.events import MARK, encode, event


@dataclass(slots=True)
class _StreamedChoice:
    """The progress of a stream in one answer."""

    offsets: Offsets
    parts: AnswerParts
    has_begun: bool = False  # whether a completion's first chunk, with its echo, was made
    num_chars: int = 0
    # logprobs of a completion that wait for the text of their tokens, which a stop string may cut;
    # each with the place where its token begins
    held: list[tuple[Place, int]] = field(default_factory=list)
    plain: list[bytes] | None = None  # the bytes of a plain event around its text and usage


class CompletionStream:
    """The server-sent events of a reply, as news of its answers comes."""

    def __init__(self, reply: CompletionReply) -> None:
        call = reply.call
        self._reply = reply
        self._kind = "chat.completion.chunk" if reply.is_chat else "text_completion"
        self._choices = [
            _StreamedChoice(reply.offsets(), AnswerParts(call)) for _ in range(call.num_answers)
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
            usage = encode(self._usage_so_far(answers, output.index))
            return plain[0] + encode(output.text) + plain[1] + usage + plain[2]
        return plain[0] + encode(output.text) + plain[1]

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
        is_plain = self._is_plain and choice.parts.is_plain
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
        part: Json = {"index": number} | self._text_part(MARK, None)
        example = event(self._chunk([part], MARK if self._has_usage else None))
        return example.rsplit(encode(MARK), 2 if self._has_usage else 1)

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
            ending: Json = {"finish_reason": reason, "stop_reason": output.stop_reason}
            if reason is not None:
                ending |= told_weights(output.weights)
            yield self._text_part(text, logprobs, ids) | ending | prompt_ids

    def _chat_parts(self, output: Output, choice: _StreamedChoice) -> Iterator[Json]:
        reason = reason_text(output.finish_reason)
        if output.text or output.logprobs or self._told_ids(output) or reason is not None:
            yield from self._deltas(output, choice)
        if reason is not None:
            if reason == "stop" and choice.parts.num_calls:
                reason = "tool_calls"
            ending: Json = {"finish_reason": reason, "stop_reason": output.stop_reason}
            ending |= told_weights(output.weights)
            yield {"delta": {}, "logprobs": None, **ending}

    def _deltas(self, output: Output, choice: _StreamedChoice) -> Iterator[Json]:
        """Return chunks with the parts that are now certain. Logprobs and ids are in the first
        chunk."""
        tokenizer = self._reply.tokenizer
        ids = self._told_ids(output)
        logprobs = chat_logprobs(output.logprobs, tokenizer) if output.logprobs else None
        number = choice.parts.num_calls  # of the next call
        parts = choice.parts.read(output.text, is_last=output.finish_reason is not None)
        if not parts and (logprobs is not None or ids):
            parts = [""]
        for part in parts:
            if isinstance(part, str):
                yield self._text_part(part, logprobs, ids)
            elif isinstance(part, Reasoning):
                thought = dict.fromkeys(REASONING_NAMES, part.text)
                yield self._text_part("", logprobs, ids) | {"delta": thought}
            else:
                delta = {"tool_calls": [{"index": number} | part.to_json()]}
                yield self._text_part("", logprobs, ids) | {"delta": delta}
                number += 1
            logprobs, ids = None, None

    def _told_ids(self, output: Output) -> tuple[int, ...] | None:
        """The token ids of some news, if the caller wants them."""
        call = self._reply.call
        if not call.returns_token_ids:
            return None
        return () if call.is_scoring else output.token_ids
