"""Errors in the format of each path's API: Anthropic's Messages API has its own format."""

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mainstem.server.faults import ApiError
from mainstem.wire.messages.rendering import error_body

MESSAGES = "/v1/messages"


def is_messages_path(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error in the format of this path's API."""
    response = error.response()
    if not is_messages_path(scope["path"]):
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
