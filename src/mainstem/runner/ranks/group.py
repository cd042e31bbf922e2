"""The engine process's side of the ranks of one model: it sends them messages and collects their
reports.

A thread reads all reports. If a rank ends or reports an error, all ranks are killed, since the
others may be waiting for it in the middle of a layer. From then on every call that needs a rank
raises.

    launch n -->  rank 0: step n -->  StepEnded n, with the result
                  rank 1: step n -->  StepEnded n
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Condition, Thread
from time import monotonic

from mainstem.core.errors import ConfigError, EngineLost, OutOfDeviceMemory, UnsupportedModel
from mainstem.core.interrupts import held_interrupts
from mainstem.core.step import Step, StepResult
from mainstem.runner.ranks import protocol
from mainstem.runner.ranks.process import RankProcess, end_all

MAX_AHEAD = 2  # steps that a rank may have in its queue: one runs, one waits
# after a rank reports an error, wait this long for another rank's death that may have caused it
BLAME_S = 0.25
EXIT_S = 1.0  # a process whose connection closed gets this long to end
CLOSE_S = 10.0  # ranks that were told to end get this long

log = logging.getLogger("mainstem.engine")


class Copy:
    """A Transfer: every rank copies its part of the pages."""

    def __init__(self, ranks: "RankGroup", num_layers: int) -> None:
        self._ranks = ranks
        self._num_layers = num_layers
        self._done = [0] * ranks.num_ranks
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        return min(self._done) == self._num_layers

    def note(self, rank: int, copied: protocol.Copied) -> None:
        """Record progress; the caller holds the group's lock."""
        self._done[rank] = copied.num_layers
        self._seconds = max(self._seconds, copied.seconds)

    def num_layers_done(self) -> int:
        """Layers that are done on every rank; raises EngineLost."""
        if not self.is_done:
            self._ranks.check()
        return min(self._done)

    def wait(self) -> None:
        self._ranks.wait_until(lambda: self.is_done)

    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return self._seconds


