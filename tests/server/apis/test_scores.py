"""Routes that score choices, over FakeRunner: scores are exact, and errors name the field."""

from math import exp

import pytest

from mainstem.core.json import AnyJson
from tests.fake_engines import a_tokenizer
from tests.fakes import fake_logprob
from tests.server.running import ALICE, Running

CONTEXT = "question: which of these letters is the one that I like best? answer:"
CHOICES = [" a", " b or c", " b or d"]
TOKENIZER = a_tokenizer()


def logprobs_of(context: str, choice: str) -> list[float]:
    """FakeRunner's logprobs of a choice's tokens; each byte is a token."""
    ids = TOKENIZER.encode(context)
    found = []
    for token_id in TOKENIZER.encode(choice):
        found.append(fake_logprob(ids, token_id, 0).logprob)
        ids = [*ids, token_id]
    return found


def asked(
    server: Running, body: AnyJson, path: str = "/v1/score", key: str | None = None
) -> AnyJson:
    response = server.post(path, body, key)
    assert response.status_code == 200, response.text
    found: AnyJson = response.json()
    return found


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_choices_are_scored_after_a_prompt(server: Running, path: str) -> None:
    reply = asked(server, {"prompt": CONTEXT, "choices": CHOICES}, path)
    assert reply["object"] == "score"
    wanted = [logprobs_of(CONTEXT, choice) for choice in CHOICES]
    assert [each["token_logprobs"] for each in reply["choices"]] == wanted
    sums = [sum(each) for each in wanted]
    assert [each["logprob"] for each in reply["choices"]] == pytest.approx(sums)
    assert reply["best"] == sums.index(max(sums))
    assert sum(each["probability"] for each in reply["choices"]) == pytest.approx(1)
    num_tokens = len(CONTEXT) + sum(map(len, CHOICES))
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_tokens
    again = asked(server, {"prompt": CONTEXT, "choices": CHOICES}, path)
    assert again["choices"] == reply["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(CONTEXT) - 1


def test_contexts_may_be_ids_or_messages_and_may_follow_an_app(server: Running) -> None:
    ids = TOKENIZER.encode(CONTEXT)
    given = asked(server, {"prompt": ids, "choices": CHOICES})
    assert given["choices"][1]["token_logprobs"] == logprobs_of(CONTEXT, CHOICES[1])
    messages = [{"role": "user", "content": CONTEXT}]
    chat = asked(server, {"messages": messages, "choices": CHOICES})
    assert chat["choices"] != given["choices"]
    named = asked(server, {"prompt": CONTEXT, "choices": CHOICES, "app": "polite"})
    assert named["model"].endswith(":polite")
    assert named["choices"] != given["choices"]


def test_labels_are_scored_in_the_format_of_sglang(server: Running) -> None:
    labels = [5, 7, 9]
    body: AnyJson = {"query": CONTEXT, "items": [" a", " bc"], "label_token_ids": labels}
    reply = asked(server, body)
    wanted = [
        [fake_logprob(TOKENIZER.encode(CONTEXT + item), label, 0).logprob for label in labels]
        for item in (" a", " bc")
    ]
    assert reply["scores"] == [pytest.approx([exp(each) for each in row]) for row in wanted]
    soft = asked(server, body | {"apply_softmax": True})
    shares = [[exp(each) / sum(map(exp, row)) for each in row] for row in wanted]
    assert soft["scores"] == [pytest.approx(row) for row in shares]
    turned = asked(server, body | {"item_first": True, "items": " a"})
    first = fake_logprob(TOKENIZER.encode(" a" + CONTEXT), labels[0], 0).logprob
    assert turned["scores"][0][0] == pytest.approx(exp(first))
    ids = body | {"query": TOKENIZER.encode(CONTEXT), "items": [TOKENIZER.encode(" a")]}
    assert asked(server, ids)["scores"] == [pytest.approx(reply["scores"][0])]
    data = asked(server, body, "/generative_scoring")["data"]
    assert [each["score"] for each in data] == pytest.approx([row[0] for row in shares])
    assert [each["index"] for each in data] == [0, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a", "text_2": "b"}, "text_1"),
        ({"queries": "a", "documents": ["b"]}, "queries"),
        ({"prompt": "a"}, "choices"),
        ({"choices": ["a"]}, "prompt"),
        ({"prompt": "a", "choices": []}, "choices"),
        ({"prompt": "a", "choices": [""]}, "choices"),
        ({"prompt": "a", "choices": ["b"] * 129}, "choices"),
        ({"prompt": "", "choices": ["b"]}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "choices": ["b"]}, None),
        ({"prompt": ["a", "b"], "choices": ["b"]}, "prompt"),
        ({"prompt": "a", "choices": ["b"], "temperature": 1}, "temperature"),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        (
            {"query": "a", "items": ["b"] * 33, "label_token_ids": [*range(32)]},
            "label_token_ids",
        ),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, None),
        ({"prompt": "a" * 100_000, "choices": ["b"]}, "prompt"),
    ],
)
def test_the_error_names_the_field_that_cannot_be_scored(
    server: Running, body: AnyJson, param: str | None
) -> None:
    response = server.post("/v1/score", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param or param is None


def test_scores_need_a_key(locked: Running) -> None:
    body = {"prompt": CONTEXT, "choices": CHOICES}
    assert locked.post("/v1/score", body).status_code == 401
    reply = asked(locked, body, key=ALICE)
    assert reply["choices"][0]["token_logprobs"] == logprobs_of(CONTEXT, CHOICES[0])


@pytest.mark.parametrize("is_list", [False, True])
def test_an_evaluation_computes_a_context_once(server: Running, is_list: bool) -> None:
    """A request like those of lm-evaluation-harness: ids, echo, logprobs 1, max_tokens 1."""
    context = TOKENIZER.encode(f"{is_list}: {CONTEXT * 3}")
    prompts = [[*context, *TOKENIZER.encode(choice)] for choice in CHOICES]
    fields: AnyJson = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    sent = [prompts] if is_list else prompts
    replies = [server.complete(each, **fields) for each in sent]
    choices = [choice for reply in replies for choice in reply["choices"]]
    for prompt, choice in zip(prompts, choices, strict=True):
        found = [fake_logprob(prompt[:i], prompt[i], 1) for i in range(1, len(prompt))]
        assert choice["logprobs"]["token_logprobs"][1:-1] == [each.logprob for each in found]
        tops = [next(iter(top.values())) for top in choice["logprobs"]["top_logprobs"][1:-1]]
        assert len(tops) == len(found)
    usages = [reply["usage"] for reply in replies]
    num_tokens = sum(each["prompt_tokens"] for each in usages)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    of_choices = sum(len(prompt) - len(context) for prompt in prompts)
    assert num_tokens - cached - of_choices <= 1.1 * len(context)
