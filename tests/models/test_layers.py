"""Products of the CPU decoder in 16 bits, on CPUs with and without instructions for them."""

import pytest
import torch

from mainstem.models.cpu import layers
from mainstem.models.cpu.layers import DenseLinear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 19])
@pytest.mark.parametrize("has_products", [None, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_right_and_leave_onednn_on(
    dtype: torch.dtype,
    has_products: bool | None,
    rows: int,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this CPU's own instructions, and as if it had none for 16 bits; a warning is an error
    here. A weight of 40 x 64 is widened in three parts."""
    if has_products is not None:
        monkeypatch.setattr(layers, "has_products", lambda kind: kind == torch.float32)
    monkeypatch.setattr(layers, "WIDENED_AT_ONCE", 16 * 64)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, 64), (40, 64), (40,))
    )
    is_enabled = torch._C._get_mkldnn_enabled()
    found = DenseLinear(weight, bias if has_bias else None)(x)
    assert found.dtype == dtype
    right = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[dtype]
    torch.testing.assert_close(found.double(), right, rtol=rounding, atol=32 * rounding)
    assert torch._C._get_mkldnn_enabled() == is_enabled
