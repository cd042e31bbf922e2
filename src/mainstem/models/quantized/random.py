"""Packed weights of random numbers, for measuring speed."""

import torch
from torch import Generator, Tensor

from mainstem.models.packed import PackedKind, PackedWeight
from mainstem.models.quantized.packing import Packing

STD = 0.02  # standard deviation of the numbers
_INT_SPREAD = 0.29  # standard deviation of a uniform distribution, as a part of its range
# 2^-7 * 2.9 is about STD; 2.9 is the standard deviation of MXFP4's 16 numbers
_MXFP4_EXPONENT = 127 - 7


def random_packed(
    packing: Packing, shape: tuple[int, ...], dtype: torch.dtype, generator: Generator
) -> PackedWeight:
    """A weight [.., out, in] on the generator's device."""
    *lead, out, width = shape
    kind, device = packing.kind, generator.device
    group, block_rows = packing.group or width, packing.block_rows or 1
    num_scales = (*lead, -(-out // block_rows), -(-width // group))

    def whole(low: int, high: int, size: tuple[int, ...]) -> Tensor:
        found = torch.empty(size, dtype=torch.uint8, device=device)
        return found.random_(low, high, generator=generator)

    def scales(size: float, scale_dtype: torch.dtype) -> Tensor:
        return torch.full(num_scales, size, dtype=scale_dtype, device=device)

    zeros = None
    if kind is PackedKind.FP8:
        numbers = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        values = numbers.to(torch.float8_e4m3fn)
        found = scales(STD, torch.float32)
    elif kind is PackedKind.MXFP4:
        values = whole(0, 256, (*lead, out, width // 2))
        found = scales(_MXFP4_EXPONENT, torch.uint8)
    else:
        middle = kind.middle
        values = whole(0, 256, (*lead, out, width // kind.columns_per_value))
        found = scales(STD / (_INT_SPREAD * 2 * middle), dtype)
        zeros = whole(middle - 1, middle + 2, num_scales) if packing.has_zeros else None
    return PackedWeight(kind, values, found, zeros, group, block_rows)
