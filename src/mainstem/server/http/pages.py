"""Pages of a list, as in OpenAI's API."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mainstem.core.json import Json
from mainstem.server.http.faults import ApiError

MAX_LISTED = 100


def page_of(request: Request, items: Sequence[tuple[str, Json]], order: str = "desc") -> Response:
    """Return at most `limit` items with their ids, starting after the id `after`. They are given
    with the latest first; the request's `order`, or else this one, says how they are listed."""
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
            "data": [item for _, item in shown],
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
            "has_more": start + len(shown) < len(ordered),
        }
    )
