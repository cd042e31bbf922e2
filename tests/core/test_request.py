"""Bad values raise an error that names the field and the allowed range."""

import numpy as np
import pytest

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams, id_array


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "between 1 and 128"),
        ("n", 10**9, "between 1 and 128"),
        ("n", 1.5, "whole number"),
        ("n", True, "whole number"),
        ("temperature", -0.1, "between 0 and 100"),
        ("temperature", float("nan"), "between 0 and 100"),
        ("temperature", "warm", "a number"),
        ("top_p", -0.1, "between 0 and 1"),
        ("top_p", 1.1, "between 0 and 1"),
        ("top_k", -2, "between -1"),
        ("min_p", 2.0, "between 0 and 1"),
        ("seed", 2**64, "between"),
        ("presence_penalty", 3.0, "between -2 and 2"),
        ("frequency_penalty", -3.0, "between -2 and 2"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("repetition_penalty", 1e-40, "between 0.01 and 100"),
        ("max_tokens", 0, "between 1 and 2,147,483,647"),
        ("min_tokens", -1, "between 0"),
        ("logprobs", 21, "between 0 and 20"),
        ("prompt_logprobs", -1, "between 0 and 20"),
        ("stop", [""], "non-empty"),
        ("stop", ["x"] * 65, "at most 64"),
        ("stop_token_ids", [-1], "between 0"),
        ("stop_token_ids", ["a"], "whole number"),
        ("logit_bias", {1: 101.0}, "between -100 and 100"),
        ("logit_bias", {"a": 1.0}, "whole number"),
    ],
)
def test_the_error_for_a_bad_value_names_the_field(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == field
    assert allowed in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)


@pytest.mark.parametrize("ids", [[], [-1], [[1, 2]]])
def test_prompts_must_hold_token_ids(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        Request(RequestId("a"), np.array(ids, np.int32))


def test_stop_ids_join_eos_and_the_callers_own() -> None:
    prompt = np.array([1], np.int32)
    own = SamplingParams(stop_token_ids=[7, 2])
    assert Request(RequestId("a"), prompt, own, eos_ids=(2,)).stop_ids == (2, 7)
    ignoring = SamplingParams(stop_token_ids=[7], ignore_eos=True)
    assert Request(RequestId("a"), prompt, ignoring, eos_ids=(2,)).stop_ids == (7,)


def test_a_temperature_so_low_that_logits_would_overflow_is_greedy() -> None:
    assert SamplingParams(temperature=1e-40).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_the_ids_of_a_prompt_are_copied_once() -> None:
    given = np.array([1, 2, 3], np.int32)
    ids = id_array(given)
    given[0] = 9
    assert ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9
    assert id_array(ids) is ids
    whole = np.array([1, 2, 3], np.int32)
    view = whole[:2]
    view.setflags(write=False)
    assert id_array(view) is not view, "the owner of the underlying array may change it"


def test_the_smallest_top_p_leaves_the_likeliest_token() -> None:
    for top_p in (0, 0.0, 1e-7):
        assert SamplingParams(top_p=top_p).is_greedy
    assert not SamplingParams(top_p=1e-5).is_greedy
