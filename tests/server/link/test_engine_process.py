"""When the engine's process ends in any way, clients get an error and another process is
started."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import pytest

from mainstem.core.config import EngineConfig, ModelConfig
from mainstem.core.json import AnyJson
from mainstem.core.snapshot import EngineSnapshot
from mainstem.server.link.answering import EngineFault
from mainstem.server.link.engine_client import MAX_STARTS, EngineClient, EngineState
from mainstem.server.link.engine_process import EngineNotMade, EngineProcess
from mainstem.server.link.protocol import BeginEngine, Ready, frame
from tests.fake_engines import a_tokenizer
from tests.kv.mirror import Mirror
from tests.server.process import Process, a_process
from tests.server.router import TOPIC, Router, apply_plain
from tests.waiting import LIMIT_S, until

NUM_STREAMS = 50
APP = "Be brief. "


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with a fake engine in a separate process."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "app.txt").write_text(APP)
    flags = ["--data-dir", str(folder / "data"), "--app", f"brief={folder / 'app.txt'}"]
    flags += ["--kv-events", f"ipc://{folder}/events", "--kv-events-topic", TOPIC]
    flags += ["--kv-events-replay", f"ipc://{folder}/replay"]
    with a_process(flags, "split") as process:
        yield process


class Stream:
    """A client that reads a stream on a thread."""

    def __init__(self, process: Process, number: int) -> None:
        self.events: list[str] = []
        body = json.dumps({
            "messages": [{"role": "user", "content": f"stream {number}"}],
            "stream": True, "max_tokens": 3000, "ignore_eos": True,
        }).encode()  # fmt: skip
        host, port = process.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._connection = socket.create_connection((host, int(port)), timeout=300)
        self._connection.sendall(head.encode() + body)
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._connection, self._connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    self.events.append(line.removeprefix(b"data: ").decode())

    def end(self) -> str:
        """The last event, when the server has closed the stream."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the stream did not end"
        return self.events[-1]


