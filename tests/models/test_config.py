"""config.json becomes a ModelSpec: which fields are read, and which are refused with their name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mainstem.core.config import DType, EngineConfig, SchedConfig
from mainstem.core.errors import ConfigError, UnsupportedModel
from mainstem.models.families import read_spec, spec_from_config
from mainstem.models.spec import NormPlace, Residual, RopeScaling
from mainstem.runner.origin import context_of

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def test_a_plain_llama_is_read() -> None:
    spec = spec_from_config(LLAMA)
    assert spec.head_dim == 16
    assert spec.dtype is DType.BF16
    assert spec.eos_ids == (2, 7)
    assert spec.kv_elements_per_token == 2 * 2 * 2 * 16
    assert not spec.has_qkv_bias
    assert [rope.theta for rope in spec.ropes] == [10000.0]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_settings_in_both_formats_are_read(rope: dict[str, object]) -> None:
    found = spec_from_config({**LLAMA, **rope}).ropes[0]
    assert (found.theta, found.scaling, found.factor) == (5e5, RopeScaling.LINEAR, 2.0)


def yarn(**settings: object) -> dict[str, object]:
    return {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **settings}}


def test_attn_factor_multiplies_the_default_score_factor_of_yarn() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has the inverse of the default: its scores are not scaled.
    transformers ignores the field and scales them."""
    (usual,) = spec_from_config(yarn()).ropes
    (rope,) = spec_from_config(yarn(attn_factor=0.8782488562869419)).ropes
    assert usual.score_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope.score_factor == pytest.approx(1.0, abs=1e-12)
    (half,) = spec_from_config(yarn(attn_factor=0.5, mscale=0.7, mscale_all_dim=1.0)).ropes
    (whole,) = spec_from_config(yarn(mscale=0.7, mscale_all_dim=1.0)).ropes
    assert half.score_factor == pytest.approx(0.5 * whole.score_factor)
    with pytest.raises(UnsupportedModel, match="attn_factor"):
        spec_from_config(yarn(attn_factor=0.5, attention_factor=0.5))


def test_yarn_may_say_that_the_model_was_finetuned() -> None:
    assert spec_from_config(yarn(finetuned=True)) == spec_from_config(yarn())


LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}


def limited(max_model_len: int | None) -> EngineConfig:
    return EngineConfig(sched=SchedConfig(max_model_len=max_model_len))


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (yarn(original_max_position_embeddings=192), 768),  # as Qwen 3's authors recommend
        (yarn(original_max_position_embeddings=32), 256),  # the file says more
        (yarn(original_max_position_embeddings=256), 1024),  # Qwen 2.5
        (yarn(), 256),  # the file's number may already include the factor
        ({**LLAMA, **LINEAR}, 256),
        ({**LLAMA, **LINEAR, "max_sequence_length": 1024}, 1024),  # Vicuna's 16k models
        ({**LLAMA, **LINEAR, "max_sequence_length": 128}, 256),
        ({**LLAMA, "max_sequence_length": 1024}, 256),  # not stretched
    ],
)
def test_a_stretched_rope_lengthens_the_context(config: dict[str, object], positions: int) -> None:
    spec = spec_from_config(config)
    assert spec.max_positions == positions
    assert context_of(spec, limited(None)) == context_of(spec, limited(positions)) == positions
    with pytest.raises(ConfigError, match=f"the model's {positions} positions"):
        context_of(spec, limited(positions + 1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* layers of Mamba 1"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "has multi-head latent attention"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "has sparse attention"),
        ({"architectures": ["BloomForCausalLM"]}, "has positions by ALiBi"),
        ({"architectures": ["XverseForCausalLM"]}, "XverseForCausalLM is not supported; known"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 64}, "sliding_window=64: only null"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}}, "alpha"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta": 1}}, "beta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1.5}}, "truncate"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta": 1}}, "beta"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"dtype": "float8"}, "float8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_the_error_names_an_unsupported_field_that_changes_the_mathematics(
    changes: dict[str, object], name: str
) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        spec_from_config({**LLAMA, **changes})


