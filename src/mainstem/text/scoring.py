"""Scores how likely choices are after a context: makes prompts for the engine, and collects the
results.

    context  = c1 c2 c3        choices that differ only in their last token are one prompt,
    choices  = a b | a d | e   which leaves out that token:

        c1 c2 c3 a  -> logprob of a, then of b and of d as next tokens
        c1 c2 c3    -> logprob of e as the next token

The prompts share the context, which is computed once.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import MAX_NEXT_IDS, Output, SamplingParams, Scoring, TokenLogprobs
from mainstem.text.encoding import App, Prompt, begin_prompt
from mainstem.text.tokenizer import Tokenizer, check_unicode

MAX_CHOICES = MAX_NEXT_IDS
SCORE_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)  # its token is ignored


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One choice, and how likely it is after its context."""

    text: str | None  # None: given as ids
    token_ids: list[int]
    token_logprobs: list[float]  # of each token, given the context and the tokens before it
    is_greedy: bool  # whether each of its tokens is the likeliest at its place
    probability: float  # relative to all choices of the call

    @property
    def logprob(self) -> float:
        """Log-probability of the whole choice."""
        return sum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, which does not favour short choices."""
        return self.logprob / len(self.token_logprobs)


@dataclass(slots=True)
class ScoreOutput:
    """A context and its choices in the given order; `error` says why there are none."""

    context_token_ids: list[int]
    choices: list[ChoiceScore] = field(default_factory=list)
    num_cached_tokens: int = 0  # context tokens that were not computed for this call
    error: str | None = None  # only in calls with errors="return"

    @property
    def best(self) -> int:
        """The index of the choice with the largest `logprob`."""
        places = range(len(self.choices))
        return max(places, key=lambda place: self.choices[place].logprob)


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    """A continuation as tokens."""

    text: str | None
    token_ids: list[int]


def checked_choice(text: object) -> str:
    """Return the choice; raises InvalidRequest if it is not a text."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest("choices", f"must be texts that are not empty, got {text!r:.80}")
    check_unicode("choices", text)
    return text


class ContextScoring:
    """The prompts that score the choices of one context, and their results."""

    def __init__(self, context_ids: list[int], choices: Sequence[ChoiceTokens]) -> None:
        """Raises InvalidRequest."""
        if not 0 < len(choices) <= MAX_CHOICES:
            reason = f"must be 1 to {MAX_CHOICES:,} for a context, got {len(choices):,}"
            raise InvalidRequest("choices", reason)
        if not context_ids:
            raise InvalidRequest("prompt", "must hold at least one token before the choices")
        for choice in choices:
            if not choice.token_ids:
                raise InvalidRequest("choices", f"{choice.text!r:.80} has no tokens")
        self.context_ids = context_ids
        self.choices = choices
        heads: dict[tuple[int, ...], list[int]] = {}  # all tokens except the last -> choices
        for place, choice in enumerate(choices):
            heads.setdefault(tuple(choice.token_ids[:-1]), []).append(place)
        self._heads = list(heads.items())
        self._found: list[list[TokenLogprobs]] = [[] for _ in choices]
        self._num_cached: int | None = None

    def prompts(self) -> list[tuple[list[int], Scoring]]:
        """The prompts to submit; `take` gets an answer by the index of its prompt."""
        context, asked = self.context_ids, []
        for head, places in self._heads:
            last_ids = dict.fromkeys(self.choices[place].token_ids[-1] for place in places)
            asked.append(([*context, *head], Scoring(len(context), tuple(last_ids))))
        return asked

    def take(self, place: int, output: Output) -> None:
        """Record the logprobs in news of the answer to one of the prompts."""
        if output.prompt_logprobs is None:
            return
        head, members = self._heads[place]
        entries = [each for each in output.prompt_logprobs if each is not None]
        following = {each.token_id: each for each in entries[len(head) :]}
        for member in members:
            last_id = self.choices[member].token_ids[-1]
            self._found[member] = [*entries[: len(head)], following[last_id]]
        num_cached = output.num_cached_tokens  # later prompts find the context cached
        before = num_cached if self._num_cached is None else self._num_cached
        self._num_cached = min(before, num_cached)

    def result(self) -> ScoreOutput:
        """Return the scores. Called after all prompts are answered."""
        sums = [sum(each.logprob for each in found) for found in self._found]
        weights = [exp(each - max(sums)) for each in sums]
        scores = [
            ChoiceScore(
                choice.text,
                choice.token_ids,
                [each.logprob for each in found],
                all(each.rank == 1 for each in found),
                weight / sum(weights),
            )
            for choice, found, weight in zip(self.choices, self._found, weights, strict=True)
        ]
        return ScoreOutput(self.context_ids, scores, self._num_cached or 0)


def encode_scoring(
    tokenizer: Tokenizer,
    prompt: Prompt,
    texts: Sequence[str],
    app: App | None = None,
    salt: bytes = b"",
    max_tokens: int = sys.maxsize,
) -> "ContextScoring":
    """Return a context and its choices as tokens; `app`, `salt` and `max_tokens` are as in
    `begin_prompt`.

    Spaces at the end of a context's text are moved to the choices, as tokenizers expect. Context
    and choice are encoded together, and the choice's tokens are those after the context's ids. The
    choice is encoded alone if that encoding does not begin with the context's ids, or if the
    context is a conversation or was given as ids. Raises InvalidRequest.
    """
    for text in texts:
        checked_choice(text)
    stem = prompt.rstrip(" ") if isinstance(prompt, str) else prompt
    begun = begin_prompt(tokenizer, stem, app, None, salt, max_tokens)
    if begun.text is None or begun.is_chat:
        choices = [ChoiceTokens(text, tokenizer.encode_plain(text)) for text in texts]
        return ContextScoring(begun.pending.finish(), choices)
    assert isinstance(prompt, str)
    assert isinstance(stem, str)
    spaces = prompt[len(stem) :]
    context_ids, *wholes = tokenizer.encode_batch(
        [begun.text, *(begun.text + spaces + text for text in texts)]
    )
    choices = []
    for text, whole in zip(texts, wholes, strict=True):
        rest = whole[len(context_ids) :]
        if whole[: len(context_ids)] != context_ids or not rest:
            rest = tokenizer.encode_plain(spaces + text)
        choices.append(ChoiceTokens(text, rest))
    return ContextScoring(context_ids, choices)
