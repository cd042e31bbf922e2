"""Bodies and replies of `/v1/score` and similar routes: how likely choices, or labels, are after a
context.

{"prompt": ... or "messages": [...], "choices": [text, ...]}               ours
{"query": ..., "items": [...], "label_token_ids": [id, ...], ...}          SGLang's and vLLM's
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Annotated

from msgspec import Meta

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json, JsonView
from mainstem.text.encoding import Prompt
from mainstem.text.scoring import SCORE_SAMPLING, ScoreOutput, checked_choice
from mainstem.wire.answers import Heading
from mainstem.wire.calls import MAX_TOKEN_ID, BodyLimits, Call, CallKind
from mainstem.wire.chat.bodies import Message
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError, from_invalid
from mainstem.wire.fields import RoutedBody, read_fields
from mainstem.wire.neutral import SCORES, without_neutral

MAX_LABEL_PAIRS = 1024
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
# fields of vLLM's API for models that compare texts; the error says what to send instead
_OTHERS = ("text_1", "text_2", "queries", "documents", "data_1", "data_2")


class ScoreBody(RoutedBody, frozen=True, kw_only=True):
    """`POST /v1/score`: a context, and what may follow it."""

    choices: Annotated[list[str], Meta(min_length=1)]
    prompt: Annotated[str | list[int], Meta(description="a text or token ids")] | None = None
    messages: list[Message] | None = None


class LabelScoreBody(RoutedBody, frozen=True, kw_only=True):
    """`POST /v1/score` in SGLang's format: the probability of each label as the next token."""

    query: str | list[TokenId]
    items: str | Annotated[list[str | list[TokenId]], Meta(min_length=1)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    apply_softmax: Annotated[bool, Meta(description="over the labels")] | None = None
    item_first: bool | None = None


@dataclass(frozen=True, slots=True)
class AskedScores:
    """What a body asks for: the call's choices after one prompt, or labels after each of several
    prompts."""

    call: Call
    prompts: tuple[Prompt, ...]
    label_ids: tuple[int, ...] = ()
    has_softmax: bool | None = None  # None: the route's default


def read_scores(parser: CallParser, body: JsonView) -> AskedScores:
    """Read a body; raises WireError that names the field."""
    given = without_neutral(body, SCORES)
    for name in _OTHERS:
        if name in given:
            reason = "this model continues texts; send prompt and choices, or query and items"
            raise WireError("unknown_field", f"{name}: is not supported: {reason}", name)
    try:
        if "query" in given or "items" in given:
            return _labels(parser, read_fields(given, LabelScoreBody))
        return _choices(parser, given)
    except InvalidRequest as error:
        raise from_invalid(error) from None


def _choices(parser: CallParser, given: Json) -> AskedScores:
    body = read_fields(given, ScoreBody)
    _check_number("choices", len(body.choices), parser.limits)
    for choice in body.choices:
        checked_choice(choice)
    if (body.messages is None) is (body.prompt is None):
        raise WireError("invalid_row", "the body must have either a prompt or messages", "prompt")
    name = "prompt" if body.messages is None else "messages"
    call, prompts = _parse(parser, body, {name: given[name]})
    if len(prompts) != 1:
        reason = "prompt: must be one text or one list of token ids"
        raise WireError("invalid_value", reason, "prompt")
    return AskedScores(replace(call, choices=tuple(body.choices)), prompts)


def _labels(parser: CallParser, body: LabelScoreBody) -> AskedScores:
    items = [body.items] if isinstance(body.items, str) else body.items
    _check_number("items", len(items), parser.limits)
    _check_number("label_token_ids", len(body.label_token_ids), parser.limits)
    num_pairs = len(items) * len(body.label_token_ids)
    # each pair needs a row of logits in a step, which delays other requests
    if num_pairs > MAX_LABEL_PAIRS:
        reason = f"at most {MAX_LABEL_PAIRS:,} pairs of an item and a label, got {num_pairs:,}"
        raise WireError("invalid_value", f"label_token_ids: {reason}", "label_token_ids")
    joined: list[str | list[int]] = []
    for item in items:
        match (item, body.query) if body.item_first else (body.query, item):
            case (str(first), str(second)):
                joined.append(first + second)
            case (list(first_ids), list(second_ids)):
                joined.append([*first_ids, *second_ids])
            case _:
                reason = "must be texts if the query is a text, and token ids if it is ids"
                raise WireError("invalid_value", f"items: {reason}", "items")
    call, prompts = _parse(parser, body, {"prompt": joined})
    return AskedScores(call, prompts, tuple(body.label_token_ids), body.apply_softmax)


def _parse(
    parser: CallParser, body: ScoreBody | LabelScoreBody, prompt: Json
) -> tuple[Call, tuple[Prompt, ...]]:
    """Parse the prompts and the fields that all routes have, as in a completion or chat."""
    fields = {
        name: value
        for name in ("model", "app", "cache_salt", "priority")
        if (value := getattr(body, name)) is not None
    }
    kind = CallKind.CHAT if "messages" in prompt else CallKind.COMPLETION
    call, prompts = parser.parse({**fields, **prompt}, kind)
    return replace(call, sampling=SCORE_SAMPLING), prompts


def _check_number(name: str, number: int, limits: BodyLimits) -> None:
    if number > limits.max_answers:
        reason = f"{name}: at most {limits.max_answers} in one request, got {number}"
        raise WireError("invalid_value", reason, name)


# --- replies -------------------------------------------------------------------------------------


def choices_reply(heading: Heading, result: ScoreOutput) -> Json:
    """The reply in our format, for `/v1/score` and for a row of a batch."""
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprob": choice.logprob,
            "mean_logprob": choice.mean_logprob,
            "probability": choice.probability,
            "is_greedy": choice.is_greedy,
            "token_ids": choice.token_ids,
            "token_logprobs": choice.token_logprobs,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _reply(heading, "score", {"choices": choices, "best": result.best}, [result])


def labels_reply(heading: Heading, results: Sequence[ScoreOutput], has_softmax: bool) -> Json:
    """The reply in SGLang's format: for each item, the probability of each label."""
    scores = [_label_scores(result, has_softmax) for result in results]
    return _reply(heading, "scoring", {"scores": scores}, results)


def first_label_reply(heading: Heading, results: Sequence[ScoreOutput], has_softmax: bool) -> Json:
    """The reply in vLLM's format: for each item, the probability of the first label."""
    data = [
        {"index": index, "object": "score", "score": _label_scores(result, has_softmax)[0]}
        for index, result in enumerate(results)
    ]
    return _reply(heading, "list", {"data": data}, results)


def _label_scores(result: ScoreOutput, has_softmax: bool) -> list[float]:
    return [each.probability if has_softmax else exp(each.logprob) for each in result.choices]


def _reply(heading: Heading, kind: str, scores: Json, results: Sequence[ScoreOutput]) -> Json:
    """A reply; its usage is the tokens in contexts and choices, since none are generated."""
    texts = [each for result in results for each in result.choices if each.text is not None]
    num_tokens = sum(len(result.context_token_ids) for result in results)
    num_tokens += sum(len(each.token_ids) for each in texts)
    return {
        "id": heading.reply_id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        **scores,
        "usage": {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(result.num_cached_tokens for result in results)
            },
        },
    }
