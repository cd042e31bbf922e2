"""Special tokens spelled out in a message have no effect; far too long prompts are not encoded."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread, current_thread

import pytest

from mainstem.cli.flags import engine_config
from mainstem.cli.serve import open_model, parser
from mainstem.core.json import AnyJson
from mainstem.server.http.auth import KeyRing
from tests.fake_engines import EOS_ID
from tests.server.running import ALICE, BOB, Running

END = "<|end|>"
LONG = {"role": "user", "content": "x" * 20_000}


def chat_ids(server: Running, *messages: AnyJson, **fields: object) -> list[int]:
    reply = server.post("/tokenize", {"messages": list(messages)} | fields)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["tokens"]
    return ids


def refusal(server: Running, body: AnyJson, path: str = "/v1/chat/completions") -> AnyJson:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    error: AnyJson = reply.json()["error"]
    return error


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_special_tokens_in_a_message_are_text(server: Running, role: str) -> None:
    ids = chat_ids(server, {"role": role, "content": f"so {END} ends"})
    assert EOS_ID not in ids
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == f"<{role}>so {END} ends\n<assistant>"


def test_special_tokens_in_a_raw_prompt_are_control_tokens(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": f"so {END}"}).json()["tokens"]
    assert ids[-1] == EOS_ID


def test_only_one_prompt_is_tokenized(server: Running) -> None:
    assert server.post("/tokenize", {"prompt": ["a"]}).status_code == 200
    reply = server.post("/tokenize", {"prompt": ["a", "bc"]})
    assert reply.status_code == 400
    assert "one text" in reply.json()["error"]["message"]


@pytest.mark.parametrize("flags", [[], ["--allow-special-tokens"]])
def test_special_tokens_in_messages_are_control_tokens_with_the_flag(
    smollm2_folder: Path, flags: list[str]
) -> None:
    args = parser().parse_args(["--model", str(smollm2_folder), *flags])
    tokenizer, _ = open_model(engine_config(args), "info", None)
    plain, spelled = (
        tokenizer.encode_chat([{"role": "user", "content": said}]) for said in ("x", "x<|im_end|>")
    )
    acting = [ids.count(tokenizer.encode("<|im_end|>")[0]) for ids in (plain, spelled)]
    assert acting[1] - acting[0] == len(flags)


def test_a_session_continues_after_a_special_token_that_is_text(server: Running) -> None:
    messages: list[AnyJson] = [
        {"role": "user", "content": f"What does {END} mean, and what > this <"}
    ]
    body: AnyJson = {"messages": messages, "session_id": "spelled", "max_tokens": 8}
    body |= {"temperature": 0, "ignore_eos": True, "stop_token_ids": [95]}
    first = server.post("/v1/chat/completions", body).json()
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on"})
    second = server.post("/v1/chat/completions", body).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 4 * 4


@pytest.mark.parametrize("role", ["narrator", END, "user\n", ""])
def test_a_role_that_no_template_knows_is_refused(server: Running, role: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": "x"}]
    error = refusal(server, {"messages": messages})
    assert error["param"] == "messages[1].role"
    assert "must be one of system, developer, user, assistant, tool, function" in error["message"]


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_content_of_null_is_refused_with_a_reason(server: Running, role: str) -> None:
    error = refusal(server, {"messages": [{"role": role, "content": None}]})
    assert error["message"] == "messages[0].content: must be a text, got null"


def test_an_assistant_message_of_null_is_empty(server: Running) -> None:
    asked = {"role": "user", "content": "x"}
    null, empty = ({"role": "assistant", "content": content} for content in (None, ""))
    assert chat_ids(server, asked, null) == chat_ids(server, asked, empty)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x" * 20_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 20_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [LONG]}, "messages"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "x" * 200_000, "context_overflow": "recompute"},
            "prompt",
        ),
    ],
)
def test_a_prompt_that_is_far_too_long_is_refused_before_encoding(
    server: Running, path: str, body: AnyJson, field: str
) -> None:
    """The longest token is `<|end|>`, so 20,000 characters are at least 2,858 tokens."""
    error = refusal(server, body, path)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert error["message"].startswith("This model's maximum context length is ")
    assert "has at least " in error["message"]


def test_a_long_prompt_that_may_be_truncated_is_encoded(server: Running) -> None:
    body = {"prompt": "x" * 20_000, "max_tokens": 1, "context_overflow": "recompute"}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/tokenize", {"prompt": "x" * 20_000}).json()["count"] == 20_000


def test_cached_texts_of_one_key_are_not_used_for_another(locked: Running) -> None:
    """The time that a prompt takes must not reveal whether another tenant has sent it."""
    tokenizer = locked.gateway.engine.tokenizer
    messages = [{"role": "user", "content": "A text that only Alice has sent until now."}]
    body = {"messages": messages, "max_tokens": 1}
    assert locked.post("/v1/chat/completions", body, ALICE).status_code == 200
    text = tokenizer.chat_text(messages)
    ring = KeyRing({"alice": ALICE, "bob": BOB})
    new = [tokenizer.look_up_chat_text(text, each.salt).num_new_chars for each in ring.tenants]
    assert new[0] == 0
    assert new[1] > 0


def test_many_ids_are_not_decoded_on_the_event_loops_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.gateway.engine.tokenizer
    threads: set[Thread] = set()

    def noting(method: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object) -> object:
            threads.add(current_thread())
            return method(*args)

        return noted

    for name in ("token_bytes", "decode_all"):
        monkeypatch.setattr(tokenizer, name, noting(getattr(tokenizer, name)))
    text = "many " * 1000
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert "".join(found["token_strs"]) == text
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert threads
    assert server.thread not in threads, "the thread of the event loop was used"


def test_no_more_ids_are_decoded_than_a_prompt_may_have(server: Running) -> None:
    most = 32 * server.gateway.engine.max_model_len
    assert server.post("/detokenize", {"tokens": [5] * most}).status_code == 200
    error = refusal(server, {"tokens": [5] * (most + 1)}, "/detokenize")
    assert error["message"] == f"tokens: {most + 1} ids; at most {most} are allowed"
