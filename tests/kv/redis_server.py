"""A real redis-server on a free port, and a proxy that delays or holds bytes and cuts lines."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep

import pytest

from mainstem.kv.bytes import line as line_module
from mainstem.kv.bytes import remote as remote_module
from mainstem.kv.bytes.line import Address, LineError, RemoteLine, Reply
from mainstem.sched import fetching as fetching_module

CHUNK = 1 << 18
LONG_S = 300.0  # a limit that only an error reaches, on any machine


def wait_long(patch: pytest.MonkeyPatch) -> None:
    """A server that answers at all is not given up, however slow the machine is. One that failed is
    tried again after 20 ms."""
    for name in ("CONNECT_S", "OPEN_S", "STALL_S"):
        patch.setattr(line_module, name, LONG_S)
    for name in ("WRITE_LIMIT_S", "ASK_LIMIT_S", "CLOSE_LIMIT_S"):
        patch.setattr(remote_module, name, LONG_S)
    for name in ("PAUSE_S", "MAX_PAUSE_S"):
        patch.setattr(remote_module, name, 0.02)
    for name in ("READ_LIMIT_S", "ALWAYS_PATIENCE_S"):
        patch.setattr(fetching_module, name, LONG_S)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class RedisServer:
    """One server process; its values are lost when it ends."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--unixsocket", str(self.socket), "--dir", str(self._folder),
                *self._options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        until_s = monotonic() + LONG_S
        while True:
            with suppress(LineError):
                self.call("PING")
                return
            assert monotonic() < until_s, "the server does not answer"
            sleep(0.01)

    def call(self, *command: bytes | str | int) -> Reply:
        """Send one command, not through the proxy."""
        line = RemoteLine(Address(f"unix://{self.socket}"))
        (reply,) = line.call([command], LONG_S)
        line.close()
        return reply

    def names(self) -> list[bytes]:
        """The names of all values."""
        found = self.call("KEYS", "*")
        assert isinstance(found, list)
        return found

    def pause(self) -> None:
        """The server hangs; connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self._process is not None
        self.go_on()
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)

    def restart(self) -> None:
        self.stop()
        self.start()


class Proxy:
    """Connections to a server; each direction is delayed by half of `delay_s`."""

    def __init__(self, server_port: int, delay_s: float = 0.0) -> None:
        self._server_port = server_port
        self.delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._is_closed, self._may_pass = Event(), Event()
        self._may_pass.set()
        Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Pass nothing on, in either direction, until `let_go`."""
        self._may_pass.clear()

    def let_go(self) -> None:
        self._may_pass.set()

    def cut(self) -> None:
        """End every connection, in the middle of any transfer."""
        ends, self._open = self._open, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closed.set()
        self.let_go()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                with suppress(OSError):  # the connection is already closed
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                Thread(target=self._take, args=(one, chunks), daemon=True).start()
                Thread(target=self._pass, args=(other, chunks), daemon=True).start()

    def _take(self, end: socket.socket, chunks: "SimpleQueue[tuple[float, bytes]]") -> None:
        chunk = b"more"
        while chunk:
            try:
                chunk = end.recv(CHUNK)
            except OSError:
                chunk = b""
            chunks.put((monotonic() + self.delay_s / 2, chunk))

    def _pass(self, end: socket.socket, chunks: "SimpleQueue[tuple[float, bytes]]") -> None:
        while (item := chunks.get())[1]:
            sleep(max(0.0, item[0] - monotonic()))
            self._may_pass.wait(LONG_S)
            with suppress(OSError):
                end.sendall(item[1])
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def main(argv: Sequence[str]) -> None:
    """A proxy in a separate process: it prints its port and runs until standard input ends."""
    proxy = Proxy(int(argv[0]), float(argv[1]))
    print(proxy.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
