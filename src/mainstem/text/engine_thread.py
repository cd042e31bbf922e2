"""A TextEngine on a separate thread, for callers on any thread.

submit, abort, close  --- commands (queue) --->  engine thread, between two steps
deliver(news)         <-------------------------  once per step, on the engine's thread
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from mainstem.core.errors import AnswerFailed, EngineLost, InvalidRequest, MainstemError
from mainstem.core.request import Output, Request
from mainstem.engine.engine import Engine
from mainstem.text.text_engine import TextEngine

IDLE_S = 0.2  # between steps while no request runs; such steps only complete saves of pages
MAX_LAST_STEPS = 100

log = logging.getLogger("mainstem.text")


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended early, and why."""

    request_id: str
    error: MainstemError


News = Output | Ended
BeginChange = Callable[[Engine], "Future[str]"]  # Engine.update_weights, sleep or wake


@dataclass(frozen=True, slots=True)
class _WaitedFor:
    """A change of the engine that its caller waits for."""

    begin: BeginChange
    done: "Future[str]"


class EngineThread:
    """Runs the engine; only its thread uses the TextEngine.

    `deliver` gets the end of every submitted request: outputs with a finish reason, one for each
    answer, or one `Ended`. For an aborted request it gets neither.
    """

    def __init__(self, engine: TextEngine, deliver: Callable[[list[News]], None]) -> None:
        """`deliver` is called on the engine's thread and must not wait."""
        self._engine = engine
        self._deliver = deliver
        self._commands: SimpleQueue[Request | str | _WaitedFor | None] = SimpleQueue()  # None: stop
        self._changes: list[_WaitedFor] = []  # begun, and not done
        # unfinished answers of each request; used only by the thread
        self._num_open: dict[str, int] = {}
        self._is_stopped = False
        self._lock = Lock()  # so that nothing is submitted after the command to stop
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; an error in it is delivered as news."""
        with self._lock:
            if self._is_stopped:
                raise _closed()
            self._commands.put(request)

    def abort(self, request_id: str) -> None:
        """Stop a request; only news of a step that is already running may still be delivered."""
        self._commands.put(request_id)

    def change(self, begin: BeginChange) -> "Future[str]":
        """Have the engine change something between steps (Engine.update_weights, sleep, wake)."""
        done: Future[str] = Future()
        with self._lock:
            if self._is_stopped:
                raise _closed()
            self._commands.put(_WaitedFor(begin, done))
        return done

    def close(self) -> None:
        """End open requests with an error, and wait for the thread, which closes the engine."""
        with self._lock:
            self._is_stopped = True
            self._commands.put(None)
        self._thread.join()

    # --- on the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._run_until_stopped():
                self._stop()
        except Exception:
            log.exception("the engine failed while it was being closed")
        finally:
            self._engine.engine.close()

    def _run_until_stopped(self) -> bool:
        """Run until the command to stop; False: the engine failed."""
        try:
            while self._take_commands():
                self._report(self._engine.step())
        except Exception as error:
            log.exception("the engine failed and stops")
            self._fail(f"{type(error).__name__}: {error}")
            return False
        return True

    def _take_commands(self) -> bool:
        """Carry out queued commands; waits a while when there is nothing to run. False: stop."""
        is_waiting = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=is_waiting, timeout=IDLE_S)
            except Empty:
                return True
            is_waiting = False
            if command is None:
                return False
            if isinstance(command, Request):
                self._submit(command)
            elif isinstance(command, _WaitedFor):
                self._begin(command)
            else:
                self._num_open.pop(command, None)
                self._engine.abort(command)

    def _begin(self, change: "_WaitedFor") -> None:
        if not change.done.set_running_or_notify_cancel():
            return  # the caller no longer waits; from here on, it cannot cancel
        try:
            begun = change.begin(self._engine.engine)
        except Exception as error:  # raised in the caller
            change.done.set_exception(error)
            return
        self._changes.append(change)

        def end(begun: "Future[str]") -> None:
            if change not in self._changes:
                return  # its caller has an error already, since the thread stops
            self._changes.remove(change)
            if (error := begun.exception()) is not None:
                change.done.set_exception(error)
            else:
                change.done.set_result(begun.result())

        begun.add_done_callback(end)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except InvalidRequest as error:
            self._deliver([Ended(request.request_id, error)])
        except Exception as error:  # for example from a callback; other requests continue
            log.exception("a request could not be queued")
            fault = AnswerFailed(f"the prompt could not be queued: {error}")
            self._deliver([Ended(request.request_id, fault)])
        else:
            self._num_open[request.request_id] = request.sampling.n

    def _report(self, outputs: list[Output]) -> None:
        news: list[News] = []
        for output in outputs:
            request_id = output.request_id
            if request_id not in self._num_open:
                continue  # the request was aborted, or another of its answers failed
            if output.fault is not None:
                error = AnswerFailed(f"the prompt could not be answered: {output.fault}")
                news.append(Ended(request_id, error))
                del self._num_open[request_id]
                self._engine.abort(request_id)  # ends its other answers
                continue
            news.append(output)
            if output.finish_reason is not None:
                self._num_open[request_id] -= 1
                if not self._num_open[request_id]:
                    del self._num_open[request_id]
        if news:
            self._deliver(news)

    def _stop(self) -> None:
        """End open requests, and run the steps that this takes."""
        for request_id in self._num_open:
            self._engine.abort(request_id)
        self._end_all(_closed)
        for _ in range(MAX_LAST_STEPS):
            if not self._engine.has_work:
                break
            self._engine.step()

    def _end_all(self, make_error: Callable[[], MainstemError]) -> None:
        self._deliver([Ended(request_id, make_error()) for request_id in self._num_open])
        self._num_open.clear()
        changes, self._changes = self._changes, []
        for change in changes:
            change.done.set_exception(make_error())

    def _fail(self, reason: str) -> None:
        """After a failure, end open and new requests with an error, until `close`."""
        self._end_all(lambda: EngineLost(reason))
        while (command := self._commands.get()) is not None:
            if isinstance(command, Request):
                self._deliver([Ended(command.request_id, EngineLost(reason))])
            elif isinstance(command, _WaitedFor) and command.done.set_running_or_notify_cancel():
                command.done.set_exception(EngineLost(reason))


def _closed() -> InvalidRequest:
    return InvalidRequest("LLM", "is closed")
