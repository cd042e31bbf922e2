"""The OpenAPI document, made from the records that bodies are checked against."""

import re

import msgspec
from msgspec import Struct

from mainstem.core.json import Json
from mainstem.core.neutral import OnlyAt
from mainstem.core.request import SAMPLING_RANGES
from mainstem.core.version import __version__
from mainstem.wire import neutral
from mainstem.wire.bodies import (
    AppBody,
    BatchBody,
    DetokenizeBody,
    SleepBody,
    TokenizeOptions,
    WakeBody,
    WeightsBody,
)
from mainstem.wire.chat.bodies import ChatBody, CompletionBody
from mainstem.wire.chat.stored import CHATS_URL, ChatUpdate, StoredChatFields
from mainstem.wire.messages.batches import BATCHES_URL, MessageBatchBody
from mainstem.wire.messages.bodies import CountBody, MessagesBody
from mainstem.wire.responses.bodies import ResponsesBody
from mainstem.wire.scores import LabelScoreBody, ScoreBody

BODIES = (
    ChatBody,
    CompletionBody,
    StoredChatFields,
    ChatUpdate,
    ResponsesBody,
    MessagesBody,
    CountBody,
    MessageBatchBody,
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
RULES: dict[type[Struct], neutral.Rules] = {
    ChatBody: neutral.CHAT,
    CompletionBody: neutral.COMPLETION,
    ResponsesBody: neutral.RESPONSES,
    MessagesBody: neutral.MESSAGES,
    CountBody: neutral.MESSAGES,
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


def _schema(body: type[Struct]) -> Json:
    return {"$ref": REFS.format(name=body.__name__)}


_SCORES: Json = {"anyOf": [_schema(ScoreBody), _schema(LabelScoreBody)]}
# a text or a conversation, with the options of /tokenize
_TOKENIZED = {"TokenizeTextBody": CompletionBody, "TokenizeChatBody": ChatBody}
_TEXT: Json = {"anyOf": [{"$ref": REFS.format(name=name)} for name in _TOKENIZED]}
# path, method, summary, body
ROUTES: tuple[tuple[str, str, str, type[Struct] | Json | None], ...] = (
    ("/v1/models", "get", "The model, and the model with each app", None),
    ("/v1/models/{name}", "get", "One model", None),
    ("/v1/chat/completions", "post", "Answer a conversation", ChatBody),
    (CHATS_URL, "get", "The stored chats of this key", None),
    (f"{CHATS_URL}/{{chat_id}}", "get", "A stored chat", None),
    (f"{CHATS_URL}/{{chat_id}}", "post", "Replace its metadata", ChatUpdate),
    (f"{CHATS_URL}/{{chat_id}}", "delete", "Forget a stored chat", None),
    (f"{CHATS_URL}/{{chat_id}}/messages", "get", "The messages that it answered", None),
    ("/v1/completions", "post", "Continue prompts", CompletionBody),
    ("/v1/responses", "post", "Answer items", ResponsesBody),
    ("/v1/responses/input_tokens", "post", "The number of an input's tokens", ResponsesBody),
    ("/v1/responses/{response_id}", "get", "A kept response", None),
    ("/v1/responses/{response_id}/input_items", "get", "What it answered", None),
    ("/v1/responses/{response_id}/cancel", "post", "400: no response is in progress", None),
    ("/v1/responses/{response_id}", "delete", "Forget a response", None),
    ("/v1/messages", "post", "Answer a conversation, as Anthropic does", MessagesBody),
    ("/v1/messages/count_tokens", "post", "The number of a prompt's tokens", CountBody),
    (BATCHES_URL, "get", "The message batches of this key", None),
    (BATCHES_URL, "post", "Answer many requests", MessageBatchBody),
    (f"{BATCHES_URL}/{{batch_id}}", "get", "A message batch", None),
    (f"{BATCHES_URL}/{{batch_id}}", "delete", "Remove a batch that has ended", None),
    (f"{BATCHES_URL}/{{batch_id}}/cancel", "post", "End a message batch early", None),
    (f"{BATCHES_URL}/{{batch_id}}/results", "get", "Its results as JSON lines", None),
    ("/v1/score", "post", "How likely choices are after a context", _SCORES),
    ("/score", "post", "Same as /v1/score", _SCORES),
    ("/generative_scoring", "post", "The first label's probability", LabelScoreBody),
    ("/v1/files", "get", "The files of this key", None),
    ("/v1/files", "post", "Upload a file", _UPLOAD),
    ("/v1/files/{file_id}", "get", "A file", None),
    ("/v1/files/{file_id}", "delete", "Remove a file", None),
    ("/v1/files/{file_id}/content", "get", "A file's bytes", None),
    ("/v1/batches", "get", "The batches of this key", None),
    ("/v1/batches", "post", "Answer the rows of a file", BatchBody),
    ("/v1/batches/{batch_id}", "get", "A batch", None),
    ("/v1/batches/{batch_id}/cancel", "post", "End a batch early", None),
    ("/v1/sessions", "get", "The sessions of this key", None),
    ("/v1/sessions/{session_id}", "delete", "Forget a session", None),
    ("/tokenizer_info", "get", "Special tokens and chat template", None),
    ("/tokenize", "post", "Token ids of a text or conversation", _TEXT),
    ("/detokenize", "post", "Text of token ids", DetokenizeBody),
    ("/health", "get", "503 if the engine failed repeatedly", None),
    ("/ready", "get", "Whether requests should be sent here", None),
    ("/version", "get", "The version", None),
    ("/metrics", "get", "Metrics as Prometheus text", None),
    ("/live", "get", "What the server is doing now", None),
    ("/admin/apps", "get", "Names of the apps", None),
    ("/admin/apps/{name}", "put", "Add an app, or change its prompt", AppBody),
    ("/admin/apps/{name}", "delete", "Remove an app", None),
    ("/admin/reset_prefix_cache", "post", "Forget cached pages not in use", None),
    ("/admin/weights", "get", "The version of the weights in force", None),
    ("/admin/weights", "post", "Bring other weights into force", WeightsBody),
    ("/admin/sleep", "post", "Give memory back", SleepBody),
    ("/admin/wake_up", "post", "Undo sleep", WakeBody),
)


def document(*, has_any_role: bool = False) -> Json:
    """The whole document. `has_any_role`: the server allows any role in messages."""
    paths: dict[str, Json] = {}
    for path, method, summary, body in ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, summary, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mainstem", "version": __version__},
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _schemas(has_any_role=has_any_role),
        },
        "security": [{}, {"key": []}, {"api_key": []}],
        "paths": paths,
    }


