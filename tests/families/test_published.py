"""The files of published models are read: sizes and kinds, without weights."""

import pytest

from mainstem.core.errors import UnsupportedModel
from mainstem.models.families import spec_from_config
from mainstem.models.spec import (
    Activation,
    MlpSpec,
    ModelSpec,
    NormKind,
    NormPlace,
    QkNorm,
    Residual,
    RopeScaling,
)
from tests.families.published import PUBLISHED

BILLIONS = {  # of weights, as published
    "huggyllama/llama-7b": 6.74,
    "the first LLaMA conversions": 32.53,
    "microsoft/phi-2": 2.78,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/Phi-3-mini-128k-instruct": 3.82,
    "microsoft/phi-4": 14.66,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "tiiuae/falcon-7b": 6.92,
    "tiiuae/falcon-40b": 41.30,
    "tiiuae/falcon-11B": 11.10,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "allenai/OLMo-2-1124-7B": 7.30,
    "ibm-granite/granite-3.1-8b-instruct": 8.17,
    "stabilityai/stablelm-2-1_6b": 1.64,
}


def read(name: str, **changes: object) -> ModelSpec:
    return spec_from_config({**PUBLISHED[name], **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_is_known_and_the_size_is_right(name: str) -> None:
    spec = read(name)
    assert spec.ignored_fields == ()
    num_tables = 1 if spec.has_tied_embeddings else 2
    found = spec.num_layer_params + num_tables * spec.vocab_size * spec.hidden_size
    assert found / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_phi_2() -> None:
    spec = read("microsoft/phi-2")
    assert (spec.head_dim, spec.rotary_dim) == (80, 32)
    assert (spec.norm.kind, spec.norm.has_bias) == (NormKind.LAYER, True)
    assert spec.residual is Residual.PARALLEL
    assert spec.layers[0].mlp == MlpSpec(10240, Activation.GELU_TANH, is_gated=False, has_bias=True)
    assert spec.has_head_bias


def test_phi_3() -> None:
    (kind,) = read("microsoft/Phi-3-mini-4k-instruct").attention_kinds
    assert kind.window == 2047
    spec = read("microsoft/Phi-3-mini-128k-instruct")
    (rope,) = spec.ropes
    assert (rope.scaling, rope.original_positions) == (RopeScaling.LONGROPE, 4096)
    assert rope.score_factor == pytest.approx(1.19024, abs=1e-5)
    assert spec.at_context(4096).ropes[0].divisors == rope.divisors
    assert spec.at_context(4097).ropes[0].divisors == rope.long_divisors
    assert [kind.window for kind in spec.at_context(131072).attention_kinds] == [None]


def test_phi_4() -> None:
    spec = read("microsoft/phi-4")
    assert (spec.num_kv_heads, spec.head_dim, spec.ropes[0].theta) == (10, 128, 250000)
    mini = read("microsoft/Phi-4-mini-instruct")
    assert (mini.head_dim, mini.rotary_dim, mini.has_tied_embeddings) == (128, 96, True)


@pytest.mark.parametrize(
    ("name", "kv_heads", "residual", "is_tied", "positions"),
    [
        ("tiiuae/falcon-7b", 1, Residual.PARALLEL, True, 2048),
        ("tiiuae/falcon-40b", 8, Residual.PARALLEL_TWO_NORMS, True, 2048),
        ("tiiuae/falcon-11B", 8, Residual.PARALLEL, False, 8192),
    ],
)
def test_falcon(
    name: str, kv_heads: int, residual: Residual, is_tied: bool, positions: int
) -> None:
    spec = read(name)
    assert (spec.num_kv_heads, spec.residual, spec.head_dim) == (
        kv_heads,
        residual,
        128 if name.endswith("11B") else 64,
    )
    assert (spec.has_tied_embeddings, spec.max_positions) == (is_tied, positions)


def test_smollm3() -> None:
    spec = read("HuggingFaceTB/SmolLM3-3B")
    assert [layer.attention.rope is None for layer in spec.layers[:8]] == [
        False,
        False,
        False,
        True,
    ] * 2
    assert spec.ropes[0].theta == 5e6
    assert spec.has_tied_embeddings
    windowed = read(
        "HuggingFaceTB/SmolLM3-3B", use_sliding_window=True, sliding_window=8, layer_types=None
    )
    assert [layer.attention.window for layer in windowed.layers[:4]] == [None, None, None, 8]


def test_olmo2() -> None:
    spec = read("allenai/OLMo-2-1124-7B")
    assert (spec.norm_place, spec.qk_norm) == (NormPlace.AFTER, QkNorm.ROWS)
    assert spec.norm.eps == 1e-6


def test_granite() -> None:
    spec = read("ibm-granite/granite-3.1-8b-instruct")
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (12.0, 0.22, 1 / 16)
    assert spec.layers[0].attention.scale == 0.0078125


@pytest.mark.parametrize("name", ["huggyllama/llama-7b", "the first LLaMA conversions"])
def test_llama_1(name: str) -> None:
    spec = read(name)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_positions) == (spec.num_heads, 128, 2048)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiiuae/falcon-7b", {"alibi": True}),
        ("tiiuae/falcon-7b", {"apply_residual_connection_post_layernorm": True}),
        ("tiiuae/falcon-11B", {"ff_factor": 3}),
        ("microsoft/phi-2", {"qk_layernorm": True}),
        ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("microsoft/Phi-4-mini-instruct", {"interpolate_factor": 2}),
        ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [1, 0]}),
        ("allenai/OLMo-2-1124-7B", {"clip_qkv": 8.0}),
        ("ibm-granite/granite-3.1-8b-instruct", {"residual_multiplier": "0.22"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_family_does_not_have_is_refused_by_name(
    name: str, changes: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        read(name, **changes)
