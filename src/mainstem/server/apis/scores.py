"""Scores of choices: `/v1/score` in our format and in SGLang's, vLLM's `/generative_scoring`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from mainstem.core.ids import RequestId, unique_ids
from mainstem.core.json import Json
from mainstem.core.request import Request
from mainstem.server.gateway import Gateway, Prepared
from mainstem.server.http.auth import Tenant
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.stream import PING
from mainstem.server.link.answering import Answering
from mainstem.text.encoding import App, begin_prompt
from mainstem.text.scoring import (
    SCORE_SAMPLING,
    ChoiceTokens,
    ContextScoring,
    ScoreOutput,
    encode_scoring,
)
from mainstem.wire.answers import Heading
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.scores import (
    AskedScores,
    choices_reply,
    first_label_reply,
    labels_reply,
    read_scores,
)

Write = Callable[[Heading, AskedScores, list[ScoreOutput]], Json]


class ScoreRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parser = CallParser(limits=gateway.limits.body)
        self._ids = unique_ids()

    def listed(self) -> list[Route]:
        return [
            Route("/score", self.score, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/generative_scoring", self.labels, methods=["POST"]),
        ]

    async def score(self, request: HttpRequest) -> Response:
        return await self._answer(request, _score_reply)

    async def labels(self, request: HttpRequest) -> Response:
        return await self._answer(request, _labels_reply)

    async def _answer(self, request: HttpRequest, write: Write) -> Response:
        gateway = self._gateway
        asked = read_scores(self._parser, await read_json(request, gateway.limits))

        async def prepare(heading: Heading, tenant: Tenant, app: App | None) -> Prepared:
            salt = tenant.page_salt(asked.call.cache_salt)
            scorings = await asyncio.to_thread(self._encode, asked, app, salt)
            prompts = [each for scoring in scorings for each in scoring.prompts()]
            requests = [
                Request(
                    RequestId(f"{heading.reply_id}-{place}"),
                    np.asarray(ids),
                    SCORE_SAMPLING,
                    salt=salt,
                    public_tokens=gateway.filler.public_tokens(app, ids),
                    priority=asked.call.priority,
                    scoring=scoring,
                )
                for place, (ids, scoring) in enumerate(prompts)
            ]
            return requests, ScoreWriter(scorings, partial(write, heading, asked))

        num_answers = max(len(asked.call.choices), len(asked.prompts))
        reply_id = f"score-{next(self._ids)}"
        return await gateway.exchange(request, asked.call, num_answers, reply_id, prepare)

    def _encode(self, asked: AskedScores, app: App | None, salt: bytes) -> list[ContextScoring]:
        tokenizer, most = self._gateway.engine.tokenizer, self._gateway.engine.max_model_len - 1
        if asked.call.choices:
            (prompt,) = asked.prompts
            choices = asked.call.choices
            return [encode_scoring(tokenizer, prompt, choices, app, salt, most)]
        labels = [ChoiceTokens(None, [token_id]) for token_id in asked.label_ids]
        begun = [begin_prompt(tokenizer, p, app, None, salt, most) for p in asked.prompts]
        return [ContextScoring(each.pending.finish(), labels) for each in begun]


class ScoreWriter:
    """Collects the results for all prompts and writes them; scores are never streamed."""

    ping = PING

    def __init__(
        self, scorings: Sequence[ContextScoring], write: Callable[[list[ScoreOutput]], Json]
    ) -> None:
        self._scorings = scorings
        self._write = write

    async def whole(self, answering: Answering) -> bytes:
        owners = [(each, place) for each in self._scorings for place in range(len(each.prompts()))]
        async for news in answering:
            for place, output in news:
                scoring, own_place = owners[place]
                scoring.take(own_place, output)
        return msgspec.json.encode(self._write([scoring.result() for scoring in self._scorings]))

    def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError

    def last_words(self, error: ApiError) -> bytes:
        raise NotImplementedError


def _score_reply(heading: Heading, asked: AskedScores, results: list[ScoreOutput]) -> Json:
    if asked.call.choices:
        return choices_reply(heading, results[0])
    return labels_reply(heading, results, bool(asked.has_softmax))


def _labels_reply(heading: Heading, asked: AskedScores, results: list[ScoreOutput]) -> Json:
    return first_label_reply(heading, results, asked.has_softmax is not False)
