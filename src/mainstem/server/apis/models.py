"""The model and its tokenizer: OpenAI's `/v1/models`, and vLLM's `/tokenize`, `/detokenize` and
`/tokenizer_info`."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.json import Json
from mainstem.core.request import Overflow
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Tenant
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, is_anthropics
from mainstem.server.http.pages import messages_page
from mainstem.text.encoding import Chat
from mainstem.text.tokenizer import SPECIAL_ROLES
from mainstem.wire.bodies import DetokenizeBody, tokenize_options
from mainstem.wire.calls import CallKind
from mainstem.wire.chat.logprobs import token_text
from mainstem.wire.fields import read_fields
from mainstem.wire.messages.rendering import moment

INLINE_IDS = 1 << 10  # writing out more ids would block the event loop for over 1 ms

Written = TypeVar("Written")


class ModelRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        names = self._model_names()
        if is_anthropics(request.scope):
            return messages_page(request, [(name, self._model_info(name)) for name in names])
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._model_names():
            message = f"the model {name!r} does not exist"
            raise ApiError(404, message, "model", "model_not_found")
        is_other = is_anthropics(request.scope)
        return JSONResponse(self._model_info(name) if is_other else self._model(name))

    def _model_names(self) -> list[str]:
        """Return the model's names, and then its first name combined with each app."""
        names = self._gateway.model.names
        return [*names, *(f"{names[0]}:{app}" for app in self._gateway.apps.names)]

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._gateway.model.created,
            "owned_by": "mainstem",
            "max_model_len": self._gateway.engine.max_model_len,
        }

    def _model_info(self, name: str) -> dict[str, object]:
        """A model in the format of Anthropic's API."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": moment(self._gateway.model.created),
            "max_input_tokens": self._gateway.engine.max_model_len,
            "max_tokens": self._gateway.engine.max_model_len,
            "lifecycle": "active",
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to use the tokenizer remotely, under Hugging Face's names."""
        tokenizer = self._gateway.engine.tokenizer
        special = {f"{role}_token": None for role in SPECIAL_ROLES} | tokenizer.special_tokens
        found = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._gateway.engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template,
        }
        return JSONResponse(special | found)

    async def tokenize(self, request: Request) -> Response:
        found = await self._tokenized(await self._read(request), request.state.tenant)
        return await asyncio.to_thread(JSONResponse, found)  # there may be very many ids

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse(await self._detokenized(await self._read(request)))

    async def _read(self, request: Request) -> Json:
        return await read_json(request, self._gateway.limits)

    async def _tokenized(self, body: Json, tenant: Tenant) -> Json:
        """Return the ids of a text (`prompt`) or of a conversation (`messages`)."""
        gateway = self._gateway
        kind = CallKind.CHAT if body.get("messages") is not None else CallKind.COMPLETION
        options, fields = tokenize_options(body)
        call, prompts = gateway.parser.parse(fields, kind)
        if len(prompts) != 1:
            message = f"prompt: must be one text or one list of ids, got {len(prompts)}"
            raise ApiError(400, message, "prompt", "invalid_value")
        _, app = gateway.apps.resolve(call, gateway.model.names)
        tokenizer = gateway.engine.tokenizer
        prompt, wants_special = prompts[0], options.add_special_tokens
        if wants_special and isinstance(prompt, Chat):
            message = "add_special_tokens: must not be true for a chat: its template writes them"
            raise ApiError(400, message, "add_special_tokens", "invalid_value")
        call = replace(call, overflow=Overflow.RECOMPUTE)  # the prompt may exceed the context
        salt = tenant.page_salt(call.cache_salt)
        all_ids = await gateway.encode(call, prompts, app, None, salt)
        if wants_special is False and isinstance(prompt, str):
            text = app.prompt + prompt if app else prompt
            all_ids = [await asyncio.to_thread(tokenizer.encode_plain, text)]
        gateway.check_lengths(call, all_ids)
        [ids] = gateway.cut(call, all_ids, app)
        found = {"tokens": ids, "count": len(ids), "max_model_len": gateway.engine.max_model_len}
        if options.return_token_strs:
            found["token_strs"] = await _on_thread_if_many(
                ids, lambda: [token_text(token_id, tokenizer) for token_id in ids]
            )
        return found

    async def _detokenized(self, body: Json) -> Json:
        """Return the text of ids (`tokens`), including special tokens."""
        tokens = read_fields(body, DetokenizeBody).tokens
        if len(tokens) > self._gateway.most_read:
            message = f"tokens: {len(tokens)} ids; at most {self._gateway.most_read} are allowed"
            raise ApiError(400, message, "tokens", "invalid_value")
        return {"prompt": await _on_thread_if_many(tokens, lambda: self._text(tokens))}

    def _text(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._gateway.engine.tokenizer
        if not all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids):
            message = f"tokens: must be token ids from 0 to {tokenizer.vocab_size - 1}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return tokenizer.decode_all(token_ids)


async def _on_thread_if_many(ids: Sequence[int], write: Callable[[], Written]) -> Written:
    """Render a reply with ids; on a thread if there are many, so that other requests do not
    wait."""
    return write() if len(ids) <= INLINE_IDS else await asyncio.to_thread(write)
