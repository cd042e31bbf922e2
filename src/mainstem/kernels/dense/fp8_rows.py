"""Rows in fp8: the format that kernels write and linears read."""

from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mainstem.kernels.dense.fp8_few import FewRows

FP8 = torch.float8_e4m3fn
MAX = 448.0  # the largest fp8 number; of numbers that share a scale, the largest becomes this
MIN_PEAK = 1e-12  # so that a row of zeros is not divided by zero
GROUP = 128  # columns that share a scale
_ALIGN_ROWS = 16  # with a scale per group, the library refuses some other numbers of rows

Fp8Rows = tuple[Tensor, Tensor]  # values [tokens, in], scales fp32 [tokens, 1 or in / 128]


class Fp8Per(Enum):
    """Which numbers share a scale."""

    ROW = "row"  # all columns of a token
    GROUP = "group"  # 128 columns of a token


def empty_rows(tokens: int, size: int, per: Fp8Per, device: torch.device) -> Fp8Rows:
    """Allocate rows. The scales of groups are stored column by column."""
    if per is Fp8Per.ROW:
        values = torch.empty(tokens, size, dtype=FP8, device=device)
        return values, torch.empty(tokens, 1, dtype=torch.float32, device=device)
    rows = _padded(tokens)
    values = torch.empty(rows, size, dtype=FP8, device=device)
    scales = torch.empty(size // GROUP, rows, dtype=torch.float32, device=device)
    return values[:tokens], scales.t()[:tokens]


def with_padding(rows: Fp8Rows) -> Fp8Rows:
    """Return rows made by `empty_rows` for groups, with undefined rows added up to a multiple of
    16."""
    values, scales = rows
    count = _padded(len(values))
    return (
        values.as_strided((count, values.shape[1]), values.stride()),
        scales.as_strided((count, scales.shape[1]), scales.stride()),
    )


def rounded(x: Tensor, peaks: Tensor) -> Fp8Rows:
    """Return x (fp32) rounded to fp8, and its scales: a magnitude of `peaks` becomes MAX. On a
    CPU the bits are the same as in the kernels."""
    peaks = peaks.clamp(min=MIN_PEAK)
    factors = torch.full_like(peaks, MAX) / peaks  # MAX / peaks would multiply by a reciprocal
    return (x * factors).clamp_(-MAX, MAX).to(FP8), peaks / MAX


def few_rows(values: Tensor, scales: Tensor, bias: Tensor | None) -> "FewRows | None":
    """The product of few rows with this weight; None without a card."""
    if not values.is_cuda:
        return None
    from mainstem.kernels.dense.fp8_few import FewRows  # noqa: PLC0415  a CPU needs no Triton

    return FewRows(values, scales, bias)


def _padded(tokens: int) -> int:
    return -(-tokens // _ALIGN_ROWS) * _ALIGN_ROWS
