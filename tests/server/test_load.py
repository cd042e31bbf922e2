"""Two hundred clients leave about every fifth stream early; another client polls /health."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

import httpx
import pytest

from tests.waiting import until

pytestmark = pytest.mark.serial

NUM_CLIENTS = 200
LEAVING = 0.2
SYSTEM = "All of these conversations begin with the same few words about nothing much. "


@contextmanager
def a_process(kind: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """A server that logs to a file: a pipe that is not read would block it."""
    command = [sys.executable, "-m", "tests.server.checked_serve", kind, "--port", "0"]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as popen:
        try:
            until(lambda: '"ready"' in log.read_text())
            lines = map(json.loads, log.read_text().splitlines())
            address = httpx.URL(next(line["url"] for line in lines if "url" in line))
            assert address.port is not None
            yield popen, address.host, address.port
        finally:
            popen.kill()


@dataclass
class Tally:
    """The results of the clients."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_left: int = 0
    num_whole: int = 0
    health_s: list[float] = field(default_factory=list)


class Crowd:
    """The clients. They use plain sockets, so that two hundred of them are not the bottleneck."""

    def __init__(self, host: str, port: int, end_s: float) -> None:
        self._address = (host, port)
        self._end_s = end_s
        self.tally = Tally()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(Random(number)))

    async def _client(self, random: Random) -> None:
        while monotonic() < self._end_s:
            leaves_after = random.randrange(1, 20) if random.random() < LEAVING else None
            body = {
                "prompt": f"{SYSTEM}{random.randrange(50)} bottles",
                "max_tokens": random.randrange(5, 40),
                "stream": True,
                "ignore_eos": True,
            }
            await self._stream(json.dumps(body).encode(), leaves_after)

    async def _stream(self, body: bytes, leaves_after: int | None) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(300):
                self.tally.statuses[int((await reader.readline()).split()[1])] += 1
                num_events = 0
                is_whole = False
                while line := await reader.readline():
                    num_events += line.startswith(b"data: ")
                    is_whole |= line == b"data: [DONE]\n"
                    if num_events == leaves_after:
                        self.tally.num_left += 1
                        return
                assert is_whole, "a stream ended early"
                self.tally.num_whole += 1
        finally:
            writer.close()

    async def _watch(self) -> None:
        while monotonic() < self._end_s:
            began_s = monotonic()
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(b"GET /health HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n\r\n")
            status = int((await reader.readline()).split()[1])
            self.tally.health_s.append(monotonic() - began_s)
            self.tally.statuses[status] += 1
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "seconds", "most_health_s"),
    [
        # a fake engine shares the server's interpreter lock; a real one has its own process
        ("fake", 2, 30.0),
        pytest.param("real", 60, 1.0, marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
)
def test_many_clients_that_connect_and_disconnect_lose_nothing(
    kind: str, seconds: float, most_health_s: float, tmp_path: Path
) -> None:
    with a_process(kind, tmp_path / "log") as (popen, host, port):
        crowd = Crowd(host, port, monotonic() + seconds)
        asyncio.run(crowd.run())
        tally = crowd.tally
        assert set(tally.statuses) == {200}
        assert tally.num_left > 5
        assert tally.num_whole > 50
        health_s = sorted(tally.health_s)
        p99_s = health_s[int(len(health_s) * 0.99)]
        print(f"{tally.num_whole} whole, {tally.num_left} left, health p99 {p99_s * 1e3:.1f} ms")
        assert p99_s < most_health_s
        url = f"http://{host}:{port}/live"
        for _ in range(100):
            live = httpx.get(url).json()
            if live["running"] == live["waiting"] == 0:
                break
        assert live["pages"]["held"] == 0
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(60) == 0, "a page was lost, or the server did not stop"
