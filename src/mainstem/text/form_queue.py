"""Compiles forms on its own threads, round-robin: one form at a time for each owner.

An owner that sends many slow forms delays only itself; other owners' forms go before its next one.
"""

from collections import deque
from concurrent.futures import Future
from threading import Condition, Thread

from mainstem.core.errors import TooManyForms
from mainstem.text.form_errors import FIELD
from mainstem.text.grammar import CompiledForm, Grammars

NUM_THREADS = 2
MAX_WAITING = 256  # maximum number of forms of one owner that wait

_Job = tuple[str, "Future[CompiledForm]"]


class FormQueue:
    """Owns the threads; each of the first forms starts one. May be used on any thread."""

    def __init__(self, grammars: Grammars, num_threads: int = NUM_THREADS) -> None:
        self._grammars = grammars
        self._num_threads = num_threads
        self._threads: list[Thread] = []
        self._waiting: dict[str, deque[_Job]] = {}  # by owner; the next owner comes first
        self._busy: set[str] = set()  # owners whose form is being compiled
        self._change = Condition()
        self._is_closed = False

    def submit(self, form: str, owner: str = "") -> "Future[CompiledForm]":
        """Return a future of `Grammars.compile`. It is done already if the form is compiled."""
        future: Future[CompiledForm] = Future()
        if (found := self._grammars.find(form, owner)) is not None:
            future.set_result(found)
            return future
        with self._change:
            if self._is_closed:
                future.cancel()
                return future
            jobs = self._waiting.setdefault(owner, deque())
            if len(jobs) >= MAX_WAITING:
                future.set_exception(
                    TooManyForms(FIELD, f"{MAX_WAITING} forms already wait; retry later")
                )
                return future
            jobs.append((form, future))
            if len(self._threads) < self._num_threads:
                name = f"grammar_{len(self._threads)}"
                thread = Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._change.notify()
        return future

    def close(self) -> None:
        """Let the threads finish their current form, then end them; waiting forms are cancelled."""
        with self._change:
            self._is_closed = True
            for jobs in self._waiting.values():
                for _, future in jobs:
                    future.cancel()
            self._waiting.clear()
            self._change.notify_all()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            owner, (form, future) = taken
            if future.set_running_or_notify_cancel():
                self._fulfil(future, form, owner)
            with self._change:
                self._busy.discard(owner)
                self._change.notify()

    def _take(self) -> tuple[str, _Job] | None:
        """Return the next form of the owner that has waited longest; None if the queue is
        closed."""
        with self._change:
            while not self._is_closed:
                for owner, jobs in self._waiting.items():
                    if owner in self._busy:
                        continue
                    job = jobs.popleft()
                    del self._waiting[owner]
                    if jobs:
                        self._waiting[owner] = jobs  # after the other owners
                    self._busy.add(owner)
                    return owner, job
                self._change.wait()
        return None

    def _fulfil(self, future: "Future[CompiledForm]", form: str, owner: str) -> None:
        try:
            compiled = self._grammars.compile(form, owner)
        except Exception as error:  # delivered to the caller
            future.set_exception(error)
        except BaseException as error:  # a panic in the parser's native code
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(compiled)
