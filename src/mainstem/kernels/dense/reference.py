"""Norm and activation in plain PyTorch, fp32 inside: the oracle of the kernels.

Nothing here changes its arguments or shares code with a fast kernel.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis."""
    wide = x.float()
    normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * gain.float()).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last axis and up the second."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
