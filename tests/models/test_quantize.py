"""int8 linears: close to fp32, and a token's output hardly depends on other tokens."""

from pathlib import Path

import pytest
import torch

from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.cpu.layers import Mlp
from mainstem.models.cpu.quantize import SATURATES, Int8Linear, quantize_decoder
from mainstem.models.families import read_spec
from tests.models.checkpoints import make_checkpoint


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 65, 513, 1100])
def test_outputs_are_close_to_fp32_for_any_number_of_tokens(tokens: int) -> None:
    """Two products of the same shape in turn: a kernel must not mix up their weights."""
    weights = [randn(96, 64, seed=seed) for seed in (1, 2)]
    bias = randn(96, seed=3)
    x = randn(tokens, 64)
    for weight, linear in [(w, Int8Linear(w, bias)) for w in weights] * 2:
        assert relative_error(linear(x), x @ weight.T + bias) < 0.02


def test_channels_of_any_size_keep_their_accuracy() -> None:
    weight = randn(64, 64, seed=1) * torch.logspace(-4, 4, 64)[:, None]
    x = randn(5, 64)
    exact = x @ weight.T
    found = Int8Linear(weight)(x)
    for channel in range(64):
        # x86 without VNNI gives activations 7 bits, which are twice as coarse
        assert relative_error(found[:, channel], exact[:, channel]) < (0.08 if SATURATES else 0.05)


def test_a_token_of_large_values_does_not_change_the_others() -> None:
    weight = randn(32, 64, seed=1)
    x = randn(8, 64)
    linear = Int8Linear(weight)
    quiet = linear(x)[1:]
    x[0] *= 1e4
    torch.testing.assert_close(linear(x)[1:], quiet, atol=0.02 * float(quiet.abs().max()), rtol=0)


def test_the_output_of_zeros_is_zero() -> None:
    assert float(Int8Linear(randn(8, 16))(torch.zeros(3, 16)).abs().max()) < 1e-30


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_quantized_layer_is_close_to_fp32(name: str, tmp_path: Path) -> None:
    """Loud channels are scaled down in the norm and up in the weights: outputs must not change."""
    make_checkpoint(name, tmp_path)
    dense = load_decoder(tmp_path, read_spec(tmp_path), torch.float32)
    quantized = quantize_decoder(dense)
    x = randn(9, 48) * torch.logspace(-1, 1, 48)
    for before, after in zip(dense.layers, quantized.layers, strict=True):
        assert before.qkv is not None
        assert after.qkv is not None
        exact = before.qkv(before.attention_norm(x))
        assert relative_error(after.qkv(after.attention_norm(x)), exact) < 0.05
        assert isinstance(before.mlp, Mlp)
        assert isinstance(after.mlp, Mlp)
        exact = before.mlp.first(before.mlp_norm(x))
        assert relative_error(after.mlp.first(after.mlp_norm(x)), exact) < 0.05
