"""What scripts hand to LLM: every way that vLLM knows is taken or refused by name."""

from typing import Any

import numpy as np
import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.text.prompts import listed_conversations, listed_params, listed_prompts

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
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([], []),
    ],
)
def test_prompts_of_every_kind_are_taken(given: Any, listed: object) -> None:
    assert listed_prompts(given) == listed


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"hi", "text or token ids"),
        ([b"hi"], "prompt 0 must be text"),
        (["hi", None], "prompt 1 must be text"),
        ([{"prompt": "hi", "multi_modal_data": {}}], "multi_modal_data"),
        ([{"prompt": 5}], "prompt 0"),
        ([{"prompt_token_ids": "hi"}], "prompt_token_ids"),
        ([{"prompt_embeds": [0.5]}], "prompt_embeds"),
        ([{}], "prompt 0"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        listed_prompts(given)


@pytest.mark.parametrize("given", [{"temperature": 0}, [None], "greedy", 5])
def test_settings_that_are_no_sampling_params_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        listed_params(given, 1)


def test_a_conversation_and_a_list_of_them_are_told_apart() -> None:
    assert listed_conversations([USER]) == [[USER]]
    assert listed_conversations([[USER], [USER, USER]]) == [[USER], [USER, USER]]


def test_texts_in_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert listed_conversations([{"role": "user", "content": parts}]) == [
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
def test_no_message_is_dropped_in_silence(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        listed_conversations(given)


def test_vllms_absent_values_are_taken() -> None:
    params: dict[str, Any] = {"stop": None, "stop_token_ids": None, "seed": None, "logprobs": None}
    assert SamplingParams(**params) == SamplingParams()


@pytest.mark.parametrize(
    "setting",
    [{"stop": 5}, {"stop_token_ids": 5}, {"ignore_eos": "no"}, {"skip_special_tokens": None}],
)
def test_a_setting_of_another_kind_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        SamplingParams(**setting)


def test_a_seed_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="seed"):
        SchedConfig(seed=None)  # type: ignore[arg-type]  # as a script may
