"""Requests and replies in OpenAI's format; the fake model's answers are known exactly."""

import json
from pathlib import Path

import pytest
import tokenizers

from mainstem.core.json import AnyJson
from mainstem.server.served_model import ServedModel
from mainstem.wire import neutral
from tests.builders import VOCAB
from tests.fake_engines import TEMPLATE, FakeEngines, a_tokenizer, expected_text
from tests.fakes import fake_answer, fake_logprob
from tests.server.running import Running, a_server, events

CHAT = [{"role": "user", "content": "Who are you?"}]
RENDERED = "<user>Who are you?\n<assistant>"
PROMPTS: dict[str, AnyJson] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "Once upon"},
}
ROOT = Path(__file__).resolve().parents[3]


def answer_to(prompt: str, length: int) -> str:
    tokenizer = a_tokenizer()
    return tokenizer.decode(fake_answer(tokenizer.encode(prompt), length, VOCAB))


def stream(server: Running, path: str, body: AnyJson) -> list[AnyJson]:
    """The chunks of a stream; checks its end mark."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


def test_a_chat_has_the_format_of_openai(server: Running) -> None:
    body = {"model": "fake", "messages": CHAT, "max_tokens": 6, "temperature": 0}
    reply = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "fake"
    [choice] = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == answer_to(RENDERED, 6)
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(RENDERED)
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["usage"]["total_tokens"] == len(RENDERED) + 6


def test_a_completion_has_the_format_of_openai(server: Running) -> None:
    reply = server.complete("Once upon", max_tokens=5)
    assert reply["object"] == "text_completion"
    [choice] = reply["choices"]
    assert choice["text"] == answer_to("Once upon", 5)
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"


def test_fields_that_a_request_leaves_out_come_from_generation_config() -> None:
    with a_server(sampling={"temperature": 0.25, "top_k": 7}) as server:
        server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})
        server.post("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 2, "top_k": 3})
        asked = [(s.temperature, s.top_k) for s in server.engines.samplings.values()]
        assert asked == [(0.25, 7), (0.25, 3), (0.25, 3)]


def test_a_completion_has_16_tokens_by_default(server: Running) -> None:
    assert server.complete("Once upon")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("seed", [1, 2])
def test_the_chunks_of_a_streamed_chat_make_the_whole_answer(server: Running, seed: int) -> None:
    body = {"messages": CHAT, "max_tokens": 12, "seed": seed, "n": 2, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", body).json()
    chunks = stream(server, "/v1/chat/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"
        assert own[-1]["delta"] == {}


def test_a_stream_ends_with_usage_if_asked(server: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
    chunks = stream(server, "/v1/completions", body | {"ignore_eos": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk for chunk in stream(server, "/v1/completions", {"prompt": "a"}))


def test_several_prompts_give_choices_in_order(server: Running) -> None:
    reply = server.complete(["first", "second"], max_tokens=4, n=2)
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == [answer_to("first", 4)] * 2 + [answer_to("second", 4)] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == len("first") + len("second")


def test_streamed_chunks_of_several_prompts_have_their_index(server: Running) -> None:
    body = {"prompt": ["first", "second"], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    texts = ["", ""]
    for chunk in stream(server, "/v1/completions", body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [answer_to("first", 4), answer_to("second", 4)]


def test_prompts_may_be_token_ids(server: Running) -> None:
    ids = a_tokenizer().encode("token ids")
    for prompt in (ids, [ids]):
        assert server.complete(prompt, max_tokens=4)["choices"][0]["text"] == answer_to(
            "token ids", 4
        )


def test_echo_puts_the_prompt_before_the_answer(server: Running) -> None:
    reply = server.complete("say it", max_tokens=3, echo=True)
    assert reply["choices"][0]["text"] == "say it" + answer_to("say it", 3)
    chunks = stream(server, "/v1/completions", {"prompt": "say it", "echo": True, "max_tokens": 3})
    assert "".join(c["choices"][0]["text"] for c in chunks).startswith("say it")


def test_echo_of_token_ids_is_their_text(server: Running) -> None:
    ids = a_tokenizer().encode("as ids")
    assert server.complete(ids, max_tokens=1, echo=True)["choices"][0]["text"].startswith("as ids")


def test_a_prompt_can_be_scored_without_an_answer(server: Running) -> None:
    reply = server.complete("score", max_tokens=0, echo=True, logprobs=1)
    [choice] = reply["choices"]
    assert choice["text"] == "score"
    assert choice["logprobs"]["tokens"] == list("score")
    ids = a_tokenizer().encode("score")
    found = [fake_logprob(ids[:place], ids[place], 1).logprob for place in range(1, len(ids))]
    assert choice["logprobs"]["token_logprobs"] == [None, *found]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert reply["usage"]["completion_tokens"] == 0


def test_a_chat_may_have_logprobs(server: Running) -> None:
    body = {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    reply = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert {"token", "logprob", "bytes", "top_logprobs"} == content[0].keys()
    chunks = stream(server, "/v1/chat/completions", body | {"ignore_eos": True})
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(logprobs["content"]) for logprobs in told) == 4


def test_offsets_of_a_streamed_completion_are_those_of_the_whole(server: Running) -> None:
    body = {"prompt": "offsets", "max_tokens": 9, "temperature": 0, "logprobs": 0, "echo": True}
    body["ignore_eos"] = True
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = stream(server, "/v1/completions", body)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for entry in logprobs for item in entry[name]] == whole[name]


@pytest.mark.parametrize("is_found", [False, True])
def test_offsets_are_right_while_text_is_held_back_for_a_stop_string(
    server: Running, is_found: bool
) -> None:
    """The stop string is several tokens long, and is completed or not."""
    text = answer_to("offsets", 9)
    stop = text[3:7] if is_found else text[3:7] + "\ue000"
    body = {"prompt": "offsets", "max_tokens": 9, "temperature": 0, "logprobs": 0, "stop": stop}
    body["ignore_eos"] = True
    whole = server.post("/v1/completions", body).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(server, "/v1/completions", body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for entry in told for item in entry[name]] == whole["logprobs"][name]


def test_a_stop_string_ends_the_answer_before_it(server: Running) -> None:
    text = answer_to("stop here", 12)
    stop = text[4:6]
    reply = server.complete("stop here", max_tokens=12, stop=[stop])
    [choice] = reply["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop


def test_an_end_token_ends_the_answer(server: Running) -> None:
    reply = server.complete("ends", max_tokens=300, ignore_eos=False)
    assert reply["choices"][0]["text"] == expected_text("ends", 300)


def test_a_returning_prompt_is_cached(server: Running) -> None:
    prompt = "a prompt that is long enough for several pages of four tokens"
    first = server.complete(prompt, max_tokens=1)["usage"]
    again = server.complete(prompt, max_tokens=1)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 4
    assert again["prompt_tokens_details"]["cached_tokens"] > len(prompt) - 8


def test_another_cache_salt_shares_nothing(server: Running) -> None:
    prompt = "another prompt that fills a few pages of four tokens"
    server.complete(prompt, max_tokens=1, cache_salt="one")
    for salt, is_cached in (("two", False), ("one", True)):
        usage = server.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is is_cached


def test_fields_of_sampling_are_accepted(server: Running) -> None:
    fields = {
        "max_completion_tokens": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 1, "seed": 7,
        "logit_bias": {"5": 1.5}, "stop_token_ids": [90], "priority": 1, "top_p": 0.9,
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    reply = server.post("/v1/completions", {"prompt": "x"} | fields)
    assert reply.json()["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("name", sorted(neutral.harmless(neutral.CHAT)))
def test_a_harmless_field_is_accepted_and_documented(server: Running, name: str) -> None:
    body = {"prompt": "x", "max_tokens": 1, name: "anything"}
    assert server.post("/v1/completions", body).status_code == 200
    assert f"`{name}`" in (ROOT / "docs" / "serve.md").read_text()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("session_id", "a/b"),
        ("session_id", 5),
        ("context_overflow", "kv"),
        ("context_overflow", "drop"),
        ("best_of", 2),
        ("no_such_field", 1),
        ("echo", True),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [5]),
        ("add_special_tokens", True),
        ("top_logprobs", 21),
        ("top_logprobs", 5),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("continue_final_message", "yes"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    server: Running, field: str, value: object
) -> None:
    response = server.post("/v1/chat/completions", {"messages": CHAT, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", -0.5),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("logprobs", 10**6),
        ("stop", [""]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"1": 1000}),
        ("prompt", []),
        ("prompt", [VOCAB]),
        ("prompt", [-1]),
        ("prompt", [2**40]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", {"a": 1}),
        ("prompt", ["ok", 5]),
        ("prompt", ""),
        ("prompt", "x" * 800),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("app", 5),
        ("echo", 1),
        ("seed", 2**70),
        ("cache_salt", 5),
        ("priority", 2**40),
        ("ignore_eos", "no"),
    ],
)
def test_the_error_names_a_value_out_of_range(server: Running, field: str, value: object) -> None:
    response = server.post("/v1/completions", {"prompt": "x"} | {field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


def test_a_misspelled_field_names_the_one_that_was_meant(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": "x", "temperature_": 1})
    said = response.json()["error"]["message"]
    assert said == "the field 'temperature_' is not supported. Did you mean temperature?"
    response = server.post("/v1/completions", {"prompt": "x", "zzz": 1})
    assert response.json()["error"]["message"] == "the field 'zzz' is not supported"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_not_text_is_refused_by_its_kind(server: Running, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    response = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    )
    assert response.status_code == 400
    said = response.json()["error"]["message"]
    assert said == f"messages[0].content[1]: {kind} parts are not supported: the model reads text"


def test_a_misspelled_kind_of_part_names_the_one_that_was_meant(server: Running) -> None:
    content = [{"type": "Text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    said = server.post("/v1/chat/completions", body).json()["error"]["message"]
    not_supported = "messages[0].content[0]: Text parts are not supported: the model reads text"
    assert said == f"{not_supported}. Did you mean text?"


def test_a_bad_request_to_stream_is_a_400_and_not_a_stream(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": [VOCAB], "stream": True})
    assert response.status_code == 400


def test_an_unknown_model_is_not_found(server: Running) -> None:
    for model in ("gpt-4", "fake:nobody", "nobody:polite"):
        response = server.post("/v1/completions", {"prompt": "x", "model": model})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_models_lists_the_names_and_the_apps(server: Running) -> None:
    listed = server.get("/v1/models").json()
    assert server.get("/v1/models/").json() == listed
    assert [model["id"] for model in listed["data"]] == [
        "fake", "alias", "fake:pirate", "fake:polite",
    ]  # fmt: skip
    assert server.get("/v1/models/alias").json()["id"] == "alias"
    assert server.get("/v1/models/other").status_code == 404


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": "to and fro"}).json()
    assert found["count"] == len("to and fro")
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == "to and fro"
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    assert chat["count"] == len(RENDERED)


@pytest.mark.parametrize("tokens", ["x", [10**6], [-1], ["a"], None, [True]])
def test_detokenize_refuses_ids_that_are_not_tokens(server: Running, tokens: object) -> None:
    response = server.post("/detokenize", {"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_tokenize_accepts_bodies_of_vllm_clients(server: Running) -> None:
    body = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    found = server.post("/tokenize", body).json()
    assert (found["count"], found["token_strs"]) == (2, ["a", "b"])
    body = {"messages": CHAT, "add_special_tokens": False, "truncate_prompt_tokens": 3}
    assert server.post("/tokenize", body).json()["tokens"] == a_tokenizer().encode(RENDERED)[-3:]
    for wrong in ({"prompt": "a", "add_special_tokens": 5}, body | {"add_special_tokens": True}):
        refused = server.post("/tokenize", wrong)
        assert refused.json()["error"]["param"] == "add_special_tokens"


def test_special_tokens_around_a_prompt_may_be_left_out() -> None:
    before = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 96)]
    )
    engines = FakeEngines(num_pages=64, max_model_len=80)
    with a_server(engines=engines) as server:
        server.gateway.engine.tokenizer._backend.post_processor = before
        for adds, count in ((None, 3), (True, 3), (False, 2)):
            body = {"prompt": "ab", "add_special_tokens": adds}
            assert server.post("/tokenize", body).json()["count"] == count


def test_tokenizer_info_has_the_fields_of_vllm(server: Running) -> None:
    """The remote tokenizer of lm-evaluation-harness reads these fields and encodes the end
    token."""
    body = {"prompt": "<|end|>", "add_special_tokens": False}
    assert server.post("/tokenize", body).json()["tokens"] == [96]
    found = server.get("/tokenizer_info").json()
    assert found["chat_template"] == TEMPLATE
    assert found["model_max_length"] == 800
    assert {"eos_token", "bos_token", "pad_token"} <= found.keys()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/tokenise", "did you mean /tokenize?"),
        ("/v1/assistants", "use POST /v1/chat/completions"),
        ("/v1/conversations/c1/items", "use previous_response_id"),
        ("/v1/embeddings", "embeddings are not served"),
        ("/qqqqqq", "/openapi.json"),
    ],
)
def test_the_reply_to_an_unknown_path_names_known_paths(
    server: Running, path: str, said: str
) -> None:
    response = server.post(path, {})
    assert response.status_code == 404
    assert said in response.json()["error"]["message"]


def test_the_reply_to_a_wrong_method_names_the_right_ones(server: Running) -> None:
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/sessions/x", "DELETE"),
    ):
        response = server.send(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert f"{path} takes {allowed}, not {method}" in response.json()["error"]["message"]


def test_each_chunk_has_the_usage_so_far_when_asked(server: Running) -> None:
    """A request like GuideLLM's; the last event has the usage of all answers."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 4, "ignore_eos": True, "n": 2, "stream_options": options}
    for path, prompt in PROMPTS.items():
        chunks = stream(server, path, prompt | fields)
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
        for index in range(2):
            own = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in own]
            assert counts == sorted(counts)
            first = 0 if "chat" in path else 1  # a chat opens with the role
            assert (counts[0], counts[-1]) == (first, 4)
            assert {usage["prompt_tokens"] for usage in own} == {last["usage"]["prompt_tokens"]}


