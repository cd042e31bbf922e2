"""`/admin/weights`, `/admin/sleep`, `/admin/wake_up` over a tiny model in its own process."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from mainstem.core.json import AnyJson
from tests.engine.test_weights import tensors_of
from tests.models.checkpoints import make_checkpoint
from tests.server.checked_engine import PIPE
from tests.server.process import Process, a_process
from tests.server.running import ADMIN
from tests.waiting import until

pytestmark = pytest.mark.torch
HEADERS = {"authorization": f"Bearer {ADMIN}"}
BYTES = HEADERS | {"content-type": "application/octet-stream"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("root")
    for number, name in enumerate(("a", "b")):
        torch.manual_seed(number)
        model = make_checkpoint("llama", root / name, vocab_size=49152)
        if name == "b":
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(-1.0)
            model.save_pretrained(root / name)
        for file in TOKENIZER_FILES:
            shutil.copy(smollm2_folder / file, root / name)
    (root / "admin").write_text(f"root:{ADMIN}\n")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Process]:
    flags = ["--model", str(root / "a"), "--device", "cpu", "--kv-tokens", "2048"]
    flags += ["--admin-key-file", str(root / "admin"), "--weights-root", str(root / "b")]
    flags += ["--max-weights-gib", "0.1", "--threads", "1"]
    (root / "b" / "part").mkdir()
    with a_process(flags, "real") as process:
        yield process


def admin(server: Process, path: str, body: object) -> httpx.Response:
    return server.request("POST", f"/admin/{path}", json=body, headers=HEADERS)


def complete(server: Process) -> httpx.Response:
    body = {"prompt": "One two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return server.request("POST", "/v1/completions", json=body)


def choice(server: Process) -> AnyJson:
    response = complete(server)
    assert response.status_code == 200, response.text
    found: AnyJson = response.json()["choices"][0]
    return found


def version(server: Process) -> str:
    told = server.request("GET", "/admin/weights", headers=HEADERS).json()
    return str(told["version"])


def test_updates_sleep_and_a_crash(server: Process, root: Path) -> None:
    """One server goes through all of it, since each start takes seconds."""
    first, name = choice(server), version(server)
    assert first["weights"] == [name]
    check_refused(server)
    changed = admin(server, "weights", {"folder": "."})
    assert changed.status_code == 200, changed.text
    second = choice(server)
    assert second["weights"] == [changed.json()["version"]] == [version(server)]
    assert second["text"] != first["text"]
    tensors = save(tensors_of(root / "a"))
    back = server.request("POST", "/admin/weights?mode=abort", content=tensors, headers=BYTES)
    assert back.status_code == 200, back.text
    third = choice(server)
    assert third["text"] == first["text"]
    assert third["weights"] == [back.json()["version"]] != [name]
    check_sleep(server, first["text"])
    check_update_asleep(server, second["text"])
    check_crash(server, root, first["text"], second["text"])


def check_refused(server: Process) -> None:
    for body, status, said in (
        ({"folder": "../a"}, 403, "below --weights-root"),
        ({"folder": "nowhere"}, 404, "no folder"),
        ({"folder": "part"}, 400, "model.safetensors is missing"),
        ({}, 400, "folder is missing"),
        ({"folder": ".", "mode": "later"}, 400, "mode"),
        ({"resume": True, "folder": "."}, 400, "resume takes no folder"),
    ):
        refused = admin(server, "weights", body)
        assert refused.status_code == status, refused.text
        assert said in refused.json()["error"]["message"]
    large = server.request("POST", "/admin/weights", content=bytes(120 << 20), headers=BYTES)
    assert large.status_code == 413
    broken = server.request("POST", "/admin/weights", content=b"nothing", headers=BYTES)
    assert broken.status_code == 400, broken.text
    assert server.request("POST", "/admin/weights", json={"folder": "."}).status_code == 401


def check_sleep(server: Process, text: str) -> None:
    assert admin(server, "sleep", {"level": 1}).json()["is_sleeping"]
    asleep = complete(server)
    assert asleep.status_code == 503
    assert "wake_up" in asleep.json()["error"]["message"]
    assert admin(server, "wake_up", {"tags": ["weights"]}).json()["is_sleeping"]
    assert not admin(server, "wake_up", {}).json()["is_sleeping"]
    assert choice(server)["text"] == text


def check_update_asleep(server: Process, text: str) -> None:
    """An update brings the memory of weights back, so only that of pages must be woken."""
    assert admin(server, "sleep", {"level": 2}).json()["is_sleeping"]
    assert admin(server, "weights", {"folder": "."}).json()["is_sleeping"]
    assert not admin(server, "wake_up", {"tags": ["kv_cache"]}).json()["is_sleeping"]
    assert choice(server)["text"] == text


def check_crash(server: Process, root: Path, first: str, second: str) -> None:
    """The weights of --model never come back in silence, after an update or during one."""
    kill(server)
    lost = complete(server)
    assert lost.status_code == 503
    assert "Update all weights again, or go on" in lost.json()["error"]["message"]
    part = {"model.norm.weight": tensors_of(root / "b")["model.norm.weight"]}
    refused = server.request("POST", "/admin/weights", content=save(part), headers=BYTES)
    assert refused.status_code == 400, refused.text
    assert complete(server).status_code == 503
    assert admin(server, "weights", {"folder": "."}).status_code == 200
    assert choice(server)["text"] == second
    with a_held_update(server, root) as update:
        kill(server)
    assert update.result().status_code == 503
    assert "ended" in update.result().json()["error"]["message"]
    lost = complete(server)
    assert lost.status_code == 503
    assert "Update all weights again, or go on" in lost.json()["error"]["message"]
    refused = server.request("POST", "/admin/weights", content=save(part), headers=BYTES)
    assert refused.status_code == 400, refused.text
    assert admin(server, "weights", {"resume": True}).status_code == 200
    assert choice(server)["text"] == first
    kill(server)
    assert choice(server)["text"] == first  # nothing was updated since


@contextmanager
def a_held_update(server: Process, root: Path) -> Iterator[Future[httpx.Response]]:
    """An update that has changed the engine's weights and is not over."""
    pipe = root / "a" / PIPE
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(admin, server, "weights", {"folder": "."})
        with pipe.open("wb"):  # returns when the engine reads it
            yield update
    pipe.unlink()


def kill(server: Process) -> None:
    before = server.engine_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: server.engine_pid != before and is_ready(server))


def is_ready(server: Process) -> bool:
    return server.request("GET", "/ready").status_code == 200
