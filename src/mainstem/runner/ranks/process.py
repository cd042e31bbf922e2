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
        with suppress(OSError):  # that it has ended is seen by whoever listens
            line.send(begin)
        return cls(begin.shard.rank, line, process)

    def end(self, within_s: float) -> str:
        """Wait until it ends, killed after `within_s`; returns how it ended."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
