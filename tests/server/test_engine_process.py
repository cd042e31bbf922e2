"""The engine's process ends, in whatever way: clients hear of it, and another one takes over."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest

from mainstem.core.config import EngineConfig, ModelConfig
from mainstem.server.engine_process import EngineNotMade, EngineProcess
from mainstem.server.messages import Begin, frame
from tests.batch.fake_batch import a_tokenizer
from tests.server.process import Process, a_process
from tests.server.running import Json, until

NUM_STREAMS = 50
APP = "Be brief. "


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server whose engine, a fake one, has a process of its own."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "app.txt").write_text(APP)
    flags = ["--data-dir", str(folder / "data"), "--app", f"brief={folder / 'app.txt'}"]
    with a_process(flags, "split") as process:
        yield process


class Stream:
    """A client that reads a stream on a thread; times its last event."""

    def __init__(self, process: Process, number: int) -> None:
        self.events: list[str] = []
        self.last_s = 0.0
        body = json.dumps({
            "messages": [{"role": "user", "content": f"stream {number}"}],
            "stream": True, "max_tokens": 3000, "ignore_eos": True,
        }).encode()  # fmt: skip
        host, port = process.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._connection = socket.create_connection((host, int(port)), timeout=30)
        self._connection.sendall(head.encode() + body)
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._connection, self._connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    self.events.append(line.removeprefix(b"data: ").decode())
                    self.last_s = monotonic()

    def end(self) -> str:
        """The last event, when the server has closed the stream."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream did not end"
        return self.events[-1]


def chat(process: Process, content: str, **fields: object) -> Json:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    response = process.request("POST", "/v1/chat/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
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
    killed_s = monotonic()
    for stream in streams:
        error = json.loads(stream.end())["error"]
        assert "engine's process ended" in error["message"]
        assert stream.last_s - killed_s < 2
    until(lambda: process.engine_pid != engine and is_ready(process))


def check_repeated_kills(process: Process, times: int) -> None:
    chat(process, "remember me", session_id="kept")
    before = chat(process, "the same question", model="smollm2:brief")
    kill_under_load(process)  # what is opened once stays open
    num_files = open_files(process)
    for _ in range(times - 1):
        kill_under_load(process)
    until(lambda: open_files(process) <= num_files)
    sessions = process.request("GET", "/v1/sessions").json()["data"]
    assert "kept" in [session["id"] for session in sessions]
    after = chat(process, "the same question", model="smollm2:brief")
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(APP)  # filled again
    assert process.request("GET", "/live").json()["running"] == 0
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text()
    assert len(children.split()) <= 1


def test_a_killed_engine_is_replaced_and_nothing_is_lost(split: Process) -> None:
    check_repeated_kills(split, times=2)


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again(split: Process) -> None:
    check_repeated_kills(split, times=20)


def test_while_there_is_no_engine_requests_hear_so(split: Process) -> None:
    os.kill(split.engine_pid, signal.SIGKILL)
    until(lambda: not is_ready(split))
    body = {"prompt": "x", "max_tokens": 2}
    response = split.request("POST", "/v1/completions", json=body)
    assert response.status_code in (200, 503)  # it may be back already
    if response.status_code == 503:
        assert "restarting" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
    assert split.request("GET", "/health").status_code == 200
    until(lambda: is_ready(split))


def test_an_engine_does_not_outlive_its_front() -> None:
    with a_process([], "split") as process:
        engine = process.engine_pid
        process.kill()
        until(lambda: not Path(f"/proc/{engine}").exists() or is_zombie(engine))


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_front_that_dies_takes_a_loading_engine_with_it() -> None:
    """It is still making its engine, and does not read what it is told."""
    ours, theirs = socket.socketpair()
    code = (
        "import sys, time\n"
        "from mainstem.server.engine_process import main\n"
        "main(sys.argv[1:], lambda begin: time.sleep(60))\n"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as loading:
        theirs.close()
        ours.sendall(frame(Begin(EngineConfig(), "", "error")))
        sleep(1.5)
        ours.close()
        assert loading.wait(10) != 0


def test_what_is_wrong_with_a_model_is_told_by_the_front(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchFamily"]}')
    (tmp_path / "tokenizer.json").write_text(a_tokenizer().to_json())
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
    with pytest.raises(EngineNotMade, match="NoSuchFamily"):
        EngineProcess.launch(Begin(config, str(tmp_path), "error"))


def test_a_process_that_ends_at_once_is_told() -> None:
    begin = Begin(EngineConfig(), "", "error")
    with pytest.raises(EngineNotMade, match="exit status 1"):
        EngineProcess.launch(begin, "no_such_module_anywhere")
