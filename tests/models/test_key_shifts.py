"""Key shifts: what is read of the biases of keys, and that a shift changes no answer."""

from dataclasses import replace

import pytest
import torch

from mainstem.core.errors import UnsupportedModel
from mainstem.models.key_shifts import MOST_LEFT, KeyShifts
from mainstem.models.rope import turns_by
from mainstem.models.shard import Shard
from mainstem.models.spec import ModelSpec, QkNorm
from mainstem.models.tensors import TensorReader
from mainstem.models.weights import WeightSource
from tests.runner.recipes import RECIPES, RecipeOrigin

pytestmark = pytest.mark.torch

# rotated in part, or whole; with gates
MODELS = ["PhiForCausalLM", "Qwen2MoeForCausalLM", "NemotronForCausalLM", "GptOssForCausalLM"]


def a_source(spec: ModelSpec, key_bias: float = 0.0) -> WeightSource:
    return RecipeOrigin(spec, key_bias).open(torch.float32, torch.device("cpu"))


def with_gates(spec: ModelSpec) -> ModelSpec:
    layers = []
    for layer in spec.layers:
        assert layer.attention is not None
        layers.append(replace(layer, attention=replace(layer.attention, has_gate=True)))
    return replace(spec, layers=tuple(layers))


def with_adjacent_pairs(spec: ModelSpec) -> ModelSpec:
    layers = []
    for layer in spec.layers:
        assert layer.attention is not None
        assert layer.attention.rope is not None
        rope = replace(layer.attention.rope, has_adjacent_pairs=True)
        layers.append(replace(layer, attention=replace(layer.attention, rope=rope)))
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("name", [*MODELS, "gates", "adjacent pairs"])
def test_the_bias_of_keys_is_that_of_the_layer(name: str) -> None:
    """Also if the rows of queries are twice as many, because of gates, or in another order."""
    spec = RECIPES["Qwen2MoeForCausalLM" if name not in RECIPES else name]
    if name == "gates":
        spec = with_gates(spec)
    elif name == "adjacent pairs":
        spec = with_adjacent_pairs(spec)
    reader = TensorReader(a_source(spec), spec)
    for index, layer in enumerate(spec.layers):
        assert layer.attention is not None
        shape = spec.kv_shape(layer.attention)
        qkv = reader.layer(index).qkv
        assert qkv is not None
        assert qkv.bias is not None
        keys = qkv.bias[spec.num_heads * shape.dim :][: shape.heads * shape.dim]
        assert torch.equal(reader.key_bias(index), keys.view(shape.heads, shape.dim))


def test_a_rank_shifts_its_own_heads() -> None:
    spec = RECIPES["PhiForCausalLM"]
    whole = KeyShifts.read(a_source(spec, 200.0), spec).of_place
    halves = [KeyShifts.read(a_source(spec, 200.0), spec, Shard(n, 2)).of_place for n in range(2)]
    assert whole.keys() == halves[0].keys() == halves[1].keys() == {0, 1}
    for place, shift in whole.items():
        assert torch.equal(torch.cat([half[place] for half in halves]), shift)


@pytest.mark.parametrize("name", ["PhiForCausalLM", "Qwen2MoeForCausalLM"])
def test_little_is_left_of_a_bias_that_hardly_turns(name: str) -> None:
    """At any position: a tenth at most. And a softmax over scores stays the same."""
    spec = RECIPES[name]
    source = a_source(spec, 200.0)
    bias = TensorReader(source, spec).key_bias(0)
    shift = KeyShifts.read(source, spec).of_place[0]
    rope, positions = spec.ropes[0], torch.arange(0, spec.max_positions, 50)
    half = rope.rotary_dim // 2
    turned = bias.expand(len(positions), -1, -1).clone()
    pairs = (
        torch.complex(bias[:, :half], bias[:, half : 2 * half]) * turns_by(rope, positions)[:, None]
    )
    turned[..., :half], turned[..., half : 2 * half] = pairs.real, pairs.imag
    assert turned.abs().max() > 150
    assert (turned - shift).abs().max() < 20
    query = torch.randn(bias.shape[1], generator=torch.Generator().manual_seed(0))
    plain, shifted = turned[:, 0] @ query, (turned[:, 0] - shift[0]) @ query
    weights = plain.double().softmax(0)
    assert torch.allclose(shifted.double().softmax(0), weights, atol=1e-4)


def test_small_biases_are_not_shifted() -> None:
    spec = RECIPES["Qwen2MoeForCausalLM"]
    shifts = KeyShifts.read(a_source(spec), spec)
    assert not shifts.of_place
    assert shifts.layout == b""


@pytest.mark.parametrize("what", ["sinks", "softcap", "norm"])
def test_keys_stay_if_scores_or_norms_would_change(what: str) -> None:
    """Of such a model, a large bias is refused."""
    spec = RECIPES["Qwen2MoeForCausalLM"]
    layers = []
    for layer in spec.layers:
        assert layer.attention is not None
        kind = replace(
            layer.attention,
            has_sinks=what == "sinks",
            softcap=20.0 if what == "softcap" else None,
        )
        layers.append(replace(layer, attention=kind))
    changed = replace(spec, layers=tuple(layers))
    if what == "norm":  # it removes the bias
        changed = replace(changed, qk_norm=QkNorm.HEADS)
        assert not KeyShifts.read(a_source(changed, 300.0), changed).of_place
        return
    assert not KeyShifts.read(a_source(changed, 0.9 * MOST_LEFT), changed).of_place
    with pytest.raises(UnsupportedModel, match="the keys of layer 0 have biases"):
        KeyShifts.read(a_source(changed, 300.0), changed)


def test_only_changed_biases_are_read_again() -> None:
    spec = RECIPES["Qwen2MoeForCausalLM"]
    shifts, other = KeyShifts.read(a_source(spec), spec), a_source(spec, 300.0)
    prefix = spec.names.layer.format(1)
    shifts.check(other, [f"{prefix}.self_attn.k_proj.weight", "model.norm.weight"])
    with pytest.raises(UnsupportedModel, match="layer 1"):
        shifts.check(other, [f"{prefix}.self_attn.k_proj.bias"])
