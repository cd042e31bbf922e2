"""fp8 weights with a scale for each block: a CPU multiplies the rounded numbers."""

import pytest
import torch

from mainstem.kernels import LayoutError
from mainstem.kernels.dense import fp8_blocks
from mainstem.kernels.dense.fp8_blocks import Fp8BlockLinear, has_block_product, quantize_groups
from mainstem.kernels.dense.fp8_rows import Fp8Rows

pytestmark = pytest.mark.torch


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_group_of_a_token_is_scaled_by_its_own_largest_value() -> None:
    x = some(3, 256)
    x[1, :128] *= 1000.0
    x[2] = 0.0
    values, scales = quantize_groups(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, 2)
    assert scales.stride(0) == 1
    peaks = values.float().view(3, 2, 128).abs().amax(2)
    assert torch.equal(peaks[:2], torch.full((2, 2), 448.0))
    off = (values.float().view(3, 2, 128) * scales[:, :, None] - x.view(3, 2, 128)).abs()
    assert bool((off <= x.view(3, 2, 128).abs() / 16 + 2**-10 * scales[:, :, None]).all())


def test_the_linear_multiplies_the_rounded_numbers() -> None:
    values = some(256, 512).to(torch.float8_e4m3fn)
    scales, bias, x = some(2, 4, seed=1).abs(), some(256, seed=2), some(5, 512, seed=3)
    linear = Fp8BlockLinear(values, scales, bias, torch.float32)
    weight = values.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    x_values, x_scales = quantize_groups(x)
    rounded = x_values.double() * x_scales.double().repeat_interleave(128, 1)
    torch.testing.assert_close(
        linear(x).double(), rounded @ weight.t() + bias, rtol=1e-5, atol=1e-4
    )
    error = (linear(x) - (x.double() @ weight.t() + bias)).norm() / (x.double() @ weight.t()).norm()
    # The rounding error of 3 bits of mantissa is 2.6 % (root mean square). So is the sum's: sums
    # and their errors both grow with the root of the number of terms.
    assert 0.023 < float(error) < 0.03
    assert torch.equal(linear((x_values, x_scales)), linear(x))


def test_products_need_multiples_of_128_rows_and_512_columns_and_no_fp16() -> None:
    cpu = torch.device("cpu")
    assert has_block_product(256, 512, torch.bfloat16, cpu)
    assert not has_block_product(200, 512, torch.bfloat16, cpu)
    assert not has_block_product(256, 640, torch.bfloat16, cpu)
    assert not has_block_product(256, 512, torch.float16, cpu)


def test_the_error_names_a_refused_argument() -> None:
    values = some(256, 512).to(torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match="each block of 128 x 128"):
        Fp8BlockLinear(values, torch.ones(2, 2), None, torch.float32)
    linear = Fp8BlockLinear(values, torch.ones(2, 4), None, torch.float32)
    with pytest.raises(ValueError, match="takes 512 columns, got 256"):
        linear(some(2, 256))
    with pytest.raises(LayoutError, match="multiple of 128"):
        quantize_groups(some(2, 200))


def test_a_product_with_another_layout_of_scales_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check that runs once for a card's library, here run on the emulation."""
    is_right = fp8_blocks.is_library_right.__wrapped__
    assert is_right(torch.device("cpu"))
    product = Fp8BlockLinear.product

    def with_scales_elsewhere(linear: Fp8BlockLinear, rows: Fp8Rows) -> torch.Tensor:
        other = Fp8BlockLinear(linear._values, linear._scales.flip(1), None, torch.bfloat16)
        return product(other, rows)

    monkeypatch.setattr(Fp8BlockLinear, "product", with_scales_elsewhere)
    assert not is_right(torch.device("cpu"))