def test_token_ids_are_returned_when_asked(server: Running) -> None:
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokenizer = a_tokenizer()
    for path, prompt in PROMPTS.items():
        text = RENDERED if "messages" in prompt else str(prompt["prompt"])
        prompt_ids = tokenizer.encode(text)
        told = fake_answer(prompt_ids, 4, VOCAB)
        whole = server.post(path, prompt | fields).json()
        [choice] = whole["choices"]
        assert choice["token_ids"] == [*told]
        place = whole if "messages" in prompt else choice  # as in vLLM
        assert place["prompt_token_ids"] == prompt_ids
        chunks = stream(server, path, prompt | fields)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [i for choice in choices for i in choice.get("token_ids", ())] == [*told]
        first = chunks[0] if "messages" in prompt else choices[0]
        assert first["prompt_token_ids"] == prompt_ids
        assert json.dumps(chunks).count("prompt_token_ids") == 1


def test_a_final_message_is_continued(server: Running) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "I am "}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    rendered = "<user>Who are you?\n<assistant>I am "
    for fields in ({}, {"add_generation_prompt": False}):
        whole = body | {"continue_final_message": True} | fields
        reply = server.post("/v1/chat/completions", whole).json()
        assert reply["choices"][0]["message"]["content"] == answer_to(rendered, 5)
    both = body | {"continue_final_message": True, "add_generation_prompt": True}
    error = server.post("/v1/chat/completions", both).json()["error"]
    assert error["param"] == "continue_final_message"


