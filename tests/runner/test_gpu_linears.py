"""Which kernel multiplies with weights of which format on a GPU, under Triton's interpreter."""

import logging
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.models.packed import PackedKind, PackedWeight
from mainstem.models.tensors import Product

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; see test_interpreter.py", allow_module_level=True)

from mainstem.kernels.dense.fp8_rows import Fp8Per
from mainstem.kernels.dense.int4 import MOST_TOKENS
from mainstem.models.gpu.linears import LinearMaker

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
FP32 = torch.float32


def a_maker(quantize: Quantize = Quantize.NONE, is_deterministic: bool = False) -> LinearMaker:
    return LinearMaker(quantize, is_deterministic, FP32, CPU)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_int4(out: int, width: int, group: int = 32) -> PackedWeight:
    generator = torch.Generator().manual_seed(3)
    values = torch.empty((out, width // 2), dtype=torch.uint8).random_(0, 256, generator=generator)
    scales = 0.1 * torch.rand(out, width // group, generator=generator)
    return PackedWeight(PackedKind.INT4, values, scales, None, group)


def some_fp8(out: int, width: int, block: int | None) -> PackedWeight:
    rows, group = (1, width) if block is None else (block, block)
    scales = 0.01 + 0.01 * torch.rand(out // rows, width // group)
    values = some(out, width).to(torch.float8_e4m3fn)
    return PackedWeight(PackedKind.FP8, values, scales, None, group, rows)


def answer(maker: LinearMaker, product: Product, x: Tensor) -> Tensor:
    linear = maker.layer(product)
    maker.finish()
    return linear(x, x.new_full((len(x), product.weight.shape[0]), float("nan")))


def right(product: Product, x: Tensor) -> Tensor:
    y = x @ product.unpacked(FP32).dense.t()
    return y if product.bias is None else y + product.bias


@pytest.mark.parametrize("tokens", [3, MOST_TOKENS + 1], ids=["few", "many: dequantized"])
def test_four_bit_products_in_act_order_with_a_bias_are_right(tokens: int) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4)).int()
    product = Product(replace(some_int4(24, 96), order=order), some(24, seed=2))
    x = some(tokens, 96)
    torch.testing.assert_close(answer(a_maker(), product, x), right(product, x))


def test_the_buffer_for_dequantized_weights_has_the_size_of_the_largest() -> None:
    maker = a_maker()
    for size in (32, 96, 64):
        maker.layer(Product(some_int4(16, size)))
    maker.finish()
    assert maker.room_bytes == 4 * 16 * 96
    with_head = a_maker()
    product, x = Product(some_int4(24, 96)), some(MOST_TOKENS + 1, 96)
    head = with_head.head(product)
    with_head.finish()
    assert with_head.room_bytes == 0
    torch.testing.assert_close(head(x, torch.empty(len(x), 24)), right(product, x))
    alone = a_maker(is_deterministic=True)
    alone.layer(Product(some_int4(16, 96)))
    alone.finish()
    assert alone.room_bytes == 0  # one kernel for every step


@pytest.mark.parametrize("block", [None, 128], ids=["channels", "blocks"])
def test_fp8_weights_are_multiplied_without_conversion(block: int | None) -> None:
    """Rows are rounded to fp8, each number by about 2.6 %."""
    product, x = Product(some_fp8(128, 512, block)), some(5, 512)
    maker = a_maker()
    assert maker.layer(product).fp8_per is (Fp8Per.ROW if block is None else Fp8Per.GROUP)
    found = answer(maker, product, x)
    assert 0.003 < float((found - right(product, x)).norm() / right(product, x).norm()) < 0.05


@pytest.mark.parametrize(
    ("weight", "is_deterministic", "words"),
    [
        (some_fp8(64, 192, 64), False, "fp8 in 64 x 64"),
        (some_fp8(128, 512, 128), True, "fp8 in 128 x 128 in the deterministic setting"),
        (some_int4(16, 96, group=16), False, "int4 in 1 x 16"),
    ],
)
def test_a_format_without_a_kernel_is_dequantized_and_logged(
    weight: PackedWeight,
    is_deterministic: bool,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    product, x = Product(weight), some(3, weight.shape[1])
    with caplog.at_level(logging.WARNING):
        found = answer(a_maker(is_deterministic=is_deterministic), product, x)
    torch.testing.assert_close(found, right(product, x))
    assert words in caplog.text


def test_quantize_fp8_keeps_fp8_weights_that_have_a_scale_per_channel() -> None:
    product, x = Product(some_fp8(64, 96, None)), some(3, 96)
    found = answer(a_maker(Quantize.FP8), product, x)
    assert torch.equal(found, answer(a_maker(), product, x))
    blocks = a_maker(Quantize.FP8).layer(Product(some_fp8(128, 512, 128)))
    assert blocks.fp8_per is Fp8Per.ROW  # one scale per channel, as requested


def test_quantize_fp8_converts_packed_weights() -> None:
    product, x = Product(some_int4(32, 96)), some(3, 96)
    linear = a_maker(Quantize.FP8).layer(product)
    assert linear.fp8_per is Fp8Per.ROW
    found = linear(x, torch.empty(3, 32))
    assert float((found - right(product, x)).norm() / right(product, x).norm()) < 0.06
