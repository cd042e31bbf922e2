"""int8 linears for CPUs: weights per output channel, activations per token as they come.

    y = (q(x / peak) @ q(w / scale).T) * scale * peak      peak [tokens, 1], scale [out]

oneDNN's dynamic int8 linear quantizes activations with one scale for the whole tensor. Rows are
divided by their own peak first, so that a token with huge activations costs the others nothing
and a token's answer does not hang on its neighbours. Channel scales are applied to the output:
the kernel is given one weight scale of 1, because with per-channel scales torch 2.13 on aarch64
takes a path that is 30 times slower and wrong for more than one row.
"""

import warnings

import torch
from torch import Tensor

from mainstem.core.errors import ConfigError

_ENGINE = "onednn"
_MAX = 127.0


class Int8Linear:
    """As DenseLinear, from fp32 weights [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        _require_engine()
        self._scale = weight.abs().amax(dim=1).clamp_(min=1e-12) / _MAX
        levels = (weight / self._scale[:, None]).round_().clamp_(-_MAX, _MAX).to(torch.int8)
        self._bias = bias
        with warnings.catch_warnings():
            # torch announces the end of quantized tensors; the version range in pyproject covers us
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch._make_per_tensor_quantized_tensor(levels, 1.0, 0)
        self._packed = torch.ops.quantized.linear_prepack(tensor, None)

    def __call__(self, x: Tensor) -> Tensor:
        peak = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1, keepdim=True)
        peak.clamp_(min=1e-30)
        y: Tensor = torch.ops.quantized.linear_dynamic(x / peak, self._packed, False)
        y.mul_(self._scale).mul_(peak)
        return y if self._bias is None else y.add_(self._bias)


def _require_engine() -> None:
    """Select oneDNN's integer kernels, or say that this build of torch has none."""
    if _ENGINE not in torch.backends.quantized.supported_engines:
        raise ConfigError("quantize=int8 needs a torch built with oneDNN, and this one is not")
    if torch.backends.quantized.engine != _ENGINE:
        torch.backends.quantized.engine = _ENGINE
