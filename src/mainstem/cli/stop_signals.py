"""Signals that ask a command to stop after the running step, not in the middle of it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from mainstem.core.interrupts import guarded_interrupts


class StopSignals:
    """Remembers the first signal; a second one raises KeyboardInterrupt."""

    def __init__(self, *numbers: signal.Signals) -> None:
        """`numbers` are the signals to catch; SIGINT and SIGTERM by default."""
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM)
        self.received: int | None = None

    def is_set(self) -> bool:
        return self.received is not None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """In this context, a signal only asks the command to stop."""
        before = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._receive)
        try:
            with guarded_interrupts():  # the second Ctrl-C, too, waits for a change in progress
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
