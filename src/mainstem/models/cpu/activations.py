"""Activations of MLPs on a CPU: gated ones halve the size of the last axis, plain ones keep it.

For a single token a torch call's overhead of several microseconds counts, so each function makes as
few calls as possible. Only tensors made here are changed in place, never arguments.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.core.errors import UnsupportedModel
from mainstem.models.spec import Activation

Activate = Callable[[Tensor], Tensor]

CLAMP_LIMIT = 7.0  # gpt-oss: the largest gate, and the largest magnitude of up
CLAMP_SLOPE = 1.702  # gpt-oss: the factor of the gate inside the sigmoid


def plain(activation: Activation) -> Activate:
    """[tokens, size] -> [tokens, size]."""
    if activation not in _PLAIN:
        raise UnsupportedModel(f"activation {activation.value} has no form without a gate")
    return _PLAIN[activation]


def gated(activation: Activation) -> Activate:
    """[tokens, 2 * size], gate then up -> [tokens, size]: act(gate) * up."""
    if activation is Activation.CLAMPED_SILU:
        return _clamped_silu_mul
    act = plain(activation)

    def activate(gate_up: Tensor) -> Tensor:
        size = gate_up.shape[1] // 2
        return act(gate_up[:, :size]).mul_(gate_up[:, size:])

    return activate


def _clamped_silu_mul(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[1] // 2
    gate = gate_up[:, :size].clamp(max=CLAMP_LIMIT)
    up = gate_up[:, size:].clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
    return torch.sigmoid(gate * CLAMP_SLOPE).mul_(gate).mul_(up)


_PLAIN: dict[Activation, Activate] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: torch.relu,
    Activation.RELU_SQUARED: lambda x: torch.relu(x).square_(),
}
