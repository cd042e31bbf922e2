"""Products on a GPU. They take rows and a buffer for the output (`out`). Products in fp8 also take
rows that a fused kernel has quantized, and may return new memory instead of the buffer."""

import logging
from typing import Protocol

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.kernels.dense.fp8 import Fp8Linear
from mainstem.kernels.dense.fp8_rows import Fp8Per, Fp8Rows
from mainstem.kernels.dense.invariant import matmul
from mainstem.models.gpu.packed import (
    DenseRoom,
    Fp8Product,
    NibbleLinear,
    Unpacked,
    fp8_linear,
    pack_nibbles,
)
from mainstem.models.packed import PackedWeight
from mainstem.models.tensors import Product

log = logging.getLogger("mainstem.models")

Rows = Tensor | Fp8Rows  # [tokens, size]


class Linear(Protocol):
    """x @ weight.T + bias."""

    @property
    def fp8_per(self) -> Fp8Per | None:
        """The form of quantized rows that the product takes; None if it takes plain rows only."""

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        """x [tokens, in], buffer [tokens, out] -> output [tokens, out]."""


class PlainLinear:
    """A product by the vendor's library."""

    fp8_per = None

    def __init__(self, product: Product) -> None:
        self._columns = product.dense.t()
        self._bias = product.bias

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        if self._bias is None:
            return torch.mm(x, self._columns, out=out)
        return torch.addmm(self._bias, x, self._columns, out=out)


class InvariantLinear:
    """Like PlainLinear, but each row has the same bits as if it were alone."""

    fp8_per = None

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, x: Rows, out: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return matmul(x, self._product.dense, self._product.bias, out=out)


class LinearMaker:
    """Makes a model's products, by the kind of weight and the settings. Call `finish` when all are
    made."""

    def __init__(
        self, quantize: Quantize, is_deterministic: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._quantize = quantize
        self._is_deterministic = is_deterministic
        self._dtype = dtype
        self._room = DenseRoom(dtype, device)
        self._unpacked: list[str] = []  # formats of the products that were dequantized
        self._unpacked_experts: list[Unpacked] = []  # by layer

    def again(self) -> "LinearMaker":
        """Another one with the same settings, for weights that replace those made here."""
        room = self._room
        return LinearMaker(self._quantize, self._is_deterministic, self._dtype, room.device)

    @property
    def room_bytes(self) -> int:
        """The size of the memory that the products share; known after `finish`."""
        return self._room.nbytes

    def layer(self, product: Product) -> Linear:
        """A product of a layer."""
        weight, bias = product.weight, product.bias
        if isinstance(weight, PackedWeight) and not self._is_deterministic:
            made = fp8_linear(weight, bias, self._dtype)
            # with --quantize fp8, only weights that are in fp8 per channel already stay as they are
            if made is not None and (
                self._quantize is not Quantize.FP8 or made.fp8_per is Fp8Per.ROW
            ):
                return made
        if self._quantize is Quantize.FP8:
            dense = product.unpacked(self._dtype).dense
            return Fp8Product(Fp8Linear.quantize(dense, bias, self._dtype))
        return self._exact(product, self._room)

    def head(self, product: Product) -> Linear:
        """The LM head. It is never quantized to fp8: little time would be saved, and much accuracy
        lost. It gets no memory for dequantizing: it is multiplied with few rows, and would need the
        most memory."""
        return self._exact(product, None)

    def _exact(self, product: Product, room: DenseRoom | None) -> Linear:
        """A product with the weight's own values; `room` is the memory in which large steps
        dequantize it."""
        weight = product.weight
        if isinstance(weight, PackedWeight):
            nibbles = pack_nibbles(weight, self._dtype)
            if nibbles is not None:
                order, is_deterministic = weight.order, self._is_deterministic
                return NibbleLinear(nibbles, product.bias, order, room, is_deterministic)
            self._unpacked.append(f"{weight.kind.value} in {weight.block_rows} x {weight.group}")
            product = product.unpacked(self._dtype)
        return InvariantLinear(product) if self._is_deterministic else PlainLinear(product)

    def note_experts(self, unpacked: Unpacked) -> None:
        """The experts of a layer were dequantized."""
        self._unpacked_experts.append(unpacked)

    def finish(self) -> None:
        """Allocate the memory that the products share, and log what was dequantized."""
        self._room.open()
        if experts := self._unpacked_experts:
            log.warning(
                "the experts of %d layers are dequantized to %s: no kernel supports %s; they take "
                "%.1f GB instead of %.1f",
                len(experts),
                self._dtype,
                ", ".join(sorted({each.kind for each in experts})),
                sum(each.held_bytes for each in experts) / 1e9,
                sum(each.stored_bytes for each in experts) / 1e9,
            )
        if self._unpacked:
            log.warning(
                "%d products are dequantized to %s: no kernel supports %s%s",
                len(self._unpacked),
                self._dtype,
                ", ".join(sorted(set(self._unpacked))),
                " in the deterministic setting" if self._is_deterministic else "",
            )
