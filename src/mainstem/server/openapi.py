"""The OpenAPI document: paths, bodies and statuses, for tools that read it."""

from mainstem import __version__

Json = dict[str, object]

_TEXTS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}

# fields that chats and completions have in common
_SAMPLING: Json = {
    "model": {"type": "string", "description": "the model's name, or name:app"},
    "app": {"type": "string", "description": "a system prompt the server keeps"},
    "stream": {"type": "boolean"},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "stop": _TEXTS,
    "stop_token_ids": _IDS,
    "include_stop_str_in_output": {"type": "boolean"},
    "skip_special_tokens": {"type": "boolean"},
    "ignore_eos": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "min_tokens": {"type": "integer", "minimum": 0},
    "cache_salt": {"type": "string"},
    "priority": {"type": "integer"},
    "session_id": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "context_overflow": {"type": "string", "enum": ["error", "recompute", "kv"]},
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
        },
    },
    "guided_json": {"type": "object"},
    "guided_regex": {"type": "string"},
    "guided_choice": {"type": "array", "items": {"type": "string"}},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "user": {"type": "string"},
}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant"]},
        "content": {"type": "string"},
    },
}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
        },
    },
}
_CHAT: Json = {
    "type": "object",
    "required": ["messages"],
    "properties": _SAMPLING
    | {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "add_generation_prompt": {"type": "boolean"},
        "chat_template_kwargs": {"type": "object"},
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"anyOf": [{"type": "string"}, _TOOL]},
    },
}
_COMPLETION: Json = {
    "type": "object",
    "required": ["prompt"],
    "properties": _SAMPLING
    | {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": _IDS},
            ]
        },
        "echo": {"type": "boolean"},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    },
}
_TOKENIZE: Json = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string"},
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    },
}
_DETOKENIZE: Json = {"type": "object", "required": ["tokens"], "properties": {"tokens": _IDS}}
_APP: Json = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": {"type": "string"}},
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


_SESSION_ID: Json = _NAME | {"name": "session_id"}
_FILE_ID: Json = _NAME | {"name": "file_id"}
_BATCH_ID: Json = _NAME | {"name": "batch_id"}
_BATCH: Json = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string", "enum": ["/v1/chat/completions", "/v1/completions"]},
        "completion_window": {"type": "string", "enum": ["24h"]},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def document() -> Json:
    """The whole document."""
    paths: Json = {
        "/v1/models": {"get": _operation("The model, and the model with each app")},
        "/v1/models/{name}": {"get": _operation("One of them", parameters=[_NAME])},
        "/v1/chat/completions": {"post": _operation("Answer a conversation", _CHAT)},
        "/v1/completions": {"post": _operation("Continue prompts", _COMPLETION)},
        "/v1/files": {"get": _operation("The files of this key")},
        "/v1/files/{file_id}": {
            "get": _operation("A file", parameters=[_FILE_ID]),
            "delete": _operation("Remove a file", parameters=[_FILE_ID]),
        },
        "/v1/files/{file_id}/content": {"get": _operation("Its bytes", parameters=[_FILE_ID])},
        "/v1/batches": {
            "get": _operation("The batches of this key"),
            "post": _operation("Answer the rows of a file", _BATCH),
        },
        "/v1/batches/{batch_id}": {"get": _operation("A batch", parameters=[_BATCH_ID])},
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("End a batch early", parameters=[_BATCH_ID])
        },
        "/v1/sessions": {"get": _operation("The sessions of this key")},
        "/v1/sessions/{session_id}": {
            "delete": _operation("Forget a session", parameters=[_SESSION_ID])
        },
        "/tokenize": {"post": _operation("Token ids of a text or conversation", _TOKENIZE)},
        "/detokenize": {"post": _operation("Text of token ids", _DETOKENIZE)},
        "/health": {"get": _operation("Whether the engine can answer")},
        "/ready": {"get": _operation("Whether requests should be sent here")},
        "/version": {"get": _operation("The version")},
        "/metrics": {"get": _operation("Prometheus text")},
        "/live": {"get": _operation("What the server is doing now")},
        "/admin/apps": {"get": _operation("Names of the apps")},
        "/admin/apps/{name}": {
            "put": _operation("Add an app, or change its prompt", _APP, [_NAME]),
            "delete": _operation("Remove an app", parameters=[_NAME]),
        },
        "/admin/reset_prefix_cache": {"post": _operation("Forget all cached pages")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mainstem", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(
    summary: str, body: Json | None = None, parameters: list[Json] | None = None
) -> Json:
    content = {"application/json": {"schema": _ERROR}}
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "the caller's fault", "content": content},
            "503": {"description": "not now", "content": content},
        },
    }
    if parameters is not None:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation
