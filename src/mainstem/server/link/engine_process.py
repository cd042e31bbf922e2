"""The process of the engine, and how the front (the server's process that speaks HTTP) starts it.

    EngineProcess.start  -- BeginEngine -->  python -m mainstem.server.link.engine_process SOCKET

The two processes communicate over a pair of sockets that no other process has. When one process
ends for any reason, the other sees that the connection is closed.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from time import monotonic

from mainstem.core.environment import SWITCH_S, child_environment
from mainstem.core.errors import MainstemError
from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.server.http.logs import set_up_logs
from mainstem.server.link.engine_host import EngineHost
from mainstem.server.link.kv_events import KvEventPublisher
from mainstem.server.link.protocol import (
    BeginEngine,
    NotMade,
    Ready,
    decode_begin,
    decode_report,
    frame,
    read_frame,
)
from mainstem.text.grammar import Grammars
from mainstem.text.tokenizer import Tokenizer

MODULE = "mainstem.server.link.engine_process"
START_S = 3600.0  # limit for loading a model
LOOK_S = 0.5  # how often a process that loads a model checks whether its front is still there

log = logging.getLogger("mainstem.server")

MakeEngine = Callable[[BeginEngine, EventBus], tuple[Engine, Grammars]]


class EngineNotMade(MainstemError):
    """The engine's process could not make the engine; the message says why."""


class EngineGone(Exception):
    """The engine's process has ended without giving a reason."""


# --- in the front --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process for an engine, at the other end of `connection`."""

    connection: socket.socket
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, begin: BeginEngine, module: str = MODULE) -> "EngineProcess":
        """Start a process, which begins to make its engine."""
        ours, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C reaches only the front, which stops the engine itself.
            # The process imports modules from the same folders as the front, and no others (-P).
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env=child_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        with suppress(ConnectionError):  # `wait_ready` reports that it has ended
            ours.sendall(frame(begin))
        return cls(ours, process)

    def wait_ready(self) -> Ready:
        """Wait until the engine is ready. If this raises EngineNotMade, the process has ended."""
        began_s = monotonic()
        try:
            ready = first_word(self.connection)
        except BaseException as error:
            self.connection.close()
            if not isinstance(error, EngineGone):
                self.process.kill()
            how = self.end(None)
            if isinstance(error, EngineGone):
                raise EngineNotMade(f"the engine's process ended: {how}") from None
            raise
        facts = {"pid": self.process.pid, "seconds": round(monotonic() - began_s, 1)}
        log.info("engine started", extra={"facts": facts})
        return ready

    def kill(self) -> None:
        """Kill it; the connection closes."""
        self.process.kill()

    def end(self, within_s: float | None) -> str:
        """Wait until the process ends and return how; it is killed after `within_s` (None:
        never)."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return _how(status)


def first_word(connection: socket.socket) -> Ready:
    """The first message of an engine; raises EngineNotMade, EngineGone."""
    connection.settimeout(START_S)
    try:
        message = read_frame(connection)
    except TimeoutError:
        raise EngineNotMade(f"the engine was not made within {START_S:.0f} s") from None
    except ConnectionError:
        message = None
    if message is None:
        raise EngineGone
    said = decode_report(message)
    if isinstance(said, NotMade):
        raise EngineNotMade(said.reason)
    assert isinstance(said, Ready), "the first message of an engine must be Ready"
    return said


def _how(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


# --- in the engine's process ---------------------------------------------------------------------


def main(argv: list[str], make: MakeEngine | None = None) -> int:
    """Make the engine that the front asks for, and run it until the front leaves."""
    # ignored: a signal to all processes reaches the front, too, which stops the engine
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    with closing(socket.socket(fileno=int(argv[0]))) as connection, ExitStack() as opened:
        message = read_frame(connection)
        if message is None:
            return 1  # the front has left
        begin = decode_begin(message)
        set_up_logs(begin.log_level)
        bus = EventBus()
        kv_events: KvEventPublisher | None = None
        is_made = Flag()
        Thread(target=_end_with_front, args=(connection, is_made), daemon=True).start()
        try:
            if begin.kv_events is not None:
                kv_events = opened.enter_context(closing(KvEventPublisher(begin.kv_events, bus)))
            engine, grammars = (make or make_engine)(begin, bus)
        except MainstemError as error:
            connection.sendall(frame(NotMade(str(error))))
            return 2
        finally:
            is_made.set()
        try:
            EngineHost(engine, connection, grammars, kv_events).run()
        except Exception:
            log.exception("the engine failed and stops")
            return 1
    return 0


def make_engine(begin: BeginEngine, bus: EventBus) -> tuple[Engine, Grammars]:
    """The engine of a model, and the compiler of forms for its vocabulary."""
    from mainstem.engine.build import build_engine  # noqa: PLC0415  # imports torch

    folder = Path(begin.folder)
    grammars = Grammars(Tokenizer.load(folder, begin.config.model.chat_template))
    return build_engine(folder, begin.config, bus), grammars


def _end_with_front(connection: socket.socket, is_made: Flag) -> None:
    """End the process if the front leaves while the model is being loaded."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    while not is_made.wait(LOOK_S):
        if poll.poll(0):
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
