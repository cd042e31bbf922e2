"""The rounding error of fp8 linears, on a CPU."""

import pytest
import torch

from mainstem.core.errors import ConfigError
from mainstem.kernels.dense import fp8
from mainstem.kernels.dense.fp8 import Fp8Linear, quantize_rows, quantize_weight

pytestmark = pytest.mark.torch


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_quantized_weight_is_within_half_a_step() -> None:
    """e4m3 has 3 bits of mantissa: half a step is 1/16 of the value; below the smallest normal
    number half a step is 2^-10."""
    weight = some(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    values, scale = quantize_weight(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (20,)
    scaled = weight / scale[:, None]
    off = (values.float() - scaled).abs()
    assert bool((off <= scaled.abs() / 16 + 2**-10).all())
    assert torch.equal(values.float().abs().amax(dim=1), torch.full((20,), 448.0))


def test_each_token_is_scaled_by_its_own_largest_value() -> None:
    x = some(3, 32)
    x[1] *= 1000.0
    x[2] = 0.0
    values, scales = quantize_rows(x)
    assert torch.equal(values[0].float(), quantize_rows(x[:1])[0][0].float())
    assert scales.shape == (3, 1)
    assert values[2].float().abs().max() == 0


@pytest.mark.parametrize(("num_out", "num_in"), [(48, 64), (50, 72), (1, 80), (33, 40)])
def test_the_linear_multiplies_the_rounded_numbers(num_out: int, num_in: int) -> None:
    weight, bias, x = some(num_out, num_in), some(num_out, seed=1), some(5, num_in, seed=2)
    linear = Fp8Linear.quantize(weight, bias, out_dtype=torch.float32)
    w_values, w_scale = quantize_weight(weight)
    x_values, x_scales = quantize_rows(x)
    right = (x_values.double() * x_scales) @ (w_values.double() * w_scale[:, None]).t() + bias
    torch.testing.assert_close(linear(x).double(), right, rtol=1e-5, atol=1e-4)
    assert torch.equal(linear((x_values, x_scales)), linear(x))
    error = (linear(x) - (x @ weight.t() + bias)).norm() / (x @ weight.t()).norm()
    assert 0.005 < float(error) < 0.05  # two roundings of 2.6 % each: 3.7 %


@pytest.mark.parametrize(("num_in", "has_few"), [(1024, True), (1016, False)])
def test_few_rows_are_multiplied_only_with_whole_weights(
    num_in: int, has_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1016 columns are padded to 1024, but rows are not."""
    monkeypatch.setattr(fp8, "few_rows", lambda *weight: "few")
    made: object = Fp8Linear.quantize(some(16, num_in))._few
    assert (made == "few") is has_few


def test_the_output_is_in_bf16_by_default() -> None:
    assert Fp8Linear.quantize(some(16, 32))(some(2, 32)).dtype == torch.bfloat16


def test_the_error_names_a_wrong_width() -> None:
    with pytest.raises(ValueError, match="takes 32 columns, got 16"):
        Fp8Linear.quantize(some(16, 32))(some(2, 16))


def test_the_error_names_a_card_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"A100 has 8\.0"):
        fp8.require_fp8(torch.device("cuda"))
