"""The OpenAPI document, made from the bodies that the parser checks (bodies.py)."""

import msgspec
from msgspec import Struct

from mainstem.core.request import SAMPLING_RANGES
from mainstem.core.version import __version__
from mainstem.wire.bodies import (
    HARMLESS,
    AppBody,
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeOptions,
)
from mainstem.wire.messages_bodies import HARMLESS as HARMLESS_IN_MESSAGES
from mainstem.wire.messages_bodies import CountBody, MessagesBody
from mainstem.wire.responses_bodies import HARMLESS as RESPONSE_HARMLESS
from mainstem.wire.responses_bodies import ResponsesBody
from mainstem.wire.scores import LabelScoreBody, ScoreBody

Json = dict[str, object]

BODIES = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    TokenizeOptions,
    DetokenizeBody,
    AppBody,
    BatchBody,
    ScoreBody,
    LabelScoreBody,
)
RANGES = SAMPLING_RANGES | {
    "max_completion_tokens": SAMPLING_RANGES["max_tokens"],
    "max_output_tokens": SAMPLING_RANGES["max_tokens"],
    "top_logprobs": SAMPLING_RANGES["logprobs"],
}
HARMLESS_IN: dict[type[Struct], frozenset[str]] = {
    ChatBody: HARMLESS,
    CompletionBody: HARMLESS,
    ResponsesBody: RESPONSE_HARMLESS,
    MessagesBody: HARMLESS_IN_MESSAGES,
    CountBody: HARMLESS_IN_MESSAGES,
}
REFS = "#/components/schemas/{name}"

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
}


def document() -> Json:
    """The whole document."""
    chat, completion = _body(ChatBody), _body(CompletionBody)
    either: Json = {
        "anyOf": [_schema(CompletionBody), _schema(ChatBody)],
        "allOf": [_schema(TokenizeOptions)],
    }
    scores = _content("application/json", {"anyOf": [_schema(ScoreBody), _schema(LabelScoreBody)]})
    paths: Json = {
        "/v1/models": {"get": _operation("The model, and the model with each app")},
        "/v1/models/{name}": {"get": _operation("One model", "name")},
        "/v1/chat/completions": {"post": _operation("Answer a conversation", body=chat)},
        "/v1/completions": {"post": _operation("Continue prompts", body=completion)},
        "/v1/responses": {"post": _operation("Answer items", body=_body(ResponsesBody))},
        "/v1/responses/{response_id}": {
            "get": _operation("A kept response", "response_id"),
            "delete": _operation("Forget a response", "response_id"),
        },
        "/v1/messages": {
            "post": _operation(
                "Answer a conversation, as Anthropic does",
                body=_body(MessagesBody),
                error=_MESSAGES_ERROR,
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                "The number of a prompt's tokens", body=_body(CountBody), error=_MESSAGES_ERROR
            )
        },
        "/v1/score": {"post": _operation("How likely choices are after a context", body=scores)},
        "/score": {"post": _operation("Same as /v1/score", body=scores)},
        "/generative_scoring": {
            "post": _operation("The first label's probability", body=_body(LabelScoreBody))
        },
        "/v1/files": {
            "get": _operation("The files of this key"),
            "post": _operation("Upload a file", body=_content("multipart/form-data", _UPLOAD)),
        },
        "/v1/files/{file_id}": {
            "get": _operation("A file", "file_id"),
            "delete": _operation("Remove a file", "file_id"),
        },
        "/v1/files/{file_id}/content": {"get": _operation("A file's bytes", "file_id")},
        "/v1/batches": {
            "get": _operation("The batches of this key"),
            "post": _operation("Answer the rows of a file", body=_body(BatchBody)),
        },
        "/v1/batches/{batch_id}": {"get": _operation("A batch", "batch_id")},
        "/v1/batches/{batch_id}/cancel": {"post": _operation("End a batch early", "batch_id")},
        "/v1/sessions": {"get": _operation("The sessions of this key")},
        "/v1/sessions/{session_id}": {"delete": _operation("Forget a session", "session_id")},
        "/tokenizer_info": {"get": _operation("Special tokens and chat template")},
        "/tokenize": {
            "post": _operation(
                "Token ids of a text or conversation", body=_content("application/json", either)
            )
        },
        "/detokenize": {"post": _operation("Text of token ids", body=_body(DetokenizeBody))},
        "/health": {"get": _operation("503 if the engine failed repeatedly")},
        "/ready": {"get": _operation("Whether requests should be sent here")},
        "/version": {"get": _operation("The version")},
        "/metrics": {"get": _operation("Metrics as Prometheus text")},
        "/live": {"get": _operation("What the server is doing now")},
        "/admin/apps": {"get": _operation("Names of the apps")},
        "/admin/apps/{name}": {
            "put": _operation("Add an app, or change its prompt", "name", _body(AppBody)),
            "delete": _operation("Remove an app", "name"),
        },
        "/admin/reset_prefix_cache": {"post": _operation("Forget cached pages not in use")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mainstem", "version": __version__},
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _schemas(),
        },
        "security": [{}, {"key": []}, {"api_key": []}],
        "paths": paths,
    }


def _schemas() -> Json:
    """The schemas of all bodies, by name; sampling fields get the ranges that the engine checks."""
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=REFS)
    for body, harmless in HARMLESS_IN.items():
        properties = schemas[body.__name__]["properties"]
        properties |= {name: {"description": "accepted, without effect"} for name in harmless}
        for name, described in properties.items():
            if name not in RANGES:
                continue
            for option in described.get("anyOf", [described]):
                if option.get("type") in ("integer", "number"):
                    option["minimum"], option["maximum"] = RANGES[name]
    return schemas


def _schema(body: type[Struct]) -> Json:
    return {"$ref": REFS.format(name=body.__name__)}


def _body(body: type[Struct]) -> Json:
    return _content("application/json", _schema(body))


def _content(media_type: str, schema: Json) -> Json:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _operation(
    summary: str, parameter: str | None = None, body: Json | None = None, error: Json = _ERROR
) -> Json:
    content = {"application/json": {"schema": error}}
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "the request was refused", "content": content},
            "503": {"description": "the server cannot answer now", "content": content},
        },
    }
    if parameter is not None:
        schema = {"type": "string"}
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": schema}
        ]
    if body is not None:
        operation["requestBody"] = body
    return operation
