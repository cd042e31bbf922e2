"""Errors for clients: an HTTP status and an error object, which is Anthropic's for requests to
its API, and OpenAI's for all others."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from mainstem.core.errors import EngineAsleep, InvalidRequest, TooManyForms, WeightsLost
from mainstem.core.spelling import nearest
from mainstem.server.link.answering import EngineFault, FormFault, RequestFault
from mainstem.wire.errors import WireError
from mainstem.wire.messages.rendering import error_body

MAX_MESSAGE_CHARS = 500  # a message may quote what the client sent

log = logging.getLogger("mainstem.server")

INVALID = "invalid_request_error"
MESSAGES = "/v1/messages"
MODELS = "/v1/models"
NOT_FOUND = ("model_not_found", "app_not_found")
CHAT = "use POST /v1/chat/completions"
# other APIs that clients may expect, by the beginning of their paths
NOT_SERVED = {
    "/v1/conversations": "OpenAI's Conversations API is not served; use previous_response_id of "
    "POST /v1/responses",
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


class ApiError(Exception):
    """An error that ends a request: an HTTP `status` and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The error object; its message is cut to a limited length and made valid Unicode."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}..."
        return {
            "error": {
                "message": _clean(message),
                "type": self.kind,
                "param": None if self.param is None else _clean(self.param[:MAX_MESSAGE_CHARS]),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()


def is_messages_path(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def is_anthropics(scope: Scope) -> bool:
    """Whether a request is to be answered in the format of Anthropic's API: by its path or, for
    paths that OpenAI's API has too, by its header."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return is_messages_path(path)


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error in the format of this path's API."""
    response = error.response()
    if not is_anthropics(scope):
        return response
    body = messages_error(error, scope["state"]["request_id"])
    headers = {
        name: value
        for name, value in response.headers.items()
        if name in ("retry-after", "www-authenticate")
    }
    return JSONResponse(body, error.status, headers)


def messages_error(error: ApiError, request_id: str) -> dict[str, object]:
    """An error in the format of the Messages API."""
    told = error.body()["error"]
    assert isinstance(told, dict)
    return error_body(error.status, told["message"], error.code, request_id)


def from_invalid(error: InvalidRequest) -> ApiError:
    """The error for a request that the engine refuses."""
    if isinstance(error, WeightsLost | EngineAsleep):
        return unavailable(error.reason)
    if isinstance(error, TooManyForms):
        return busy(str(error), 5)
    return ApiError(400, str(error), error.field, "invalid_value")


def from_wire(error: WireError) -> ApiError:
    """The error for a body with a wrong field."""
    status = 404 if error.code in NOT_FOUND else 400
    code = "invalid_value" if error.code == "invalid_row" else error.code  # a body is no row
    return ApiError(status, error.message, error.param, code)


def busy(message: str, retry_after_s: int) -> ApiError:
    """The error for too many requests; the client may try again."""
    code, kind = "rate_limit_exceeded", "rate_limit_error"
    return ApiError(429, message, code=code, kind=kind, retry_after_s=retry_after_s)


def from_fault(fault: EngineFault) -> ApiError:
    """The error for a fault that ended an answer; the status says whether to try again."""
    if isinstance(fault, FormFault):
        return ApiError(400, str(fault), "response_format", "form_limit_reached")
    if isinstance(fault, RequestFault):
        return ApiError(500, str(fault), code="step_failed", kind="server_error")
    return unavailable(str(fault))


def unavailable(message: str) -> ApiError:
    """The error for a server that cannot answer now."""
    return ApiError(503, message, code="unavailable", kind="server_error", retry_after_s=5)


@contextmanager
def disk_is_needed() -> Iterator[None]:
    """In this context, a failed write becomes 507 instead of an internal error."""
    try:
        yield
    except OSError as error:
        log.error("write to the data folder failed", extra={"facts": {"reason": str(error)}})
        message = f"the server cannot store this: {error.strerror or 'its disk fails'}"
        raise ApiError(507, message, code="storage_failed", kind="server_error") from None


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
