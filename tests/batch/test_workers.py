"""`mainstem batch --workers`: servers answer as one engine does, each row once despite kills."""

import asyncio
import json
import random
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from time import sleep
from unittest.mock import Mock

import pytest
from httpx import ConnectError

from mainstem.batch import http_worker
from mainstem.batch.bundles import Bundle, Bundles, Task
from mainstem.batch.driver import Desk, WorkerLost
from mainstem.batch.http_worker import HttpWorker, _Answer
from mainstem.cli.batch import main
from mainstem.cli.batch_workers import join_ray_address
from mainstem.core.errors import ConfigError
from mainstem.core.events import StepFinished
from mainstem.core.json import AnyJson, Json
from tests.batch.test_kill import SOME_FAILED, essences, run, write_input
from tests.fake_engines import FakeEngines, a_tokenizer
from tests.server.checked_serve import SLOW_STEP_S
from tests.server.process import a_process
from tests.server.running import ALICE, Running, a_server
from tests.waiting import until

NUM_ROWS = 100


def engines() -> FakeEngines:
    return FakeEngines(num_pages=512, max_model_len=800)


def rows(count: int = NUM_ROWS) -> list[AnyJson]:
    """Questions over documents: chats and prompts, greedy and sampled, with one answer or two."""
    found: list[AnyJson] = []
    for index in range(count):
        text = f"document {index % 7} and all that is in it, word for word; question {index}"
        row: AnyJson = {
            "custom_id": f"row {index}",
            "max_tokens": 3 + index % 8,
            "ignore_eos": True,
        }
        row["temperature"] = index % 2
        if index % 3:
            row["prompt"] = text
        else:
            row["messages"] = [{"role": "user", "content": text}]
        if index % 5 == 0:
            row["n"], row["model"] = 2, "another name"
        found.append(row)
    return [*found, found[2] | {"custom_id": "a copy"}]


