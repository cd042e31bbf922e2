"""A request's body as JSON: bounded in bytes, time and depth before it is parsed."""

import asyncio
import re

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from mainstem.core.json import Json
from mainstem.server.http.faults import ApiError
from mainstem.server.http.limits import ServerLimits

INLINE_BYTES = 1 << 16  # larger bodies are parsed on another thread
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_OPENING = np.zeros(256, np.int8)
_OPENING[[ord("["), ord("{")]] = 1
_OPENING[[ord("]"), ord("}")]] = -1


async def read_json(request: Request, limits: ServerLimits) -> Json:
    """The JSON object a client sent; raises ApiError 400, 408, 413 or 415."""
    # a web page must send the content type, see sites.py; other clients may leave it out
    unsaid = "unknown" if "origin" in request.headers else "application/json"
    kind = request.headers.get("content-type", unsaid).partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise ApiError(415, f"the content type must be application/json, not {kind}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"send the body without content-encoding, not as {encoding}")
    data = await _read(request, limits)
    if len(data) <= INLINE_BYTES:
        return parse_json(data, limits.max_depth)
    return await asyncio.to_thread(parse_json, data, limits.max_depth)


async def _read(request: Request, limits: ServerLimits) -> bytes:
    too_large = ApiError(413, f"the body is limited to {limits.body_bytes} bytes", code="too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.stream():
                data += piece
                if len(data) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body took more than {limits.body_s:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete") from None
    return bytes(data)


def parse_json(data: bytes, max_depth: int) -> Json:
    """A JSON object, strictly: UTF-8, no NaN, no lone surrogates, at most `max_depth` deep."""
    if _depth(data) > max_depth:
        message = f"the body is nested more than {max_depth} deep"
        raise ApiError(400, message, code="invalid_json")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _depth(data: bytes) -> int:
    """How deep brackets outside strings are nested; vectorised, since clients choose the size."""
    bare = np.frombuffer(_STRINGS.sub(b"", data), np.uint8)
    steps = _OPENING[bare]
    steps = steps[steps != 0]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))