def test_truncate_prompt_tokens_keeps_the_end_of_a_prompt(server: Running) -> None:
    def answered(**fields: object) -> tuple[int, str]:
        reply = server.complete("0123456789", None, max_tokens=3, **fields)
        return reply["usage"]["prompt_tokens"], reply["choices"][0]["text"]

    assert answered(truncate_prompt_tokens=4) == (4, answer_to("6789", 3))
    assert answered(truncate_prompt_tokens=4, echo=True) == (4, "6789" + answer_to("6789", 3))
    assert answered(truncate_prompt_tokens=10**6)[0] == 10
    usage = server.complete("x" * 2000, max_tokens=30, truncate_prompt_tokens=-1)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (770, 30)
    for fields in ({"app": "polite"}, {"session_id": "s"}):
        body = {"prompt": "x", "truncate_prompt_tokens": 4} | fields
        error = server.post("/v1/completions", body).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"


def test_replies_have_a_fingerprint(server: Running) -> None:
    first = server.complete("x", max_tokens=1)["system_fingerprint"]
    assert first.startswith("fp_")
    assert stream(server, "/v1/completions", {"prompt": "x"})[0]["system_fingerprint"] == first
    others = [
        ServedModel(("other",), 0),
        ServedModel(("fake", "alias"), 0, {"top_k": 5}),
        ServedModel(("fake", "alias"), 0, settings="int8"),
    ]
    assert ServedModel(("fake", "alias"), 1).fingerprint == first
    assert len({first, *(model.fingerprint for model in others)}) == 4


