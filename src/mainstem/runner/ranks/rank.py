"""A rank: a process that has one part of a model, and runs every Step on it.

    main thread      reads messages: launches steps, starts copies
    ended            waits for launched steps in order and reports them (if steps overlap)
    copies           reports how far copies are
    watch            ends the process as soon as the engine's process has ended

Any exception is reported and ends the process: the other ranks may be waiting for this one in the
middle of a step, so the step cannot be retried here.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic, sleep
from traceback import format_exc

from mainstem.core.environment import SWITCH_S
from mainstem.core.errors import MainstemError, OutOfDeviceMemory
from mainstem.core.step import InFlight, Runner, Step
from mainstem.kv.transfer import PageCopier, Transfer
from mainstem.runner.ranks import protocol

LOOK_S = 0.001  # between two checks of copies in progress
TOLD_LAYERS = 8  # progress of a copy is reported every 8 layers
PARENT_S = 1.0  # between two checks of whether the parent process is alive


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a model, after loading."""

    runner: Runner
    loaded: protocol.Loaded
    open_copier: Callable[[int], PageCopier]  # over a slab of this many bytes
    enter_thread: Callable[[], None]  # called first on a thread that waits for the device


LoadPart = Callable[[protocol.BeginRank], RankPart]


class Rank:
    """Handles the messages of the engine's process until CloseRank."""

    def __init__(self, part: RankPart, channel: protocol.Channel, number: int) -> None:
        self._part = part
        self._runner = part.runner
        self._channel = channel
        self._number = number
        self._copier: PageCopier | None = None
        self._launched: SimpleQueue[InFlight] = SimpleQueue()
        self._copies: SimpleQueue[tuple[int, Transfer]] = SimpleQueue()
        self._num_ended = 0
        self._ended = Condition()
        if self._runner.can_overlap:
            self._on_thread("ended", self._report_steps)

    def run(self) -> None:
        """Handle messages until CloseRank. Raises the errors of steps and copies."""
        while True:
            message = receive(self._channel)
            match message:
                case Step():
                    self._launch(message)
                case protocol.SavePages(number, pages, slots, parts, after_steps):
                    self._await_steps(after_steps)
                    self._copies.put((number, self._open_copier.save(pages, slots, parts)))
                case protocol.LoadPages(number, load_id, slots, pages, parts, after_steps):
                    self._await_steps(after_steps)
                    copy = self._open_copier.load(load_id, slots, pages, parts)
                    self._copies.put((number, copy))
                case protocol.ForgetLoad(load_id):
                    self._open_copier.forget(load_id)
                case protocol.Open(host_bytes):
                    self._copier = self._part.open_copier(host_bytes)
                    self._on_thread("copies", self._report_copies)
                    self._channel.send(protocol.Opened())
                case protocol.CloseRank():
                    if self._copier is not None:
                        self._copier.close()
                    self._runner.close()
                    return
                case _:
                    raise AssertionError(f"a rank was sent {message}")

    @property
    def _open_copier(self) -> PageCopier:
        assert self._copier is not None, "a copy before Open"
        return self._copier

    # --- steps ----------------------------------------------------------------------------------

    def _launch(self, step: Step) -> None:
        handle = self._runner.launch(step)
        if self._runner.can_overlap:
            self._launched.put(handle)
        else:
            self._finish(handle)

    def _report_steps(self) -> None:
        while True:
            self._finish(self._launched.get())

    def _finish(self, handle: InFlight) -> None:
        result = handle.wait()
        with self._ended:
            self._num_ended += 1
            self._ended.notify_all()
        self._channel.send(protocol.StepEnded(result if self._number == 0 else None))

    def _await_steps(self, count: int) -> None:
        """Wait until this rank has ended `count` steps. Rank 0 has ended them already, so the wait
        is short."""
        with self._ended:
            self._ended.wait_for(lambda: self._num_ended >= count)

    # --- copies ---------------------------------------------------------------------------------

    def _report_copies(self) -> None:
        num_layers = self._open_copier.num_layers
        # number of a copy -> the copy, and how many of its layers were reported
        under_way: dict[int, tuple[Transfer, int]] = {}
        while True:
            while not under_way or not self._copies.empty():
                number, transfer = self._copies.get()
                under_way[number] = transfer, 0
            for number, (transfer, told) in list(under_way.items()):
                done = transfer.num_layers_done()
                if done == num_layers:
                    del under_way[number]
                    self._channel.send(protocol.Copied(number, done, transfer.seconds()))
                elif done >= told + TOLD_LAYERS:
                    under_way[number] = transfer, done
                    self._channel.send(protocol.Copied(number, done, 0.0))
            if under_way:
                sleep(LOOK_S)

    def _on_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self._part.enter_thread()
                work()
            except BaseException as error:
                fail(self._channel, error)

        Thread(target=run, name=name, daemon=True).start()


def receive(channel: protocol.Channel) -> protocol.ToRank | protocol.FromRank:
    """The next message; ends this process if the engine's process has ended."""
    try:
        return channel.receive()
    except (EOFError, OSError):
        os._exit(1)


def fail(channel: protocol.Channel, error: BaseException) -> None:
    """Report an error and end the process, from any thread."""
    known = error if isinstance(error, MainstemError) else None
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        known = OutOfDeviceMemory(str(error))
    words = f"{type(error).__name__}: {error}"
    with suppress(OSError):  # the engine's process has ended
        channel.send(protocol.Failed(monotonic(), known, words, format_exc()))
    os._exit(1)


def watch(fd: int, parent: int) -> None:
    """End this process when its parent has ended. (The socket does not show this if a fork of the
    parent keeps it open.)"""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    while not poll.poll(PARENT_S * 1e3) and os.getppid() == parent:
        pass
    os._exit(1)


def main(argv: list[str], load: LoadPart) -> None:
    """Run a rank, then exit without waiting for threads of libraries. Never returns."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the engine's process ends its ranks
        signal.signal(each, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    fd, parent = map(int, argv)
    channel = protocol.Channel(fd)
    Thread(target=partial(watch, fd, parent), name="watch", daemon=True).start()
    try:
        begin = receive(channel)
        assert isinstance(begin, protocol.BeginRank)
        part = load(begin)
        channel.send(part.loaded)
        Rank(part, channel, begin.shard.rank).run()
    except BaseException as error:
        fail(channel, error)
    os._exit(0)
