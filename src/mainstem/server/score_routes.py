"""The routes that score choices: `/v1/score` in our format and in SGLang's, and vLLM's
`/generative_scoring`."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import time

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import Request as EngineRequest
from mainstem.server.answering import SHUTTING_DOWN, Answering, EngineFault
from mainstem.server.auth import Tenant
from mainstem.server.body import read_json
from mainstem.server.faults import from_fault, from_invalid, unavailable
from mainstem.server.gateway import CLIENT_LEFT, Exchange, Gateway
from mainstem.server.ids import unique_ids
from mainstem.server.live import RequestState
from mainstem.server.stream import ClientLeft, while_connected
from mainstem.text.encoding import App, begin_prompt
from mainstem.text.scoring import SCORE_SAMPLING, ChoiceTokens, ContextScoring, encode_scoring
from mainstem.wire.answers import Heading
from mainstem.wire.calls import Call
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.scores import (
    AskedScores,
    choices_reply,
    first_label_reply,
    labels_reply,
    read_scores,
)

Write = Callable[[Heading, AskedScores, list[ContextScoring]], Json]


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

    async def score(self, request: Request) -> Response:
        return await self._answer(request, _score_reply)

    async def labels(self, request: Request) -> Response:
        return await self._answer(request, _labels_reply)

    async def _answer(self, request: Request, write: Write) -> Response:
        gateway, tenant = self._gateway, request.state.tenant
        gateway.gate.allow(tenant)
        asked = read_scores(self._parser, await read_json(request, gateway.limits))
        model, app = gateway.apps.resolve(asked.call, gateway.model.names)
        if gateway.is_draining:
            raise unavailable(SHUTTING_DOWN)
        heading = Heading(f"score-{next(self._ids)}", model, int(time()))
        with ExitStack() as held:
            number = max(len(asked.call.choices), len(asked.prompts))
            held.enter_context(gateway.gate.enter(tenant, number))
            salt = tenant.page_salt(asked.call.cache_salt)
            try:
                scorings = await asyncio.to_thread(self._encode, asked, app, salt)
                requests = self._requests(asked.call, heading, scorings, tenant, app)
            except InvalidRequest as error:
                raise from_invalid(error) from None
            answering = await gateway.submit(requests, tenant)
            exchange = held.enter_context(Exchange(gateway, answering, heading, request, app))
            try:
                await while_connected(request.receive, _hear(answering, scorings))
            except ClientLeft:
                exchange.state = RequestState.ABORTED
                return Response(status_code=CLIENT_LEFT)
            except EngineFault as fault:
                exchange.state = RequestState.FAILED
                raise from_fault(fault) from None
        reply = write(heading, asked, scorings)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    def _encode(self, asked: AskedScores, app: App | None, salt: bytes) -> list[ContextScoring]:
        tokenizer, most = self._gateway.engine.tokenizer, self._gateway.engine.max_model_len - 1
        if asked.call.choices:
            (prompt,) = asked.prompts
            choices = asked.call.choices
            return [encode_scoring(tokenizer, prompt, choices, app, salt, most)]
        labels = [ChoiceTokens(None, [token_id]) for token_id in asked.label_ids]
        begun = [begin_prompt(tokenizer, p, app, None, salt, most) for p in asked.prompts]
        return [ContextScoring(each.pending.finish(), labels) for each in begun]

    def _requests(
        self,
        call: Call,
        heading: Heading,
        scorings: Sequence[ContextScoring],
        tenant: Tenant,
        app: App | None,
    ) -> list[EngineRequest]:
        asked = [each for scoring in scorings for each in scoring.prompts()]
        return [
            EngineRequest(
                RequestId(f"{heading.reply_id}-{place}"),
                np.asarray(ids),
                SCORE_SAMPLING,
                salt=tenant.page_salt(call.cache_salt),
                public_tokens=self._gateway.filler.public_tokens(app, ids),
                priority=call.priority,
                scoring=scoring,
            )
            for place, (ids, scoring) in enumerate(asked)
        ]


async def _hear(answering: Answering, scorings: Sequence[ContextScoring]) -> None:
    """Read the engine's results for all prompts."""
    owners = [(scoring, place) for scoring in scorings for place in range(len(scoring.prompts()))]
    async for news in answering:
        for place, output in news:
            if output.prompt_logprobs is not None:
                scoring, own_place = owners[place]
                scoring.take(own_place, output.prompt_logprobs, output.num_cached_tokens)


def _score_reply(heading: Heading, asked: AskedScores, scorings: list[ContextScoring]) -> Json:
    results = [scoring.result() for scoring in scorings]
    if asked.call.choices:
        return choices_reply(heading, results[0])
    return labels_reply(heading, results, bool(asked.has_softmax))


def _labels_reply(heading: Heading, asked: AskedScores, scorings: list[ContextScoring]) -> Json:
    results = [scoring.result() for scoring in scorings]
    return first_label_reply(heading, results, asked.has_softmax is not False)
