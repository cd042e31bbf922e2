"""The process that the engine lives in, and how the front starts one.

    EngineProcess.launch  -- socket pair, Begin -->  python -m mainstem.server.engine_process FD

The two talk over a pair of sockets that nobody else has. When one of them ends, in whatever way,
the other sees the connection close.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from time import monotonic

from mainstem.core.config import SWITCH_S, child_environment
from mainstem.core.errors import MainstemError
from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.server.engine_host import RECEIVE_BYTES, EngineHost
from mainstem.server.logs import set_up_logs
from mainstem.server.messages import (
    Begin,
    NotMade,
    Ready,
    Unframer,
    decode_begin,
    decode_report,
    frame,
)
from mainstem.text.grammar import Grammars
from mainstem.text.tokenizer import Tokenizer

MODULE = "mainstem.server.engine_process"
LOOK_S = 0.5  # how often a process that loads a model looks whether its front is still there

log = logging.getLogger("mainstem.server")

MakeEngine = Callable[[Begin], tuple[Engine, Grammars]]


class EngineNotMade(MainstemError):
    """The engine's process could not make the engine; the message says why."""


class EngineGone(Exception):
    """The engine's process has ended and has not said why."""


# --- in the front --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process with an engine that is ready, at the other end of `connection`."""

    connection: socket.socket
    ready: Ready
    process: subprocess.Popen[bytes]

    @classmethod
    def launch(cls, begin: Begin, module: str = MODULE) -> "EngineProcess":
        """Start a process and wait for its engine; raises EngineNotMade."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the front, which tells the engine in its own time.
            # Modules come from where the front has them, and from no other folder (-P).
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env=child_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        began_s = monotonic()
        try:
            ours.sendall(frame(begin))
            launched = cls(ours, first_word(ours), process)
        except BaseException as error:
            ours.close()
            if isinstance(error, EngineGone | ConnectionError):
                how = _how(process.wait())
                raise EngineNotMade(f"the engine's process ended: {how}") from None
            process.kill()
            process.wait()
            raise
        facts = {"pid": process.pid, "seconds": round(monotonic() - began_s, 1)}
        log.info("engine started", extra={"facts": facts})
        return launched

    def end(self, within_s: float | None) -> str:
        """Wait for its end, and how it came; killed if that takes too long (None: never)."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return _how(status)


def first_word(connection: socket.socket) -> Ready:
    """What an engine says when it is made; raises EngineNotMade, EngineGone."""
    unframer = Unframer()
    while True:
        try:
            data = connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EngineGone
        for message in unframer.push(data):
            said = decode_report(message)
            if isinstance(said, NotMade):
                raise EngineNotMade(said.reason)
            assert isinstance(said, Ready), "the engine says more than it was asked"
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
    """Make the engine that the front asks for, and run it until the front is gone."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the front has heard it, too, and says when
        signal.signal(each, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    with closing(socket.socket(fileno=int(argv[0]))) as connection:
        begin = _read_begin(connection)
        set_up_logs(begin.log_level)
        is_made = Flag()
        Thread(target=_end_with_front, args=(connection, is_made), daemon=True).start()
        try:
            engine, grammars = (make or make_engine)(begin)
        except MainstemError as error:
            connection.sendall(frame(NotMade(str(error))))
            return 2
        finally:
            is_made.set()
        try:
            EngineHost(engine, connection, grammars).run()
        except Exception:
            log.exception("the engine is lost")
            return 1
    return 0


def make_engine(begin: Begin) -> tuple[Engine, Grammars]:
    """The engine of a model, and what compiles forms for its vocabulary."""
    from mainstem.engine.build import build_engine  # noqa: PLC0415  # brings torch

    folder = Path(begin.folder)
    grammars = Grammars(Tokenizer.load(folder, begin.config.model.chat_template))
    return build_engine(folder, begin.config, EventBus()), grammars


def _read_begin(connection: socket.socket) -> Begin:
    unframer = Unframer()
    while data := connection.recv(RECEIVE_BYTES):
        for message in unframer.push(data):
            return decode_begin(message)
    raise SystemExit("the front has left")


def _end_with_front(connection: socket.socket, is_made: Flag) -> None:
    """Nobody needs a model whose front has gone while it was loaded."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    while not is_made.wait(LOOK_S):
        if poll.poll(0):
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
