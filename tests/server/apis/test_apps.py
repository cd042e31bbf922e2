"""Apps: prefixes are computed before they are asked for; several apps run at the same time."""

from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from pathlib import Path

import httpx
import pytest

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.server import apps
from mainstem.server.apps import AppFile, AppRegistry
from mainstem.text.encoding import App, shared_prefixes
from tests.fake_engines import FakeEngines, a_tokenizer
from tests.server.conftest import PIRATE, POLITE
from tests.server.running import ADMIN, ALICE, BOB, Running, a_server
from tests.waiting import until

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


def test_the_prompt_of_an_app_precedes_the_messages(server: Running) -> None:
    found = server.post("/tokenize", {"messages": CHAT, "app": "polite"}).json()
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == f"<system>{POLITE.prompt}\n<user>How are you?\n<assistant>"


def test_a_system_message_is_joined_to_the_prompt_of_the_app(server: Running) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    found = server.post("/tokenize", {"messages": chat, "app": "polite"}).json()
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text.startswith(f"<system>{POLITE.prompt}\n\nBe brief.\n<user>")


def test_contradicting_and_unknown_apps_are_refused(server: Running) -> None:
    both = {"prompt": "x", "model": "fake:pirate", "app": "polite"}
    assert server.post("/v1/completions", both).json()["error"]["param"] == "app"
    unknown = server.post("/v1/completions", {"prompt": "x", "app": "nobody"})
    assert unknown.status_code == 404
    echo = server.post("/v1/completions", {"prompt": "x", "app": "polite", "echo": True})
    assert echo.json()["error"]["param"] == "echo"


def test_forty_conversations_with_two_apps_at_once_get_the_same_answers_as_alone() -> None:
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


def test_an_apps_prefix_is_computed_once_and_later_tokens_once_per_tenant() -> None:
    """Shown by cached tokens, and by the tokens that went through the model."""
    own = "what this tenant alone has said, over several pages"
    with a_server([POLITE], has_keys=True) as running:

        def computed() -> int:
            return int(running.get("/live", ADMIN).json()["totals"]["computed_tokens"])

        def ask(key: str) -> tuple[int, int]:
            before = computed()
            reply = running.complete(own, key, app="polite", max_tokens=1)
            return cached_tokens(reply), computed() - before

        assert computed() < 2 * (len(POLITE.prompt) + len("<system>\n<user>")), (
            "the prefix was computed once per tenant"
        )
        num_public = len(POLITE.prompt)
        num_prompt = len(POLITE.prompt + own)
        assert ask(ALICE) == (num_public, num_prompt - num_public)
        assert ask(BOB) == (num_public, num_prompt - num_public)
        assert ask(ALICE)[0] == ask(BOB)[0] == num_prompt // 4 * 4


def test_an_apps_pages_stay_cached_while_many_other_requests_run() -> None:
    with a_server([POLITE], engines=FakeEngines(num_pages=96, max_model_len=200)) as running:
        for number in range(12):
            running.complete(f"{number:03} " * 30, max_tokens=4)
        body = {"model": "fake:polite", "messages": CHAT, "max_tokens": 2}
        reply = running.post("/v1/chat/completions", body).json()
        assert cached_tokens(reply) == len(f"<system>{POLITE.prompt}\n<user>")
        running.settle()


@pytest.mark.parametrize("loss", ["reset", "fault"])
def test_an_apps_pages_are_pinned_again_after_the_cache_was_lost(loss: str) -> None:
    with a_server([POLITE], engines=FakeEngines(num_pages=96, max_model_len=200)) as running:

        def fail_once(_: object) -> None:
            running.engines.at_launch = None
            raise RuntimeError("a step that fails")

        if loss == "reset":
            running.send("POST", "/admin/reset_prefix_cache", None, ADMIN)
        else:
            running.engines.at_launch = fail_once
            assert running.post("/v1/completions", {"prompt": "x"}).status_code == 200
            until(lambda: running.gateway.engine.num_recoveries == 1)
            # the recovery's own refill may not have ended
            running.on_loop(running.gateway.filler.fill_all())
        for number in range(12):
            running.complete(f"{number:03} " * 30, max_tokens=4)
        assert cached_tokens(running.complete("Hm", app="polite")) == len(POLITE.prompt)
        running.settle()


