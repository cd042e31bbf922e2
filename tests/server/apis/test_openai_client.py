"""The stock `openai` client, connected to a real process that serves smollm2."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.process import Process, a_process
from tests.server.running import ADMIN, ALICE

pytestmark = pytest.mark.torch

SYSTEM = (
    "You are the assistant of a small shop that sells garden tools. Answer in one short sentence. "
    "Never promise a delivery date. If you do not know something, say so and offer to ask."
)
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def process(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "system.txt").write_text(SYSTEM)
    (folder / "keys").write_text(f"alice:{ALICE}\n")
    (folder / "admin").write_text(f"root:{ADMIN}\n")
    flags = ["--model", str(smollm2_folder), "--kv-tokens", "8192", "--served-model-name", "smol"]
    flags += ["--app", f"shop={folder / 'system.txt'}"]
    flags += ["--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin")]
    with a_process(flags, "real") as made:
        yield made


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{process.url}/v1", api_key=ALICE, max_retries=0, timeout=300) as made:
        yield made


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol", "smol:shop"]
    assert client.models.retrieve("smol:shop").id == "smol:shop"


def test_chat_whole_and_streamed_agree(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Name a colour."}],
        max_completion_tokens=12,
        temperature=0,
    )
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(
        client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "Name a colour."}],
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_an_app_is_cached_before_the_first_request(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol:shop",
        messages=[{"role": "user", "content": "Do you sell rakes?"}],
        max_tokens=8,
        temperature=0,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    # the tokens after the app's prompt fill less than a page
    assert answer.usage.prompt_tokens - cached < 16


def test_completions_can_stop_and_echo(client: OpenAI) -> None:
    plain = client.completions.create(model="smol", prompt=FRANCE, max_tokens=8, temperature=0)
    assert "Paris" in plain.choices[0].text
    stopped = client.completions.create(
        model="smol", prompt=FRANCE, max_tokens=8, temperature=0, stop=["ris"], echo=True
    )
    assert stopped.choices[0].text == f"{FRANCE} Pa"
    assert stopped.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model="smol", prompt=FRANCE, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain.choices[0].text


def test_chats_and_completions_have_logprobs(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    scored = client.completions.create(
        model="smol", prompt=FRANCE, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == scored.choices[0].text
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


def test_n_and_seed_give_different_but_repeatable_answers(client: OpenAI) -> None:
    def ask() -> list[str]:
        reply = client.completions.create(
            model="smol", prompt="Once upon a time", max_tokens=8, n=3, seed=11, temperature=1.0
        )
        return [choice.text for choice in reply.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_answers_have_the_form_that_was_asked_for(client: OpenAI) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "in_europe": {"type": "boolean"},
        },
        "required": ["capital", "in_europe"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        max_tokens=40,
        temperature=0,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    for choice in reply.choices:
        value = json.loads(choice.message.content or "")
        assert "Paris" in value["capital"]
        assert isinstance(value["in_europe"], bool)
        assert choice.finish_reason == "stop"


def test_a_session_finds_the_pages_of_its_turns(client: OpenAI) -> None:
    messages: list[dict[str, str]] = []
    totals: list[tuple[int, int]] = []
    for question in ("Tell me about the river Rhine, please.", "And now something else."):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model="smol",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=40,
            temperature=1.5,  # rare words: encoding their text may give other ids
            seed=5,
            extra_body={"session_id": "rhine", "top_k": 50},
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        totals.append((cached, reply.usage.total_tokens))
    assert totals[1][0] >= totals[0][1] - 16, "the answer's own pages were not found"


def test_responses_continue_each_other(client: OpenAI) -> None:
    first = client.responses.create(
        model="smol",
        instructions="Answer in one sentence.",
        input="What is the capital of France, and which river flows through it?",
        max_output_tokens=24,
        temperature=0,
    )
    assert first.usage is not None
    with client.responses.stream(
        model="smol",
        instructions="Answer in one sentence.",
        input="And of Italy?",
        previous_response_id=first.id,
        max_output_tokens=64,
        temperature=0,
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        second = stream.get_final_response()
    assert "".join(deltas) == second.output_text
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 16, "the answer's own pages were not found"
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_penalties_bias_and_extra_fields_are_accepted(client: OpenAI) -> None:
    reply = client.completions.create(
        model="smol",
        prompt=[504, 3575, 282],
        max_tokens=4,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"100": -100},
        user="me",
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4


def test_the_client_raises_its_own_error_classes(client: OpenAI, process: Process) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "Hi"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "y"}},
            },
        )
    assert refused.value.param == "response_format"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
    with (
        OpenAI(base_url=f"{process.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_anthropics_client_gets_the_same_answer(client: OpenAI, process: Process) -> None:
    anthropic = pytest.importorskip("anthropic")
    chat = client.chat.completions.create(
        model="smol",
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Do you sell rakes?"},
        ],
        max_tokens=16,
        temperature=0,
    )
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    with (
        anthropic.Anthropic(base_url=process.url, api_key=ALICE, max_retries=0) as other,
        other.messages.stream(
            model="smol",
            system=system,
            messages=[{"role": "user", "content": "Do you sell rakes?"}],
            max_tokens=16,
            extra_body={"temperature": 0},
        ) as stream,
    ):
        message = stream.get_final_message()
    assert message.content[0].text == chat.choices[0].message.content
    assert message.usage.cache_read_input_tokens > 32
    assert chat.usage is not None
    total = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert total + message.usage.cache_creation_input_tokens == chat.usage.prompt_tokens


def test_the_cache_is_reset_by_an_admin(client: OpenAI, process: Process) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    reset = httpx.post(f"{process.url}/admin/reset_prefix_cache", headers=headers, timeout=300)
    assert reset.json()["forgotten_pages"] > 0


def test_sigterm_ends_the_process_with_status_0(client: OpenAI, process: Process) -> None:
    """This must be the last test of the module, since it ends the process."""
    os.kill(process.popen.pid, signal.SIGTERM)
    assert process.popen.wait(30) == 0
    events = [line["event"] for line in process.lines]
    assert "shutting down" in events
    assert not [line for line in process.lines if line["level"] == "error"]
