"""The engine on a thread of its own; the event loop talks to it by queues.

    event loop                                     engine thread
    submit, abort, call  --- commands (queue) --->  between two steps
    Ticket, by id        <-- call_soon_threadsafe --  outputs, once per step

Neither waits for the other: a command is taken when the running step ends, and outputs are handed
over without looking whether anybody reads them. The TextEngine is touched by its thread alone, the
table of open requests by the event loop alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import TypeVar

import numpy as np

from mainstem.core.errors import EngineLost, InvalidRequest
from mainstem.core.events import SequenceAdmitted, StepFailed
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.core.snapshot import EngineSnapshot
from mainstem.text.form_queue import FormQueue
from mainstem.text.grammar import CompiledForm
from mainstem.text.text_engine import TextEngine, TextOutput

SNAPSHOT_S = 0.2  # a look at the engine is at most so old while it runs
IDLE_S = 0.2  # between two steps with nothing to run
PROBE = RequestId("probe")
MAX_PROBE_STEPS = 100

log = logging.getLogger("mainstem.server")
T = TypeVar("T")


class EngineFault(Exception):
    """A request ended through no fault of its own: the engine is lost, or going down."""


class RequestFault(EngineFault):
    """Steps failed over a request whenever it was tried; others are answered."""


class FormFault(EngineFault):
    """An answer cannot go on in the form it must have; the request asks too much of its parser."""


Fault = EngineFault | InvalidRequest


class WorkerState(Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"  # the engine could not be brought back; nothing is answered any more


class Ticket:
    """One prompt in progress, on the event loop. Times are monotonic seconds."""

    def __init__(self, place: int, request: Request, answering: "Answering") -> None:
        self.place = place  # among the prompts of its Answering
        self.request = request
        self.answering = answering
        self.began_s = monotonic()
        self.admitted_s: float | None = None  # its first answer left the queue
        self.token_s: list[float] = []  # when the tokens of its first answer came
        self.ended_s: float | None = None
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_open = request.sampling.n
        self.is_accepted = False

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0


class Answering:
    """The prompts of one HTTP request in progress: iterate to hear of all their answers.

    Whoever leaves before the end must close it through `Worker.abandon`, which frees the pages.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.tickets = [Ticket(place, request, self) for place, request in enumerate(requests)]
        self.fault: Fault | None = None
        self._news: list[tuple[int, TextOutput]] = []
        self._wake = asyncio.Event()

    def accept(self, ticket: Ticket) -> None:
        """The engine has queued a prompt."""
        ticket.is_accepted = True
        self._wake.set()

    def hear(self, ticket: Ticket, output: TextOutput, now_s: float) -> None:
        """Take news of an answer in; whoever iterates gets it next."""
        self._news.append((ticket.place, output))
        ticket.num_output_tokens += len(output.token_ids)
        if output.index == 0:
            ticket.num_cached_tokens = output.num_cached_tokens
            ticket.token_s += [now_s] * len(output.token_ids)
        if output.finish_reason is not None:
            ticket.num_open -= 1
            ticket.ended_s = now_s
        self._wake.set()

    def fail(self, fault: Fault) -> None:
        """End it; whoever waits for news gets `fault`."""
        self.fault = fault
        self._wake.set()

    async def accepted(self) -> None:
        """Wait until the engine has queued every prompt; raises the fault if it refused one."""
        while not all(ticket.is_accepted for ticket in self.tickets):
            if self.fault is not None:
                raise self.fault
            self._wake.clear()
            await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, TextOutput]]]:
        """(place of the prompt, news) in order, as much as there is; raises what ended it early."""
        while True:
            if self._news:
                news, self._news = self._news, []
                yield news
            elif self.fault is not None:
                raise self.fault
            elif all(ticket.is_finished for ticket in self.tickets):
                return
            else:
                self._wake.clear()
                await self._wake.wait()


# --- commands, to the engine's thread ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]


class _Stop:
    """End the thread; whatever is open is aborted."""


_Command = _Submit | _Abort | _Call | _Stop


# --- reports, to the event loop ------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """What happened on the engine's thread since the last report."""

    accepted: list[str] = field(default_factory=list)
    refused: list[tuple[str, InvalidRequest]] = field(default_factory=list)
    admitted: list[tuple[str, float]] = field(default_factory=list)  # and when
    outputs: list[TextOutput] = field(default_factory=list)
    failed: list[tuple[str, EngineFault]] = field(default_factory=list)
    has_recovered: bool = False  # the engine is back, its cache empty

    @property
    def is_empty(self) -> bool:
        lists = (self.accepted, self.refused, self.admitted, self.outputs, self.failed)
        return not (any(lists) or self.has_recovered)


