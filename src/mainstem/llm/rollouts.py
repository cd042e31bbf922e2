"""Many sampled answers of each prompt, in groups, for trainers (docs/rollouts.md)."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from mainstem.core.errors import AnswerFailed, InvalidRequest
from mainstem.core.request import MAX_N, Output, SamplingParams
from mainstem.core.step import Float32s, Int32s
from mainstem.text.results import AnswerPiece, piece_of
from mainstem.text.tokenizer import Tokenizer

SEED_STEP = 1_000_003  # so that a part of an answer has other noise than the parts before it


@dataclass(slots=True)
class Rollout:
    """One sampled answer, or the part of it that there is so far."""

    token_ids: Int32s
    raw_logprobs: Float32s  # [tokens] in the model's own distribution
    drawn_logprobs: Float32s  # [tokens] in the distribution that each token was drawn from
    text: str = ""
    finish_reason: str | None = None  # None: the budget ended before the answer
    weights: tuple[str, ...] = ()  # the versions of the weights that made it, in order


@dataclass(slots=True)
class RolloutGroup:
    """All answers of one prompt."""

    index: int  # place of the prompt in the call that it came from
    prompt_token_ids: list[int]
    answers: list[Rollout]

    @property
    def is_whole(self) -> bool:
        """Whether every answer has come to its end."""
        return all(answer.finish_reason is not None for answer in self.answers)


@dataclass(slots=True)
class RolloutPart:
    """What one request makes: all answers of a new group, or the rest of one answer."""

    group: RolloutGroup
    first: int  # number of its first answer
    prompt_ids: list[int]
    sampling: SamplingParams
    is_last: bool  # whether an answer that gets this long has ended
    num_open: int = 0  # answers that have not come to their end, or to that of the budget

    def __post_init__(self) -> None:
        self.num_open = self.sampling.n

    def add(self, piece: AnswerPiece) -> None:
        """Add the news of an answer to the group."""
        answer = self.group.answers[self.first + piece.index]
        answer.token_ids = np.append(answer.token_ids, np.array(piece.token_ids, np.int32))
        answer.raw_logprobs = np.append(answer.raw_logprobs, np.array(piece.raw, np.float32))
        answer.drawn_logprobs = np.append(answer.drawn_logprobs, np.array(piece.drawn, np.float32))
        answer.text += piece.text
        if piece.finish_reason is not None:
            is_cut = piece.finish_reason == "length" and not self.is_last
            answer.finish_reason = None if is_cut else piece.finish_reason
            new = (version for version in piece.weights if version not in answer.weights[-1:])
            answer.weights += tuple(new)


def new_group(index: int, prompt_ids: list[int], n: int) -> RolloutGroup:
    """A group without tokens."""
    if not 1 <= n <= MAX_N:
        raise InvalidRequest("n", f"must be between 1 and {MAX_N}, got {n!r}")
    return RolloutGroup(index, prompt_ids, [_nothing() for _ in range(n)])


def _nothing() -> Rollout:
    return Rollout(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))


def parts_of(
    group: RolloutGroup, sampling: SamplingParams, budget: int | None
) -> list[RolloutPart]:
    """The requests for what a group lacks, of at most `budget` tokens for each answer."""
    if sampling.max_tokens is None:
        raise InvalidRequest("max_tokens", "must be set for rollouts")
    if budget is not None and budget < 1:
        raise InvalidRequest("budget", f"must be at least 1, got {budget!r}")
    if all(len(answer.token_ids) == 0 for answer in group.answers):
        wanted = _limited(sampling, 0, budget)
        params = replace(sampling, n=len(group.answers), max_tokens=wanted)
        is_last = wanted == sampling.max_tokens
        return [RolloutPart(group, 0, group.prompt_token_ids, params, is_last)]
    parts: list[RolloutPart] = []
    for number, answer in enumerate(group.answers):
        if answer.finish_reason is not None:
            continue
        num_known = len(answer.token_ids)
        wanted = _limited(sampling, num_known, budget)
        seed = sampling.seed
        if seed is not None:
            seed += number + SEED_STEP * num_known
        params = replace(
            sampling,
            n=1,
            seed=seed,
            max_tokens=wanted,
            min_tokens=min(wanted, max(0, sampling.min_tokens - num_known)),
        )
        ids = [*group.prompt_token_ids, *answer.token_ids.tolist()]
        is_last = num_known + wanted == sampling.max_tokens
        parts.append(RolloutPart(group, number, ids, params, is_last))
    return parts


def _limited(sampling: SamplingParams, num_known: int, budget: int | None) -> int:
    assert sampling.max_tokens is not None
    left = sampling.max_tokens - num_known
    if left < 1:
        raise InvalidRequest(
            "max_tokens", f"is {sampling.max_tokens}: an answer is as long already"
        )
    return left if budget is None else min(left, budget)


def check_continuable(sampling: SamplingParams, budget: int | None) -> None:
    """Raise InvalidRequest for settings that depend on the tokens before a budget ended."""
    if budget is None:
        return
    asked = {
        "stop": bool(sampling.stop_strings),
        "structured_outputs": sampling.grammar is not None,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
    }
    for name, is_asked in asked.items():
        if is_asked:
            reason = "cannot be combined with a budget: it depends on the whole answer"
            raise InvalidRequest(name, reason)


@dataclass(eq=False, slots=True)
class OpenGroup:
    """A group that is being made, and the queues of its requests' outputs."""

    parts: list[tuple[RolloutPart, deque[Output]]]

    @property
    def group(self) -> RolloutGroup:
        return self.parts[0][0].group

    def read(self, tokenizer: Tokenizer) -> bool:
        """Take in what has come; returns whether nothing more will come. Raises AnswerFailed."""
        num_open = 0
        for part, news in self.parts:
            while news:
                output = news.popleft()
                if output.fault is not None:
                    raise AnswerFailed(f"a prompt could not be answered: {output.fault}")
                part.num_open -= output.finish_reason is not None
                part.add(piece_of(output, tokenizer))
            num_open += part.num_open
        return num_open == 0
