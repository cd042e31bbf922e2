"""What a server does while nobody asks for anything."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mainstem.core.request import SamplingParams
from mainstem.server.engine_client import EngineClient
from mainstem.text.text_engine import TextEngine
from tests.batch.fake_batch import a_tokenizer
from tests.builders import a_request
from tests.kv.tiered import a_tiered_engine
from tests.server.thread_engine import ThreadEngine

NUM_PAGES = 25


def num_on_disk(folder: Path) -> int:
    address = f"file:{folder}/index.sqlite?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as index:
        return int(index.execute("SELECT count(*) FROM pages").fetchone()[0])


@pytest.mark.serial
def test_an_idle_engine_saves_its_pages_and_forgets_old_ones(tmp_path: Path) -> None:
    """More pages than are saved at once: the rest is saved though no request follows."""

    async def become(count: int) -> None:
        async with asyncio.timeout(20):
            while num_on_disk(tmp_path) != count:
                await asyncio.sleep(0.02)

    async def serve() -> None:
        tiered = a_tiered_engine(
            num_pages=32, num_slots=32, disk_dir=tmp_path, ttl_s=2.0, chunk_tokens=512
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
        await become(0)
        await engine.close()

    asyncio.run(serve())
