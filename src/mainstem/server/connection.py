"""HTTP connections whose headers are bounded in bytes and in time."""

import asyncio
from asyncio import TimerHandle
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mainstem.server.limits import ServerLimits


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for headers: uvicorn itself waits for ever and accepts any
    size. Headers must have at most `header_bytes` and be complete within `header_s`, counted from
    the connection or from the first byte of a later request. Otherwise the reply is 408 or 431 and
    the connection ends.
    """

    limits: ClassVar[ServerLimits] = ServerLimits()

    _deadline: TimerHandle | None = None
    _head_bytes = 0
    _is_in_head = True
    _is_head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            self._await_head()
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.limits.header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._cancel_deadline()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self.limits.header_bytes:
            self._is_head_too_large = True
            raise ValueError("the headers are too large")  # the parser ends with an error
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        if self._is_head_too_large:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.header_s, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _refuse(self, status: HTTPStatus) -> None:
        if self.transport.is_closing():
            return
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        self.transport.write(f"{line}connection: close\r\ncontent-length: 0\r\n\r\n".encode())
        self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded_by(limits: ServerLimits) -> type[GuardedProtocol]:
    """A class of the protocol with these limits; uvicorn makes the objects."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
