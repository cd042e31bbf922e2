"""Products with packed weights on a GPU; each kind of weight has its own kernels.

INT4, MXFP4   few tokens: read packed; many tokens: dequantized into memory that all products share
FP8           per channel or tensor, or in blocks of 128 x 128: fp8 products
others        dequantized when they are loaded, which is logged
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.kernels.dense.fp8 import Fp8Linear, has_fp8
from mainstem.kernels.dense.fp8_blocks import BLOCK, Fp8BlockLinear, has_block_product
from mainstem.kernels.dense.fp8_rows import Fp8Per, Fp8Rows
from mainstem.kernels.dense.int4 import MOST_TOKENS, dequantize, deterministic_tile, multiply
from mainstem.kernels.dense.nibbles import Nibbles, can_pack_int4, can_pack_mxfp4
from mainstem.models.packed import PackedKind, PackedWeight


class DenseRoom:
    """Memory for one dequantized weight, the size of the largest weight. Large steps dequantize
    4-bit weights here. All products of a model share it, so they must run one after another."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self.device = dtype, device
        self._most = 0
        self._room: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._room is None else self._room.nbytes

    def reserve(self, weight: Nibbles) -> None:
        """Ask for enough memory for this weight; called before `open`."""
        assert self._room is None, "the room is open"
        self._most = max(self._most, weight.num_out * weight.num_in)

    def open(self) -> None:
        """Allocate the memory, unless no product has reserved any."""
        self._room = torch.empty(self._most, dtype=self._dtype, device=self.device)

    def dense(self, weight: Nibbles) -> Tensor:
        """The weight dequantized, [out, in]; valid until the next call."""
        assert self._room is not None, "the room is not open"
        size = weight.num_out * weight.num_in
        return dequantize(weight, self._room[:size].view(weight.num_out, weight.num_in))


class NibbleLinear:
    """4-bit weights: read packed for few tokens, dequantized for many if there is a DenseRoom. If
    deterministic, one kernel is always used, in which a row's bits do not depend on other rows."""

    fp8_per = None

    def __init__(
        self,
        weight: Nibbles,
        bias: Tensor | None,
        order: Tensor | None,
        room: DenseRoom | None,
        is_deterministic: bool,
    ) -> None:
        self._weight, self._bias, self._order = weight, bias, order
        self._room = None if is_deterministic else room
        self._is_deterministic = is_deterministic
        if self._room is not None:
            self._room.reserve(weight)

    def __call__(self, x: Tensor | Fp8Rows, out: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        if self._order is not None:
            x = x.index_select(1, self._order)
        if self._is_deterministic:
            tile = deterministic_tile(x.dtype, x.device)
            return multiply(x, self._weight, self._bias, out, tile)
        if self._room is None or len(x) <= MOST_TOKENS:
            return multiply(x, self._weight, self._bias, out)
        columns = self._room.dense(self._weight).t()
        if self._bias is None:
            return torch.mm(x, columns, out=out)
        return torch.addmm(self._bias, x, columns, out=out)


class Fp8Product:
    """fp8 weights, with a scale for each output (ROW) or for each block (GROUP). Takes plain or
    quantized rows."""

    def __init__(self, linear: Fp8Linear | Fp8BlockLinear) -> None:
        self._linear = linear
        self.fp8_per = Fp8Per.ROW if isinstance(linear, Fp8Linear) else Fp8Per.GROUP

    def __call__(self, x: Tensor | Fp8Rows, out: Tensor) -> Tensor:
        return self._linear(x)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Weights that are quantized in the checkpoint, and dequantized because no kernel reads
    them."""

    kind: str
    stored_bytes: int
    held_bytes: int


def pack_nibbles(weight: PackedWeight, dtype: torch.dtype) -> Nibbles | None:
    """The weight in the layout of the 4-bit kernels; None for other kinds, and for 4-bit weights
    that the kernels do not support."""
    if weight.kind is PackedKind.MXFP4 and can_pack_mxfp4(weight.scales, dtype):
        return Nibbles.mxfp4(weight.values, weight.scales, dtype)
    if weight.kind is PackedKind.INT4 and can_pack_int4(weight.group, weight.shape[-1]):
        return Nibbles.int4(weight.values, weight.scales.to(dtype), weight.zeros, weight.group)
    return None


def fp8_linear(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Fp8Product | None:
    """Return an fp8 product; None for other kinds of weights, and for fp8 weights that this card
    cannot multiply."""
    if weight.kind is not PackedKind.FP8 or weight.order is not None:
        return None
    (out, width), device = weight.shape, weight.device
    # some cards, and some versions of the library, refuse outputs of other dtypes than bf16
    is_answered = device.type != "cuda" or dtype == torch.bfloat16
    if weight.group >= width and is_answered and has_fp8(device):
        scales = weight.scales.repeat_interleave(weight.block_rows, dim=0)[:out, 0].contiguous()
        return Fp8Product(Fp8Linear(weight.values, scales, bias, dtype))
    is_blocks = weight.group == weight.block_rows == BLOCK
    if is_blocks and has_block_product(out, width, dtype, device):
        return Fp8Product(Fp8BlockLinear(weight.values, weight.scales, bias, dtype))
    return None
