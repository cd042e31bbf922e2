"""Waits for an event. The limit is reached only if the event never comes, on any machine."""

from collections.abc import Callable
from time import monotonic, sleep

LIMIT_S = 300.0  # for a reply, or the end of a process: far longer than on one busy core


def until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return when the condition is true; fails after `limit_s`."""
    deadline_s = monotonic() + limit_s
    while not is_true():
        assert monotonic() < deadline_s, "the condition did not become true in time"
        sleep(0.005)