def test_an_apps_pages_are_evicted_if_a_request_would_not_fit_otherwise() -> None:
    with a_server([POLITE], engines=FakeEngines(num_pages=64, max_model_len=256)) as running:
        assert running.complete("y" * 240, max_tokens=10)["usage"]["completion_tokens"] == 10
        running.settle()


def test_a_reset_computes_the_apps_again() -> None:
    with a_server([POLITE]) as running:
        running.send("POST", "/admin/reset_prefix_cache", None, ADMIN)
        reply = running.complete("Hm", app="polite", max_tokens=1)
        assert cached_tokens(reply) == len(POLITE.prompt)


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


def test_an_app_has_a_prefix_for_chats_and_one_for_prompts() -> None:
    tokenizer = a_tokenizer()
    texts = [tokenizer.decode(ids) for ids in shared_prefixes(tokenizer, POLITE)]
    assert texts == [POLITE.prompt, f"<system>{POLITE.prompt}\n<user>"]


def test_the_prompt_of_an_app_flag_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Be kind.")
    app = App.from_flag(f"kind={tmp_path / 'prompt.txt'}")
    assert app == App("kind", "Be kind.")
    for flag in ("kind", "kind=/no/such/file", f"b a d={tmp_path / 'prompt.txt'}"):
        with pytest.raises(ConfigError):
            App.from_flag(flag)
    with pytest.raises(ConfigError, match=r"cannot read \S+: No such file or directory$"):
        App.from_flag("kind=/no/such/file")
    with pytest.raises(ConfigError, match="twice"):
        AppRegistry([app, app])


def test_an_app_needs_a_name_and_a_prompt() -> None:
    with pytest.raises(InvalidRequest):
        App("", "x")
    with pytest.raises(InvalidRequest):
        App("x", "  ")


# --- kept in the data folder ---------------------------------------------------------------------


def put(server: Running, name: str, prompt: str) -> httpx.Response:
    return server.send("PUT", f"/admin/apps/{name}", {"prompt": prompt}, ADMIN)


def test_apps_that_were_added_outlive_a_restart(tmp_path: Path) -> None:
    with a_server([POLITE], data_dir=tmp_path) as server:
        for name in ("added", "gone", "polite"):
            assert put(server, name, f"You are {name}, and were not there. ").status_code == 200
        assert server.send("DELETE", "/admin/apps/gone", key=ADMIN).status_code == 200
    file = tmp_path / "apps.json"
    assert file.stat().st_mode & 0o777 == 0o600
    with a_server([POLITE], data_dir=tmp_path) as server:
        assert server.gateway.apps.names == ["added", "polite"]
        reply = server.complete("hello", app="added")
        assert cached_tokens(reply) == len("You are added, and were not there. ")
        assert server.gateway.apps.find("polite") == POLITE, "a flag overrides the stored app"
        assert server.send("DELETE", "/admin/apps/added", key=ADMIN).status_code == 200
    with a_server(data_dir=tmp_path) as server:
        assert server.gateway.apps.names == ["polite"]


def test_an_app_that_cannot_be_stored_is_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device")

    with a_server(data_dir=tmp_path) as server:
        assert put(server, "first", "You were there before. ").status_code == 200
        before = (tmp_path / "apps.json").read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(apps, "write_whole", fail)
            for name in ("first", "second"):
                refused = put(server, name, "You come when the disk is full. ")
                assert refused.status_code == 507
                assert "No space left" in refused.json()["error"]["message"]
            assert server.send("DELETE", "/admin/apps/first", key=ADMIN).status_code == 507
        assert server.gateway.apps.names == ["first"]
        assert cached_tokens(server.complete("x", app="first")) == len("You were there before. ")
        assert (tmp_path / "apps.json").read_bytes() == before
        assert put(server, "second", "You come when there is room again. ").status_code == 200
        server.settle()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"apps": {}}', '{"version": 2, "apps": {}}', '{"version": 1, "apps": [1]}',
             '{"version": 1, "apps": {"a b": "x"}}', '{"version": 1, "apps": {"a": 5}}']
)  # fmt: skip
def test_the_error_names_a_damaged_file_of_apps(tmp_path: Path, text: str) -> None:
    path = tmp_path / "apps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"apps\.json .*repair or remove it"):
        AppRegistry([], AppFile(path))
    assert path.read_text() == text


def test_incomplete_files_of_apps_left_by_a_kill_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "apps.json.1234.fresh"
    leftover.write_text("half")
    AppRegistry([], AppFile(tmp_path / "apps.json"))
    assert not leftover.exists()
