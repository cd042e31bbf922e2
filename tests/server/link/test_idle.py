"""A server without requests saves its pages; a long step is reported while it runs."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import pytest

from mainstem.core.config import EngineConfig, SchedConfig
from mainstem.core.json import AnyJson
from mainstem.core.request import SamplingParams
from mainstem.kv import stack as stack_module
from mainstem.server.link.engine_client import EngineClient
from mainstem.text.text_engine import TextEngine
from tests.builders import a_request
from tests.fake_engines import FakeEngines, a_tokenizer
from tests.kv.tiered import a_tiered_engine
from tests.server.running import a_server
from tests.server.thread_engine import ThreadEngine
from tests.waiting import LIMIT_S, until

NUM_PAGES = 25


def num_on_disk(folder: Path) -> int:
    address = f"file:{folder}/index.sqlite?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as index:
        return int(index.execute("SELECT count(*) FROM pages").fetchone()[0])


def test_an_idle_engine_saves_its_pages_and_forgets_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more pages than are saved at once; the rest is saved although no request
    follows."""

    later_s = 0.0
    monkeypatch.setattr(stack_module, "monotonic", lambda: monotonic() + later_s)

    async def become(count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while num_on_disk(tmp_path) != count:
                await asyncio.sleep(0.02)

    async def serve() -> None:
        nonlocal later_s
        tiered = a_tiered_engine(
            num_pages=32, num_slots=32, disk_dir=tmp_path, ttl_s=1e6, chunk_tokens=512
        )
        text_engine = TextEngine(tiered.engine, a_tokenizer())
        engine = EngineClient(text_engine.tokenizer, lambda: ThreadEngine(text_engine))
        await engine.start()
        prompt = [token % 90 for token in range(4 * NUM_PAGES + 3)]
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        answering = await engine.submit([a_request(prompt, sampling=sampling)])
        async for _ in answering:
            pass
        await become(NUM_PAGES)
        later_s = 2e6
        await become(0)
        await engine.close()

    asyncio.run(serve())


def test_a_long_step_is_reported_while_it_runs() -> None:
    """Progress of a prompt that takes several steps is reported, too."""
    engines = FakeEngines(num_pages=512, max_model_len=800)
    config, go = EngineConfig(sched=SchedConfig(chunk_tokens=64)), Event()
    with a_server(engines=engines, config=config) as running:

        def wait(_: object) -> None:
            assert go.wait(LIMIT_S)

        engines.at_launch = wait
        body = {"prompt": "x" * 200, "max_tokens": 2, "ignore_eos": True}
        asking = Thread(target=running.post, args=("/v1/completions", body))
        asking.start()

        def live() -> AnyJson:
            found: AnyJson = running.get("/live").json()
            return found

        until(lambda: live()["step"] is not None)
        step, (own,) = live()["step"], live()["recent"]
        assert step["tokens"] == 64
        assert (own["state"], own["prompt_tokens"], own["computed_tokens"]) == ("running", 200, 64)
        assert live()["running"] == 1
        assert live()["waiting"] == 0
        until(lambda: live()["step"]["seconds"] > step["seconds"])
        second = Thread(target=running.post, args=("/v1/completions", {"prompt": "y"}))
        second.start()
        until(lambda: live()["waiting"] == 1)  # the engine has not received the request yet
        text = running.get("/metrics").text
        assert 'mainstem:step_tokens{engine="0",model_name="fake"} 64.0' in text
        assert 'mainstem:unfinished_prompt_tokens{engine="0",model_name="fake"} 64.0' in text
        assert 'vllm:num_requests_waiting{engine="0",model_name="fake"} 1.0' in text
        engines.at_launch = None
        go.set()
        asking.join()
        second.join()
        running.settle()
        assert live()["step"] is None
