# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The layout in which kernels read 4-bit weights, and how a kernel unpacks them.

    words    int16 [.., blocks, out, 32]: a block is 128 columns of every row. Word w of a row holds
             columns w, 32 + w, 64 + w and 96 + w of the block.
             INT4   the first is in the lowest four bits, the last in the highest
             MXFP4  sign and magnitude (two bits of exponent, one of mantissa) are apart:
                        15 | 14 13 12 | 11 | 10 | 9 | 8 7 6 | 5 4 3 | 2 1 0
                        s0 | fourth   | s2 | s3 | s1| first | third | second
    factors  INT4   [.., groups, out], integers twice as long as the weight's dtype: the scale in
                    the low half, and in the high half the shift, which is added before scaling
             MXFP4  int32 [.., blocks, out]: a byte for each of a block's four groups of 32, the
                    exponent + 126

A program reads contiguous memory of each block. A block has four quarters: tiles [out, 32] with
columns in order; a word holds one number of each quarter. A register holds two words; a mask that
leaves one quarter gives a pair of 16-bit numbers. Scale and shift of 16 bits are one number of 32
bits, because loads of 32 bits can be issued ahead of the loop. Columns of padding hold arbitrary
numbers; x has zeros there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from mainstem.kernels.dense.split_columns import make_counters
from mainstem.kernels.errors import LayoutError

BLOCK = 128  # columns
WORDS = BLOCK // 4  # words of a row in a block
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}  # that unpacking adds
SMALL_GROUPS = (32, 64)  # group sizes smaller than a block
_MOST_EXPONENT = 128  # so that 2^(exponent - 1) is finite
_ROWS_AT_ONCE = 4096  # rows packed at once, so that intermediate tensors are small
_WORDS_AT_ONCE = 1 << 24

QUARTER = tl.constexpr(WORDS)
WIDTH = tl.constexpr(BLOCK)
_INT4_BF16 = tl.constexpr(  # a value OR'ed into the bits of 128 is 128 plus the value
    """
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.u32 $3, $4, 4;
    lop3.b32 $1, $3, 0x000f000f, 0x43004300, 0xea;
    shr.u32 $3, $4, 8;
    lop3.b32 $2, $3, 0x000f000f, 0x43004300, 0xea;
    shr.u32 $3, $4, 12;
    lop3.b32 $3, $3, 0x000f000f, 0x43004300, 0xea;
    """
)
_INT4_FP16 = tl.constexpr(_INT4_BF16.value.replace("0x43004300", "0x64006400"))  # 1024
# (part + shift) * scale; the sum is exact, so there is only one rounding
_SCALE_BF16 = tl.constexpr(
    """{
    .reg .b32 one, nothing;
    mov.b32 one, 0x3f803f80;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 $0, $1, one, $2;
    fma.rn.bf16x2 $0, $0, $3, nothing;
    }"""
)
_SCALE_FP16 = tl.constexpr(_SCALE_BF16.value.replace("0x3f803f80", "0x3c003c00").replace("bf", "f"))
# Sign and magnitude at bits 15 and 8 to 6 of bf16 are the number times 2^-126, also for subnormal
# ones. The first number is in place; the second takes one shift, the others two. Shifts to the left
# are multiplications on a card, which leaves the unit for logic to the masks.
_E2M1 = tl.constexpr(
    """{ .reg .b32 sign, rest;
    and.b32 $0, $4, 0x81c081c0;
    shl.b32 rest, $4, 6;
    and.b32 $1, rest, 0x81c081c0;
    shl.b32 sign, $4, 4;
    shl.b32 rest, $4, 3;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $2, sign, 0x80008000, rest, 0xea;
    shl.b32 sign, $4, 5;
    shr.u32 rest, $4, 6;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $3, sign, 0x80008000, rest, 0xea; }"""
)
# times the factor in one half of a register
_TIMES_LOW = tl.constexpr(
    """{ .reg .b16 low, high; .reg .b32 factor, nothing;
    mov.b32 {low, high}, $2;
    mov.b32 factor, {low, low};
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 $0, $1, factor, nothing; }"""
)
_TIMES_HIGH = tl.constexpr(_TIMES_LOW.value.replace("{low, low}", "{high, high}"))


