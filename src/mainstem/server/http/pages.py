"""Pages of a list, as in OpenAI's and in Anthropic's API."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mainstem.core.json import Json
from mainstem.server.http.faults import ApiError

T = TypeVar("T")

MAX_LISTED = 100
MAX_MESSAGES_LISTED = 1000  # in Anthropic's API


def page_of(
    request: Request,
    items: Sequence[tuple[str, T]],
    order: str = "desc",
    show: Callable[[T], object] = lambda item: item,
) -> Response:
    """Return at most `limit` items with their ids, starting after the id `after`. They are given
    with the latest first; the request's `order`, or else this one, says how they are listed. `show`
    makes the JSON of an item, only of those on the page."""
    text = request.query_params.get("limit", "20")
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if limit < 1:
        raise ApiError(400, "limit: must be a whole number above 0", "limit", "invalid_value")
    order = request.query_params.get("order", order)
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: must be asc or desc", "order", "invalid_value")
    ordered = items if order == "desc" else items[::-1]
    after = request.query_params.get("after")
    ids = [item_id for item_id, _ in ordered]
    if after is not None and after not in ids:
        raise ApiError(400, "after: there is no item with this id", "after", "invalid_value")
    start = 0 if after is None else ids.index(after) + 1
    shown = ordered[start : start + min(limit, MAX_LISTED)]
    return JSONResponse(
        {
            "object": "list",
            "data": [show(item) for _, item in shown],
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
            "has_more": start + len(shown) < len(ordered),
        }
    )


def messages_page(request: Request, items: Sequence[tuple[str, Json]]) -> Response:
    """Return at most `limit` items with their ids in the format of Anthropic's API: those after the
    id `after_id`, or the last before `before_id`."""
    params, ids = request.query_params, [item_id for item_id, _ in items]
    text = params.get("limit", "20")
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= MAX_MESSAGES_LISTED:
        message = f"limit: must be between 1 and {MAX_MESSAGES_LISTED}, got {text!r:.80}"
        raise ApiError(400, message, "limit", "invalid_value")
    after, before = params.get("after_id"), params.get("before_id")
    for field, item_id in (("after_id", after), ("before_id", before)):
        if item_id is not None and item_id not in ids:
            message = f"{field}: there is no {item_id!r:.80}"
            raise ApiError(400, message, field, "invalid_value")
    first = 0 if after is None else ids.index(after) + 1
    end = len(items) if before is None else ids.index(before)
    found = items[first:end]
    is_backwards = before is not None and after is None
    shown = found[-limit:] if is_backwards else found[:limit]
    return JSONResponse(
        {
            "data": [item for _, item in shown],
            "has_more": len(shown) < len(found),
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
        }
    )
