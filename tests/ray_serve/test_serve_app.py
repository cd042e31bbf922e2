"""Two replicas under Ray Serve, asked by the stock `openai` client; skipped without Ray."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.fake_engines import TEMPLATE, a_tokenizer
from tests.needs import needs
from tests.server.running import ADMIN, ALICE
from tests.waiting import until

pytestmark = [
    needs("ray"),
    pytest.mark.torch,
    # Ray leaves sockets and files open until the process ends
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
UP = ["up", "up"]
START_S = 600.0  # limit for the proxies to start
LONG = 1500  # tokens; the answer still runs when its replica is killed


@dataclass
class Fleet:
    """A running application."""

    url: str
    client: OpenAI

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=_key(ADMIN), timeout=300)

    def post(self, path: str, body: dict[str, Any] | None = None, key: str = ALICE) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, headers=_key(key), timeout=300)

    def states(self) -> list[str]:
        found: list[str] = self.get("/health").json()["replicas"]
        return found

    def ask(self, text: str, **more: object) -> tuple[int, str]:
        """The replica that has answered, and its answer."""
        body = {"prompt": text, "max_tokens": 4, "temperature": 0, **more}
        reply = self.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        return int(reply.headers["x-mainstem-replica"]), reply.json()["choices"][0]["text"]


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # long, for busy machines
    import ray  # noqa: PLC0415  # an extra
    from ray import serve  # noqa: PLC0415

    from mainstem.ray.serve_app import app  # noqa: PLC0415
    from tests.models.checkpoints import make_checkpoint  # noqa: PLC0415  # imports torch

    folder = tmp_path_factory.mktemp("fleet")
    make_checkpoint("llama", folder, vocab_size=300, max_position_embeddings=4096)
    (folder / "tokenizer.json").write_text(a_tokenizer().to_json())
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "keys").write_text(f"alice:{ALICE}\n")
    (folder / "admin").write_text(f"root:{ADMIN}\n")
    (folder / "shop.txt").write_text("You sell garden tools. " * 3)
    arguments = {
        "replicas": 2,
        "engine": {"model": str(folder), "kv_tokens": 16384, "threads": 1, "device": "cpu"},
        "served_model_name": ["tiny"],
        "apps": {"shop": {"file": str(folder / "shop.txt"), "replicas": [1]}},
        "api_key_file": str(folder / "keys"),
        "admin_key_file": str(folder / "admin"),
        "num_cpus": 0.5,
    }
    port, patch = _free_port(), pytest.MonkeyPatch()
    for name in ("api", "client"):  # Ray's limit is 60 s, whatever the machine
        patch.setattr(f"ray.serve._private.{name}.HTTP_PROXY_TIMEOUT", START_S, raising=False)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(arguments), name="mainstem")
        url = f"http://127.0.0.1:{port}"
        with OpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0, timeout=300) as client:
            made = Fleet(url, client)
            until(lambda: made.states() == UP)
            yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


def test_models_are_listed_and_a_chat_is_streamed(fleet: Fleet) -> None:
    assert "tiny" in [model.id for model in fleet.client.models.list()]
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    settings: Any = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    whole = fleet.client.chat.completions.create(**settings)
    pieces = fleet.client.chat.completions.create(**settings, stream=True)
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert said == whole.choices[0].message.content


def test_requests_with_a_wrong_key_and_for_files_are_refused(fleet: Fleet) -> None:
    reply = fleet.post("/v1/completions", {"prompt": "x"}, key="no such key")
    assert reply.status_code == 401
    assert fleet.post("/admin/replicas/0/drain").status_code == 401
    assert fleet.post("/v1/files").status_code == 501


def test_new_prompts_go_to_both_replicas(fleet: Fleet) -> None:
    assert {fleet.ask(f"{n} " * 50)[0] for n in range(8)} == {0, 1}


def test_prompts_with_one_prefix_go_to_one_replica(fleet: Fleet) -> None:
    """Random routing would send all eight prompts to one of the two replicas in 1 of 128 cases."""
    prefix = "the same document " * 150
    places = {fleet.ask(f"{prefix} question {n}")[0] for n in range(8)}
    assert len(places) == 1


def test_a_session_stays_on_its_replica(fleet: Fleet) -> None:
    text = ""
    places: set[int] = set()
    for turn in range(6):
        text += f"turn {turn}. "
        place, said = fleet.ask(text, session_id="talk")
        text, places = text + said, places | {place}
    assert len(places) == 1
    listed = fleet.client.get("/sessions", cast_to=object)
    assert [session["id"] for session in listed["data"]] == ["talk"]  # type: ignore[index]
    gone = httpx.delete(f"{fleet.url}/v1/sessions/talk", headers=_key(ALICE))
    assert gone.status_code == 200


def test_requests_for_an_app_go_to_a_replica_that_has_it(fleet: Fleet) -> None:
    assert {fleet.ask(f"{n}?", app="shop")[0] for n in range(6)} == {1}


def test_a_stored_response_is_found(fleet: Fleet) -> None:
    asked = [
        fleet.client.responses.create(model="tiny", input=f"{n}?", max_output_tokens=4)
        for n in range(4)
    ]
    for response in asked:
        assert fleet.client.responses.retrieve(response.id).id == response.id
        more = fleet.client.responses.create(
            model="tiny", input="more", max_output_tokens=4, previous_response_id=response.id
        )
        assert more.previous_response_id == response.id


def test_a_draining_replica_gets_nothing_new(fleet: Fleet) -> None:
    assert fleet.post("/admin/replicas/0/drain", key=ADMIN).json()["state"] == "draining"
    try:
        assert {fleet.ask(f"{n} drained?")[0] for n in range(6)} == {1}
        assert fleet.states() == ["draining", "up"]
    finally:
        fleet.post("/admin/replicas/0/resume", key=ADMIN)
    assert fleet.states() == UP


def test_a_client_that_disconnects_frees_its_place(fleet: Fleet) -> None:
    def num_open() -> int:
        listed = fleet.get("/admin/replicas").json()["replicas"]
        return sum(int(replica["open_requests"]) for replica in listed)

    body: Any = {"ignore_eos": True}
    stream = fleet.client.completions.create(
        model="tiny", prompt="leaving", max_tokens=LONG, stream=True, extra_body=body
    )
    next(iter(stream))
    assert num_open() == 1
    stream.close()
    until(lambda: num_open() == 0)


def replica_pid(place: int) -> int:
    name = f"replica-{place}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended
        if line.startswith(b"ray::ServeReplica") and name in line:
            return int(folder.name)
    raise AssertionError(f"replica {place} has no process")


def in_background(work: Callable[[], object]) -> tuple[Thread, list[object]]:
    found: list[object] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_a_killed_replica_ends_only_its_own_streams(fleet: Fleet) -> None:
    settings: Any = {"model": "tiny", "max_tokens": LONG, "temperature": 0}
    settings["extra_body"] = {"ignore_eos": True, "session_id": "doomed"}
    place, _ = fleet.ask("doomed", session_id="doomed")
    stream = fleet.client.completions.create(prompt="doomed", stream=True, **settings)
    next(iter(stream))
    # as long as the stream, and begun after it: it cannot end before the stream is cut off
    body = {"max_tokens": LONG, "ignore_eos": True, "session_id": "doomed"}
    waiting, answers = in_background(lambda: fleet.ask("doomed", **body))
    until(lambda: fleet.get("/admin/replicas").json()["replicas"][place]["open_requests"] == 2)
    os.kill(replica_pid(place), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the replica was lost while it answered"):
        list(stream)
    waiting.join(300)
    # another replica answers, or this one, whose restart may be quicker
    assert len(answers) == 1, "the request was lost"
    for number in range(4):
        fleet.ask(f"{number} and now?")
    until(lambda: fleet.states() == UP)
    assert place in {fleet.ask(f"{n} again " * 40)[0] for n in range(8)}, (
        "the killed replica serves again"
    )
