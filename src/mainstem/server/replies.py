"""Answers as OpenAI writes them: whole, and as the chunks of a stream."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from mainstem.batch.replies import Answer, Answers
from mainstem.batch.rows import Kind
from mainstem.core.request import FinishReason
from mainstem.server.schema import Ask
from mainstem.server.turns import Turn
from mainstem.server.worker import Answering
from mainstem.text.text_engine import TextOutput
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import ToolCall, ToolReader
from mainstem.wire.logprobs import (
    Offsets,
    Place,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of a reply repeats."""

    reply_id: str
    model: str
    created: int  # seconds since 1970


@dataclass(slots=True)
class _Choice:
    """How far a stream has told one answer."""

    offsets: Offsets
    tools: ToolReader | None
    has_begun: bool = False
    num_chars: int = 0


class Reply:
    """Turns news of a request's answers into JSON. Answer i of prompt p is choice p * n + i."""

    def __init__(
        self,
        ask: Ask,
        heading: Heading,
        prompt_ids: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        turn: Turn | None,
    ) -> None:
        """`turn` hears of the answer before the client does, so that the next turn finds it."""
        self._ask = ask
        self._heading = heading
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._turn = turn
        self._answers = [Answers(len(ids), ask.sampling) for ids in prompt_ids]

    @property
    def _is_chat(self) -> bool:
        return self._ask.kind is Kind.CHAT

    # --- whole ----------------------------------------------------------------------------------

    async def whole(self, answering: Answering) -> bytes:
        """The reply as JSON when every answer is finished; raises what ended one early."""
        async for news in answering:
            for place, output in news:
                self._answers[place].add(output)
        self._end_turn()
        if self._ask.num_answers == 1 and self._ask.sampling.logprobs is None:
            return self._render_whole()
        return await asyncio.to_thread(self._render_whole)  # may be many megabytes

    def _render_whole(self) -> bytes:
        choices = [
            self._whole_choice(place, index)
            for place in range(len(self._answers))
            for index in range(self._ask.sampling.n)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        whole = self._object(kind, choices) | {"usage": self.usage()}
        if self._is_chat and self._ask.sampling.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(0)
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

    def _whole_choice(self, place: int, index: int) -> Json:
        answers = self._answers[place]
        answer = answers.answers[index]
        choice: Json = {"index": place * self._ask.sampling.n + index}
        has_logprobs = self._ask.sampling.logprobs is not None
        logprobs: Json | None = None
        reason = _reason(answer.finish_reason)
        if self._is_chat:
            choice["message"], has_calls = self._message(answer)
            reason = "tool_calls" if has_calls and reason == "stop" else reason
            if has_logprobs:
                logprobs = chat_logprobs(answer.logprobs, self._tokenizer)
        else:
            echo = self._echo(place)
            choice["text"] = echo + ("" if self._ask.is_scoring else answer.text)
            if has_logprobs:
                shown = () if self._ask.is_scoring else answer.logprobs
                places: list[Place] = [(entry.token_id, entry) for entry in shown]
                if self._ask.has_echo:
                    places = [*self._prompt_places(place), *places]
                num_chars = len(str(choice["text"]))
                logprobs = completion_logprobs(places, self._offsets(), num_chars, self._tokenizer)
            if self._ask.wants_prompt_logprobs:
                choice["prompt_logprobs"] = self._prompt_logprobs(place)
        choice["logprobs"] = logprobs
        choice["finish_reason"] = reason
        choice["stop_reason"] = answer.stop_reason  # as vLLM: the stop string or token id
        if self._ask.is_scoring:
            choice |= {"finish_reason": "length", "stop_reason": None}
        return choice

    def _message(self, answer: Answer) -> tuple[Json, bool]:
        """A chat's answer, and whether it calls tools."""
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if self._ask.tools is None:
            return message, False
        reader = ToolReader(self._ask.tools.format)
        parts = [*reader.push(answer.text), *reader.finish()]
        calls = [part.to_json() for part in parts if isinstance(part, ToolCall)]
        if calls:
            text = "".join(part for part in parts if isinstance(part, str)).strip()
            message |= {"content": text or None, "tool_calls": calls}
        return message, bool(calls)

    def usage(self) -> Json:
        """Tokens so far, of all prompts and answers."""
        prompt_tokens = sum(answers.prompt_tokens for answers in self._answers)
        completion_tokens = sum(
            len(answer.token_ids) for answers in self._answers for answer in answers.answers
        )
        if self._ask.is_scoring:
            completion_tokens = 0
        details = {"cached_tokens": sum(answers.cached_tokens for answers in self._answers)}
        if num_dropped := sum(answers.dropped_tokens for answers in self._answers):
            details["dropped_tokens"] = num_dropped
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": details,
        }

    # --- streamed -------------------------------------------------------------------------------

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Server-sent events: chunks, usage where asked for, and the end mark."""
        tools = self._ask.tools
        choices = [
            _Choice(self._offsets(), None if tools is None else ToolReader(tools.format))
            for _ in range(self._ask.num_answers)
        ]
        async for news in answering:
            lines = []
            for place, output in news:
                self._answers[place].add(output)
                if output.finish_reason is not None:
                    self._end_turn()
                number = place * self._ask.sampling.n + output.index
                for choice in self._chunk_choices(place, output, choices[number]):
                    lines.append(self._event([{"index": number} | choice]))
            if lines:
                yield b"".join(lines)
        if self._ask.includes_usage:
            yield self._event([], self.usage())
        yield b"data: [DONE]\n\n"

    def _chunk_choices(self, place: int, output: TextOutput, told: _Choice) -> Iterator[Json]:
        """What one piece of news adds to the stream, as choices without their index."""
        reason = _reason(output.finish_reason)
        ending: Json = {"finish_reason": reason, "stop_reason": output.stop_reason}
        text, entries = output.text, output.logprobs
        if self._ask.is_scoring:
            text, entries = "", ()
        is_first = not told.has_begun
        told.has_begun = True
        if self._is_chat:
            if is_first:
                delta: Json = {"role": "assistant", "content": ""}
                yield {"delta": delta, "logprobs": None, "finish_reason": None}
            if text or entries or reason is not None:
                yield from self._chat_chunks(text, output, told)
            if reason == "stop" and told.tools is not None and told.tools.num_calls:
                ending["finish_reason"] = "tool_calls"
            if reason is not None:
                yield {"delta": {}, "logprobs": None, **ending}
            return
        places: list[Place] = [(entry.token_id, entry) for entry in entries]
        if is_first and self._ask.has_echo:
            text = self._echo(place) + text
            if self._ask.sampling.logprobs is not None:
                places = [*self._prompt_places(place), *places]
        told.num_chars += len(text)
        if text or places or reason is not None:
            logprobs = None
            if places:
                logprobs = completion_logprobs(
                    places, told.offsets, told.num_chars, self._tokenizer
                )
            yield {"text": text, "logprobs": logprobs, **ending}

    def _chat_chunks(self, text: str, output: TextOutput, told: _Choice) -> Iterator[Json]:
        """Text and tool calls that are certain now; logprobs go with the first chunk."""
        logprobs = chat_logprobs(output.logprobs, self._tokenizer) if output.logprobs else None
        parts: list[str | ToolCall] = [text] if text else []
        first_call = 0
        if told.tools is not None:
            first_call = told.tools.num_calls
            parts = told.tools.push(text)
            if output.finish_reason is not None:
                parts += told.tools.finish()
        if not parts and logprobs is not None:
            parts = [""]
        for part in parts:
            delta: Json = {"content": part}
            if isinstance(part, ToolCall):
                delta = {"tool_calls": [{"index": first_call} | part.to_json()]}
                first_call += 1
            yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
            logprobs = None

    def _event(self, choices: list[Json], usage: Json | None = None) -> bytes:
        chunk = self._object(
            "chat.completion.chunk" if self._is_chat else "text_completion", choices
        )
        if self._ask.includes_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end(self._answers[0].answers[0].token_ids)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        heading = self._heading
        return {
            "id": heading.reply_id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
        }

    # --- parts ----------------------------------------------------------------------------------

    def _echo(self, place: int) -> str:
        """The prompt as text, where the caller wants it back."""
        if not self._ask.has_echo:
            return ""
        prompt = self._ask.prompts[place]
        if isinstance(prompt, str):
            return prompt
        skips_special = self._ask.sampling.skip_special_tokens
        return self._tokenizer.decode(self._prompt_ids[place], skips_special)

    def _offsets(self) -> Offsets:
        return Offsets(self._tokenizer, self._ask.sampling.skip_special_tokens)

    def _prompt_logprobs(self, place: int) -> list[Json | None]:
        return prompt_logprobs(self._answers[place].prompt_logprobs, self._tokenizer)

    def _prompt_places(self, place: int) -> list[Place]:
        ids = self._prompt_ids[place]
        return [*zip(ids, self._answers[place].prompt_logprobs, strict=True)]


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def event(value: Json) -> bytes:
    """One server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