@dataclass(frozen=True, slots=True)
class Nibbles:
    """A weight [.., out, in] as kernels read it."""

    words: Tensor
    factors: Tensor
    group: int  # columns that share factors
    num_in: int
    dtype: torch.dtype  # dtype of the unpacked numbers and of x
    arrived: Tensor  # of `make_counters`
    is_mxfp4: bool = False

    @classmethod
    def int4(cls, values: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> "Nibbles":
        """Pack weights that are (value - zero) * scale in the dtype of the scales. values: uint8
        [.., out, in / 2], with the even column in the low half; scales and zeros: [.., out,
        groups]. If zeros is None, every zero is 8.
        """
        num_in = 2 * values.shape[-1]
        blocks = -(-num_in // BLOCK)
        if not can_pack_int4(group, num_in):
            raise LayoutError(f"4-bit weights need groups of 32, 64, a multiple of 128 or all "
                              f"columns, got {group}")  # fmt: skip
        if group >= num_in:
            group = blocks * BLOCK
        factors = _int4_factors(scales, zeros, group, blocks)
        return cls(
            _pack_words(values), factors, group, num_in, scales.dtype, make_counters(values.device)
        )

    @classmethod
    def mxfp4(cls, values: Tensor, exponents: Tensor, dtype: torch.dtype) -> "Nibbles":
        """Pack MXFP4 weights. values: as in `int4`, but e2m1; exponents: uint8 [.., out, in / 32],
        e8m0."""
        if not can_pack_mxfp4(exponents, dtype):
            raise LayoutError(f"MXFP4 weights need bfloat16 or float32 and scales of at most 2, "
                              f"got {dtype} and 2^{int(exponents.max()) - 127}")  # fmt: skip
        num_in = 2 * values.shape[-1]
        factors = _mxfp4_factors(exponents, -(-num_in // BLOCK))
        words, counts = _pack_words(values), make_counters(values.device)
        _spread(words)
        return cls(words, factors, 32, num_in, dtype, counts, is_mxfp4=True)

    @property
    def num_out(self) -> int:
        return self.words.shape[-2]

    @property
    def num_blocks(self) -> int:
        return self.words.shape[-3]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.factors.nbytes

    def options(self) -> dict[str, int | bool]:
        """Constants for the kernels that read this weight."""
        return {
            "GROUP": self.group,
            "IS_MXFP4": self.is_mxfp4,
            "IS_EVEN": self.num_in % BLOCK == 0,
            "IS_PTX": has_ptx(self.dtype, self.words.device),
        }


def can_pack_int4(group: int, num_in: int) -> bool:
    """Whether the kernels support groups of this size."""
    return group >= num_in or group in SMALL_GROUPS or group % BLOCK == 0


def can_pack_mxfp4(exponents: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels support this dtype and these exponents: the range of fp16 is too small,
    and 2^(exponent - 1) must be finite. Waits for the device."""
    return dtype in (torch.bfloat16, torch.float32) and int(exponents.max()) <= _MOST_EXPONENT


def _pack_words(values: Tensor) -> Tensor:
    """uint8 [.., out, in / 2], the even column in the low half -> words."""
    *lead, out, width = values.shape
    blocks = -(-2 * width // BLOCK)
    words = values.new_empty((*lead, blocks, out, WORDS), dtype=torch.int16)
    flat, flat_words = values.view(-1, out, width), words.view(-1, blocks, out, WORDS)
    for index in range(len(flat)):
        for first in range(0, out, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            flat_words[index, :, rows] = _words_of(flat[index, rows], blocks)
    return words


def _words_of(values: Tensor, blocks: int) -> Tensor:
    """[rows, in / 2] -> [blocks, rows, WORDS]"""
    rows, width = values.shape
    values = F.pad(values, (0, blocks * BLOCK // 2 - width))
    nibbles = torch.stack((values & 15, values >> 4), dim=-1).view(rows, blocks, 4, WORDS)
    low = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).transpose(0, 1)
    high = (nibbles[:, :, 2] | nibbles[:, :, 3] << 4).transpose(0, 1)
    return torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1)


def _spread(words: Tensor) -> None:
    """Move the bits of e2m1 numbers from nibbles to their places, in place."""
    for part in words.view(-1).split(_WORDS_AT_ONCE):
        wide = part.int()
        moved = torch.zeros_like(wide)
        for index, (sign, magnitude) in enumerate(((15, 6), (9, 0), (11, 3), (10, 12))):
            number = wide >> 4 * index
            moved |= ((number >> 3) & 1) << sign | (number & 7) << magnitude
        part.copy_(moved)


def _int4_factors(scales: Tensor, zeros: Tensor | None, group: int, blocks: int) -> Tensor:
    """[.., out, groups] each -> int32 [.., groups, out], or int64 if scales are fp32."""
    dtype = scales.dtype
    shifts = torch.full_like(scales, 8) if zeros is None else zeros.to(dtype)
    pairs = torch.stack((scales, -OFFSETS[dtype] - shifts), dim=-1)
    missing = -(-blocks * BLOCK // group) - scales.shape[-1]
    pairs = F.pad(pairs, (0, 0, 0, max(missing, 0))).transpose(-2, -3).contiguous()
    return pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).squeeze(-1)


def _mxfp4_factors(exponents: Tensor, blocks: int) -> Tensor:
    """uint8 [.., out, groups of 32] -> int32 [.., blocks, out]"""
    *lead, out, groups = exponents.shape
    padded = F.pad(exponents + 126, (0, 4 * blocks - groups)).view(*lead, out, blocks, 4)
    return padded.transpose(-2, -3).contiguous().view(torch.int32).squeeze(-1)


def has_ptx(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PTX instructions unpack two numbers at a time; other targets use plain arithmetic."""
    if dtype not in (torch.bfloat16, torch.float16) or device.type != "cuda":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@triton.jit
def load_block(
    words_ptrs, factors_ptr, block, outs, num_out,
    GROUP: tl.constexpr, IS_MXFP4: tl.constexpr, DTYPE: tl.constexpr, IS_PTX: tl.constexpr,
):  # fmt: skip
    """Load the rows `outs` of a block, [outs, 128] numbers."""
    words = tl.load(words_ptrs)
    if IS_MXFP4:
        factors = tl.load(factors_ptr + block * num_out + outs)
        first, second, third, fourth = mxfp4_quarters(words, factors, DTYPE, IS_PTX)
    else:
        ptrs = factors_ptr + (block * WIDTH // GROUP) * num_out + outs
        factor_0 = tl.load(ptrs)
        factor_1, factor_2, factor_3 = factor_0, factor_0, factor_0
        if GROUP == 64:
            factor_2 = tl.load(ptrs + num_out)
            factor_3 = factor_2
        elif GROUP == 32:
            factor_1 = tl.load(ptrs + num_out)
            factor_2 = tl.load(ptrs + 2 * num_out)
            factor_3 = tl.load(ptrs + 3 * num_out)
        first, second, third, fourth = _int4_quarters(
            words, (factor_0, factor_1, factor_2, factor_3), DTYPE, IS_PTX
        )
    # Join the quarters. A thread holds the same columns of each quarter, so no data moves, and the
    # matrix instructions of one quarter run while the next is unpacked.
    both = tl.join(tl.join(first, third), tl.join(second, fourth))
    return both.permute(0, 2, 3, 1).reshape(words.shape[0], WIDTH)


@triton.jit
def load_columns(x_ptrs, columns, num_in, is_row, IS_EVEN: tl.constexpr):
    """Load x as [columns, rows], with zeros past the last column or row."""
    if IS_EVEN:
        x = tl.load(x_ptrs, mask=is_row, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=is_row & (columns < num_in)[:, None], other=0.0)
    return x


@triton.jit
def _int4_quarters(words, factors, DTYPE: tl.constexpr, IS_PTX: tl.constexpr):
    """int16 [out, 32] and the factors of each quarter -> four of [out, 32] in DTYPE."""
    if IS_PTX:
        if tl.bfloat16 == DTYPE:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _INT4_BF16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _INT4_FP16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        first = _scaled(first, factors[0], DTYPE)
        second = _scaled(second, factors[1], DTYPE)
        third = _scaled(third, factors[2], DTYPE)
        fourth = _scaled(fourth, factors[3], DTYPE)
    else:
        first = _plain(words, 0, factors[0], DTYPE)
        second = _plain(words, 1, factors[1], DTYPE)
        third = _plain(words, 2, factors[2], DTYPE)
        fourth = _plain(words, 3, factors[3], DTYPE)
    return first, second, third, fourth


@triton.jit
def _scaled(part, factor, DTYPE: tl.constexpr):
    scale = factor.to(tl.int16).to(DTYPE, bitcast=True)
    shift = (factor >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    scale = tl.broadcast_to(scale[:, None], part.shape)
    shift = tl.broadcast_to(shift[:, None], part.shape)
    if tl.bfloat16 == DTYPE:
        scaled = tl.inline_asm_elementwise(
            _SCALE_BF16, "=&r,r,r,r", [part, shift, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        scaled = tl.inline_asm_elementwise(
            _SCALE_FP16, "=&r,r,r,r", [part, shift, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    return scaled


@triton.jit
def _plain(words, INDEX: tl.constexpr, factor, DTYPE: tl.constexpr):
    """Quarter number INDEX of `_int4_quarters`, with plain arithmetic, for every target."""
    part = ((words >> (4 * INDEX)) & 15).to(tl.float32)
    if tl.float32 == DTYPE:
        scale = factor.to(tl.int32).to(tl.float32, bitcast=True)
        shift = (factor >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        part += 128.0 if tl.bfloat16 == DTYPE else 1024.0
        scale = factor.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        shift = (factor >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return ((part + shift[:, None]) * scale[:, None]).to(DTYPE)


@triton.jit
def mxfp4_quarters(words, factors, DTYPE: tl.constexpr, IS_PTX: tl.constexpr):
    """int16 [out, 32] and int32 [out] -> four of [out, 32] in DTYPE, bf16 or fp32."""
    if IS_PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _E2M1, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        # a factor is 2^126 * 2^(exponent - 127) = 2^(exponent - 1), at most 2^127
        even, odd = (factors << 7) & 0x7F807F80, (factors >> 1) & 0x7F807F80
        first = _times(first, even, _TIMES_LOW)
        second = _times(second, odd, _TIMES_LOW)
        third = _times(third, even, _TIMES_HIGH)
        fourth = _times(fourth, odd, _TIMES_HIGH)
    else:
        first = _plain_e2m1(words, 15, 6, factors, DTYPE)
        second = _plain_e2m1(words, 9, 0, factors >> 8, DTYPE)
        third = _plain_e2m1(words, 11, 3, factors >> 16, DTYPE)
        fourth = _plain_e2m1(words, 10, 12, factors >> 24, DTYPE)
    return first, second, third, fourth


@triton.jit
def _times(part, factors, HALF: tl.constexpr):
    """part * the factor in that half of `factors` [out]."""
    factors = tl.broadcast_to(factors[:, None], part.shape)
    return tl.inline_asm_elementwise(
        HALF, "=r,r,r,r", [part, factors], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _plain_e2m1(words, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr, factors, DTYPE: tl.constexpr):
    """The number whose sign and magnitude begin at these bits, times the lowest factor."""
    bits = words.to(tl.int32)
    bits = (((bits >> SIGN) & 1) << 31) | (((bits >> MAGNITUDE) & 7) << 22)  # times 2^-126
    factor = ((factors & 255) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * factor[:, None]).to(DTYPE)
