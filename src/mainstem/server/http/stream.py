"""Sends events as they come, until the last one or until the client has left."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack
from time import monotonic
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

PING = b": ping\n\n"  # a comment, which clients ignore
PING_S = 10.0  # pause after which a silent stream sends a ping; many proxies cut it after 60 s


class ClientLeft(Exception):
    """The client closed its connection, or has read nothing for too long."""


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return the result of `work`. If the client leaves, cancels `work` and raises ClientLeft."""
    return await _until(_disconnect(receive), work)


async def _until(end: Coroutine[None, None, None], work: Coroutine[None, None, T]) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events. `held` is always closed at the end.

    If `events` raises, the stream ends with the event that `last_words` makes from the exception.
    After PING_S without an event, `ping` is sent. Events set no timer: each stream has one, which
    is set again, when it fires, to what is left of PING_S since the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        last_words: Callable[[Exception], bytes],
        held: ExitStack,
        write_s: float,
        ping: bytes,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._last_words = last_words
        self._held = held
        self._write_s = write_s
        self._ping = ping
        self._sent_s = monotonic()  # when the last event began to be sent
        self._is_sending = True  # also before the start and after the end, when no ping may be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                await _until(self._watch(receive, send), self._write(send))
            except ClientLeft:
                pass  # `held` releases the stream's resources
            finally:
                await self._events.aclose()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._send(send, start)
        try:
            async for event in self._events:
                await self._send(send, _more(event))
        except Exception as error:  # the status was sent already: report the error in the stream
            await self._send(send, _more(self._last_words(error)))
        self._is_sending = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._sent_s, self._is_sending = monotonic(), True
        await send(message)
        self._is_sending = False

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Send pings. Return when the client has closed the connection, or has read nothing for
        `write_s`."""
        leaving = asyncio.ensure_future(_disconnect(receive))
        pause_s = longest_s = min(self._write_s / 4, PING_S)
        try:
            while not (await asyncio.wait({leaving}, timeout=pause_s))[0]:
                silent_s, pause_s = monotonic() - self._sent_s, longest_s
                if self._is_sending:
                    if silent_s > self._write_s:
                        return
                elif silent_s < PING_S:
                    pause_s = min(longest_s, PING_S - silent_s)
                else:
                    async with asyncio.timeout(self._write_s):
                        await send(_more(self._ping))
                    self._sent_s = monotonic()
        except TimeoutError:
            return  # the client does not even read pings
        finally:
            leaving.cancel()


def _more(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
