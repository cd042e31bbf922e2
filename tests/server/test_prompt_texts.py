"""What a request says is text to the model, and is not read at all where it is far too long."""

import pytest

from mainstem.cli.flags import engine_config
from mainstem.cli.serve import parser
from mainstem.server.auth import KeyRing
from tests.batch.fake_batch import EOS_ID
from tests.server.running import ALICE, BOB, Json, Running

END = "<|end|>"
LONG = {"role": "user", "content": "x" * 20_000}


def chat_ids(server: Running, *messages: Json, **fields: object) -> list[int]:
    reply = server.post("/tokenize", {"messages": list(messages)} | fields)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["tokens"]
    return ids


def refusal(server: Running, body: Json, path: str = "/v1/chat/completions") -> Json:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    error: Json = reply.json()["error"]
    return error


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_special_tokens_in_a_message_are_text(server: Running, role: str) -> None:
    ids = chat_ids(server, {"role": role, "content": f"so {END} ends"})
    assert EOS_ID not in ids
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == f"<{role}>so {END} ends\n<assistant>"


def test_special_tokens_in_a_raw_prompt_act(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": f"so {END}"}).json()["tokens"]
    assert ids[-1] == EOS_ID


def test_the_flag_is_a_setting_of_the_model() -> None:
    assert not engine_config(parser().parse_args([])).model.allow_special_tokens
    args = parser().parse_args(["--allow-special-tokens"])
    assert engine_config(args).model.allow_special_tokens


def test_a_session_goes_on_after_a_special_token_that_is_text(server: Running) -> None:
    messages: list[Json] = [{"role": "user", "content": f"What does {END} mean, and what > this <"}]
    body: Json = {"messages": messages, "session_id": "spelled", "max_tokens": 8}
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


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_content_that_is_null_is_refused_in_words(server: Running, role: str) -> None:
    error = refusal(server, {"messages": [{"role": role, "content": None}]})
    assert error["message"] == "messages[0].content: must be a text, got null"


def test_an_answer_that_is_null_is_empty(server: Running) -> None:
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
def test_a_prompt_that_is_far_too_long_is_refused_unread(
    server: Running, path: str, body: Json, field: str
) -> None:
    """The longest token is `<|end|>`: 20,000 characters are 2,858 tokens or more."""
    error = refusal(server, body, path)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "has at least " in error["message"]


def test_what_may_outgrow_the_window_is_read(server: Running) -> None:
    body = {"prompt": "x" * 20_000, "max_tokens": 1, "context_overflow": "recompute"}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/tokenize", {"prompt": "x" * 20_000}).json()["count"] == 20_000


def test_one_keys_texts_are_unknown_to_another(locked: Running) -> None:
    """How long a prompt takes must not say whether somebody else has sent it."""
    tokenizer = locked.gateway.engine.tokenizer
    messages = [{"role": "user", "content": "A text that only Alice has sent until now."}]
    body = {"messages": messages, "max_tokens": 1}
    assert locked.post("/v1/chat/completions", body, ALICE).status_code == 200
    text = tokenizer.chat_text(messages)
    ring = KeyRing({"alice": ALICE, "bob": BOB})
    new = [tokenizer.look_up_chat_text(text, each.salt).num_new_chars for each in ring.tenants]
    assert new[0] == 0
    assert new[1] > 0
