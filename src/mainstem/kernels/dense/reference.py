"""Norms and activations in plain PyTorch, computed in fp32: the kernels are tested against them.

Nothing here changes its arguments or shares code with a fast kernel. Rounding is the same as in the
kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last axis. Rounds also before the gain is
    applied, unless the gain is fp32."""
    wide = x.float()
    normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if gain.dtype != torch.float32:
        normed = normed.to(x.dtype).float()
    return (normed * gain.float()).to(x.dtype)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * gain + bias over the last axis."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, dim=-1, keepdim=True, correction=0)
    normed = (wide - mean) / torch.sqrt(variance + eps) * gain.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def activation(x: Tensor, name: str) -> Tensor:
    """act(x)."""
    return ACTIVATIONS[name](x.float()).to(x.dtype)


def gated(gate_up: Tensor, name: str) -> Tensor:
    """act(gate) * up, where gate is the first half of the last axis and up the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    if name == "clamped":
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(gate_up.dtype)
    return (activation(gate, name).float() * up.float()).to(gate_up.dtype)
