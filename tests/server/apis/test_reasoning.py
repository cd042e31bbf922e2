"""Reasoning over HTTP and in batches, with templates that support it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstem.cli.batch import main
from mainstem.core.json import AnyJson
from mainstem.text.parsers.formats import find_formats
from mainstem.wire.calls import CallKind
from mainstem.wire.chat.parsing import CallParser
from tests.fake_engines import TEMPLATE, FakeEngines, a_tokenizer
from tests.server.running import Running, a_server, events
from tests.text.test_tools import HERMES, WEATHER

CHAT = [{"role": "user", "content": "What is <think> for?"}]
SAID = "<think>\nHm, hm.\n</think>\n\nYes."
OPENS = (  # like Qwen3's: reasoning begins in the prompt, unless it is turned off
    "{% if add_generation_prompt %}{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    engines = FakeEngines(num_pages=512, max_model_len=800, template=HERMES + OPENS)
    with a_server(engines=engines) as running:
        yield running


def message(running: Running, **fields: object) -> AnyJson:
    reply = running.post("/v1/chat/completions", {"messages": CHAT, **fields})
    assert reply.status_code == 200, reply.text
    found: AnyJson = reply.json()["choices"][0]["message"]
    return found


def test_an_answer_begins_with_reasoning_if_the_prompt_opens_it(thinking: Running) -> None:
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    thought = message(thinking, **fields)
    assert thought["content"] is None
    assert thought["reasoning_content"] == thought["reasoning"]
    body = {"messages": CHAT, "stream": True, **fields}
    data = events(thinking.post("/v1/chat/completions", body).text)[:-1]
    deltas = [json.loads(each)["choices"][0]["delta"] for each in data]
    streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert streamed == thought["reasoning_content"]
    assert not any(delta.get("content") for delta in deltas)
    declined = message(thinking, **fields, **NO_THOUGHT)
    assert declined["content"]
    assert "reasoning_content" not in declined
    thinking.settle()


def test_an_answer_may_open_its_reasoning_itself(thinking: Running) -> None:
    found = message(thinking, guided_choice=[SAID])
    assert (found["reasoning_content"], found["content"]) == ("Hm, hm.", "Yes.")


def test_an_answer_with_a_form_has_no_reasoning(thinking: Running) -> None:
    found = message(thinking, guided_choice=["yes"])
    assert found["content"] == "yes"
    assert "reasoning_content" not in found
    called = message(thinking, tools=[WEATHER], tool_choice="required")
    assert called["tool_calls"][0]["function"]["name"] == "weather"
    assert called["content"] is None


def test_a_continued_message_may_be_within_its_reasoning(thinking: Running) -> None:
    def continued(said: str) -> AnyJson:
        chat = [*CHAT, {"role": "assistant", "content": said}]
        fields = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
        return message(thinking, messages=chat, continue_final_message=True, **fields)

    assert continued("<think>\nI")["content"] is None
    assert continued("<think>\nI</think>\nSo")["content"]


def test_completions_are_plain_text(thinking: Running) -> None:
    body = {"prompt": "<assistant><think>\n", "guided_choice": [SAID], "max_tokens": 64}
    reply = thinking.post("/v1/completions", body).json()
    assert reply["choices"][0]["text"] == SAID
    assert "completion_tokens_details" not in reply["usage"]


def test_a_template_without_reasoning_leaves_it_in_the_text(server: Running) -> None:
    found = message(server, guided_choice=[SAID])
    assert found["content"] == SAID
    assert "reasoning_content" not in found


@pytest.mark.parametrize(("flags", "is_parsed"), [([], True), (["--reasoning-parser=none"], False)])
def test_reasoning_in_rows_of_a_batch_is_parsed_the_same_way(
    tmp_path: Path, flags: list[str], is_parsed: bool
) -> None:
    row = {"custom_id": "1", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    row |= {"ignore_eos": True}
    plain = row | {"custom_id": "2", **NO_THOUGHT}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(plain)}\n")
    paths = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main([*paths, "--no-progress", *flags], FakeEngines(template=TEMPLATE + OPENS)) == 0
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"] for line in lines}
    assert ("reasoning_content" in found["1"]) is is_parsed
    assert (found["1"]["content"] is None) is is_parsed
    assert found["2"]["content"]


def test_a_reasoning_mark_in_an_earlier_message_does_not_begin_reasoning() -> None:
    tokenizer = a_tokenizer()
    formats = find_formats(tokenizer, "none", "think")
    body = {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": False}
    call, _ = CallParser({}, find_formats=lambda: formats).parse(body, CallKind.CHAT)
    mentioned = "<user>What is <think>?<|end|><assistant>It"
    assert call.rendering(tokenizer.encode(mentioned), tokenizer).opening == ""
    begun = f"{mentioned}<|end|><assistant><think>It"
    assert call.rendering(tokenizer.encode(begun), tokenizer).opening == "<think>"
