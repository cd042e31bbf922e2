"""`mainstem serve` as a separate process, with FakeRunner or a model; tests stop or kill it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

import httpx

from mainstem.core.json import AnyJson
from tests.waiting import LIMIT_S, until


@dataclass
class Process:
    """A server process and what it has logged."""

    popen: subprocess.Popen[str]
    lines: list[AnyJson] = field(default_factory=list)
    _client: httpx.Client | None = None

    @property
    def url(self) -> str:
        return str(next(line["url"] for line in self.lines if line["event"] == "listening"))

    @property
    def engine_pid(self) -> int:
        """Process id of the last engine that was started."""
        started = [line["pid"] for line in self.lines if line["event"] == "engine started"]
        return int(started[-1])

    def has_said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.lines)

    def request(self, method: str, path: str, **fields: object) -> httpx.Response:
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=LIMIT_S, verify=False)
        return self._client.request(method, path, **fields)  # type: ignore[arg-type]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def stop(self) -> int:
        """Stop the server with SIGTERM; returns its exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(LIMIT_S)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(LIMIT_S)


@contextmanager
def a_process(flags: Sequence[str], kind: str = "fake") -> Iterator[Process]:
    """A server that is ready. It is killed at the end if it still runs."""
    command = [sys.executable, "-m", "tests.server.checked_serve", kind, "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as popen:
        process = Process(popen)
        reader = Thread(target=_read, args=(process,))
        reader.start()
        try:
            until(lambda: process.has_said("ready") or popen.poll() is not None)
            assert popen.poll() is None, process.lines
            yield process
        finally:
            process.close()
            popen.kill()
            popen.wait(LIMIT_S)
            reader.join(30)


def _read(process: Process) -> None:
    assert process.popen.stderr is not None
    for line in process.popen.stderr:
        try:
            process.lines.append(json.loads(line))
        except ValueError:
            process.lines.append({"event": "unreadable", "line": line})
