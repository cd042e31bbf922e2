"""Requests and batches meet an engine that goes to sleep, over FakeRunner."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mainstem.core.config import EngineConfig, SchedConfig
from mainstem.core.json import AnyJson
from mainstem.core.weights import Tag, Update
from mainstem.engine.engine import Engine
from tests.fake_engines import expected_text
from tests.server.apis.test_batches import ENDED, a_client, a_row, answers, lines
from tests.server.running import ADMIN, Running, a_server
from tests.waiting import until


class SameWeights:
    """Weights that can sleep."""

    def update(self, update: Update) -> bytes:
        raise NotImplementedError

    def lose(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: frozenset[Tag]) -> None: ...


@contextmanager
def a_sleepy_server(data_dir: Path | None = None) -> Iterator[tuple[Running, Engine]]:
    """A server with small steps, and its engine."""
    config = EngineConfig(sched=SchedConfig(chunk_tokens=8))
    with a_server(data_dir=data_dir, config=config) as running:
        assert running.engines.engine is not None
        engine = running.engines.engine.engine
        engine._weights = SameWeights()
        yield running, engine


def admin(running: Running, path: str, **fields: object) -> httpx.Response:
    response = running.post(f"/admin/{path}", fields, ADMIN)
    assert response.status_code == 200, response.text
    return response


def begin(running: Running, rows: list[AnyJson], endpoint: str) -> Callable[[], AnyJson]:
    """Begin a batch; returns a function that looks at it."""
    with a_client(running) as client:
        made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    body = {"input_file_id": made.id, "endpoint": endpoint, "completion_window": "24h"}
    batch_id = running.post("/v1/batches", body).json()["id"]
    return lambda: running.get(f"/v1/batches/{batch_id}").json()


@pytest.mark.parametrize("mode", ["finish", "abort"])
def test_rows_of_batches_wait_for_an_engine_that_sleeps(tmp_path: Path, mode: str) -> None:
    """Those that are being answered as well as those that come later."""
    prompts = [f"row {n}" for n in range(60)]
    rows = [a_row(prompt, prompt, max_tokens=20) for prompt in prompts]
    with a_sleepy_server(tmp_path) as (running, _), a_client(running) as client:
        running.pause(0.01)
        look = begin(running, rows, "/v1/completions")
        until(lambda: look()["request_counts"]["completed"] > 3)
        assert admin(running, "sleep", level=1, mode=mode).json()["is_sleeping"]
        running.engines.at_step = None
        assert running.post("/v1/completions", {"prompt": "now"}).status_code == 503
        assert look()["status"] == "in_progress"
        admin(running, "wake_up")
        until(lambda: look()["status"] in ENDED)
        assert look()["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        found = answers(client, look()["output_file_id"])
        for prompt in prompts:
            (choice,) = found[prompt]["response"]["body"]["choices"]
            assert choice["text"] == expected_text(prompt, 20)


def test_requests_that_waited_for_the_sleep_are_refused() -> None:
    """They are not at fault."""
    body: AnyJson = {"prompt": "a", "ignore_eos": True, "temperature": 0}
    with a_sleepy_server() as (running, engine), ThreadPoolExecutor(4) as pool:
        running.pause(0.02)
        first = pool.submit(running.post, "/v1/completions", body | {"max_tokens": 500})
        until(lambda: engine.num_running == 1)
        slept = pool.submit(admin, running, "sleep", level=1, mode="finish")
        until(lambda: engine._scheduler.is_holding)
        held = [
            pool.submit(running.post, "/v1/completions", body | {"stream": is_streaming})
            for is_streaming in (False, True)
        ]
        until(lambda: len(engine._scheduler._held or ()) == 2)
        running.engines.at_step = None
        assert first.result().status_code == 200
        assert slept.result().json()["is_sleeping"]
        whole, stream = [each.result() for each in held]
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "it sleeps; call wake_up first"
        assert "it sleeps; call wake_up first" in stream.text


def test_scores_of_an_aborted_request_are_refused() -> None:
    body: AnyJson = {"prompt": "question " * 60, "choices": [" a", " bc", " de"]}
    with a_sleepy_server() as (running, engine), ThreadPoolExecutor(1) as pool:
        right = running.post("/v1/score", body).json()["choices"]
        running.pause(0.02)
        other = body | {"prompt": "answer " * 60}
        asked = pool.submit(running.post, "/v1/score", other)
        until(lambda: engine.num_running > 0)
        admin(running, "sleep", level=1, mode="abort")
        refused = asked.result()
        assert refused.status_code == 503, refused.text
        assert "aborted" in refused.json()["error"]["message"]
        running.engines.at_step = None
        admin(running, "wake_up")
        assert running.post("/v1/score", body).json()["choices"] == right
        running.settle()
