"""Arguments of vLLM: accepted if they mean the same here; otherwise the error says what to use."""

from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest

import mainstem
from mainstem.core.config import SETTINGS
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.vllm_names import (
    LLM_ARGUMENTS,
    SAME_MEANING,
    SAMPLING_ARGUMENTS,
    SamplingParams,
    VllmArguments,
    own_arguments,
)

GIVEN: dict[str, object] = {row.argument: row.default for row in SETTINGS} | {"dtype": "auto"}


@pytest.mark.parametrize(
    ("others", "name", "value"),
    [
        ({"max_num_batched_tokens": 512}, "chunk_tokens", 512),
        ({"max_num_batched_tokens": None}, "chunk_tokens", None),
        ({"block_size": 32}, "page_size", 32),
        ({"tensor_parallel_size": 2, "trust_remote_code": False}, "tensor_parallel", 2),
        ({"tokenizer": "smollm2"}, "model", "smollm2"),
    ],
)
def test_arguments_with_the_same_meaning_are_accepted(
    others: dict[str, object], name: str, value: object
) -> None:
    assert own_arguments(GIVEN, others)[name] == value


@pytest.mark.parametrize(
    ("dtype", "own"),
    [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")],
)
def test_names_of_dtypes_in_vllm_are_accepted(dtype: str, own: str) -> None:
    assert own_arguments({**GIVEN, "dtype": dtype}, {})["dtype"] == own


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"data_parallel_size": True}, "data_parallel_size=True"),
        ({"enforce_eager": True}, "CUDA graphs"),
        ({"trust_remote_code": True}, "is never run"),
        ({"quantization": "awq"}, "use quantize='int8'"),
        ({"enable_prefix_caching": False}, "share='none'"),
        ({"swap_space": 4}, "host_gb"),
        ({"tokenizer": "other/one"}, "in the model's folder"),
        ({"kv_token": 5}, "unknown setting 'kv_token'. Did you mean kv_tokens?"),
        ({"max_loras": 5}, "unknown setting 'max_loras'"),
    ],
)
def test_arguments_with_another_meaning_are_refused_with_a_replacement(
    others: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        own_arguments(GIVEN, others)
    assert complaint in str(caught.value)


def test_two_names_of_one_setting_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size and page_size mean the same"):
        own_arguments({**GIVEN, "page_size": 32}, {"block_size": 64})


def test_the_tables_name_nothing_that_is_a_setting_here() -> None:
    own = {row.argument for row in SETTINGS}
    assert not own & {*LLM_ARGUMENTS, *SAME_MEANING}
    assert own >= set(SAME_MEANING.values())
    assert not {field.name for field in fields(SamplingParams)} & SAMPLING_ARGUMENTS.keys()


def test_the_types_of_arguments_have_the_names_of_the_tables() -> None:
    assert VllmArguments.__annotations__.keys() == {*SAME_MEANING, *LLM_ARGUMENTS}


def test_dir_lists_names_that_are_imported_on_first_use() -> None:
    assert set(mainstem.__all__) <= set(dir(mainstem))


def test_sampling_params_declare_the_names_of_the_table_in_its_order() -> None:
    declared = [name for name in signature(SamplingParams).parameters if name in SAMPLING_ARGUMENTS]
    assert declared == [*SAMPLING_ARGUMENTS]


@pytest.mark.parametrize(
    "others", [{"best_of": 1}, {"best_of": None}, {"bad_words": []}, {"detokenize": True}]
)
def test_sampling_arguments_without_effect_are_accepted(others: dict[str, Any]) -> None:
    assert SamplingParams(**others) == SamplingParams()
    assert replace(SamplingParams(**others), n=3, best_of=3) == SamplingParams(n=3)


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        ({"best_of": 4}, "best_of: 4 is not supported: .*cumulative_logprob"),
        ({"use_beam_search": True}, "use_beam_search: True is not supported"),
        ({"guided_decoding": object()}, "guided_decoding: .*StructuredOutputsParams"),
        ({"bad_words": ["x"]}, r"bad_words: \['x'\] is not supported: use logit_bias"),
        ({"detokenize": False}, "detokenize: False"),
    ],
)
def test_sampling_arguments_that_would_change_the_answer_are_refused(
    others: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        SamplingParams(**others)
