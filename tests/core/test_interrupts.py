"""An interrupt during a change is raised when the change is complete, and is never lost."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mainstem.core.interrupts import guarded_interrupts, held_interrupts


@pytest.fixture(autouse=True)
def _are_heard() -> Iterator[None]:
    """Without this, a process that a shell runs in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def guarded() -> Iterator[None]:
    with guarded_interrupts():
        yield


@pytest.mark.usefixtures("guarded")
def test_an_interrupt_is_raised_when_the_held_change_is_complete() -> None:
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


@pytest.mark.usefixtures("guarded")
def test_the_end_of_the_outermost_change_raises_the_interrupt() -> None:
    done: list[str] = []

    @held_interrupts()
    def work() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
        done.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the inner one"]


@pytest.mark.usefixtures("guarded")
def test_an_interrupt_is_raised_instead_of_an_error() -> None:
    @held_interrupts()
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("as well")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.usefixtures("guarded")
def test_each_change_holds_interrupts_again() -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), held_interrupts():
            signal.raise_signal(signal.SIGINT)
        with held_interrupts():
            pass  # the interrupt is not raised again


def test_the_handler_of_the_process_is_replaced_once_and_put_back() -> None:
    with guarded_interrupts():
        guard = signal.getsignal(signal.SIGINT)
        assert guard is not signal.default_int_handler
        with guarded_interrupts(), held_interrupts():
            assert signal.getsignal(signal.SIGINT) is guard
        assert signal.getsignal(signal.SIGINT) is guard
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_is_called_between_changes() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("heard"))
    with guarded_interrupts():
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == ["heard"]
        signal.raise_signal(signal.SIGINT)
        assert heard == ["heard", "heard"]


def test_a_process_that_ignores_interrupts_keeps_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with guarded_interrupts(), held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_replace_the_handler() -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with guarded_interrupts(), held_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    on_a_thread(look)
    assert seen == [handler]


@pytest.mark.usefixtures("guarded")
def test_a_change_on_another_thread_does_not_hold_interrupts_of_the_main_thread() -> None:
    def interrupt_main() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    enter, leave = held_interrupts().__enter__, held_interrupts().__exit__
    with ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result()
        interrupt_main()
        thread.submit(leave).result()


def on_a_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()
