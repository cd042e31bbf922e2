"""Random tensors of every format and the numbers in them, decoded one by one from the formats'
descriptions, without code of the engine. `out` and `width` are the shape of a weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tensors = dict[str, Tensor]
Numbers = NDArray[np.float32]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# which of eight rows is in a word's lowest bits, then in the next bits, ...
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Case:
    """A format, with its quantization_config."""

    name: str
    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], tuple[Tensors, Numbers]]


def random_words(rng: np.random.Generator, *shape: int) -> NDArray[np.int32]:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def number(word: int, nth: int, bits: int) -> int:
    """The nth number of a word, from its lowest bits up."""
    mask = (1 << bits) - 1
    return (word >> (bits * nth)) & mask


def scales_of(rng: np.random.Generator, *shape: int) -> Tensor:
    """Scales in fp16, such that numbers of 4 bits become a few tenths."""
    return torch.from_numpy(rng.uniform(0.02, 0.06, shape).astype(np.float16))


def gptq(
    rng: np.random.Generator,
    out: int,
    width: int,
    *,
    bits: int = 4,
    group: int = 16,
    is_symmetric: bool = False,
    has_order: bool = False,
    version: int = 1,
    order_seed: int = 0,
) -> tuple[Tensors, Numbers]:
    per_word, groups = 32 // bits, width // group
    qweight = random_words(rng, width // per_word, out)
    scales = scales_of(rng, groups, out) * (1.0 if bits == 4 else 1 / 16)
    middle = 2 ** (bits - 1)
    zeros = np.full((groups, out), middle)
    if not is_symmetric:
        zeros = rng.integers(0, 2**bits, (groups, out))
    words = [
        [
            sum(int(zeros[g, w * per_word + n]) << (bits * n) for n in range(per_word))
            for w in range(out // per_word)
        ]
        for g in range(groups)
    ]
    if version == 1:  # zero points are stored less 1; a zero borrows from the next number
        ones = sum(1 << (bits * n) for n in range(per_word))
        words = [[(word - ones) % 2**32 for word in row] for row in words]
    g_idx = np.arange(width) // group
    if has_order:
        g_idx = np.random.default_rng(order_seed).permutation(g_idx)
    stored, factors = qweight.tolist(), scales.tolist()
    found = np.empty((out, width), np.float32)
    for column, g in enumerate(g_idx.tolist()):
        words_of_rows, nth = stored[column // per_word], column % per_word
        for row in range(out):
            value = number(words_of_rows[row], nth, bits)
            found[row, column] = (value - int(zeros[g, row])) * factors[g][row]
    tensors = {
        "qweight": torch.from_numpy(qweight),
        "qzeros": torch.from_numpy(np.array(words, np.uint32).view(np.int32)),
        "scales": scales,
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    return tensors, found


def awq(
    rng: np.random.Generator, out: int, width: int, *, group: int = 16
) -> tuple[Tensors, Numbers]:
    qweight, qzeros = (
        random_words(rng, width, out // 8),
        random_words(rng, width // group, out // 8),
    )
    scales = scales_of(rng, width // group, out)
    stored, stored_zeros, factors = qweight.tolist(), qzeros.tolist(), scales.tolist()
    found = np.empty((out, width), np.float32)
    for row in range(out):
        word, nth = row // 8, AWQ_ORDER.index(row % 8)
        for column in range(width):
            zero = number(stored_zeros[column // group][word], nth, 4)
            value = number(stored[column][word], nth, 4)
            found[row, column] = (value - zero) * factors[column // group][row]
    tensors = {"qweight": qweight, "qzeros": qzeros}
    return {name: torch.from_numpy(t) for name, t in tensors.items()} | {"scales": scales}, found


def compressed(
    rng: np.random.Generator,
    out: int,
    width: int,
    *,
    bits: int = 4,
    group: int | None = 16,
    has_zeros: bool = False,
    has_order: bool = False,
) -> tuple[Tensors, Numbers]:
    """pack-quantized: half of the range is added to signed numbers and zero points."""
    per_word, shared = 32 // bits, group or width
    groups = width // shared
    packed = random_words(rng, out, width // per_word)
    scales = scales_of(rng, out, groups) * (1.0 if bits == 4 else 1 / 16)
    zeros = random_words(rng, -(-out // per_word), groups)
    g_idx = np.arange(width) // shared
    if has_order:
        g_idx = np.random.default_rng(0).permutation(g_idx)
    stored, stored_zeros, factors = packed.tolist(), zeros.tolist(), scales.tolist()
    found, middle = np.empty((out, width), np.float32), 2 ** (bits - 1)
    for row in range(out):
        for column, g in enumerate(g_idx.tolist()):
            zero = number(stored_zeros[row // per_word][g], row % per_word, bits)
            value = number(stored[row][column // per_word], column % per_word, bits)
            signed, signed_zero = value - middle, zero - middle if has_zeros else 0
            found[row, column] = (signed - signed_zero) * factors[row][g]
    tensors = {
        "weight_packed": torch.from_numpy(packed),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, width]),
    }
    if has_zeros:
        tensors["weight_zero_point"] = torch.from_numpy(zeros)
    if has_order:
        tensors["weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    return tensors, found


def int_bytes(
    rng: np.random.Generator,
    out: int,
    width: int,
    *,
    bits: int = 8,
    group: int | None = None,
    has_zeros: bool = False,
) -> tuple[Tensors, Numbers]:
    """int-quantized: one byte per number for any bit width; a scale for each row or group."""
    shared, middle = group or width, 2 ** (bits - 1)
    weight = rng.integers(-middle, middle, (out, width)).astype(np.int8)
    scales = scales_of(rng, out, width // shared) / (1 if bits == 4 else 16)
    tensors = {"weight": torch.from_numpy(weight), "weight_scale": scales}
    found = weight.astype(np.float32)
    if has_zeros:
        zeros = rng.integers(-middle, middle, (out, width // shared)).astype(np.int8)
        tensors["weight_zero_point"] = torch.from_numpy(zeros)
        found -= zeros.astype(np.float32).repeat(shared, 1)
    return tensors, found * scales.float().numpy().repeat(shared, 1)


def e4m3(byte: int) -> float:
    """A sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, (byte >> 3) & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8(
    rng: np.random.Generator,
    out: int,
    width: int,
    *,
    block: tuple[int, int] | None = None,
    scale_name: str = "weight_scale",
    scale_shape: tuple[int, ...] | None = None,
) -> tuple[Tensors, Numbers]:
    """FP8 with a scale for each block, or with scales of `scale_shape`."""
    stored = rng.integers(0, 127, (out, width)) | rng.choice([0, 128], (out, width))
    numbers = np.array([[e4m3(byte) for byte in row] for row in stored.tolist()], np.float32)
    if block is not None:
        scale_shape = (-(-out // block[0]), -(-width // block[1]))
    elif scale_shape is None:
        scale_shape = (out, 1)
    scales = rng.uniform(0.001, 0.003, scale_shape).astype(np.float32)
    wide = scales.reshape(-1, 1) if block is None else scales
    if block is not None:
        wide = wide.repeat(block[0], 0).repeat(block[1], 1)[:out, :width]
    weight = torch.from_numpy(stored.astype(np.uint8)).view(torch.float8_e4m3fn)
    return {"weight": weight, scale_name: torch.from_numpy(scales)}, numbers * wide


def mxfp4(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, Numbers]:
    """`blocks` and `scales` of one expert, as gpt-oss has them."""
    blocks = rng.integers(0, 256, (out, width // 32, 16)).astype(np.uint8)
    scales = rng.integers(120, 127, (out, width // 32)).astype(np.uint8)
    found = np.empty((out, width), np.float32)
    for row in range(out):
        for column in range(width):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            value = FP4[byte >> 4 if column % 2 else byte & 15]
            found[row, column] = value * 2.0 ** (int(scales[row, column // 32]) - 127)
    return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}, found
