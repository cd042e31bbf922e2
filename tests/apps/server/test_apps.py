"""Apps: prefixes are computed before they are asked for, and many run in one batch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mainstem.apps.server.apps_registry import App, AppRegistry, shared_prefixes
from mainstem.core.errors import ConfigError, InvalidRequest
from tests.apps.fake_batch import a_tokenizer
from tests.apps.server.conftest import PIRATE, POLITE
from tests.apps.server.running import ADMIN, ALICE, BOB, Running, a_server

CHAT = [{"role": "user", "content": "How are you?"}]


def cached_tokens(reply: dict[str, dict[str, dict[str, int]]]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_first_request_finds_the_prefix_cached() -> None:
    with a_server([POLITE]) as running:
        body = {"model": "fake:polite", "messages": CHAT, "max_tokens": 2}
        reply = running.post("/v1/chat/completions", body).json()
        assert reply["model"] == "fake:polite"
        assert cached_tokens(reply) == len(f"<system>{POLITE.prompt}\n<user>")
        assert cached_tokens(running.complete("hello", app="polite")) == len(POLITE.prompt)


def test_a_model_name_and_the_app_field_mean_the_same(server: Running) -> None:
    texts = set()
    for fields in ({"model": "fake:pirate"}, {"app": "pirate"}, {"model": "fake", "app": "pirate"}):
        texts.add(server.complete("Ahoy", max_tokens=8, **fields)["choices"][0]["text"])
    assert texts == {server.complete(PIRATE.prompt + "Ahoy", max_tokens=8)["choices"][0]["text"]}


def test_token_ids_follow_an_apps_prompt(server: Running) -> None:
    ids = a_tokenizer().encode("Ahoy")
    by_ids = server.complete(ids, max_tokens=8, app="pirate")["choices"][0]["text"]
    assert by_ids == server.complete("Ahoy", max_tokens=8, app="pirate")["choices"][0]["text"]


def test_an_app_goes_before_the_messages(server: Running) -> None:
    found = server.post("/tokenize", {"messages": CHAT, "app": "polite"}).json()
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == f"<system>{POLITE.prompt}\n<user>How are you?\n<assistant>"


def test_a_system_message_is_joined_to_the_apps(server: Running) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    found = server.post("/tokenize", {"messages": chat, "app": "polite"}).json()
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text.startswith(f"<system>{POLITE.prompt}\n\nBe brief.\n<user>")


def test_contradictions_and_unknown_apps_are_refused(server: Running) -> None:
    both = {"prompt": "x", "model": "fake:pirate", "app": "polite"}
    assert server.post("/v1/completions", both).json()["error"]["param"] == "app"
    unknown = server.post("/v1/completions", {"prompt": "x", "app": "nobody"})
    assert unknown.status_code == 404
    echo = server.post("/v1/completions", {"prompt": "x", "app": "polite", "echo": True})
    assert echo.json()["error"]["param"] == "echo"


def test_two_apps_and_forty_conversations_at_once_answer_as_each_alone() -> None:
    questions = [f"Question number {number}: what is it?" for number in range(20)]
    with a_server([POLITE, PIRATE]) as running:

        def ask(job: tuple[str, str]) -> str:
            app, question = job
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12}
            body |= {"app": app, "temperature": 0, "ignore_eos": True}
            reply = running.post("/v1/chat/completions", body)
            return str(reply.json()["choices"][0]["message"]["content"])

        jobs = [(app, question) for question in questions for app in ("polite", "pirate")]
        alone = [ask(job) for job in jobs]
        running.pause(0.005)
        with ThreadPoolExecutor(40) as pool:
            together = list(pool.map(ask, jobs))
        assert together == alone
        assert len(set(alone)) == len(jobs)
        running.settle()


def test_each_tenant_finds_the_apps_prefix_cached(locked: Running) -> None:
    for key in (ALICE, BOB):
        reply = locked.complete(f"I am {key[:3]}", key, app="polite", max_tokens=1)
        assert cached_tokens(reply) >= len(POLITE.prompt) - 4


def test_an_app_can_be_added_and_removed(server: Running) -> None:
    prompt = "A prompt that was added while the server runs. "
    added = server.send("PUT", "/admin/apps/added", {"prompt": prompt}, ADMIN)
    assert added.status_code == 200, added.text
    assert added.json()["prefix_tokens"] >= len(prompt)
    assert "added" in server.send("GET", "/admin/apps", None, ADMIN).json()["apps"]
    reply = server.complete("Hm", app="added", max_tokens=1)
    assert cached_tokens(reply) >= len(prompt) - 4
    assert server.send("DELETE", "/admin/apps/added", None, ADMIN).status_code == 200
    assert server.send("DELETE", "/admin/apps/added", None, ADMIN).status_code == 404
    assert server.post("/v1/completions", {"prompt": "x", "app": "added"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("x", {"prompt": ""}),
        ("x", {"prompt": 5}),
        ("x", {}),
        ("x", {"prompt": "x", "more": 1}),
        ("x", {"prompt": "y" * 5000}),
        ("bad%20name", {"prompt": "x"}),
        ("..", {"prompt": "x"}),
    ],
)
def test_a_wrong_app_is_refused(server: Running, name: str, body: dict[str, object]) -> None:
    response = server.send("PUT", f"/admin/apps/{name}", body, ADMIN)
    assert 400 <= response.status_code < 500
    assert server.gateway.apps.names == ["pirate", "polite"]


def test_the_prefix_cache_can_be_reset() -> None:
    with a_server() as running:
        prompt = "something that is cached and then forgotten again"
        running.complete(prompt, max_tokens=1)
        reset = running.send("POST", "/admin/reset_prefix_cache", None, ADMIN)
        assert reset.json()["forgotten_pages"] >= len(prompt) // 4
        assert cached_tokens(running.complete(prompt, max_tokens=1)) == 0


def test_prefixes_are_those_of_a_chat_and_of_a_prompt() -> None:
    tokenizer = a_tokenizer()
    texts = [tokenizer.decode(ids) for ids in shared_prefixes(tokenizer, POLITE)]
    assert texts == [POLITE.prompt, f"<system>{POLITE.prompt}\n<user>"]


def test_flags_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Be kind.")
    app = App.from_flag(f"kind={tmp_path / 'prompt.txt'}")
    assert app == App("kind", "Be kind.")
    for flag in ("kind", "kind=/no/such/file", f"b a d={tmp_path / 'prompt.txt'}"):
        with pytest.raises(ConfigError):
            App.from_flag(flag)
    with pytest.raises(ConfigError, match="twice"):
        AppRegistry([app, app])


def test_an_app_needs_a_name_and_a_prompt() -> None:
    with pytest.raises(InvalidRequest):
        App("", "x")
    with pytest.raises(InvalidRequest):
        App("x", "  ")
