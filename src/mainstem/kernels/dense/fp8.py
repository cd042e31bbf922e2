"""fp8 linears (float8_e4m3fn): weights are quantized per output channel, activations per token at
run time.

    y = (q(x) @ q(w).T) * x_scale * w_scale + bias       x_scale [tokens, 1], w_scale [out]

On a card the product is torch's row-scaled one (compute capability 8.9 and up); few rows have a
product of their own (`fp8_few.py`). On a CPU the same rounded numbers are multiplied in fp32: slow,
but it shows what fp8 costs in accuracy.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.errors import ConfigError
from mainstem.kernels.dense.fp8_rows import FP8, Fp8Rows, rounded

if TYPE_CHECKING:
    from mainstem.kernels.dense.fp8_few import FewRows

_ALIGN = 16  # the product needs both sides of the weight to be multiples of this


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [out, in]; returns the values as float8_e4m3fn, and scales [out] in fp32."""
    values, scales = _quantize_rows(weight)
    return values, scales[:, 0].contiguous()


def require_fp8(device: torch.device) -> None:
    """Raise ConfigError unless fp8 products run on this device."""
    if device.type != "cuda":
        return  # emulated
    if torch.version.hip is not None:
        raise ConfigError("quantize=fp8 needs an NVIDIA card; this torch is built for ROCm")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"quantize=fp8 needs compute capability 8.9, "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


def has_fp8(device: torch.device) -> bool:
    """Whether fp8 products run on this device; a CPU emulates them."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


class Fp8Linear:
    """Like a dense linear, with weights [out, in] in fp8 and a scale for each row. Takes plain
    rows, or rows that a fused kernel has quantized already."""

    def __init__(
        self,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        require_fp8(values.device)
        self.num_out, self.num_in = values.shape
        self.out_dtype = out_dtype
        out_pad, in_pad = -self.num_out % _ALIGN, -self.num_in % _ALIGN
        if out_pad or in_pad:  # torch cannot pad fp8, but it can pad the same data as bytes
            values = F.pad(values.view(torch.uint8), (0, in_pad, 0, out_pad)).view(FP8)
        self.values = values
        self.scale = F.pad(scale, (0, out_pad))
        self.bias = None if bias is None else F.pad(bias, (0, out_pad)).to(out_dtype)
        self._few = None if in_pad else few_rows(self.values, self.scale, self.bias)

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> "Fp8Linear":
        """Make a Fp8Linear from weights of any float dtype."""
        require_fp8(weight.device)
        return cls(*quantize_weight(weight), bias, out_dtype)

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        values, scales = quantize_rows(x) if isinstance(x, Tensor) else x
        if values.shape[1] != self.num_in:
            raise ValueError(f"this linear takes {self.num_in} columns, got {values.shape[1]}")
        if values.is_cuda:
            return self._product(values, scales)
        return self._emulated(values, scales)

    def _product(self, values: Tensor, scales: Tensor) -> Tensor:
        if self._few is not None and self._few.can_take(len(values)):
            return self._few((values, scales), self.out_dtype)[:, : self.num_out]
        if self.values.shape[1] != self.num_in:
            padding = (0, self.values.shape[1] - self.num_in)
            values = F.pad(values.view(torch.uint8), padding).view(FP8)
        y: Tensor = torch._scaled_mm(
            values,
            self.values.t(),
            scale_a=scales,
            scale_b=self.scale[None, :],
            bias=self.bias,
            out_dtype=self.out_dtype,
            use_fast_accum=True,
        )
        return y[:, : self.num_out]

    def _emulated(self, values: Tensor, scales: Tensor) -> Tensor:
        weight = self.values[: self.num_out, : self.num_in].float()
        y = (values.float() @ weight.t()).mul_(scales).mul_(self.scale[: self.num_out])
        if self.bias is not None:
            y += self.bias[: self.num_out]
        return y.to(self.out_dtype)


def few_rows(values: Tensor, scales: Tensor, bias: Tensor | None) -> "FewRows | None":
    """The product of few rows with this weight; None without a card."""
    if not values.is_cuda:
        return None
    from mainstem.kernels.dense.fp8_few import FewRows  # noqa: PLC0415  a CPU needs no Triton

    return FewRows(values, scales, bias)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Quantize per token, on any device."""
    if x.is_cuda:
        from mainstem.kernels.dense import rows  # noqa: PLC0415  a CPU needs no Triton

        return rows.quantize_rows(x)
    return _quantize_rows(x)


def _quantize_rows(x: Tensor) -> Fp8Rows:
    """Quantize in the same way as the fused kernels."""
    wide = x.float()
    return rounded(wide, wide.abs().amax(dim=1, keepdim=True))
