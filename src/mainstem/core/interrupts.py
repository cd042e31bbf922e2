"""Ctrl-C between two changes, never inside one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """What is done here comes to its end; an interrupt that comes meanwhile goes through then.

    Python interrupts the main thread only, so on others there is nothing to hold. Not for what may
    take long: a person waits.
    """
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
