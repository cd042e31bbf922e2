# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""fp8 linears with a scale for each 128 x 128 block of the weight, as DeepSeek and Qwen ship them.

    y = sum over blocks b of columns: (q(x)[:, b] @ q(w)[:, b].T) * x_scale[:, b] * w_scale[:, b]

Activations are quantized per token and 128 columns. The vendor's library computes the product, on
Hopper only. On a CPU the same rounded numbers are multiplied in fp32.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense import fp8_rows
from mainstem.kernels.dense.fp8_rows import FP8, MAX, MIN_PEAK, Fp8Rows
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

BLOCK = 128  # rows, and columns
_ALIGN_ROWS = 16  # of x: the library refuses some numbers of rows
_ALIGN_BLOCKS = 4  # of columns: a row of scales must be 16 bytes, or a multiple
_HOPPER = 9
_MOST_OFF = 0.01  # of a product; rounding of bf16 outputs is 0.002

_FP8_MAX = tl.constexpr(fp8_rows.MAX)
_MIN_PEAK = tl.constexpr(fp8_rows.MIN_PEAK)


def has_block_product(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a product for a weight of this shape, without dequantizing it."""
    if num_out % BLOCK or num_in % (BLOCK * _ALIGN_BLOCKS) or dtype == torch.float16:
        return False
    if device.type != "cuda":
        return True  # emulated
    if torch.version.hip is not None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER and is_library_right(device)


@cache
def is_library_right(device: torch.device) -> bool:
    """Check the library's product of a small weight against a product of the same rounded numbers.
    Versions of the library differ in the layout of scales, and a wrong layout raises no error."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = (100 * some(2 * BLOCK, 4 * BLOCK)).clamp_(-MAX, MAX).to(device, FP8)
    scales = torch.exp2(2 * some(2, 4)).to(device)
    loudness = torch.exp2(some(_ALIGN_ROWS, 4)).repeat_interleave(BLOCK, dim=1)
    x = (some(_ALIGN_ROWS, 4 * BLOCK) * loudness).to(device, torch.bfloat16)
    linear = Fp8BlockLinear(values, scales, None, torch.bfloat16)
    rounded = _spread(*quantize_groups(x)).double()
    right = rounded @ linear.dense().double().t()
    off = torch.linalg.vector_norm(linear(x).double() - right) / torch.linalg.vector_norm(right)
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

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out], a new tensor."""
        if x.shape[1] != self.num_in:
            raise ValueError(f"this linear takes {self.num_in} columns, got {x.shape[1]}")
        values, scales = quantize_groups(x)
        if x.is_cuda:
            y: Tensor = torch._scaled_mm(
                values,
                self._values.t(),
                scale_a=scales,
                scale_b=self._scales.t(),
                out_dtype=self._out_dtype,
            )
        else:
            y = (_spread(values, scales) @ self.dense().t()).to(self._out_dtype)
        if self._bias is not None:
            y += self._bias
        return y[: len(x)]

    def dense(self) -> Tensor:
        """The weight dequantized, fp32 [out, in]."""
        return _spread(self._values, self._scales.repeat_interleave(BLOCK, dim=0))


def quantize_groups(x: Tensor) -> Fp8Rows:
    """Values [rows, in] and scales [rows, in / 128], column by column. Rows are those of x, on
    a card followed by padding with undefined numbers."""
    tokens, width = x.shape
    if width % BLOCK or x.stride(1) != 1:
        raise LayoutError(f"x must have contiguous rows of a multiple of {BLOCK} columns, "
                          f"got {tuple(x.shape)}")  # fmt: skip
    rows = -(-tokens // _ALIGN_ROWS) * _ALIGN_ROWS
    scales = torch.empty(width // BLOCK, rows, dtype=torch.float32, device=x.device)
    if not x.is_cuda:  # the interpreter rounds to fp8 wrongly, torch does not
        groups = x.float().view(tokens, -1, BLOCK)
        peaks = groups.abs().amax(dim=2).clamp_(min=MIN_PEAK)
        scales[:, :tokens] = (peaks / MAX).t()
        factors = torch.full_like(peaks, MAX) / peaks  # `MAX / peaks` is rounded twice
        values = (groups * factors[:, :, None]).clamp_(-MAX, MAX).view(tokens, width)
        return values.to(FP8), scales[:, :tokens].t()
    values = torch.empty(rows, width, dtype=FP8, device=x.device)
    if tokens:
        num_groups = width // BLOCK
        lanes = next_power_of_2(num_groups)
        _quantize_groups_kernel[(tokens,)](
            x, values, scales, x.stride(0), rows,
            GROUPS=num_groups, LANES=lanes, SIZE=BLOCK,
            num_warps=min(max(lanes // 8, 1), 16), **overlap_options(x.device),
        )  # fmt: skip
    return values, scales.t()


@triton.jit(do_not_specialize=("rows",))
def _quantize_groups_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, rows,
    GROUPS: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_ahead(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, LANES)
    is_group = groups < GROUPS
    at = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + token * stride_x + at, mask=is_group[:, None], other=0.0).to(tl.float32)
    peaks = tl.maximum(tl.max(tl.abs(x), 1), _MIN_PEAK)
    tl.store(scales_ptr + groups * rows + token, tl.div_rn(peaks, _FP8_MAX), mask=is_group)
    x = x * tl.div_rn(_FP8_MAX, peaks)[:, None]
    x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    out_ptrs = out_ptr + token * (GROUPS * SIZE) + at
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=is_group[:, None])


def _spread(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantize values [rows, in] with scales [rows, in / 128] to fp32."""
    return values.float() * scales.repeat_interleave(BLOCK, dim=1)
