"""Read-ahead: a thread makes the next item while the caller works on this one."""

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_S = 0.1


class Ahead(Generic[T]):
    """Runs an iterable in a thread, one item ahead of the caller: at most two items exist at a
    time.

    The thread is a daemon: a read that never returns (of a pipe that nobody writes to) does not
    keep the process alive.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._queue: Queue[tuple[T] | None] = Queue()  # None: there are no more
        self._may_make = Semaphore(1)
        self._is_closed = False
        self.is_ended = False
        self.fault: BaseException | None = None  # the error that ended the iterable early
        self._thread = Thread(target=self._make, args=(iter(items),), daemon=True)
        self._thread.start()

    def poll(self) -> T | None:
        """The next item if it is ready; None if not, or if `is_ended`."""
        return self._take(None)

    def wait(self, should_stop: Callable[[], bool]) -> T | None:
        """Wait for the next item; None if `is_ended`, or when `should_stop` returns True."""
        while not self.is_ended and not should_stop():
            item = self._take(POLL_S)
            if item is not None:
                return item
        return None

    def close(self) -> None:
        """Let the thread end after the item it is making."""
        self._is_closed = True
        self._may_make.release()

    def _take(self, timeout_s: float | None) -> T | None:
        if self.is_ended:
            return None
        try:
            found = self._queue.get(block=timeout_s is not None, timeout=timeout_s)
        except Empty:
            return None
        if found is None:
            self.is_ended = True
            return None
        self._may_make.release()
        return found[0]

    def _make(self, items: Iterator[T]) -> None:
        try:
            self._may_make.acquire()
            for item in items:
                self._queue.put((item,))
                self._may_make.acquire()
                if self._is_closed:
                    return
        except BaseException as error:  # the caller raises it when `is_ended`
            self.fault = error
        finally:
            self._queue.put(None)
