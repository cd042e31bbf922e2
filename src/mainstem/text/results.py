"""What scripts get back from LLM and AsyncLLM, with the names vLLM users know."""

from dataclasses import dataclass, field

import numpy as np

from mainstem.core.request import Output, SamplingParams, TokenLogprobs
from mainstem.core.step import Float32s
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was at one place of a text."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None  # U+FFFD if it is not a whole character


# token id -> Logprob at one place: first for the token there, then for the likeliest tokens
PlaceLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PlaceLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weights: tuple[str, ...] = ()  # the versions of the weights that made it, in order
    raw: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)

    @property
    def raw_logprobs(self) -> Float32s:
        """[tokens] the log-probability of each token in the model's own distribution, before
        temperature and filters; empty if logprobs were not requested."""
        return np.array(self.raw, np.float32)

    @property
    def drawn_logprobs(self) -> Float32s:
        """[tokens] the log-probability of each token in the distribution that it was drawn from:
        after penalties, masks, temperature and filters. All 0 if the answer is greedy."""
        return np.array(self.drawn, np.float32)

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer; None if logprobs were not requested."""
        if self.logprobs is None:
            return None
        places = zip(self.token_ids, self.logprobs, strict=True)
        return sum(place[token_id].logprob for token_id, place in places)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers; `error` says why answers are missing or cut short."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PlaceLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_dropped_tokens: int = 0  # prompt tokens that did not fit into the context window
    error: str | None = None  # set only in calls with errors="return"

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The new part of one answer in a stream. All pieces of an answer make a CompletionOutput."""

    index: int  # which of the n answers
    text: str  # may be empty, for example within a character or a possible stop string
    token_ids: list[int]
    logprobs: list[PlaceLogprobs] | None  # logprobs of these tokens, if they were requested
    finish_reason: str | None  # only in the last piece of an answer
    stop_reason: str | int | None
    num_cached_tokens: int
    num_dropped_tokens: int
    prompt_logprobs: list[PlaceLogprobs | None] | None = None  # sent once, with the first token
    weights: tuple[str, ...] = ()  # versions of the weights that made the answer so far, in order
    raw: tuple[float, ...] = ()  # CompletionOutput.raw_logprobs of these tokens
    drawn: tuple[float, ...] = ()  # likewise, drawn_logprobs


def empty_result(
    request_id: str, prompt: str | None, prompt_ids: list[int], sampling: SamplingParams
) -> RequestOutput:
    """Make a result whose answers are still empty."""
    wants_logprobs = sampling.logprobs is not None
    answers = [
        CompletionOutput(index, logprobs=[] if wants_logprobs else None)
        for index in range(sampling.n)
    ]
    return RequestOutput(request_id, prompt, prompt_ids, answers)


def piece_of(output: Output, tokenizer: Tokenizer) -> AnswerPiece:
    """Make a piece of a stream from the news of an answer."""
    reason, prompt = output.finish_reason, None
    if output.prompt_logprobs is not None:
        entries = output.prompt_logprobs
        prompt = [None if entry is None else _place(entry, tokenizer) for entry in entries]
    return AnswerPiece(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        logprobs=[_place(entry, tokenizer) for entry in output.logprobs] or None,
        finish_reason=None if reason is None else reason.value,
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        num_dropped_tokens=output.num_dropped_tokens,
        prompt_logprobs=prompt,
        weights=output.weights,
        raw=tuple(entry.logprob for entry in output.logprobs),
        drawn=tuple(entry.drawn_logprob or 0.0 for entry in output.logprobs),
    )


def add_piece(result: RequestOutput, piece: AnswerPiece) -> None:
    """Add the news of an answer to its result."""
    answer = result.outputs[piece.index]
    answer.text += piece.text
    answer.token_ids += piece.token_ids
    if answer.logprobs is not None:
        answer.logprobs += piece.logprobs or []
        answer.raw += piece.raw
        answer.drawn += piece.drawn
    if piece.prompt_logprobs is not None:
        result.prompt_logprobs = piece.prompt_logprobs
    if piece.index == 0:
        result.num_cached_tokens = piece.num_cached_tokens
        result.num_dropped_tokens = piece.num_dropped_tokens
    if piece.finish_reason is not None:
        answer.finish_reason = piece.finish_reason
        answer.stop_reason = piece.stop_reason
        answer.weights = piece.weights


def _place(entry: TokenLogprobs, tokenizer: Tokenizer) -> PlaceLogprobs:
    return {
        token_id: Logprob(logprob, rank, tokenizer.token_bytes(token_id).decode(errors="replace"))
        for token_id, (logprob, rank) in entry.ranked().items()
    }
