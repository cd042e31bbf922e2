"""Answers as they come, before an API renders them."""

from dataclasses import dataclass, field

from mainstem.core.request import FinishReason, Output, SamplingParams, TokenLogprobs
from mainstem.text.tools import Part, ToolCall
from mainstem.wire.calls import Call


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every object of a reply has."""

    reply_id: str
    model: str
    created: int  # seconds since 1970
    fingerprint: str | None = None  # fingerprint of version, model and settings


@dataclass(slots=True)
class AnswerSoFar:
    """One answer so far."""

    pieces: list[str] = field(default_factory=list)  # pieces of its text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    weights: tuple[str, ...] = ()  # the versions of the weights that made it

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
        answer.weights = output.weights
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.index == 0:
            self.cached_tokens = output.num_cached_tokens
            self.dropped_tokens = output.num_dropped_tokens


class AnswerParts:
    """Turns the text of one answer, as it arrives, into parts: text, reasoning and tool calls.

    Whole replies and streams of all APIs are renderings of these parts.
    """

    def __init__(self, call: Call) -> None:
        self._parser = call.parser()
        self._has_one_call = call.has_one_tool_call
        self.num_calls = 0  # calls returned so far

    @property
    def is_plain(self) -> bool:
        """Whether nothing is held back, and everything that follows is text."""
        return self._parser.is_plain

    def read(self, text: str, *, is_last: bool) -> list[Part]:
        """Add text; returns the parts that are now certain. If the call allows one tool call,
        later ones are left out."""
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.finish()
        told: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall):
                if self._has_one_call and self.num_calls:
                    continue
                self.num_calls += 1
            told.append(part)
        return told


def told_weights(versions: tuple[str, ...]) -> dict[str, object]:
    """The field of a choice that names the versions of the weights that made it."""
    return {"weights": list(versions)} if versions else {}