def chat(process: Process, content: str, **fields: object) -> AnyJson:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    response = process.request("POST", "/v1/chat/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: AnyJson = response.json()
    return answer


def is_ready(process: Process) -> bool:
    return process.request("GET", "/ready").status_code == 200


def open_files(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.popen.pid}/fd"))


def kill_under_load(process: Process) -> None:
    """SIGKILL in the middle of 50 streams; returns when the server answers again."""
    engine = process.engine_pid
    streams = [Stream(process, number) for number in range(NUM_STREAMS)]
    until(lambda: all(len(stream.events) > 3 for stream in streams))
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        error = json.loads(stream.end())["error"]
        assert "engine's process ended" in error["message"]
    until(lambda: process.engine_pid != engine and is_ready(process))


def check_repeated_kills(process: Process, times: int) -> None:
    chat(process, "remember me", session_id="kept")
    before = chat(process, "the same question", model="smollm2:brief")
    kill_under_load(process)  # the first kill opens files that stay open
    num_files = open_files(process)
    for _ in range(times - 1):
        kill_under_load(process)
    until(lambda: open_files(process) <= num_files)
    sessions = process.request("GET", "/v1/sessions").json()["data"]
    assert "kept" in [session["id"] for session in sessions]
    after = chat(process, "the same question", model="smollm2:brief")
    assert after["choices"] == before["choices"]
    # the app's prompt was computed again
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(APP)
    assert process.request("GET", "/live").json()["running"] == 0
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text()
    assert len(children.split()) <= 1


def test_a_killed_engine_is_replaced_and_open_streams_get_an_error(split: Process) -> None:
    check_repeated_kills(split, times=2)


@pytest.mark.slow
def test_an_engine_that_is_killed_repeatedly_is_replaced_each_time(split: Process) -> None:
    check_repeated_kills(split, times=20)


def test_each_engine_reports_only_its_own_pages_to_routers(split: Process) -> None:
    """The new engine has the same addresses and counts batches from 0. Each router here is new."""

    def told() -> Mirror:
        said = [line for line in split.lines if line["event"] == "publishing KV events"][-1]
        with closing(Router(said["at"], said["replay"], Mirror(4), apply_plain)) as router:
            return router.catch_up()

    def ask(page: list[int]) -> None:
        body = {"prompt": [*page, 0], "max_tokens": 1}
        assert split.request("POST", "/v1/completions", json=body).status_code == 200
        until(lambda: tuple(page) in {tokens for _, tokens in told().tokens.values()})

    until(lambda: is_ready(split))
    ask([1, 2, 3, 4])
    engine = split.engine_pid
    os.kill(engine, signal.SIGKILL)
    until(lambda: split.engine_pid != engine and is_ready(split))
    ask([5, 6, 7, 8])
    assert (1, 2, 3, 4) not in {tokens for _, tokens in told().tokens.values()}


def test_while_there_is_no_engine_requests_get_an_error(split: Process) -> None:
    os.kill(split.engine_pid, signal.SIGKILL)
    until(lambda: not is_ready(split))
    body = {"prompt": "x", "max_tokens": 2}
    response = split.request("POST", "/v1/completions", json=body)
    assert response.status_code in (200, 503)  # the engine may already be back
    if response.status_code == 503:
        assert "restarting" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
    assert split.request("GET", "/health").status_code == 200
    until(lambda: is_ready(split))


def test_an_engine_does_not_outlive_its_server() -> None:
    with a_process([], "split") as process:
        engine = process.engine_pid
        process.kill()
        until(lambda: not Path(f"/proc/{engine}").exists() or is_zombie(engine))


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_engine_that_is_loading_ends_when_its_server_dies() -> None:
    """While it loads its engine, the process does not read messages."""
    ours, theirs = socket.socketpair()
    code = (
        "import sys, time\n"
        "from mainstem.server.link.engine_process import main\n"
        "def load(begin, bus):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(600)\n"
        "main(sys.argv[1:], load)\n"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
    ) as loading:
        theirs.close()
        ours.sendall(frame(BeginEngine(EngineConfig(), "", "error")))
        assert loading.stdout is not None
        assert loading.stdout.readline() == "loading\n"
        ours.close()
        assert loading.wait(LIMIT_S) != 0


def test_the_server_reports_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchFamily"]}')
    (tmp_path / "tokenizer.json").write_text(a_tokenizer().to_json())
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
    with pytest.raises(EngineNotMade, match="NoSuchFamily"):
        EngineProcess.start(BeginEngine(config, str(tmp_path), "error")).wait_ready()


def test_an_engine_process_that_ends_at_once_is_reported() -> None:
    begin = BeginEngine(EngineConfig(), "", "error")
    with pytest.raises(EngineNotMade, match="exit status 1"):
        EngineProcess.start(begin, "no_such_module_anywhere").wait_ready()


def test_a_batch_continues_with_the_next_engine(split: Process) -> None:
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"row {number}", "max_tokens": 200, "ignore_eos": True},
        }
        for number in range(20)
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    files = {"file": ("in.jsonl", data), "purpose": (None, "batch")}
    made = split.request("POST", "/v1/files", files=files).json()
    body = {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = split.request("POST", "/v1/batches", json=body).json()["id"]
    until(lambda: split.request("GET", "/live").json()["running"] > 0)
    os.kill(split.engine_pid, signal.SIGKILL)

    def ended() -> AnyJson | None:
        found: AnyJson = split.request("GET", f"/v1/batches/{batch}").json()
        return found if found["status"] in ("completed", "failed") else None

    until(lambda: ended() is not None)
    found = ended()
    assert found is not None
    assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


# --- the client, with engines that fail to start -------------------------------------------------


class Unready:
    """An engine whose start returns or raises as `wait` does; a kill ends it at once."""

    def __init__(self, wait: Callable[[Flag], Ready]) -> None:
        self.connection, self._theirs = socket.socketpair()
        self._wait = wait
        self._is_killed = Flag()

    def wait_ready(self) -> Ready:
        try:
            return self._wait(self._is_killed)
        except BaseException:
            self.end(None)
            raise

    def kill(self) -> None:
        self._is_killed.set()

    def end(self, within_s: float | None) -> str:
        self._theirs.close()
        self.connection.close()
        return "in a test"


READY = Ready(100, EngineSnapshot(0, 0, 8, 4, 0, 0, ()))


def fails(_: Flag) -> Ready:
    raise RuntimeError("no thread can be started")


def loads_for_ever(is_killed: Flag) -> Ready:
    assert is_killed.wait(LIMIT_S)
    raise EngineNotMade("killed")


def a_client(later: Iterator[Callable[[Flag], Ready]]) -> EngineClient:
    """A client whose first engine is ready; `later` has the `wait` of each engine after that."""
    waits = chain([lambda _: READY], later)
    return EngineClient(a_tokenizer(), lambda: Unready(next(waits)))


def lose(client: EngineClient) -> None:
    assert isinstance(client._launched, Unready)
    client._launched._theirs.close()


def test_failed_starts_are_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.server.link.engine_client.FIRST_RETRY_S", 1e-4)
    states: list[EngineState] = []

    def look(_: Flag) -> Ready:
        states.append(client.state)
        return fails(_)

    def come(_: Flag) -> Ready:
        return READY

    client = a_client(chain(repeat(look, MAX_STARTS + 1), [come]))

    async def run() -> None:
        await client.start()
        lose(client)
        async with asyncio.timeout(LIMIT_S):
            while not states:
                await asyncio.sleep(0.001)
            await client.running()
        assert client.state is EngineState.RUNNING
        await client.close()

    asyncio.run(run())
    assert states[0] is EngineState.RESTARTING
    assert states[-1] is EngineState.FAILED


def test_closing_does_not_wait_for_an_engine_that_is_starting() -> None:
    client = a_client(iter([loads_for_ever]))

    async def run() -> None:
        await client.start()
        lose(client)
        async with asyncio.timeout(LIMIT_S):
            while client.state is not EngineState.RESTARTING:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # the engine is being made
            await client.close()

    asyncio.run(run())


def test_closing_ends_open_calls_with_an_error() -> None:
    client = a_client(iter([]))

    async def run() -> None:
        await client.start()
        call = asyncio.ensure_future(client.clear_cache())
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineFault):
                await call
            await closing

    asyncio.run(run())