def _schemas(*, has_any_role: bool) -> Json:
    """The schemas of all bodies, by name. They say what the records cannot: which other fields are
    accepted, the ranges that the engine checks, and roles."""
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=REFS)
    if not has_any_role:
        role = schemas["Message"]["properties"]["role"]
        role["enum"] = role["examples"]
    # `type` may be left out where there are only texts
    block = schemas["TextBlock"]
    schemas["OnlyTextBlock"] = block | {"required": ["text"]}
    for name, field in (("MessagesBody", "system"), ("CountBody", "system"),
                        ("ToolResultBlock", "content")):  # fmt: skip
        for option in schemas[name]["properties"][field]["anyOf"]:
            if "items" in option:
                option["items"] = {"$ref": REFS.format(name="OnlyTextBlock")}
    for body, rules in RULES.items():
        properties = schemas[body.__name__]["properties"]
        for name, rule in rules.items():
            properties.setdefault(name, _neutral(rule))
        for name, described in properties.items():
            if name not in RANGES:
                continue
            for option in described.get("anyOf", [described]):
                if option.get("type") in ("integer", "number"):
                    option["minimum"], option["maximum"] = RANGES[name]
    stored = schemas[StoredChatFields.__name__]["properties"]
    schemas[ChatBody.__name__]["properties"] |= stored
    for body in BODIES:
        schemas[body.__name__]["additionalProperties"] = False
    for name, kind in _TOKENIZED.items():
        parts = schemas[kind.__name__], schemas[TokenizeOptions.__name__]
        properties = parts[0]["properties"] | parts[1]["properties"]
        schemas[name] = parts[0] | {"title": name, "properties": properties}
    return schemas


def _neutral(rule: OnlyAt) -> Json:
    """A field that is accepted only with values that change nothing."""
    if neutral.is_harmless(rule):
        return {"description": "accepted, without effect"}
    if type(rule) is not OnlyAt:  # it does not list its values
        return {"description": "accepted if it changes nothing"}
    values = [value for value in rule.values if not isinstance(value, float)]
    return {"enum": [*values, None]}  # 1.0 is equal to 1


def _operation(path: str, summary: str, body: type[Struct] | Json | None) -> Json:
    error = _MESSAGES_ERROR if path.startswith("/v1/messages") else _ERROR
    content = {"application/json": {"schema": error}}
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "the request was refused", "content": content},
            "503": {"description": "the server cannot answer now", "content": content},
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if body is not None:
        media_type = "multipart/form-data" if body is _UPLOAD else "application/json"
        schema = body if isinstance(body, dict) else _schema(body)
        operation["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
    return operation
