"""Sessions over HTTP: turns extend each other, tenants share nothing, and a conversation may
outgrow the context window."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.json import AnyJson
from mainstem.server.gateway import MAX_WINDOWS
from mainstem.server.http.auth import ANYBODY
from mainstem.server.kept.response_store import response_file
from mainstem.server.kept.saver import Saver
from mainstem.text.session_file import session_file
from mainstem.text.sessions import SessionLimits, Sessions
from tests.server.conftest import PIRATE, POLITE
from tests.server.process import Process, a_process
from tests.server.running import ALICE, BOB, Running, a_server, events
from tests.waiting import until


class Talk:
    """A client that keeps its conversation as messages, as OpenAI's clients do."""

    def __init__(self, running: Running, key: str | None = None, **fields: object) -> None:
        self.running = running
        self.key = key
        self.fields = {"temperature": 0, "max_tokens": 12} | fields
        self.messages: list[AnyJson] = []
        self.usage: AnyJson = {}

    def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages} | self.fields
        reply = self.running.post("/v1/chat/completions", body, self.key)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.messages.append(answer["choices"][0]["message"])
        self.usage = answer["usage"]
        return str(answer["choices"][0]["message"]["content"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def listed(running: Running, key: str | None = None) -> list[AnyJson]:
    data: list[AnyJson] = running.get("/v1/sessions", key).json()["data"]
    return data


def test_a_turn_computes_only_its_new_tokens(server: Running) -> None:
    talk = Talk(server, session_id="turns")
    talk.say("The first thing that I have to say, which is long enough for pages.")
    before = talk.usage["total_tokens"]
    talk.say("And more.")
    assert talk.cached >= before // 4 * 4 - 4
    session = next(item for item in listed(server) if item["id"] == "turns")
    assert (session["turns"], session["object"]) == (2, "session")
    assert session["tokens"] == talk.usage["total_tokens"]


def test_a_streamed_turn_is_stored_when_its_stream_has_ended(server: Running) -> None:
    body = {"prompt": "stream", "session_id": "streamed", "max_tokens": 3, "stream": True}
    text = server.post("/v1/completions", body).text
    assert events(text)[-1] == "[DONE]"
    found = next(item for item in listed(server) if item["id"] == "streamed")
    assert found["tokens"] >= len("stream")


def test_token_ids_of_a_session_are_used_again_and_not_encoded_again(server: Running) -> None:
    """The ids of the first turn could not have come from a text."""
    strange = [5, 6, 96, 7]  # an end token in the middle
    first = server.post(
        "/v1/completions", {"prompt": strange, "session_id": "ids", "max_tokens": 2}
    ).json()
    told = server.post("/detokenize", {"tokens": strange}).json()["prompt"]
    session = next(iter(server.gateway.sessions.listed(ANYBODY.owner)))
    assert session.token_ids[:4].tolist() == strange
    assert session.text.startswith(told)
    body = {"prompt": session.text + " more", "session_id": "ids", "max_tokens": 1}
    second = server.post("/v1/completions", body).json()
    assert second["usage"]["prompt_tokens"] == first["usage"]["total_tokens"] + len(" more")


def test_an_edited_conversation_is_encoded_again(server: Running) -> None:
    talk = Talk(server, session_id="edited")
    talk.say("Something that is taken back later.")
    fresh = Talk(server)
    talk.messages = []
    assert talk.say("Something else altogether.") == fresh.say("Something else altogether.")


def test_sessions_belong_to_their_key(locked: Running) -> None:
    def secrets(key: str) -> list[AnyJson]:  # other tests leave other sessions
        return [session for session in listed(locked, key) if session["id"] == "secret"]

    own = Talk(locked, ALICE, session_id="secret")
    own.say("What alice has to say is nobody's business, over several pages.")
    [before] = secrets(ALICE)
    assert secrets(BOB) == []
    assert locked.send("DELETE", "/v1/sessions/secret", None, BOB).status_code == 404
    guess = Talk(locked, BOB, session_id="secret")
    guess.say("What alice has to say is nobody's business, over several pages.")
    assert guess.cached == 0
    assert secrets(ALICE) == [before]
    assert locked.get("/v1/sessions").status_code == 401
    assert locked.send("DELETE", "/v1/sessions/secret", None, ALICE).json()["deleted"] is True
    assert secrets(ALICE) == []
    assert len(secrets(BOB)) == 1
    assert locked.send("DELETE", "/v1/sessions/secret", None, BOB).status_code == 200


@pytest.mark.parametrize("path", ["..%2f..", "%00", "a%20b", "x" * 500, "%ff"])
def test_odd_session_names_are_not_found(server: Running, path: str) -> None:
    assert server.send("DELETE", f"/v1/sessions/{path}").status_code in (404, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"session_id": ""},
        {"session_id": "x" * 129},
        {"session_id": "ü"},
        {"session_id": ["s"]},
    ],
)
def test_invalid_session_fields_are_refused(server: Running, fields: AnyJson) -> None:
    response = server.post("/v1/completions", {"prompt": "x", "session_id": "s"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session_id"


@pytest.mark.parametrize("policy", ["kv", "important", "recompute"])
def test_a_conversation_may_outgrow_the_context_window(policy: str) -> None:
    with a_server([POLITE]) as running:
        talk = Talk(running, session_id="long", context_overflow=policy, app="polite")
        for number in range(12):
            talk.say(f"{number}: " + "and so on, " * 9)
        assert talk.usage["prompt_tokens"] > running.gateway.engine.max_model_len
        assert talk.usage["prompt_tokens_details"]["dropped_tokens"] > 0
        assert talk.cached >= len(POLITE.prompt), "the app's prompt was not kept"
        running.settle()


def test_without_context_overflow_a_prompt_beyond_the_window_is_refused(server: Running) -> None:
    body = {"prompt": "x" * 900, "max_tokens": 1}
    refused = server.post("/v1/completions", body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    explicit = body | {"session_id": "s2", "context_overflow": "error"}
    assert server.post("/v1/completions", explicit).status_code == 400
    cut = server.complete("x" * 900, max_tokens=1, context_overflow="recompute")
    assert cut["usage"]["prompt_tokens_details"]["dropped_tokens"] > 0


def test_a_prompt_many_times_longer_than_the_window_does_not_reach_the_engine(
    server: Running,
) -> None:
    most = MAX_WINDOWS * server.gateway.engine.max_model_len
    body = {"prompt": [5] * most, "max_tokens": 1, "session_id": "endless"}
    assert server.post("/v1/completions", body).status_code == 200
    refused = server.post("/v1/completions", body | {"prompt": [5] * (most + 1)})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert str(most) in refused.json()["error"]["message"]


def test_forty_sessions_with_two_apps_at_once_get_the_same_answers_as_alone() -> None:
    """Each session has two turns; the answers are greedy."""

    def talk(running: Running, number: int, name: str) -> list[str]:
        app = (POLITE, PIRATE)[number % 2].name
        conversation = Talk(running, session_id=f"{name}-{number}", app=app, ignore_eos=True)
        return [conversation.say(f"Question {number}"), conversation.say("What else?")]

    with a_server([POLITE, PIRATE]) as running:
        alone = [talk(running, number, "alone") for number in range(40)]
        running.pause(0.005)
        with ThreadPoolExecutor(40) as pool:
            together = list(pool.map(lambda number: talk(running, number, "at-once"), range(40)))
        assert together == alone
        assert len({tuple(answers) for answers in alone}) == 40
        running.settle()


@pytest.mark.torch
@pytest.mark.slow
def test_forty_sessions_of_a_real_model_get_the_same_answers_as_alone(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    """In fp32: rounding may depend on the batch, but does not change the argmax here."""
    flags = ["--model", str(smollm2_folder), "--kv-tokens", "16384"]
    for app in (POLITE, PIRATE):
        (tmp_path / app.name).write_text(app.prompt)
        flags += ["--app", f"{app.name}={tmp_path / app.name}"]

    def talk(process: Process, number: int, name: str) -> list[str]:
        app = (POLITE, PIRATE)[number % 2].name
        messages: list[AnyJson] = []
        for question in (f"What is {number} plus two?", "Why?"):
            messages.append({"role": "user", "content": question})
            body: AnyJson = {"messages": messages, "app": app}
            body["session_id"] = f"{name}-{number}"
            body |= {"temperature": 0, "max_tokens": 6}
            reply = process.request("POST", "/v1/chat/completions", json=body)
            messages.append(reply.json()["choices"][0]["message"])
        return [message["content"] for message in messages[1::2]]

    with a_process(flags, "real") as process:
        alone = [talk(process, number, "alone") for number in range(40)]
        with ThreadPoolExecutor(40) as pool:
            names = [(process, number, "at-once") for number in range(40)]
            together = list(pool.map(lambda job: talk(*job), names))
        assert together == alone
        assert process.stop() == 0


def test_sessions_that_could_not_be_saved_are_saved_later(tmp_path: Path) -> None:
    file = session_file(tmp_path / "gone" / "sessions.sqlite", "t")
    sessions = Sessions(SessionLimits())
    sessions.keep("me", "s", np.arange(3, dtype=np.int32), "abc")

    async def serve() -> None:
        saver = Saver("sessions", sessions, file, every_s=0.01)
        saver.start()
        await asyncio.sleep(0.1)
        (tmp_path / "gone").mkdir()
        await saver.close()

    asyncio.run(serve())
    assert [session.text for session in file.load().values()] == ["abc"]


@pytest.mark.parametrize("can_save", [True, False])
def test_a_server_that_ends_before_it_is_ready_saves_its_sessions(
    tmp_path: Path, can_save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = session_file((tmp_path if can_save else tmp_path / "gone") / "sessions.sqlite", "t")
    sessions = Sessions(SessionLimits())
    sessions.keep("me", "s", np.arange(3, dtype=np.int32), "abc")

    async def serve() -> None:
        await Saver("sessions", sessions, file).close()  # it was not started

    with caplog.at_level("INFO", logger="mainstem.server"):
        asyncio.run(serve())
    assert caplog.messages == ["sessions saved" if can_save else "sessions not saved"]
    if can_save:
        assert [session.text for session in file.load().values()] == ["abc"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_sessions_and_responses_outlive_the_process(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "data"
    flags = ["--data-dir", str(folder)]
    body = {"prompt": "a conversation", "session_id": "s", "max_tokens": 3}
    with a_process(flags) as first:
        asked = {"input": "a question", "max_output_tokens": 3}
        made = first.request("POST", "/v1/responses", json=asked).json()
        assert first.request("POST", "/v1/completions", json=body).status_code == 200
        before = first.request("GET", "/v1/sessions").json()
        if end == "stop":
            assert first.stop() == 0
        else:
            until((folder / "sessions.sqlite").exists)
            until(lambda: (folder / "sessions.sqlite").stat().st_size > 0)
            # the session is committed
            until(lambda: not (folder / "sessions.sqlite-journal").exists())
            until(lambda: response_file(folder / "responses.sqlite").load() != {})
            first.kill()
    with a_process(flags) as second:
        assert second.request("GET", "/v1/sessions").json() == before
        assert before["data"][0]["turns"] == 1
        assert second.request("GET", f"/v1/responses/{made['id']}").json() == made
        assert second.stop() == 0


@pytest.mark.torch
@pytest.mark.slow
def test_a_conversation_comes_back_from_disk_with_its_pages(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(smollm2_folder), "--kv-tokens", "8192"]
    flags += ["--disk-dir", str(tmp_path / "store"), "--host-gb", "0.3"]
    question = "Tell me about the Rhine, its water, its banks, its fish and its towns, in detail."
    messages: list[AnyJson] = [{"role": "user", "content": question}]

    def turn(process: Process) -> AnyJson:
        body = {"messages": messages, "session_id": "s", "max_tokens": 40, "temperature": 0}
        reply: AnyJson = process.request("POST", "/v1/chat/completions", json=body).json()
        messages.append(reply["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})
        usage: AnyJson = reply["usage"]
        return usage

    with a_process(flags, "real") as first:
        before = turn(first)
        assert first.stop() == 0
    with a_process(flags, "real") as second:
        usage = turn(second)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= before["total_tokens"] // 16 * 16 - 16
        assert 'mainstem:loaded_pages_total{engine="0",model_name="smollm2",tier="disk"}' in (
            second.request("GET", "/metrics").text
        )
        assert second.stop() == 0
