"""A rank's process, as the engine's process sees it: started, killed, and how it ended."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from mainstem.core.config import rank_environment
from mainstem.runner.ranks.messages import Begin, Line

MODULE = "mainstem.runner.ranks.rank_process"
KILL_S = 2.0  # for a killed process to be gone


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process at the other end of `line`."""

    rank: int
    line: Line
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, begin: Begin, module: str = MODULE) -> "RankProcess":
        """A process that begins to load its part."""
        ours, theirs = socket.socketpair()
        with theirs:
            # in a session of its own: Ctrl-C goes to the engine's process, which ends its ranks
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                env=rank_environment(),
                pass_fds=[theirs.fileno(), begin.meeting_fd, begin.slab_fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that of the engine's process may be a file of answers
                start_new_session=True,
            )
        line = Line(ours.detach())
        with suppress(OSError):  # the thread that reads reports sees that it has ended
            line.send(begin)
        return cls(begin.shard.rank, line, process)

    def how_it_ended(self, within_s: float) -> str:
        """In words; waits a little for a process that is about to end."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"


def end_all(processes: Sequence[RankProcess], within_s: float) -> None:
    """Wait until they end; after `within_s` they are killed. A device may hold up even that, for
    longer than anybody should wait."""
    _wait_all(processes, within_s)
    for process in processes:
        process.process.kill()
    _wait_all(processes, KILL_S)


def _wait_all(processes: Sequence[RankProcess], within_s: float) -> None:
    until_s = monotonic() + within_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, until_s - monotonic()))
