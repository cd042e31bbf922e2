"""Prompts that scripts pass to LLM: each kind of vLLM's is accepted, or the error names it."""

from typing import Any

import numpy as np
import pytest
import torch

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.text.prompts import (
    is_conversation,
    listed_conversations,
    listed_params,
    listed_prompts,
    listed_sessions,
)

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("hi", ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], "hi"], [[1, 2], "hi"]),
        ({"prompt": "hi"}, ["hi"]),
        ([{"prompt": "hi"}, {"prompt_token_ids": [1, 2]}], ["hi", [1, 2]]),
        ([{"prompt": None, "prompt_token_ids": (1, 2)}], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2]), "hi"], [[1, 2], "hi"]),
        ({"prompt_token_ids": torch.tensor([1, 2])}, [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]]),
        ((text for text in ("hi", "ho")), ["hi", "ho"]),
        ((number for number in (1, 2)), [[1, 2]]),
        ([range(3), "hi"], [[0, 1, 2], "hi"]),
        ({1: "hi", 2: "ho"}.values(), ["hi", "ho"]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([], []),
    ],
)
def test_prompts_of_every_kind_are_accepted(given: Any, listed: object) -> None:
    found, refusals = listed_prompts(given)
    assert found == listed
    assert not refusals.reasons


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"hi", "text or token ids"),
        ([b"hi"], r"prompts\[0\]: must be text"),
        (["hi", None], r"prompts\[1\]: must be text"),
        ({"hi", "ho"}, "got set"),
        (["hi", {1, 2}], r"prompts\[1\]: must be text"),
        (["hi", "\ud800"], r"prompts\[1\]: is not valid Unicode"),
        ("\ud800", "^prompt: is not valid Unicode"),
        ([{"prompt": "hi", "multi_modal_data": {}}], "multi_modal_data"),
        ([{"prompt": 5}], r"prompts\[0\]: must have prompt or prompt_token_ids"),
        ([{"prompt_token_ids": "hi"}], "prompt_token_ids"),
        ([{"prompt_embeds": [0.5]}], "prompt_embeds"),
        ([{}], r"prompts\[0\]"),
    ],
)
def test_values_that_are_not_prompts_are_refused(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        listed_prompts(given)


@pytest.mark.parametrize("given", [{"temperature": 0}, [None], "greedy", 5])
def test_settings_that_are_not_sampling_params_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        listed_params(given, 1)


def test_refused_prompts_may_be_recorded_instead_of_raised() -> None:
    prompts: list[Any] = ["hi", None, [1], b"ho"]
    chats: list[Any] = [[USER], [5]]
    listed, refusals = listed_prompts(prompts, "return")
    assert listed == ["hi", None, [1], None]
    assert list(refusals.reasons) == [1, 3]
    assert refusals.reasons[1] == "prompt: must be text or token ids, got None"
    _, refusals = listed_conversations(chats, "return")
    assert refusals.reasons == {1: "messages: message 0 must be an object: 5"}
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: message 0 must be an object: 5"):
        listed_conversations(chats)
    with pytest.raises(InvalidRequest, match=r"errors: must be 'raise' or 'return', got 'skip'"):
        listed_prompts("hi", "skip")


def test_each_prompt_may_have_a_session() -> None:
    assert listed_sessions(None, 2) == [None, None]
    assert listed_sessions("alice", 1) == ["alice"]
    assert listed_sessions(["alice", None], 2) == ["alice", None]
    assert listed_sessions((name for name in "ab"), 2) == ["a", "b"]
    for given, number, complaint in (
        ("alice", 5, "'alice' is one name for 5 prompts; give a list, a name for each"),
        (["a"], 2, "1 given for 2 prompts"),
        ([5], 1, "must be names"),
        (5, 1, "must be names"),
    ):
        with pytest.raises(InvalidRequest, match=f"sessions: .*{complaint}"):
            listed_sessions(given, number)  # type: ignore[arg-type]  # as a script may


def test_a_list_of_messages_is_not_read_as_a_prompt() -> None:
    assert is_conversation([USER])
    for prompt in ("hi", [1, 2], {"prompt": "hi"}, [{"prompt": "hi"}], []):
        assert not is_conversation(prompt)


def test_a_conversation_and_a_list_of_them_are_distinguished() -> None:
    assert listed_conversations([USER])[0] == [[USER]]
    assert listed_conversations([[USER], [USER, USER]])[0] == [[USER], [USER, USER]]


def test_texts_in_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert listed_conversations([{"role": "user", "content": parts}])[0] == [
        [{"role": "user", "content": "a\nb"}]
    ]


@pytest.mark.parametrize(
    "given",
    [
        "hi",
        USER,
        [],
        [USER, 5],
        [[USER], "hi"],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_no_message_is_dropped_without_an_error(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        listed_conversations(given)


def test_none_means_the_default_as_in_vllm() -> None:
    params: dict[str, Any] = {"stop": None, "stop_token_ids": None, "seed": None, "logprobs": None}
    assert SamplingParams(**params) == SamplingParams()


@pytest.mark.parametrize(
    "setting",
    [{"stop": 5}, {"stop_token_ids": 5}, {"ignore_eos": "no"}, {"skip_special_tokens": None}],
)
def test_the_error_names_a_setting_of_another_kind(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        SamplingParams(**setting)


def test_the_error_names_a_seed_of_none() -> None:
    with pytest.raises(ConfigError, match="seed"):
        SchedConfig(seed=None)  # type: ignore[arg-type]  # as a script may
