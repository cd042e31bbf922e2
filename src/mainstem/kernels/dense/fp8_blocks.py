"""fp8 linears with a scale for each 128 x 128 block of the weight, as DeepSeek and Qwen ship them.

    y = sum over blocks b of columns: (q(x)[:, b] @ q(w)[:, b].T) * x_scale[:, b] * w_scale[:, b]

Activations are quantized per token and 128 columns. The vendor's library computes the product, on
Hopper only; few rows have a product of their own (`fp8_few.py`). On a CPU the same rounded numbers
are multiplied in fp32.
"""

from functools import cache

import torch
from torch import Tensor

from mainstem.kernels.dense.fp8 import few_rows
from mainstem.kernels.dense.fp8_rows import (
    FP8,
    GROUP,
    MAX,
    Fp8Per,
    Fp8Rows,
    empty_rows,
    rounded,
    with_padding,
)
from mainstem.kernels.errors import LayoutError

BLOCK = GROUP  # rows and columns of a block
_ALIGN_BLOCKS = 4  # blocks of columns: a row of scales must be a multiple of 16 bytes long
_HOPPER = 9
_CHECKED_ROWS = 16
_MOST_OFF = 0.01  # largest relative error of a product; rounding to bf16 alone gives 0.002


def has_block_product(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `Fp8BlockLinear` can multiply by a weight of this shape."""
    if num_out % BLOCK or num_in % (BLOCK * _ALIGN_BLOCKS) or dtype == torch.float16:
        return False
    if device.type != "cuda":
        return True  # emulated
    if torch.version.hip is not None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER and is_library_right(device)


@cache
def is_library_right(device: torch.device) -> bool:
    """Whether the library's product of a small weight is near that of the same numbers in fp64.
    Versions of the library differ in the layout of scales, and a wrong layout raises no error."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = (100 * some(2 * BLOCK, 4 * BLOCK)).clamp_(-MAX, MAX).to(device, FP8)
    scales = torch.exp2(2 * some(2, 4)).to(device)
    loudness = torch.exp2(some(_CHECKED_ROWS, 4)).repeat_interleave(BLOCK, dim=1)
    x = (some(_CHECKED_ROWS, 4 * BLOCK) * loudness).to(device, torch.bfloat16)
    linear = Fp8BlockLinear(values, scales, None, torch.bfloat16)
    rows = quantize_groups(x)
    right = _spread(*rows).double() @ linear.dense().double().t()
    found = linear.product(rows).double()
    off = torch.linalg.vector_norm(found - right) / torch.linalg.vector_norm(right)
    return bool(off < _MOST_OFF)


class Fp8BlockLinear:
    """A linear with weights [out, in] in fp8 and scales [out / 128, in / 128] in fp32."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> None:
        num_out, self.num_in = values.shape
        if scales.shape != (num_out // BLOCK, self.num_in // BLOCK):
            raise LayoutError(f"scales must be one for each block of {BLOCK} x {BLOCK}, "
                              f"got {tuple(scales.shape)}")  # fmt: skip
        self._values = values
        self._scales = scales.contiguous()
        self._bias = bias
        self._out_dtype = out_dtype
        self._few = few_rows(self._values, self._scales, bias)

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """[tokens, in] -> [tokens, out], a new tensor."""
        rows = quantize_groups(x) if isinstance(x, Tensor) else x
        width = rows[0].shape[1]
        if width != self.num_in:
            raise ValueError(f"this linear takes {self.num_in} columns, got {width}")
        if self._few is not None and self._few.can_take(len(rows[0])):
            return self._few(rows, self._out_dtype)
        y = self.product(rows)
        if self._bias is not None:
            y += self._bias
        return y

    def product(self, rows: Fp8Rows) -> Tensor:
        """The product without bias, by the library or emulated."""
        if not rows[0].is_cuda:
            return (_spread(*rows) @ self.dense().t()).to(self._out_dtype)
        values, scales = with_padding(rows)
        y: Tensor = torch._scaled_mm(
            values,
            self._values.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            out_dtype=self._out_dtype,
        )
        return y[: len(rows[0])]

    def dense(self) -> Tensor:
        """Return the weight dequantized, [out, in] in fp32."""
        return _spread(self._values, self._scales.repeat_interleave(BLOCK, dim=0))


def quantize_groups(x: Tensor) -> Fp8Rows:
    """Quantize per token and 128 columns, on any device."""
    if x.is_cuda:
        from mainstem.kernels.dense import rows  # noqa: PLC0415  a CPU needs no Triton

        return rows.quantize_rows(x, per=Fp8Per.GROUP)
    if x.shape[1] % GROUP:
        raise LayoutError(f"x must have a multiple of {GROUP} columns, got {x.shape[1]}")
    values, scales = empty_rows(len(x), x.shape[1], Fp8Per.GROUP, x.device)
    groups = x.float().reshape(len(x), x.shape[1] // GROUP, GROUP)
    found, sizes = rounded(groups, groups.abs().amax(dim=2, keepdim=True))
    values.copy_(found.flatten(1))
    scales.copy_(sizes[:, :, 0])
    return values, scales


def _spread(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantize values [rows, in] with scales [rows, in / 128] to fp32."""
    return values.float() * scales.repeat_interleave(BLOCK, dim=1)
