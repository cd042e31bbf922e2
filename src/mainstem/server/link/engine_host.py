"""The engine's side of the connection to the front (see engine_process.py), all on one thread:

    until the front leaves:   take commands --> step --> one report

Commands are read between two steps. A report that the front does not read at once is buffered and
sent later: a slow front never blocks the engine.
"""

import logging
import select
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import get_args

import numpy as np

from mainstem.core.errors import EngineLost, InvalidRequest
from mainstem.core.events import Event, SequenceAdmitted, StepStarted
from mainstem.core.ids import RequestId
from mainstem.core.request import Output, Request, SamplingParams
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.weights import FolderUpdate
from mainstem.engine.engine import Engine
from mainstem.server.link import protocol
from mainstem.server.link.kv_events import KvEventPublisher
from mainstem.text.form_queue import FormQueue
from mainstem.text.grammar import CompiledForm, Grammars

SNAPSHOT_S = 0.2  # the front's view is at most this much older than the start of the running step
IDLE_S = 0.2  # if nothing runs: between two checks of pages that are being saved
SAVING_S = 0.01  # at the end: between two such checks
COMPILING_S = 0.002  # between two checks of forms being compiled
PROBE = RequestId("probe")
MAX_LAST_STEPS = 100
RECEIVE_BYTES = 1 << 20
MAX_UNSENT_BYTES = 1 << 28
IN_OR_OUT = select.POLLIN | select.POLLOUT

log = logging.getLogger("mainstem.server")


class FrontLeft(Exception):
    """The front has closed the connection, or its process has ended."""