class RankGroup:
    """Sends to all ranks and collects what they report. One thread sends; any may wait."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._processes = processes
        self._changed = Condition()  # guards the fields below
        self._lost: Exception | None = None
        self._failures: list[tuple[int, protocol.Failed]] = []
        self._loaded: dict[int, protocol.Loaded] = {}
        self._num_opened = 0
        self._num_launched = 0
        self._num_ended = [0] * len(processes)
        self._results: deque[StepResult] = deque()  # results of rank 0 that were not taken yet
        self._copies: dict[int, Copy] = {}  # copies in progress, by number
        self._num_copies = 0
        self._is_closing = False
        self._reader = Thread(target=self._read, name="rank-reports", daemon=True)
        self._reader.start()

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    @property
    def num_ended(self) -> int:
        """The number of steps that rank 0 has ended."""
        return self._num_ended[0]

    def check(self) -> None:
        """Raise EngineLost, or the error of loading, if a rank has ended."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)  # a new exception for each caller

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Return as soon as the condition is true; raises like `check` if a rank has ended."""
        with self._changed:
            self._changed.wait_for(lambda: is_true() or self._lost is not None)
            if not is_true():
                self.check()

    def wait_loaded(self) -> list[protocol.Loaded]:
        """Wait until every rank has loaded its part; raises the error if one could not."""
        self.wait_until(lambda: len(self._loaded) == self.num_ranks)
        return [self._loaded[rank] for rank in range(self.num_ranks)]

    def wait_opened(self) -> None:
        """Wait until every rank can copy pages."""
        self.wait_until(lambda: self._num_opened == self.num_ranks)

    def send(self, message: protocol.ToRank) -> None:
        """Send a message to every rank; blocks while a rank's socket is full."""
        assert not self._is_closing, "the ranks were closed"
        self.check()
        data = protocol.encode(message)
        try:
            for process in self._processes:
                process.channel.send_bytes(data)
        except OSError:
            # the reading thread finds the rank that ended, and this call raises
            self.wait_until(lambda: False)

    # --- steps ----------------------------------------------------------------------------------

    def launch(self, step: Step) -> int:
        """Let every rank run a step; returns its number. Waits while a rank has MAX_AHEAD steps."""
        number = self._num_launched
        self.wait_until(lambda: min(self._num_ended) > number - MAX_AHEAD)
        with held_interrupts():  # either all ranks get the step and it is counted, or none does
            self.send(step)
            self._num_launched += 1
        return number

    def take_result(self, number: int) -> StepResult:
        """Wait for a step's result; called in the order of steps."""
        self.wait_until(lambda: self.num_ended > number)
        with self._changed:
            # skip the results of steps that were dropped
            while len(self._results) > self.num_ended - number:
                self._results.popleft()
            return self._results.popleft()

    def wait_steps(self) -> None:
        """Return when no rank runs a step, or when all ranks have ended."""
        with suppress(Exception):
            self.wait_until(lambda: min(self._num_ended) == self._num_launched)

    # --- copies ---------------------------------------------------------------------------------

    def copy(
        self, make: Callable[[int, int], protocol.SavePages | protocol.LoadPages], num_layers: int
    ) -> Copy:
        """Start a copy on every rank. `make` gets the number of the copy and the number of steps
        that have ended."""
        copy = Copy(self, num_layers)
        with self._changed:
            number, self._num_copies = self._num_copies, self._num_copies + 1
            self._copies[number] = copy
            after_steps = self.num_ended
        self.send(make(number, after_steps))
        return copy

    def wait_copies(self) -> None:
        """Return when no copy is in progress, or when all ranks have ended."""
        with suppress(Exception):
            self.wait_until(lambda: not self._copies)

    # --- reports --------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # since this thread ends, callers must not wait for reports
            self._end_all(EngineLost(f"a report of a rank cannot be read: {error!r}"))

    def _read_all(self) -> None:
        ranks = {process.channel.connection: process for process in self._processes}
        while ranks and self._lost is None:
            for connection in _readable(ranks, None):
                process = ranks[connection]
                try:
                    message = process.channel.receive()
                except (EOFError, OSError):
                    if self._is_closing:
                        del ranks[connection]
                    else:
                        self._lose(ranks, process)
                        return
                else:
                    self._note(process.rank, message)
                    if isinstance(message, protocol.Failed):
                        del ranks[connection]
                        self._lose(ranks, None)
                        return

    def _note(self, rank: int, message: protocol.FromRank | protocol.ToRank) -> None:
        with self._changed:
            match message:
                case protocol.StepEnded(result):
                    self._num_ended[rank] += 1
                    if result is not None:
                        self._results.append(result)
                case protocol.Copied(number):
                    copy = self._copies[number]
                    copy.note(rank, message)
                    if copy.is_done:
                        del self._copies[number]
                case protocol.Loaded():
                    self._loaded[rank] = message
                case protocol.Opened():
                    self._num_opened += 1
                case protocol.Failed():
                    self._failures.append((rank, message))
                case _:
                    raise AssertionError(f"rank {rank} sent {message}")
            self._changed.notify_all()

    # --- the end --------------------------------------------------------------------------------

    def _lose(self, ranks: dict[Connection, RankProcess], dead: RankProcess | None) -> None:
        """End all ranks. Either `dead` closed its connection without a report, or a rank reported a
        failure, which another rank may have caused."""
        until_s = monotonic() + BLAME_S
        while dead is None and (left_s := until_s - monotonic()) > 0:
            for connection in _readable(ranks, left_s):
                process = ranks.pop(connection)
                try:
                    if isinstance(message := process.channel.receive(), protocol.Failed):
                        self._note(process.rank, message)
                    else:
                        ranks[connection] = process
                except (EOFError, OSError):
                    dead = process
            if not ranks:
                break
        self._end_all(self._verdict(dead))

    def _end_all(self, lost: Exception) -> None:
        end_all(self._processes, 0.0)
        with self._changed:
            self._lost = lost
            self._changed.notify_all()

    def _verdict(self, dead: RankProcess | None) -> Exception:
        """The error that all calls raise from now on; it names the rank that failed first."""
        if dead is not None:
            name = f"rank {dead.rank} of {self.num_ranks} (process {dead.process.pid})"
            return EngineLost(f"{name} {dead.how_it_ended(EXIT_S)}; the others were stopped, too")
        rank, failed = min(self._failures, key=lambda each: each[1].at_s)
        name = f"rank {rank} of {self.num_ranks}"
        match failed.error:
            case ConfigError() | UnsupportedModel() as error:
                return type(error)(f"{name}: {error}")
            case OutOfDeviceMemory() as error:
                return EngineLost(f"{name} is out of device memory: {error}")
            case _:
                log.error("%s failed\n%s", name, failed.traceback)
                return EngineLost(f"{name} failed: {failed.words}; all ranks were stopped")

    def kill(self) -> None:
        """End all ranks at once."""
        self._is_closing = True
        self._join(0.0)

    def close(self) -> None:
        """End all ranks; none may have work left."""
        self._is_closing = True
        if self._lost is None:
            for process in self._processes:
                with suppress(OSError):
                    process.channel.send(protocol.CloseRank())
        self._join(CLOSE_S)

    def _join(self, within_s: float) -> None:
        end_all(self._processes, within_s)
        self._reader.join(CLOSE_S)
        for process in self._processes:
            process.channel.close()


def _readable(ranks: dict[Connection, RankProcess], within_s: float | None) -> list[Connection]:
    return [each for each in wait(list(ranks), within_s) if isinstance(each, Connection)]