def test_errors_of_http_have_the_format_of_openai(server: Running) -> None:
    assert server.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert server.get("/nowhere").status_code == 404
    assert server.get("/v1/completions").status_code == 405


def test_every_response_has_an_id(server: Running) -> None:
    ids = {server.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/ready")}
    assert len(ids) == 3


def test_live_has_exactly_these_fields(server: Running) -> None:
    server.complete("something to show", max_tokens=2)
    live = server.get("/live").json()
    assert set(live) == {
        "model", "uptime_s", "running", "waiting", "pages", "stems", "totals", "tokens_per_s",
        "apps", "recent", "step",
    }  # fmt: skip
    assert set(live["pages"]) == {"total", "held", "cached", "host", "disk", "page_size"}
    assert set(live["totals"]) == {
        "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "saving_ratio",
        "read_ratio", "preemptions", "truncated_prompts", "loaded_pages",
    }  # fmt: skip
    last = live["recent"][-1]
    assert set(last) == {
        "id", "app", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens",
        "ttft_ms", "state",
    }  # fmt: skip
    assert last["state"] == "finished"
    assert last["output_tokens"] == 2
    assert last["prompt_tokens"] == last["computed_tokens"] == len("something to show")
    assert live["apps"] == ["pirate", "polite"]
    assert len(live["recent"]) <= 20


def test_metrics_have_responses_and_latencies(server: Running) -> None:
    server.complete("counted", max_tokens=2)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'mainstem:http_responses_total{code="200",engine="0",model_name="fake"}' in response.text
    assert "vllm:time_to_first_token_seconds_count" in response.text


def test_the_page_and_its_files_are_served(server: Running) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert server.get("/page/page.js").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/page/..%2fserve.py", "/page/%2e%2e/serve.py", "/page/../serve.py", "/page/nothing.js"],
)
def test_no_path_gives_access_to_files_outside_the_page(server: Running, path: str) -> None:
    assert server.get(path).status_code == 404


def test_health_ready_and_version_answer(server: Running) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    assert server.get("/version").json()["version"]


def test_the_openapi_document_names_routes(server: Running) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/admin/apps/{name}", "/live"):
        assert path in paths
    assert "/tokenizer_info" in paths


def test_prompt_logprobs_have_the_format_of_vllm(server: Running) -> None:
    ids = [5, 6, 7]
    reply = server.complete(ids, max_tokens=1, prompt_logprobs=0)
    places = reply["choices"][0]["prompt_logprobs"]
    assert places[0] is None
    assert [list(place) for place in places[1:]] == [["6"], ["7"]]
    wanted = fake_logprob([5], 6, 0)
    told = {"logprob": wanted.logprob, "rank": wanted.rank, "decoded_token": "&"}
    assert places[1]["6"] == told
    chat = {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    for fields in ({"stream": True}, {"echo": True, "logprobs": 1}):
        body = {"prompt": "x", "prompt_logprobs": 1} | fields
        assert server.post("/v1/completions", body).json()["error"]["param"] == "prompt_logprobs"
