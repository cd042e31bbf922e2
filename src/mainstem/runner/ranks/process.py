"""A rank's process, as the engine's process sees it: started, killed, and how it ended."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

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
                pass_fds=[theirs.fileno(), begin.slab_fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        line = Line(ours.detach())
        with suppress(OSError):  # the thread that reads reports sees that it has ended
            line.send(begin)
        return cls(begin.shard.rank, line, process)

    def end(self, within_s: float) -> None:
        """Wait until it ends; after `within_s` it is killed. A device may hold up even that, for
        longer than anybody should wait."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_S)

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
