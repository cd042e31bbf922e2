"""Errors for unknown paths and methods, with the path that was probably meant."""

import re
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainstem.core.spelling import nearest
from mainstem.server.http.faults import ApiError, error_response

CHAT = "use POST /v1/chat/completions"
# other APIs that clients may expect, by the beginning of their paths
NOT_SERVED = {
    "/v1/conversations": "OpenAI's Conversations API is not served; use previous_response_id of "
    "POST /v1/responses",
    "/v1/messages/batches": "Anthropic's batches are not served; use POST /v1/batches",
    "/v1/assistants": f"OpenAI's Assistants API is not served; {CHAT}",
    "/v1/threads": f"OpenAI's Assistants API is not served; {CHAT}",
    "/v1/embeddings": "embeddings are not served: the model generates text only",
    "/v1/rerank": "reranking is not served: the model generates text only",
    "/v1/moderations": "moderation is not served: the model generates text only",
    "/v1/audio": "audio is not served: the model generates text only",
    "/v1/images": "images are not served: the model generates text only",
    "/v1/fine_tuning": "fine-tuning is not served",
    "/api/generate": "Ollama's API is not served; use POST /v1/completions",
    "/api/chat": f"Ollama's API is not served; {CHAT}",
}


def explained(request: Request, error: HTTPException) -> Response:
    """Return the reply to a request that has no handler."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    headers = dict(error.headers or {})
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = _unknown_path(path, routes), "unknown_url"
    elif error.status_code == 405:
        methods = ", ".join(_methods(path, routes))
        message, code = f"{path} takes {methods}, not {request.method}", "method_not_allowed"
        headers["allow"] = methods
    response = error_response(ApiError(error.status_code, message, code=code), request.scope)
    response.headers.update(headers)
    return response


def _unknown_path(path: str, routes: Sequence[Route]) -> str:
    for known, reason in NOT_SERVED.items():
        if path == known or path.startswith(f"{known}/"):
            return reason
    meant = nearest(path, [re.sub(r":\w+}", "}", route.path) for route in routes])
    hint = "GET /openapi.json lists all paths" if meant is None else f"did you mean {meant}?"
    return f"there is no {path}; {hint}"


def _methods(path: str, routes: Sequence[Route]) -> list[str]:
    """Return the methods of all routes with this path; each method may be a separate route."""
    found = [route.methods or set() for route in routes if route.path_regex.match(path)]
    return sorted(set().union(*found))
