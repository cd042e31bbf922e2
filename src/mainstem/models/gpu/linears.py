"""Products on a GPU. All take rows and room for the answer; those of fp8 take rows that a fused
kernel has quantized already, too, and answer where they like."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.kernels.dense.fp8 import Fp8Linear
from mainstem.kernels.dense.fp8_rows import Fp8Rows
from mainstem.kernels.dense.invariant import matmul
from mainstem.models.tensors import Product

Rows = Tensor | Fp8Rows  # [tokens, size]


class Linear(Protocol):
    """x @ weight.T + bias."""

    @property
    def is_fp8(self) -> bool:
        """Whether rows may come quantized."""
        ...

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        """x [tokens, in], room [tokens, out] -> answer [tokens, out]."""
        ...


MakeLinear = Callable[[Product], Linear]


class PlainLinear:
    """Through the vendor's library."""

    is_fp8 = False

    def __init__(self, product: Product) -> None:
        self._columns = product.dense.t()
        self._bias = product.bias

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        if self._bias is None:
            return torch.mm(x, self._columns, out=out)
        return torch.addmm(self._bias, x, self._columns, out=out)


class InvariantLinear:
    """The same, each row to the bit as if it were alone."""

    is_fp8 = False

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return matmul(x, self._product.dense, self._product.bias, out=out)


class QuantizedLinear:
    """In fp8: weights per output channel, activations per token."""

    is_fp8 = True

    def __init__(self, product: Product) -> None:
        self._linear = Fp8Linear(product.dense, product.bias, product.dense.dtype)

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        return self._linear(x)


def choose_linear(
    quantize: Quantize, is_deterministic: bool, dtype: torch.dtype
) -> tuple[MakeLinear, MakeLinear]:
    """For the products of layers, and for the LM head. That stays as it is with fp8, for what it
    would gain is small and what it would lose is not. Packed weights are dequantized to `dtype`."""

    def dense(product: Product) -> Linear:
        kind = InvariantLinear if is_deterministic else PlainLinear
        return kind(product.unpacked(dtype))

    return (QuantizedLinear if quantize is Quantize.FP8 else dense), dense
