"""Connects the front, the server's process that speaks HTTP, to the engine's process; docs/serve.md
has a picture.

The commands of one iteration of the event loop are sent as one message, and a report comes after
each step. Tokens become text here: the engine knows only token ids. When the engine's process ends,
for any reason, requests in progress end with an EngineFault and another process is started.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import count
from time import monotonic
from typing import Protocol

import numpy as np

from mainstem.core.errors import InvalidRequest, WeightsLost
from mainstem.core.events import EventBus, StepFailed
from mainstem.core.request import FinishReason, Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import Int32s
from mainstem.core.weights import BOTH_TAGS, Tag, UpdateMode
from mainstem.server.link import protocol
from mainstem.server.link.answering import (
    SHUTTING_DOWN,
    AbortFault,
    Answering,
    EngineFault,
    FormFault,
    OpenRequest,
    RequestFault,
)
from mainstem.text.boundaries import MessageStarts
from mainstem.text.tokenizer import Tokenizer

FIRST_RETRY_S = 0.1  # pause before an engine that has ended is started again; doubles each time
MAX_RETRY_S = 30.0  # longest pause
MAX_STARTS = 6  # consecutive starts without a single token; then the state is FAILED
CLOSE_S = 600.0  # time limit for saving pages at the end

log = logging.getLogger("mainstem.server")


class EngineState(Enum):
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"  # the engine ended several times; it is still restarted from time to time


class Launched(Protocol):
    """An engine that is being made at the other end of a connection; see EngineProcess."""

    @property
    def connection(self) -> socket.socket: ...

    def wait_ready(self) -> protocol.Ready: ...

    def kill(self) -> None: ...

    def end(self, within_s: float | None) -> str:
        """Wait until it ends and return how; after `within_s` it is killed."""


class EngineClient:
    """Sends requests to the engine and distributes its reports. Lives on the event loop.

    `bus` repeats the events, except StepStarted, of the engine and of engines started later.
    """

    def __init__(self, tokenizer: Tokenizer, launch: Callable[[], Launched]) -> None:
        """Start the first engine and wait for it; raises its error if that fails."""
        self.tokenizer = tokenizer
        self.bus = EventBus()
        self.state = EngineState.RUNNING
        self.num_recoveries = 0  # how often the cache was lost
        self.num_restarts = 0
        self.on_tokens: Callable[[int], None] | None = None  # called with the number of new tokens
        self.on_recovered: Callable[[], None] | None = None  # called when the cache was lost
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._message_starts = MessageStarts(tokenizer)
        self._launch = launch
        self._launched = launch()
        ready = self._launched.wait_ready()
        self.max_model_len = ready.max_model_len
        self.snapshot: EngineSnapshot = ready.snapshot
        self.weights_version = ready.weights_version
        self._is_updated = False  # the engine has, or may have, other weights than the model's own
        self._asleep: frozenset[Tag] = frozenset()
        # the step that ran when the snapshot was taken
        self.step: protocol.StepInProgress | None = None
        # consecutive starts without a token, including the present one until its first token
        self._num_starts = 1
        self._open: dict[int, OpenRequest] = {}
        self._calls: dict[int, asyncio.Future[protocol.CommandResult]] = {}
        self._numbers = count()
        self._commands: list[protocol.Command] = []  # commands of this iteration of the event loop
        self._transport: asyncio.WriteTransport | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_running = asyncio.Event()
        self._is_running.set()
        self._closing = asyncio.Event()
        self.bus.subscribe(StepFailed, lambda _: self._note_recovery())

    async def start(self) -> None:
        """Connect to the engine, on the running event loop."""
        loop = asyncio.get_running_loop()
        connection = self._launched.connection
        connection.setblocking(False)
        transport, _ = await loop.create_unix_connection(
            lambda: _Reports(self._hear, self._lose), sock=connection
        )
        self._transport = transport

    # --- requests -------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """The number of prompts in progress."""
        return len(self._open)

    @property
    def num_unheard(self) -> int:
        """The number of prompts that the engine has not queued yet. It receives prompts between two
        steps, and queues a prompt when its form is compiled."""
        return sum(not opened.is_accepted for opened in self._open.values())

    async def submit(self, requests: Sequence[Request], owner: str = "") -> Answering:
        """Queue all prompts of one HTTP request, or none. The memory of their forms is charged to
        `owner`. Raises InvalidRequest if a prompt can never run, EngineFault if there is no engine.
        """
        self._check_running()
        numbers = [next(self._numbers) for _ in requests]
        answering = Answering(numbers, requests, self.tokenizer)
        for opened in answering.requests:
            self._open[opened.number] = opened
            request = self._message_starts.mark(opened.request)
            self._send(protocol.pack_request(opened.number, request, self._eos_ids, owner))
        try:
            await answering.accepted()
        except BaseException:
            self.abandon(answering)
            raise
        return answering

    def abandon(self, answering: Answering) -> None:
        """Abort answers that are not finished: the caller has stopped reading."""
        for opened in answering.requests:
            if self._open.pop(opened.number, None) is not None:
                opened.ended_s = monotonic()
                self._send(protocol.Abort(opened.number))

    def fail_open(self, reason: str) -> None:
        """End every request in progress with a fault, for example when the time for shutting down
        is over."""
        for opened in list(self._open.values()):
            self.abandon(opened.answering)
            opened.answering.fail(EngineFault(reason))

    # --- other commands -------------------------------------------------------------------------

    async def pin(
        self, name: str, prefixes: Sequence[Int32s], salt: bytes = b"", public_tokens: int = 0
    ) -> int:
        """Pin the pages of prefixes, in place of those pinned under this name before; returns how
        many are pinned. `salt` and `public_tokens` are those of the requests that computed the
        prefixes."""
        packed = tuple(np.asarray(prefix, np.int32).tobytes() for prefix in prefixes)
        reply = await self._call(lambda call: protocol.Pin(call, name, packed, salt, public_tokens))
        return reply.value

    async def clear_cache(self) -> int:
        """Forget every cached page, in every tier, that no sequence holds; returns how many were on
        the device."""
        return (await self._call(protocol.ClearCache)).value

    async def update_weights(self, path: str, mode: UpdateMode) -> str:
        """Bring other weights into force; returns the name of their version. Raises InvalidRequest,
        EngineFault."""
        was_updated, self._is_updated = self._is_updated, True
        try:
            version = await self._call_change(lambda call: protocol.UpdateWeights(call, path, mode))
        except WeightsLost:
            raise
        except InvalidRequest:  # the old weights are in force
            self._is_updated = was_updated
            raise
        self._asleep -= {Tag.WEIGHTS}
        return version

    async def resume_weights(self) -> str:
        """After a crash: answer with the model that the server was started with."""
        version = await self._call_change(protocol.ResumeWeights)
        self._is_updated = False
        self._asleep -= {Tag.WEIGHTS}
        return version

    async def sleep(self, level: int, mode: UpdateMode) -> str:
        """Give memory back until `wake`."""
        version = await self._call_change(lambda call: protocol.SleepEngine(call, level, mode))
        self._asleep = BOTH_TAGS
        return version

    async def wake(self, tags: frozenset[Tag]) -> str:
        """Undo `sleep`, or a part of it."""
        version = await self._call_change(lambda call: protocol.WakeEngine(call, tags))
        self._asleep -= tags
        return version

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has given memory back."""
        return bool(self._asleep)

    async def _call_change(self, make: Callable[[int], protocol.Command]) -> str:
        reply = await self._call(make)
        self.weights_version = reply.version
        return reply.version

    async def check(self) -> bool:
        """Whether anything runs; raises EngineFault if a page was lost."""
        return bool((await self._call(protocol.CheckEngine)).value)

    async def _call(self, make: Callable[[int], protocol.Command]) -> protocol.CommandResult:
        self._check_running()
        call = next(self._numbers)
        answer: asyncio.Future[protocol.CommandResult] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        self._send(make(call))
        try:
            return await answer
        finally:
            del self._calls[call]

    async def running(self) -> None:
        """Wait until there is an engine."""
        await self._is_running.wait()

    def _check_running(self) -> None:
        if self.state is not EngineState.RUNNING:
            raise EngineFault(f"the engine is {self.state.value}")

    def _send(self, command: protocol.Command) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._transport is not None and commands:
            self._transport.write(protocol.frame(commands))

    # --- reports --------------------------------------------------------------------------------

    def _hear(self, message: bytes) -> None:
        """Distribute a report to its requests."""
        report = protocol.decode_report(message)
        assert isinstance(report, protocol.EngineReport)
        now_s = monotonic()
        if report.snapshot is not None:
            self.snapshot, self.step = report.snapshot, report.step
        for number in report.accepted:
            if opened := self._open.get(number):
                opened.answering.accept(opened)
        for number, admitted_s in report.admitted:
            if (opened := self._open.get(number)) and opened.admitted_s is None:
                opened.admitted_s = admitted_s
        for refusal in report.refused:
            if opened := self._open.pop(refusal.number, None):
                opened.answering.fail(refusal.error())
        num_tokens = self._hear_tokens(report.tokens, now_s)
        for number, packed in report.news:
            output = protocol.unpack_output(packed)
            num_tokens += len(output.token_ids)
            if opened := self._open.get(number):
                self._read(opened, output, now_s)
        for reply in report.replies:
            self._hear_reply(reply)
        for event in report.events:
            self.bus.publish(protocol.unpack_event(event))
        if num_tokens:
            self._num_starts = 0
            if self.on_tokens is not None:
                self.on_tokens(num_tokens)

    def _hear_reply(self, reply: protocol.CommandResult) -> None:
        answer = self._calls.get(reply.call)
        if answer is None or answer.done():
            return
        if reply.refused is not None:
            answer.set_exception(reply.refused.error())
        elif reply.fault is not None:
            answer.set_exception(EngineFault(reply.fault))
        else:
            answer.set_result(reply)

    def _hear_tokens(self, tokens: list[int], now_s: float) -> int:
        """Read one more token for each of many answers. This is the common case."""
        parts = iter(tokens)
        for number, index, token_id in zip(parts, parts, parts, strict=True):
            if opened := self._open.get(number):
                self._read(opened, opened.last[index].next_token(token_id), now_s)
        return len(tokens) // 3

    def _read(self, opened: OpenRequest, output: Output, now_s: float) -> None:
        if output.finish_reason is FinishReason.ABORT and opened.request.scoring is not None:
            self.abandon(opened.answering)  # a part of the logprobs is no score
            opened.answering.fail(AbortFault())
            return
        has_ended = output.finish_reason is not None
        try:
            if not opened.hear(output, now_s):
                return  # a stop string has ended the answer
        except Exception:  # an error of one request; the others continue
            log.exception("an answer could not be read")
            self.abandon(opened.answering)
            opened.answering.fail(EngineFault("internal error"))
            return
        if output.fault is not None:
            del self._open[opened.number]
            opened.answering.fail(
                FormFault(f"the answer was ended: {output.fault}")
                if output.is_form_fault
                else RequestFault(f"steps failed on this request: {output.fault}")
            )
            return
        if output.finish_reason is not None and not has_ended:
            self._send(protocol.Stop(opened.number, output.index))
        if opened.is_finished:
            del self._open[opened.number]

    def _note_recovery(self) -> None:
        """Record that the engine continues with an empty cache."""
        self.num_recoveries += 1
        if self.on_recovered is not None:
            self.on_recovered()

    # --- its life -------------------------------------------------------------------------------

    def _lose(self) -> None:
        """Handle a closed connection."""
        self._transport = None
        fault = "the engine's process ended and is started again; send the request again"
        for opened in list(self._open.values()):
            opened.answering.fail(EngineFault(fault))
        self._open.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineFault(fault))
        self.step = None
        self.snapshot = replace(
            self.snapshot, num_running=0, num_waiting=0, num_held_pages=0, stems=(), prompts=()
        )
        if not self._closing.is_set():
            self.state = EngineState.RESTARTING
            self._is_running.clear()
            self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        """Start another engine; retry with growing pauses while that fails."""
        how = await asyncio.to_thread(self._launched.end, 10.0)
        log.error("the engine ended", extra={"facts": {"how": how}})
        while not await self._has_closed_within(self._retry_s()):
            self._num_starts += 1
            if self._num_starts > MAX_STARTS:
                self.state = EngineState.FAILED
            try:
                self._launched = self._launch()  # `close` may end it from now on
                ready = await asyncio.to_thread(self._launched.wait_ready)
                if await self._has_closed_within(0.0):
                    return
                await self.start()
            except Exception as error:
                log.error(
                    "the engine could not be started", extra={"facts": {"reason": f"{error}"}}
                )
                continue
            self.snapshot = ready.snapshot
            self.weights_version, self._asleep = ready.weights_version, frozenset()
            self.state = EngineState.RUNNING
            if self._is_updated:  # before any request
                self._send(protocol.LoseWeights(next(self._numbers)))
            self._is_running.set()
            self.num_restarts += 1
            log.info("the engine is back", extra={"facts": {"restarts": self.num_restarts}})
            self._note_recovery()
            return

    def _retry_s(self) -> float:
        return float(min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._num_starts))

    async def _has_closed_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    def stop_saving(self) -> None:
        """Kill an engine that saves its pages in `close`; the store stays valid."""
        facts = {"pages": self.snapshot.num_unsaved_pages}
        log.error("pages not saved", extra={"facts": facts})
        self._launched.kill()

    async def close(self) -> None:
        """Abort open requests, save what must be saved, and end the engine."""
        self._closing.set()
        self.fail_open(SHUTTING_DOWN)
        if self.state is not EngineState.FAILED:
            self.state = EngineState.STOPPING
        if self._transport is None:
            self._launched.kill()  # the engine has ended, or is still starting
        self._send(protocol.Close())
        self._flush()
        if self._restarting is not None:
            await self._restarting
        how = await asyncio.to_thread(self._launched.end, CLOSE_S)
        if self._transport is not None:
            self._transport.close()
        log.info("the engine ended", extra={"facts": {"how": how}})


class _Reports(asyncio.Protocol):
    """Makes messages from the engine's bytes."""

    def __init__(self, hear: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        self._hear = hear
        self._lose = lose
        self._unframer = protocol.Unframer()

    def data_received(self, data: bytes) -> None:
        for message in self._unframer.push(data):
            self._hear(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
