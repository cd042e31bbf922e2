"""Collects, on the event loop, the news of the answers to requests in progress."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import Output, Request
from mainstem.text.text_engine import AnswerReader
from mainstem.text.tokenizer import Tokenizer

SHUTTING_DOWN = "the server is shutting down"


class EngineFault(Exception):
    """A request ended because the engine failed or is shutting down."""


class RequestFault(EngineFault):
    """Steps failed every time this request was tried; other requests continue."""


class FormFault(EngineFault):
    """An answer cannot continue in its form: the parser of the form reached a limit, or no token is
    allowed next."""


class AbortFault(EngineFault):
    """The engine aborted the request, to change its weights or to sleep."""

    def __init__(self) -> None:
        super().__init__("the request was aborted; send it again")


Fault = EngineFault | InvalidRequest


class OpenRequest:
    """One prompt in progress. Times are monotonic seconds."""

    def __init__(
        self,
        number: int,
        place: int,
        request: Request,
        answering: "Answering",
        reader: AnswerReader,
    ) -> None:
        self.number = number  # its number in messages to the engine
        self.place = place  # its index among the prompts of its Answering
        self.request = request
        self.answering = answering
        self.began_s = monotonic()
        self.admitted_s: float | None = None  # when its first answer left the queue
        self.token_s: list[float] = []  # when the tokens of its first answer came
        self.ended_s: float | None = None
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.last: dict[int, Output] = {}  # the last Output of each answer
        self.is_accepted = False
        self._reader = reader

    @property
    def is_finished(self) -> bool:
        return self._reader.is_finished

    def hear(self, output: Output, now_s: float) -> bool:
        """Read news of an answer; returns False if a stop string has ended the answer already. The
        caller handles faults, since they end all answers."""
        if not self._reader.read(output):
            return False
        self.last[output.index] = output
        if output.fault is not None:
            return True
        self.num_output_tokens += len(output.token_ids)
        if output.index == 0:
            self.num_cached_tokens = output.num_cached_tokens
            self.token_s += [now_s] * len(output.token_ids)
        if output.finish_reason is not None:
            self.ended_s = now_s
        self.answering.hear(self.place, output)
        return True


class Answering:
    """The prompts of one HTTP request in progress: iterate to get the news of all their answers.

    A caller that stops early must call `EngineClient.abandon`, which frees pages.
    """

    def __init__(
        self, numbers: Sequence[int], requests: Sequence[Request], tokenizer: Tokenizer
    ) -> None:
        self.requests = [
            OpenRequest(number, place, request, self, AnswerReader(tokenizer, request))
            for place, (number, request) in enumerate(zip(numbers, requests, strict=True))
        ]
        self.fault: Fault | None = None
        self._news: list[tuple[int, Output]] = []
        self._wake = asyncio.Event()

    def accept(self, opened: OpenRequest) -> None:
        """Record that the engine has queued a prompt."""
        opened.is_accepted = True
        self._wake.set()

    def hear(self, place: int, news: Output) -> None:
        """Add news, which the iteration returns next."""
        self._news.append((place, news))
        self._wake.set()

    def fail(self, fault: Fault) -> None:
        """Record that the request ended early; the iteration raises `fault`."""
        self.fault = fault
        self._wake.set()

    async def accepted(self) -> None:
        """Wait until the engine has queued every prompt; raises the fault if it refused one."""
        while not all(opened.is_accepted for opened in self.requests):
            if self.fault is not None:
                raise self.fault
            self._wake.clear()
            await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Yield batches of (place of the prompt, news), in order. Raises the error that ended the
        request early."""
        while True:
            if self._news:
                news, self._news = self._news, []
                yield news
            elif self.fault is not None:
                raise self.fault
            elif all(opened.is_finished for opened in self.requests):
                return
            else:
                self._wake.clear()
                await self._wake.wait()
