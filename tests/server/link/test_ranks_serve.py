"""`mainstem serve --tensor-parallel`: killing a rank ends the open requests with an error; the
server restarts its engine, and ranks never outlive their engine."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import psutil
import pytest

from mainstem.core.json import AnyJson
from tests.models.checkpoints import make_checkpoint
from tests.server.process import Process, a_process
from tests.waiting import until

pytestmark = pytest.mark.torch

LIMIT_S = 60.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def server(tmp_path: Path, smollm2_folder: Path) -> Iterator[Process]:
    """A server of a tiny model with a real tokenizer, on two ranks."""
    folder = tmp_path / "model"
    make_checkpoint("llama", folder, vocab_size=49152)
    for name in TOKENIZER_FILES:
        shutil.copy(smollm2_folder / name, folder)
    flags = ["--model", str(folder), "--device", "cpu", "--threads", "2", "--kv-tokens", "4096"]
    flags += ["--tensor-parallel", "2", "--disk-dir", str(tmp_path / "disk"), "--disk-gb", "0.1"]
    with a_process(flags, "real") as process:
        yield process


def complete(process: Process, max_tokens: int) -> AnyJson:
    body = {
        "prompt": "One two three", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    response = process.request("POST", "/v1/completions", json=body)
    answer: AnyJson = response.json()
    return answer


def ranks_of(process: Process) -> list[psutil.Process]:
    found = psutil.Process(process.engine_pid).children()
    return sorted(found, key=lambda each: each.pid)


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_log_names_a_killed_rank_and_the_server_continues(server: Process) -> None:
    expected = complete(server, 8)["choices"]
    engine, ranks = server.engine_pid, ranks_of(server)
    assert len(ranks) == 2
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(complete, server, 400)
        until(lambda: server.request("GET", "/live").json()["running"] == 1)
        ranks[1].kill()
        killed_s = monotonic()
        assert "engine's process ended" in lost.result()["error"]["message"]
        assert monotonic() - killed_s < LIMIT_S
    assert all(is_over(rank) for rank in ranks)
    until(lambda: server.engine_pid != engine and is_ready(server))
    words = f"rank 1 of 2 (process {ranks[1].pid}) was killed by SIGKILL"
    assert any(words in str(line.get("traceback")) for line in server.lines)
    assert complete(server, 8)["choices"] == expected
    ranks = ranks_of(server)
    os.kill(server.engine_pid, signal.SIGKILL)
    until(lambda: all(is_over(rank) for rank in ranks))


def is_ready(process: Process) -> bool:
    return process.request("GET", "/ready").status_code == 200
