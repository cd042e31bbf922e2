"""Anthropic's message batches: the body that makes one, and the lines of its results.

    {"requests": [{"custom_id": ..., "params": {...}}, ...]}  -- rows -->  lines of a batch file
    {"custom_id": ..., "response": ..., "error": ...}         -- result_line -->  a line of results

The batch itself is answered like a batch of OpenAI's API: `params` is the body of a row for
/v1/messages.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mainstem.core.json import AnyJson, Json, JsonView
from mainstem.wire.errors import WireError
from mainstem.wire.fields import Anything, read_fields
from mainstem.wire.messages.parsing import MESSAGES_URL, in_messages_terms
from mainstem.wire.messages.rendering import error_body

BATCHES_URL = f"{MESSAGES_URL}/batches"
MAX_REQUESTS = 100_000
_NOT_FOUND = ("model_not_found", "app_not_found")


class BatchedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(?!\n)$")]
    params: Annotated[dict[str, Anything], Meta(description="the body of POST /v1/messages")]


class MessageBatchBody(Struct, frozen=True):
    """`POST /v1/messages/batches`."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]


def read_batch(body: JsonView) -> MessageBatchBody:
    """Read a body; raises WireError that names the field. `params` are not checked: a wrong one
    becomes an errored result, as in Anthropic's API."""
    read = read_fields(body, MessageBatchBody)
    seen: set[str] = set()
    for place, request in enumerate(read.requests):
        if request.custom_id in seen:
            reason = f"the custom_id {request.custom_id!r} was used before"
            message = f"requests[{place}].custom_id: {reason}; each must be unique"
            raise WireError("invalid_value", message, "requests")
        seen.add(request.custom_id)
    return read


def rows(body: MessageBatchBody) -> Iterator[Json]:
    """Yield the lines of a batch file for these requests."""
    for request in body.requests:
        yield {
            "custom_id": request.custom_id,
            "method": "POST",
            "url": MESSAGES_URL,
            "body": request.params,
        }


def result_line(row: AnyJson) -> Json:
    """The result of a row whose output line is `row`."""
    if (response := row["response"]) is not None:
        return _line(row["custom_id"], {"type": "succeeded", "message": response["body"]})
    told = row["error"]
    error = in_messages_terms(WireError(told["code"], told["message"], told["param"]))
    return errored_line(row["custom_id"], error)


def errored_line(custom_id: str, error: WireError) -> Json:
    """The result of a request that cannot be answered."""
    status = 404 if error.code in _NOT_FOUND else 500 if error.code == "engine_failed" else 400
    code = "context_length_exceeded" if error.code == "prompt_too_long" else error.code
    body = error_body(status, error.message, code, None)
    return _line(custom_id, {"type": "errored", "error": body})


def left_line(custom_id: str, kind: Literal["canceled", "expired"]) -> Json:
    """The result of a request that was not begun, or not completed, when its batch ended."""
    return _line(custom_id, {"type": kind})


def _line(custom_id: str, result: Json) -> Json:
    return {"custom_id": custom_id, "result": result}
