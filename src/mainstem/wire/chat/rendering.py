"""Renders whole answers to chats and completions in OpenAI's format, for server and batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.core.json import Json
from mainstem.core.request import FinishReason, TokenLogprobs
from mainstem.text.parsers.counting import count_reasoning
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import Reasoning, ToolCall
from mainstem.wire.answers import AnswerParts, Heading, PromptAnswers, told_weights
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.chat.logprobs import (
    Offsets,
    Place,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

REASONING_NAMES = ("reasoning_content", "reasoning")  # in messages: DeepSeek's name, vLLM's name


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is returned with its answer."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class CompletionReply:
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
        return self.call.kind is CallKind.CHAT

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
        choice |= told_weights(answer.weights)
        if call.is_scoring:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if call.returns_token_ids:
            choice["token_ids"] = [] if call.is_scoring else answer.token_ids
            if not self.is_chat:
                choice["prompt_token_ids"] = self.prompt_ids[place]
        return choice

    def _message(self, text: str) -> tuple[Json, bool]:
        """Return a chat's answer, and whether it calls tools."""
        parts = AnswerParts(self.call).read(text, is_last=True)
        said = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [part.to_json() for part in parts if isinstance(part, ToolCall)]
        message: Json = {"role": "assistant", "content": said, "refusal": None}
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


def token_places(entries: Sequence[TokenLogprobs]) -> list[Place]:
    return [(entry.token_id, entry) for entry in entries]


def reason_text(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