def test_a_window_that_no_context_exceeds_is_dropped() -> None:
    spec = spec_from_config(
        {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    )
    assert [kind.window for kind in spec.at_context(128).attention_kinds] == [None]
    assert [kind.window for kind in spec.at_context(129).attention_kinds] == [128]


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 64}, 64)],
)
def test_mistral_has_the_default_window_of_transformers(
    changes: dict[str, object], window: int | None
) -> None:
    spec = spec_from_config({**LLAMA, "architectures": ["MistralForCausalLM"], **changes})
    assert [kind.window for kind in spec.attention_kinds] == [window]


def test_qwen2_ignores_a_window_it_does_not_use() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
    spec = spec_from_config({**config, "use_sliding_window": False, "max_window_layers": 1})
    assert [kind.window for kind in spec.attention_kinds] == [None]
    assert spec.has_qkv_bias
    assert not spec.has_out_bias


@pytest.mark.parametrize("text", ["{", "[]"])
def test_the_error_names_a_broken_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_spec(tmp_path)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_spec(tmp_path)


def test_harmless_fields_are_accepted(tmp_path: Path) -> None:
    config = {**LLAMA, "use_cache": True, "attention_dropout": 0.1, "new_switch": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path) == spec_from_config(LLAMA)


def test_end_tokens_of_the_generation_config_are_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_spec(tmp_path).eos_ids == (2, 7, 9)


@pytest.mark.parametrize(
    "field",
    [
        {"unsloth_version": "2024.9"},
        {"_attn_implementation_autoset": True},
        {"_anything_private": {"of": "a tool"}},
        {"neftune_noise_alpha": 5},
        {"pretraining_tp": 2},
        {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}},
        {"model_max_length": 4096},
        {"max_sequence_length": 2048},
        {"tokenizer_model_max_length": 4096, "tokenizer_padding_side": "right"},
        {"use_flash_attention": True},
        {"max_new_tokens": 512},
        {"bf16": True},
        {"num_labels": 2, "classifier_dropout": 0.1},
        {"max_window_layers": 28},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_of_other_tools_are_ignored(field: dict[str, object]) -> None:
    assert spec_from_config({**LLAMA, **field}) == spec_from_config(LLAMA)


def test_llama_1_has_max_sequence_length_instead_of_max_positions() -> None:
    older = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    assert spec_from_config({**older, "max_sequence_length": 2048}).max_positions == 2048
    with pytest.raises(UnsupportedModel, match="max_position_embeddings is missing"):
        spec_from_config(older)


UNKNOWN: dict[str, object] = {"scale_depth": 1.4, "dim_model_base": {"of": "x" * 200}}


def test_one_error_names_all_unknown_fields_and_the_flag_that_ignores_them() -> None:
    with pytest.raises(UnsupportedModel) as refused:
        spec_from_config({**LLAMA, **UNKNOWN})
    told = str(refused.value)
    assert "scale_depth=1.4" in told
    assert told.endswith("--ignore-config-fields scale_depth,dim_model_base")
    assert len(told) < 400, "a long value is cut"


def test_unknown_fields_are_ignored_on_request() -> None:
    made = spec_from_config({**LLAMA, **UNKNOWN}, ["dim_model_base", "scale_depth", "not_there"])
    assert made.ignored_fields == ("dim_model_base", "scale_depth")
    assert replace(made, ignored_fields=()) == spec_from_config(LLAMA)
    with pytest.raises(UnsupportedModel, match="--ignore-config-fields scale_depth"):
        spec_from_config({**LLAMA, **UNKNOWN}, ["dim_model_base"])


@pytest.mark.parametrize("name", ["rope_theta", "hidden_act", "attention_bias", "layer_types"])
def test_fields_that_change_answers_cannot_be_ignored(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} cannot be ignored"):
        spec_from_config(LLAMA, [name])


@pytest.mark.parametrize("place", [NormPlace.AFTER, NormPlace.BOTH])
def test_norms_of_parallel_outputs_are_refused(place: NormPlace) -> None:
    spec = spec_from_config(LLAMA)
    with pytest.raises(UnsupportedModel, match="parallel"):
        replace(spec, residual=Residual.PARALLEL, norm_place=place)
