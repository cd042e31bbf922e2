"""Ctrl-C between two changes, never inside one."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def held_interrupts() -> Iterator[None]:
    """What is done here comes to its end; an interrupt that comes meanwhile goes through then.

    Python interrupts the main thread only, so on others there is nothing to hold. Not for what may
    take long: a person waits.
    """
    held: list[tuple[int, FrameType | None]] = []
    handler = _replace_handler(lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if held:
                handler(*held[0])


def _replace_handler(by: Handler) -> Handler | None:
    """Returns what handled interrupts of this thread until now; None: nothing does, or will."""
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        return None
    try:
        signal.signal(signal.SIGINT, by)
    except ValueError:  # in a program that embeds Python, `threading` may take another for the main
        return None
    return handler
