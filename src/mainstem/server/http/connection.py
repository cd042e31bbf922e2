"""HTTP connections that no client can hold without limit: headers and bodies are bounded."""

import asyncio
from asyncio import TimerHandle
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mainstem.server.http.limits import ServerLimits


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for headers: uvicorn itself waits for ever and accepts any
    size. Headers must have at most `header_bytes` and be complete within `header_s`, counted from
    the connection or from the first byte of a later request. Otherwise the reply is 408 or 431 and
    the connection ends.

    A reply may be sent before the body has arrived, such as 404 or 413. The rest of the body is
    then read and dropped, since many clients read no reply before they have sent everything. If it
    is not complete `body_s` after the reply, the connection ends. It also ends if a buffer is full
    and the client reads nothing for `write_s`: a closed connection would wait for ever to send it.

        in the head  -- header_s -->  408
        in the body  -- the handler's own limit; after the reply body_s -->  closed
        idle         -- idle_s (uvicorn's own timer) -->  closed
        not reading  -- write_s -->  closed
    """

    limits: ClassVar[ServerLimits] = ServerLimits()

    _deadline: TimerHandle | None = None
    _reading: TimerHandle | None = None  # set while the client must read more
    _head_bytes = 0
    _is_in_head = True
    _is_head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._cancel_reading()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            self._await_head()
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.limits.header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._cancel_deadline()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self.limits.header_bytes:
            self._is_head_too_large = True
            raise ValueError("the headers are too large")  # the parser ends with an error
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            raise ValueError("a request must name one host")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0
        self._cancel_deadline()
        if self.cycle.response_complete:  # uvicorn stopped its timer when the rest of the body came
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._is_in_head:
            self._unset_keepalive_if_required()
            self._deadline = self.loop.call_later(self.limits.body_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self._is_head_too_large:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _await_head(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._deadline is None and not is_answering:
            self._deadline = self.loop.call_later(self.limits.header_s, self._give_up)

    def _await_reading(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.limits.write_s, self._check_reading, num_bytes)

    def _check_reading(self, num_bytes: int) -> None:
        """End the connection if its buffer is no smaller than `num_bytes`."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._await_reading()
        else:
            self.transport.abort()

    def _give_up(self) -> None:
        self._deadline = None
        self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _refuse(self, status: HTTPStatus) -> None:
        if self.transport.is_closing():
            return
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        self.transport.write(f"{line}connection: close\r\ncontent-length: 0\r\n\r\n".encode())
        self.transport.close()

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded_by(limits: ServerLimits) -> type[GuardedProtocol]:
    """A class of the protocol with these limits; uvicorn makes the objects."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
