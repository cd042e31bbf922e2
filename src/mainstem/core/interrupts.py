"""Ctrl-C is raised between two changes of the engine's state, never inside one.

    with guarded_interrupts():       once, around a call on the main thread: LLM.generate, a command
        with held_interrupts():      around each change of the engine's state
            ...                      Ctrl-C that comes here waits
                                     and is raised here

Only the guard touches the process's signal handler; a change only increments and decrements a
counter. Python runs signal handlers on the main thread, so on other threads, and without a guard,
nothing happens.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from threading import local
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Changes(local, ContextDecorator):
    """The changes in progress on this thread; other threads have their own."""

    depth = 0
    held: Callable[[], object] | None = None  # the first interrupt that came during the change

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.held is not None and self.depth == 0:
            interrupt, self.held = self.held, None
            interrupt()


_changes = _Changes()


def held_interrupts() -> _Changes:
    """Code in this context, or in a function with this decorator, runs to its end; an interrupt
    that comes during it is raised afterwards. Not for long work: the user waits for Ctrl-C to take
    effect.
    """
    return _changes


class _Guard:
    """A signal handler that lets a change finish before it calls the handler it replaces."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _changes.depth == 0:
            _changes.held = None  # replaces an interrupt that `__exit__` was about to raise
            self._handler(number, frame)
        elif _changes.held is None:
            _changes.held = lambda: self._handler(number, frame)


@contextmanager
def guarded_interrupts() -> Iterator[None]:
    """In this context, an interrupt waits for the end of `held_interrupts`. Meant for the main
    thread: on other threads, which get no interrupts, and within another guard it does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    is_installed = callable(handler) and not isinstance(handler, _Guard) and _install(handler)
    try:
        yield
    finally:
        if is_installed:
            signal.signal(signal.SIGINT, handler)


def _install(handler: Handler) -> bool:
    try:
        signal.signal(signal.SIGINT, _Guard(handler))
    except ValueError:  # not the main thread
        return False
    return True
