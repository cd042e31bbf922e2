"""The engine process's side of a rank's process: starts it, ends it, and finds out how it ended."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from mainstem.core.environment import rank_environment
from mainstem.runner.ranks.protocol import BeginRank, Channel

MODULE = "mainstem.runner.ranks.rank_process"
KILL_S = 2.0  # a killed process gets this long to end


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process at the other end of `channel`."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, begin: BeginRank, module: str = MODULE) -> "RankProcess":
        """Start a process, which begins to load its part."""
        ours, theirs = socket.socketpair()
        with theirs:
            # in a new session: Ctrl-C goes only to the engine's process, which ends its ranks
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                env=rank_environment(),
                pass_fds=[theirs.fileno(), begin.meeting_fd, begin.slab_fd],
                stdin=subprocess.DEVNULL,
                # the engine process's standard output may be a file of answers
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        channel = Channel(ours.detach())
        # if the process has ended already, the thread that reads reports finds out
        with suppress(OSError):
            channel.send(begin)
        return cls(begin.shard.rank, channel, process)

    def how_it_ended(self, within_s: float) -> str:
        """How the process ended, in words; waits a little if it is about to end."""
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
    """Wait until the processes end; after `within_s` they are killed. The wait for killed processes
    is limited, since a device can block them for long."""
    _wait_all(processes, within_s)
    for process in processes:
        process.process.kill()
    _wait_all(processes, KILL_S)


def _wait_all(processes: Sequence[RankProcess], within_s: float) -> None:
    until_s = monotonic() + within_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, until_s - monotonic()))
