"""An interrupt waits for the end of what holds it, and is never lost."""

import signal
import threading
from collections.abc import Iterator
from threading import Thread

import pytest

from mainstem.core.interrupts import held_interrupts


@pytest.fixture(autouse=True)
def _are_heard() -> Iterator[None]:
    """Interrupts are ignored where a shell runs this in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_when_what_holds_it_is_done() -> None:
    done: list[int] = []

    @held_interrupts()
    def work() -> None:
        for number in range(3):
            signal.raise_signal(signal.SIGINT)
            done.append(number)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # nothing holds it any more


def test_the_outermost_lets_it_through() -> None:
    done: list[str] = []

    @held_interrupts()
    def work() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
        done.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the inner one"]


def test_an_interrupt_outweighs_an_error() -> None:
    @held_interrupts()
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("as well")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_who_ignores_interrupts_is_left_in_peace() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_hold() -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    @held_interrupts()
    def look() -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_thread_that_is_taken_for_the_main_one_has_nothing_to_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a program embeds Python, and another thread was the first to import `threading`."""
    monkeypatch.setattr("mainstem.core.interrupts.main_thread", threading.current_thread)
    done: list[str] = []

    @held_interrupts()
    def work() -> None:
        done.append("done")

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["done"]
