"""Answers as OpenAI writes them: whole, and as the chunks of a stream."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from mainstem.apps.answers import TextOutput
from mainstem.apps.jobs.replies import LEAST_LOGPROB, Answers, token_text
from mainstem.apps.jobs.rows import Kind
from mainstem.apps.server.schema import Ask
from mainstem.apps.server.worker import Answering
from mainstem.apps.text import Tokenizer
from mainstem.core.request import TokenLogprobs

Json = dict[str, object]
Place = tuple[int, TokenLogprobs | None]  # a token, and what is known of its probability


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of a reply repeats."""

    reply_id: str
    model: str
    created: int  # seconds since 1970


class _Offsets:
    """Where each token's text begins, for the logprobs of completions."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def next(self, token_id: int, tokenizer: Tokenizer, skips_special: bool) -> int:
        """The start of the next token."""
        start = self._end
        if not (skips_special and token_id in tokenizer.special_ids):
            self._end += len(self._decoder.decode(tokenizer.token_bytes(token_id)))
        return start


@dataclass(slots=True)
class _Choice:
    """How far a stream has told one answer."""

    has_begun: bool = False
    num_chars: int = 0
    offsets: _Offsets = field(default_factory=_Offsets)


class Reply:
    """Turns news of a request's answers into JSON. Answer i of prompt p is choice p * n + i."""

    def __init__(
        self, ask: Ask, heading: Heading, prompt_ids: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        self._ask = ask
        self._heading = heading
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
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
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

    def _whole_choice(self, place: int, index: int) -> Json:
        answers = self._answers[place]
        answer = answers.answers[index]
        choice: Json = {"index": place * self._ask.sampling.n + index}
        has_logprobs = self._ask.sampling.logprobs is not None
        logprobs: Json | None = None
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            if has_logprobs:
                logprobs = self._chat_logprobs(answer.logprobs)
        else:
            echo = self._echo(place)
            choice["text"] = echo + ("" if self._ask.is_scoring else answer.text)
            if has_logprobs:
                shown = () if self._ask.is_scoring else answer.logprobs
                places: list[Place] = [(entry.token_id, entry) for entry in shown]
                if self._ask.has_echo:
                    places = [*self._prompt_places(place), *places]
                logprobs = self._completion_logprobs(places, _Offsets(), len(str(choice["text"])))
        choice["logprobs"] = logprobs
        choice["finish_reason"] = answer.finish_reason.value if answer.finish_reason else None
        choice["stop_reason"] = answer.stop_reason  # as vLLM: the stop string or token id
        if self._ask.is_scoring:
            choice |= {"finish_reason": "length", "stop_reason": None}
        return choice

    def usage(self) -> Json:
        """Tokens so far, of all prompts and answers."""
        prompt_tokens = sum(answers.prompt_tokens for answers in self._answers)
        completion_tokens = sum(
            len(answer.token_ids) for answers in self._answers for answer in answers.answers
        )
        if self._ask.is_scoring:
            completion_tokens = 0
        cached_tokens = sum(answers.cached_tokens for answers in self._answers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    # --- streamed -------------------------------------------------------------------------------

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Server-sent events: chunks, usage where asked for, and the end mark."""
        choices = [_Choice() for _ in range(self._ask.num_answers)]
        async for news in answering:
            lines = []
            for place, output in news:
                self._answers[place].add(output)
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
        reason = output.finish_reason.value if output.finish_reason else None
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
            if text or entries:
                logprobs = self._chat_logprobs(entries) if entries else None
                yield {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
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
                logprobs = self._completion_logprobs(places, told.offsets, told.num_chars)
            yield {"text": text, "logprobs": logprobs, **ending}

    def _event(self, choices: list[Json], usage: Json | None = None) -> bytes:
        chunk = self._object(
            "chat.completion.chunk" if self._is_chat else "text_completion", choices
        )
        if self._ask.includes_usage:
            chunk["usage"] = usage
        return event(chunk)

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

    def _prompt_places(self, place: int) -> list[Place]:
        ids = self._prompt_ids[place]
        return [*zip(ids, self._answers[place].prompt_logprobs, strict=True)]

    def _chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        content = []
        for entry in entries:
            pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = [self._chat_token(token_id, logprob) for token_id, logprob in pairs]
            content.append(self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": token_text(token_id, self._tokenizer),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _completion_logprobs(
        self,
        places: Sequence[Place],
        offsets: _Offsets,
        num_chars: int,
    ) -> Json:
        """`num_chars`: length of the text so far, which a stop string may have cut."""
        tokenizer = self._tokenizer
        skips_special = self._ask.sampling.skip_special_tokens
        starts = [
            min(offsets.next(token_id, tokenizer, skips_special), num_chars)
            for token_id, _ in places
        ]
        return {
            "tokens": [token_text(token_id, tokenizer) for token_id, _ in places],
            "token_logprobs": [
                None if entry is None else max(entry.logprob, LEAST_LOGPROB) for _, entry in places
            ],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in places],
            "text_offset": starts,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True)]
        pairs.append((entry.token_id, entry.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(token_text(token_id, self._tokenizer), max(logprob, LEAST_LOGPROB))
        return top


def event(value: Json) -> bytes:
    """One server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