def write(path: Path, lines: list[AnyJson]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def answer(source: Path, output: Path, *flags: str) -> int:
    argv = [str(source), "-o", str(output), "--no-progress", "--window-mib", "64", *flags]
    return main(argv, engines(), lambda _: a_tokenizer())


def answers(path: Path) -> list[str]:
    """Rows as a sorted list, without marks, times, token counts and the server's fingerprint."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        del row["mainstem"]
        if row["response"] is not None:
            body = row["response"]["body"]
            for name in ("created", "usage", "system_fingerprint"):
                body.pop(name, None)
        found.append(json.dumps(row, sort_keys=True))
    return sorted(found)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Running]]:
    with ExitStack() as opened:
        yield [opened.enter_context(a_server(engines=engines())) for _ in range(2)]


def urls(running: list[Running]) -> str:
    return ",".join(server.url for server in running)


def test_two_servers_answer_as_one_engine_does(servers: list[Running], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows())
    alone, spread = tmp_path / "alone.jsonl", tmp_path / "spread.jsonl"
    assert answer(source, alone, "--summary-json", str(tmp_path / "alone.json")) == 0
    seen = ["--workers", urls(servers), "--summary-json", str(tmp_path / "spread.json")]
    assert answer(source, spread, *seen) == 0
    assert answers(spread) == answers(alone)
    assert len(answers(spread)) == NUM_ROWS + 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "spread"))
    assert two["complete"]
    assert two["deduplicated"] == 1
    same = ("rows", "answered", "failed", "prompt_tokens", "generated_tokens")
    assert [one[name] for name in same] == [two[name] for name in same]
    assert all(server.engines.samplings for server in servers), "both servers must have answered"
    for server in servers:
        server.settle()


def test_flags_reach_the_servers(servers: list[Running], tmp_path: Path) -> None:
    lines = [{"prompt": f"say {index}"} for index in range(5)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = ["--max-tokens", "5", "--temperature", "0", "--ignore-eos", "--no-plan"]
    assert answer(source, output, "--workers", urls(servers), *flags) == 0
    for line in output.read_text().splitlines():
        body = json.loads(line)["response"]["body"]
        assert body["usage"]["completion_tokens"] == 5
        assert body["model"] == "smollm2"


def test_rows_that_fail_are_error_rows(servers: list[Running], tmp_path: Path) -> None:
    lines: list[AnyJson] = [
        {"prompt": "right", "max_tokens": 2},
        {"prompt": "wrong", "echo": True},
        {"prompt": "x" * 900},
        {"prompt": "no", "app": "nobody"},
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert answer(source, output, "--workers", urls(servers)) == 1
    found = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    codes = [(found[f"line-{n}"]["error"] or {}).get("code") for n in (1, 2, 3, 4)]
    assert codes == [None, "unknown_field", "prompt_too_long", "app_not_found"]
    assert found["line-3"]["error"]["line"] == 3


def test_rows_that_a_busy_server_refuses_are_sent_again(tmp_path: Path) -> None:
    from mainstem.server.http.limits import ServerLimits  # noqa: PLC0415

    source, output = write(tmp_path / "in.jsonl", rows(30)), tmp_path / "out.jsonl"
    with a_server(engines=engines(), limits=ServerLimits(open_answers=4)) as server:
        assert answer(source, output, "--workers", server.url) == 0
    assert len(answers(output)) == 31


def test_keys_come_from_a_file_and_a_server_that_refuses_them_gets_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], servers: list[Running]
) -> None:
    source, output = write(tmp_path / "in.jsonl", rows(10)), tmp_path / "out.jsonl"
    key = tmp_path / "key"
    key.write_text(f"{ALICE}\n")
    with a_server(engines=engines(), has_keys=True) as locked:
        at_locked = ["--workers", locked.url]
        assert answer(source, output, *at_locked) == 1
        shown = capsys.readouterr().err
        assert f"{locked.url} is no longer used: HTTP 401" in shown
        assert "no worker is left" in shown
        assert output.read_text() == ""
        both = ["--workers", f"{locked.url},{servers[0].url}", "--resume"]
        assert answer(source, output, *both) == 0, "the other server answers the rows"
        assert "is no longer used" in capsys.readouterr().err
        output.unlink()
        assert answer(source, output, *at_locked, "--worker-key-file", str(key)) == 0
    assert len(answers(output)) == 11


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--workers", "localhost:8000"], "not of the form http"),
        (["--workers", "http://user:word@host"], "not of the form http"),
        (["--workers", ","], "one server or more"),
        (["--workers", "http://a,http://a"], "each once"),
        (["--worker-key-file", "k"], "needs --workers"),
        (["--ray-workers", "2"], "needs --ray"),
        (["--workers", "http://a", "--worker-rows", "0"], "at least 1"),
        (["--worker-rows", "8"], "needs --workers"),
        (["--workers", "http://a", "--max-seqs", "8"], "give --max-seqs to the servers"),
        (["--host-gb", "0", "--preload", "2"], "preload=2 would have no effect"),
        (["--no-plan", "--levels", "1"], "no effect with --no-plan"),
        (["--no-plan", "--no-reorder"], "no effect with --no-plan"),
        (["--workers", "http://a", "--worker-rows", "999999999"], "open files"),
        (["--workers", "http://a", "--worker-key-file", "/nowhere/k"], "cannot be read"),
    ],
)
def test_wrong_calls_are_refused(tmp_path: Path, flags: list[str], reason: str) -> None:
    source = write(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(ConfigError, match=reason):
        answer(source, tmp_path / "out.jsonl", *flags)
    assert not (tmp_path / "out.jsonl").exists()


def test_without_a_client_for_http_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "mainstem.batch.http_worker", raising=False)
    source = write(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(ConfigError, match=r"--workers needs httpx: .*mainstem\[server\]"):
        answer(source, tmp_path / "out.jsonl", "--workers", "http://a")


def test_the_word_after_the_ray_flag_is_its_value_only_if_it_is_an_address() -> None:
    assert join_ray_address(["--ray", "in.jsonl"]) == ["--ray=local", "in.jsonl"]
    assert join_ray_address(["--ray", "auto", "in"]) == ["--ray=auto", "in"]
    assert join_ray_address(["--ray", "ray://head:10001"]) == ["--ray=ray://head:10001"]
    assert join_ray_address(["in", "--ray"]) == ["in", "--ray=local"]
    assert join_ray_address(["--ray=10.0.0.1:6379"]) == ["--ray=10.0.0.1:6379"]


def test_a_worker_without_bundles_steals_from_the_end_of_the_longest_share() -> None:
    bundles = Bundles(2)
    first, second, third, mine = (Bundle((), seconds) for seconds in (3.0, 2.0, 1.0, 1.0))
    for bundle in (first, second, third):
        bundles.add(1, bundle)
    bundles.add(0, mine)
    assert bundles.take(0) is mine
    assert bundles.take(0) is None
    assert bundles.take_from_others() is third
    assert bundles.take(1) is first
    task = Task(*(None,) * 4)  # type: ignore[arg-type]  # the task is not run
    bundles.give_back([task])
    returned = bundles.take(1)
    assert returned is not None
    assert list(returned.tasks) == [task], "a returned task goes first"
    assert bundles.take_from_others() is second
    assert not bundles
    assert bundles.take_from_others() is None


# --- kills ---------------------------------------------------------------------------------------


def check_driver_kills(tmp_path: Path, num_kills: int, servers: list[Running]) -> None:
    """Kill points are bytes of the output, so most of them cut a line."""
    source, whole, output = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_input(source)
    assert run(source, whole) == SOME_FAILED
    flags = ["--workers", urls(servers), "--worker-rows", "8"]
    points = random.Random(num_kills).sample(range(1, whole.stat().st_size * 9 // 10), num_kills)
    for point in sorted(points):
        assert run(source, output, point, flags=flags) == -signal.SIGKILL
    assert run(source, output, flags=flags) == SOME_FAILED
    assert without_marks(output) == without_marks(whole)


def without_marks(path: Path) -> list[str]:
    """Rows without the fields in which engines name their weights, and servers their model."""
    found = []
    for line in essences(path):
        row = json.loads(line)
        del row["mainstem"]
        if row["response"] is not None:
            row["response"]["body"].pop("system_fingerprint", None)
        found.append(json.dumps(row, sort_keys=True))
    return sorted(found)


def test_two_kills_of_the_driver_lose_no_answer(tmp_path: Path, servers: list[Running]) -> None:
    check_driver_kills(tmp_path, 2, servers)


@pytest.mark.slow
def test_ten_kills_of_the_driver_lose_no_answer(tmp_path: Path, servers: list[Running]) -> None:
    check_driver_kills(tmp_path, 10, servers)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def check_worker_kills(tmp_path: Path, lasting: Running, num_kills: int, num_rows: int) -> None:
    """Two servers are killed in turn while they answer rows. A killed server is started again at
    the same address, except after the last two kills. A third server keeps running."""
    source, output = write(tmp_path / "in.jsonl", rows(num_rows)), tmp_path / "out.jsonl"
    alone, moments = tmp_path / "alone.jsonl", random.Random(num_kills)
    assert answer(source, alone) == 0
    ports = [free_port(), free_port()]
    num_killed = 0
    with ExitStack() as opened:
        flags = [["--port", str(port), "--served-model-name", "fake"] for port in ports]
        processes = [opened.enter_context(a_process(each, "slow")) for each in flags]
        all_killed = Event()

        def answer_the_last_rows_after_the_kills(_: StepFinished) -> None:
            sleep(SLOW_STEP_S)
            if num_answered() > num_rows // 2:
                all_killed.wait(300)

        lasting.engines.at_step = answer_the_last_rows_after_the_kills

        def num_answered() -> int:
            return output.read_bytes().count(b"\n") if output.exists() else 0

        def kill_some() -> None:
            nonlocal num_killed
            try:
                until(lambda: num_answered() > 0)
                for kill in range(num_kills):
                    sleep(moments.random() / 4)
                    processes[kill % 2].kill()
                    num_killed += num_answered() < num_rows
                    if num_kills - kill > 2:
                        again = a_process(flags[kill % 2], "slow")
                        processes[kill % 2] = opened.enter_context(again)
            finally:
                all_killed.set()

        killer = Thread(target=kill_some)
        killer.start()
        addresses = ",".join([*(f"http://127.0.0.1:{port}" for port in ports), lasting.url])
        status = answer(source, output, "--workers", addresses, "--worker-rows", "4")
        killer.join()
        lasting.settle()
    assert status == 0
    assert num_killed == num_kills, "the job ended before all kills"
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(found) == sorted(row["custom_id"] for row in rows(num_rows))
    assert answers(output) == answers(alone)


def test_two_kills_of_a_worker_lose_no_answer(tmp_path: Path, servers: list[Running]) -> None:
    check_worker_kills(tmp_path, servers[0], 2, 100)


@pytest.mark.slow
def test_ten_kills_of_a_worker_lose_no_answer(tmp_path: Path, servers: list[Running]) -> None:
    check_worker_kills(tmp_path, servers[0], 10, 1000)


class Restarting(HttpWorker):
    """A worker whose server refuses connections twice, is loading once, and is then ready."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None, 1, lambda _, body: body)
        self.replies = [None, None, (503, "the model is loading"), (200, "")]

    async def _request(self, method: str, path: str, body: Json | None) -> _Answer:
        if path == "/v1/models":
            return _Answer(200, {"data": [{"id": "fake"}]}, 0.0)
        if (reply := self.replies.pop(0)) is None:
            raise ConnectError("All connection attempts failed")
        status, message = reply
        return _Answer(status, {"error": {"message": message}}, 0.0)


def test_a_lost_server_is_reported_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_worker, "RETRY_S", 0.0)
    told: list[str] = []
    desk = Mock(spec=Desk, say=told.append, take=Mock(side_effect=WorkerLost("the test ends")))
    with pytest.raises(WorkerLost, match="the test ends"):
        asyncio.run(Restarting().work(desk))
    assert told == [
        "is not ready (All connection attempts failed); it gets no rows, and is tried again for "
        "60 s",
        "is ready; it gets rows",
    ]