class FrontLink:
    """A connection that is read between steps and written without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._poll = select.poll()  # not `select`, which cannot handle descriptors above 1023
        self._unframer = protocol.Unframer()
        self._unsent = bytearray()

    def receive(self, wait_s: float) -> Iterator[bytes]:
        """Yield the messages that have arrived; waits up to `wait_s` if there are none. Raises
        FrontLeft."""
        self._poll.register(self._connection, IN_OR_OUT if self._unsent else select.POLLIN)
        self._poll.poll(wait_s * 1e3)
        self._flush()
        while True:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                raise FrontLeft from None
            if not data:
                raise FrontLeft
            yield from self._unframer.push(data)

    def send(self, message: object) -> None:
        """Queue a message; it is sent as fast as the front reads. Raises FrontLeft if the front has
        left, or if more than MAX_UNSENT_BYTES wait for it."""
        self._unsent += protocol.frame(message)
        self._flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise FrontLeft

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                raise FrontLeft from None
            del self._unsent[:num_sent]


@dataclass(slots=True)
class _Submitted:
    """A request whose answers are not all finished."""

    number: int
    num_open: int
    begun: set[int]  # answers that were reported to the front


class EngineHost:
    """Runs an engine for the front at the other end of a connection."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        grammars: Grammars,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        self._engine = engine
        self._link = FrontLink(connection)
        self._forms = FormQueue(grammars)
        self._kv_events = kv_events
        self._compiling: dict[int, tuple[Request, Future[CompiledForm]]] = {}  # by number
        self._open: dict[str, _Submitted] = {}
        self._ids: dict[int, RequestId] = {}  # by number
        self._report = protocol.EngineReport()
        self._snapshot_s = 0.0
        self._was_idle = True
        self._seen: tuple[EngineSnapshot, protocol.StepInProgress | None] | None = (
            None  # what was sent last
        )
        self._must_probe = False  # a request failed, perhaps because the engine is broken
        self._is_closing = False

    def run(self) -> None:
        """Serve until the front sends Close or leaves, then close the engine. Raises errors that
        the engine does not recover from: then the process must end, and the front starts another.
        """
        try:
            self._probe()
            self._listen()
            self._link.send(self._ready())
            while not self._is_closing:
                self._take_commands()
                self._take_forms()
                self._note(self._engine.step())  # an idle step completes saves of pages
                if self._kv_events is not None:
                    self._kv_events.flush()
                if self._must_probe and not self._engine.has_work:
                    self._send()  # the last reports, if the front has not left
                    self._probe()
                self._look()
                self._send()
            self._come_to_rest()
            self._save()
        except FrontLeft:
            log.info("the front has left")
            self._come_to_rest()
        finally:
            self._forms.close()
            self._engine.close()

    def _ready(self) -> protocol.Ready:
        engine = self._engine
        return protocol.Ready(engine.max_model_len, engine.snapshot(), engine.weights_version)

    def _listen(self) -> None:
        bus = self._engine.bus
        for kind in get_args(Event):
            if kind is not StepStarted:
                bus.subscribe(kind, self._note_event)
        bus.subscribe(StepStarted, self._report_step)

    # --- commands -------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        idle_s = COMPILING_S if self._compiling else IDLE_S
        wait_s = 0.0 if self._engine.has_work else idle_s
        for message in self._link.receive(wait_s):
            for command in protocol.decode_commands(message):
                self._obey(command)

    def _obey(self, command: protocol.Command) -> None:
        match command:
            case protocol.Submit():
                self._submit(command)
            case protocol.Abort(number):
                if (waiting := self._compiling.pop(number, None)) is not None:
                    waiting[1].cancel()
                if (request_id := self._ids.get(number)) is not None:
                    self._engine.abort(request_id)
            case protocol.Stop(number, index):
                if (request_id := self._ids.get(number)) is not None:
                    self._engine.stop(request_id, index)
            case protocol.Close():
                self._is_closing = True
            case (
                protocol.UpdateWeights()
                | protocol.LoseWeights()
                | protocol.ResumeWeights()
                | protocol.SleepEngine()
                | protocol.WakeEngine()
            ):
                self._change(command)
            case _:
                self._answer(command)

    def _submit(self, command: protocol.Submit) -> None:
        number = command.number
        try:
            request = protocol.unpack_request(command)
        except InvalidRequest as error:
            self._refuse(number, error)
            return
        if request.sampling.grammar is None:
            self._queue(number, request)
        else:
            compiled = self._forms.submit(request.sampling.grammar, command.owner)
            self._compiling[number] = request, compiled

    def _take_forms(self) -> None:
        """Queue the requests whose forms are compiled."""
        done = [number for number, (_, compiled) in self._compiling.items() if compiled.done()]
        for number in done:
            request, compiled = self._compiling.pop(number)
            try:
                request = replace(request, grammar=compiled.result())
            except Exception as error:
                self._refuse(number, error)
            else:
                self._queue(number, request)

    def _queue(self, number: int, request: Request) -> None:
        try:
            self._engine.submit(request)
        except Exception as error:
            self._refuse(number, error)
            return
        self._report.accepted.append(number)
        self._open[request.request_id] = _Submitted(number, request.sampling.n, set())
        self._ids[number] = request.request_id

    def _refuse(self, number: int, error: Exception) -> None:
        """Report that a request cannot run; the others continue."""
        if not isinstance(error, InvalidRequest):
            log.error("a request could not be queued", exc_info=error)
            error = InvalidRequest("request", "the engine could not queue it")
        self._report.refused.append(protocol.Refused.of(number, error))

    def _change(self, command: protocol.Change) -> None:
        """Begin a change; its result is reported when it is made."""
        engine, call = self._engine, command.call

        def report(change: "Future[str]") -> None:
            error = change.exception()
            for opened in self._open.values():
                opened.begun.clear()  # the next news says by which weights they were made
            if error is None:
                result = protocol.CommandResult(call, 0, version=change.result())
            elif isinstance(error, InvalidRequest):
                result = protocol.CommandResult(call, 0, refused=protocol.Refused.of(0, error))
            else:
                log.error("the weights could not be changed", exc_info=error)
                result = protocol.CommandResult(call, 0, fault=f"{type(error).__name__}: {error}")
            self._report.replies.append(result)

        change: Future[str]
        try:
            match command:
                case protocol.UpdateWeights(_, path, mode):
                    change = engine.update_weights(FolderUpdate(Path(path)), mode)
                case protocol.SleepEngine(_, level, mode):
                    change = engine.sleep(level, mode)
                case protocol.WakeEngine(_, tags):
                    change = engine.wake(tags)
                case protocol.LoseWeights():
                    change = Future()
                    engine.lose_weights()
                    change.set_result(engine.weights_version)
                case protocol.ResumeWeights():
                    change = Future()
                    change.set_result(engine.resume_weights())
        except Exception as error:  # sent to the caller
            change = Future()
            change.set_exception(error)
        change.add_done_callback(report)

    def _answer(self, command: protocol.Pin | protocol.ClearCache | protocol.CheckEngine) -> None:
        try:
            value, fault = self._do(command), None
        except Exception as error:  # sent to the caller
            value, fault = 0, f"{type(error).__name__}: {error}"
        self._report.replies.append(protocol.CommandResult(command.call, value, fault))

    def _do(self, command: protocol.Pin | protocol.ClearCache | protocol.CheckEngine) -> int:
        engine = self._engine
        match command:
            case protocol.Pin(_, name, prefixes, salt, public_tokens):
                arrays = [np.frombuffer(prefix, np.int32) for prefix in prefixes]
                return engine.pin(name, arrays, salt, public_tokens)
            case protocol.ClearCache():
                return engine.clear_cache()
            case protocol.CheckEngine():
                engine.check()
                return int(engine.has_work)

    # --- reports --------------------------------------------------------------------------------

    def _note(self, outputs: list[Output]) -> None:
        tokens, news = self._report.tokens, self._report.news
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is None:
                continue  # the probe's own request
            refusal = self._engine.refusal
            if output.fault is not None and not output.is_form_fault and refusal is not None:
                # it had to wait for a change, after which no request is accepted
                self._report.refused.append(protocol.Refused.of(opened.number, refusal))
                self._note_end(opened, output)
                continue
            is_known = output.index in opened.begun
            if (
                is_known
                and len(output.token_ids) == 1
                and output.finish_reason is None
                and not output.logprobs
                and output.prompt_logprobs is None
            ):
                tokens += (opened.number, output.index, output.token_ids[0])
                continue
            opened.begun.add(output.index)
            news.append((opened.number, protocol.pack_output(output)))
            if output.fault is not None:
                self._must_probe |= not output.is_form_fault
                self._engine.abort(output.request_id)  # ends its other answers
            if output.finish_reason is not None:
                self._note_end(opened, output)

    def _note_end(self, opened: _Submitted, output: Output) -> None:
        """An answer has ended."""
        opened.num_open -= 1
        if opened.num_open == 0:
            del self._open[output.request_id], self._ids[opened.number]

    def _note_event(self, event: Event) -> None:
        if isinstance(event, SequenceAdmitted):
            opened = self._open.get(event.request_id)
            if opened is not None and event.index == 0:
                self._report.admitted.append((opened.number, monotonic()))
        self._report.events.append(protocol.pack_event(event))

    def _report_step(self, event: StepStarted) -> None:
        """Report the start of a step, which may take seconds, if the last report is old or said
        that the engine was idle."""
        now_s = monotonic()
        if self._was_idle or now_s - self._snapshot_s > SNAPSHOT_S:
            self._was_idle = False
            self._renew_snapshot(now_s, protocol.StepInProgress(event.num_tokens, now_s))
            # not raised in the middle of a step; `receive` raises it again
            with suppress(FrontLeft):
                self._send()

    def _look(self) -> None:
        """Update the snapshot if it is old or the engine is idle."""
        now_s = monotonic()
        self._was_idle = not self._engine.has_work
        if self._was_idle or now_s - self._snapshot_s > SNAPSHOT_S:
            self._renew_snapshot(now_s, None)

    def _renew_snapshot(self, now_s: float, step: protocol.StepInProgress | None) -> None:
        self._snapshot_s = now_s
        seen = self._engine.snapshot(), step
        if seen != self._seen:
            self._seen = seen
            self._report.snapshot, self._report.step = seen

    def _send(self) -> None:
        if not self._report.is_empty:
            report, self._report = self._report, protocol.EngineReport()
            self._link.send(report)

    # --- the end --------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Check that the engine still answers, by a request of one token. If that fails, the engine
        is broken, and the requests were not at fault."""
        self._must_probe = False
        if self._engine.refusal is not None:
            return
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self._engine.submit(Request(PROBE, np.zeros(1, np.int32), sampling))
        for _ in range(MAX_LAST_STEPS):
            if not self._engine.has_work:
                return
            for output in self._engine.step():
                if output.request_id == PROBE and output.fault is not None:
                    raise EngineLost(output.fault)
        raise EngineLost("the engine does not become idle")

    def _come_to_rest(self) -> None:
        """Abort open requests, and wait until no step runs."""
        for request_id in self._ids.values():
            self._engine.abort(request_id)
        for _ in range(MAX_LAST_STEPS):
            if not self._engine.has_work:
                break
            self._engine.step()

    def _save(self) -> None:
        """Wait until pages are saved, and report how many are left."""
        while self._engine.snapshot().num_unsaved_pages:
            self._engine.step()
            self._look()
            self._send()
            sleep(SAVING_S)