class Worker:
    """Owns the engine's thread. Methods are for the event loop, unless they say otherwise."""

    def __init__(self, engine: TextEngine) -> None:
        self.tokenizer = engine.tokenizer  # immutable, safe between threads
        self._forms = FormQueue(engine.grammars)  # safe between threads
        self.max_model_len = engine.engine.max_model_len
        self.snapshot: EngineSnapshot = engine.engine.snapshot()
        self.state = WorkerState.RUNNING
        self.num_recoveries = 0
        self.on_tokens: Callable[[int], None] | None = None  # told how many tokens came
        self.on_recovered: Callable[[], None] | None = None  # told when the cache was lost
        self._engine = engine
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._open: dict[str, Ticket] = {}
        self._report = _Report()
        self._num_answers: dict[str, int] = {}  # unfinished, by request; for the thread alone
        self._snapshot_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._must_probe = False  # a request ended by a fault, which may be the engine's own
        engine.engine.bus.subscribe(SequenceAdmitted, self._admitted)
        engine.engine.bus.subscribe(StepFailed, self._failed)

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return len(self._open)

    async def submit(self, requests: Sequence[Request]) -> Answering:
        """Queue the prompts of one HTTP request, all or none.

        Raises InvalidRequest if one can never run, EngineFault if none can now.
        """
        if self.state is not WorkerState.RUNNING:
            raise EngineFault(f"the engine is {self.state.value}")
        answering = Answering(requests)
        for ticket in answering.tickets:
            self._open[ticket.request.request_id] = ticket
            self._commands.put(_Submit(ticket.request))
        try:
            await answering.accepted()
        except BaseException:
            self.abandon(answering)
            raise
        return answering

    async def compile(self, sampling: SamplingParams, owner: str = "") -> CompiledForm | None:
        """The form that answers must have, if any; raises InvalidRequest."""
        if sampling.grammar is None:
            return None
        return await asyncio.wrap_future(self._forms.submit(sampling.grammar, owner))

    def abandon(self, answering: Answering) -> None:
        """Nobody listens any more: stop what is not finished."""
        for ticket in answering.tickets:
            request_id = ticket.request.request_id
            if self._open.pop(request_id, None) is not None:
                ticket.ended_s = monotonic()
                self._commands.put(_Abort(request_id))

    async def call(self, work: Callable[[TextEngine], T]) -> T:
        """Run something short on the engine's thread, between two steps."""
        if self.state is not WorkerState.RUNNING:
            raise EngineFault(f"the engine is {self.state.value}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = work(self._engine)
            except Exception as error:  # goes to whoever asked
                loop.call_soon_threadsafe(_reject, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, value)

        self._commands.put(_Call(run))
        return await future

    def fail_open(self, reason: str) -> None:
        """End every request in progress with a fault, as when the time to finish is over."""
        for ticket in list(self._open.values()):
            self.abandon(ticket.answering)
            ticket.answering.fail(EngineFault(reason))

    async def close(self) -> None:
        """End the thread and free the engine; what is open is aborted."""
        self.fail_open("the server is going down")
        if self.state is not WorkerState.FAILED:
            self.state = WorkerState.STOPPING
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join)
        self._forms.close()

    def _hear(self, report: _Report) -> None:
        """Hand a report's parts to the requests they belong to."""
        now_s = monotonic()
        for request_id in report.accepted:
            if ticket := self._open.get(request_id):
                ticket.answering.accept(ticket)
        for request_id, error in report.refused:
            if ticket := self._open.pop(request_id, None):
                ticket.answering.fail(error)
        for request_id, admitted_s in report.admitted:
            if (ticket := self._open.get(request_id)) and ticket.admitted_s is None:
                ticket.admitted_s = admitted_s
        for output in report.outputs:
            if ticket := self._open.get(output.request_id):
                ticket.answering.hear(ticket, output, now_s)
                if ticket.is_finished:
                    del self._open[output.request_id]
        for request_id, fault in report.failed:
            if ticket := self._open.pop(request_id, None):
                ticket.answering.fail(fault)
        if self.on_tokens is not None and report.outputs:
            self.on_tokens(sum(len(output.token_ids) for output in report.outputs))
        if self.on_recovered is not None and report.has_recovered:
            self.on_recovered()

    # --- on the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()  # an idle one looks after the pages that are being saved
                self._look()
                self._send()
            self._drain()
        except Exception:
            log.exception("the engine is lost")
            self.state = WorkerState.FAILED
            self._fail_all("the engine failed and could not be restarted")
            self._refuse_commands()
        finally:
            self._engine.engine.close()

    def _take_commands(self) -> bool:
        """Obey what has been asked; waits a while when there is nothing to run. False: stop."""
        is_waiting = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=is_waiting, timeout=IDLE_S)
            except Empty:
                return True
            is_waiting = False
            match command:
                case _Submit(request):
                    self._submit(request)
                case _Abort(request_id):
                    self._engine.abort(request_id)
                case _Call(run):
                    run()
                case _Stop():
                    return False

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except InvalidRequest as error:
            self._report.refused.append((request.request_id, error))
        except Exception:
            log.exception("a request could not be queued")
            refusal = InvalidRequest("request", "the engine could not queue it")
            self._report.refused.append((request.request_id, refusal))
        else:
            self._report.accepted.append(request.request_id)
            self._num_answers[request.request_id] = request.sampling.n

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineLost:
            raise
        except Exception:
            log.exception("the engine failed; requests in progress are given up")
            self._give_up()
            return
        self._note(outputs)
        if self._must_probe and not self._engine.has_work:
            self._probe()

    def _note(self, outputs: list[TextOutput]) -> None:
        for output in outputs:
            if output.fault is not None:
                if output.is_form_fault:
                    fault: EngineFault = FormFault(f"the answer was given up: {output.fault}")
                else:
                    fault = RequestFault(f"steps failed over this request: {output.fault}")
                    self._must_probe = True
                self._report.failed.append((output.request_id, fault))
                self._engine.abort(output.request_id)  # its other answers
            else:
                self._report.outputs.append(output)
            if output.finish_reason is not None:
                self._num_answers[output.request_id] -= 1
                if self._num_answers[output.request_id] == 0:
                    del self._num_answers[output.request_id]

    def _give_up(self) -> None:
        """After an error the engine does not handle itself: end what is open. Pages that it named
        may be empty, so those on the device are forgotten."""
        for request_id in self._num_answers:
            self._engine.abort(request_id)
        self._fail_all("the engine failed")
        self._probe()
        self._engine.engine.clear_device()
        self._engine.engine.check()
        self._note_recovery()

    def _probe(self) -> None:
        """Prove that the engine still answers: a request of one token takes it through a step. If
        that fails the engine is lost, and not the requests that failed were to blame."""
        self._must_probe = False
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self._engine.submit(Request(PROBE, np.zeros(1, np.int32), sampling))
        for _ in range(MAX_PROBE_STEPS):
            if not self._engine.has_work:
                return
            for output in self._engine.step():
                if output.request_id == PROBE and output.fault is not None:
                    raise EngineLost(output.fault)
        raise EngineLost("the engine does not come to rest")

    def _failed(self, event: StepFailed) -> None:
        self._note_recovery()

    def _note_recovery(self) -> None:
        """The engine goes on, its cache empty."""
        self.num_recoveries += 1
        self._report.has_recovered = True

    def _fail_all(self, reason: str) -> None:
        fault = EngineFault(reason)
        self._report.failed += [(request_id, fault) for request_id in self._num_answers]
        self._num_answers.clear()
        self._send()

    def _refuse_commands(self) -> None:
        """The engine is lost: end what still comes in, until the loop closes the worker."""
        while not isinstance(command := self._commands.get(), _Stop):
            if isinstance(command, _Submit):
                lost = EngineFault("the engine failed")
                self._report.failed.append((command.request.request_id, lost))
                self._send()
            elif isinstance(command, _Call):
                command.run()

    def _drain(self) -> None:
        """Abort what is open and let the engine come to rest."""
        for request_id in self._num_answers:
            self._engine.abort(request_id)
        for _ in range(MAX_PROBE_STEPS):
            if not self._engine.has_work:
                break
            self._engine.step()

    def _admitted(self, event: SequenceAdmitted) -> None:
        if event.index == 0:
            self._report.admitted.append((event.request_id, monotonic()))

    def _look(self) -> None:
        """Renew the snapshot when it is old or the engine comes to rest."""
        now_s = monotonic()
        if now_s - self._snapshot_s > SNAPSHOT_S or not self._engine.has_work:
            self.snapshot = self._engine.engine.snapshot()
            self._snapshot_s = now_s

    def _send(self) -> None:
        """Hand the report over to the event loop."""
        report = self._report
        if report.is_empty:
            return
        self._report = _Report()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._hear, report)
        except RuntimeError:
            log.warning("the event loop is gone; outputs are dropped")


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
