"""Receives a file sent as a form, with limits for bytes and time, and writes it to disk as it
comes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from mainstem.server.http.faults import ApiError
from mainstem.server.http.limits import ServerLimits

WRITE_BYTES = 1 << 20  # bytes passed to the parser's thread at once
MAX_FIELD_BYTES = 1024
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class Form:
    """A form with one `file` and short fields; parses as bytes come."""

    def __init__(self, boundary: bytes, target: BinaryIO) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._target = target
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._name = ""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._head,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the body; raises ApiError 400."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"the form is broken: {error}", code="invalid_form") from None

    def _begin(self) -> None:
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], b"")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = (b"", b"")

    def _head(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == "file":
            if self.filename is not None:
                raise ApiError(400, "file: the form has two files", "file", "invalid_value")
            given = options.get(b"filename", b"").decode(errors="replace")
            self.filename = Path(given.replace("\\", "/")).name[:255] or "upload"
        elif self._name not in FIELDS:
            message = f"the field {self._name[:100]!r} is not supported"
            raise ApiError(400, message, self._name[:100], "unknown_field")
        else:
            self.fields[self._name] = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._target.write(data[start:end])
            return
        self.fields[self._name] += data[start:end]
        if len(self.fields[self._name]) > MAX_FIELD_BYTES:
            raise ApiError(400, f"{self._name}: is too long", self._name, "invalid_value")

    def _end(self) -> None:
        self.is_complete = True


def expected_bytes(request: Request, limits: ServerLimits) -> int:
    """Return the maximum bytes that a request may send: what it announces, or else the general
    limit."""
    length = request.headers.get("content-length", "")
    is_known = length.isdecimal() and "transfer-encoding" not in request.headers
    return min(int(length[:20]), limits.upload_bytes) if is_known else limits.upload_bytes


async def receive_form(request: Request, path: Path, limits: ServerLimits) -> Form:
    """Write the file of a form to `path`; raises ApiError 400, 408, 413 or 415."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise ApiError(415, "the content type must be multipart/form-data with a boundary")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(
        413, f"a file may have at most {limits.upload_bytes} bytes", code="too_large"
    )
    if length.isdecimal() and int(length[:20]) > limits.upload_bytes:
        raise too_large
    num_bytes, waiting = 0, bytearray()
    with path.open("wb") as target:
        form = Form(boundary, target)
        async for piece in _pieces(request, limits):
            num_bytes += len(piece)
            if num_bytes > limits.upload_bytes:
                raise too_large
            waiting += piece
            if len(waiting) >= WRITE_BYTES:
                await asyncio.to_thread(form.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(form.write, bytes(waiting))
    if not form.is_complete or form.filename is None:
        raise ApiError(400, "file: the form has no complete file", "file", "invalid_form")
    return form


async def _pieces(request: Request, limits: ServerLimits) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Each piece must arrive within `body_s`, everything within
    `upload_s`."""
    stream = request.stream()
    deadline_s = monotonic() + limits.upload_s
    while True:
        try:
            async with asyncio.timeout(min(limits.body_s, deadline_s - monotonic())):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"nothing arrived for {limits.body_s:g} s, or the whole upload took too long"
            raise ApiError(408, message) from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before its file was complete") from None
        yield piece
