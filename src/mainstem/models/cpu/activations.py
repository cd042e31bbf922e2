"""Activation functions on CPUs."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from mainstem.models.spec import Activation


def gated(activation: Activation) -> Callable[[Tensor], Tensor]:
    """act(gate) * up; [tokens, 2 * size] -> [tokens, size]."""
    act = _FUNCTIONS[activation]

    def run(gate_up: Tensor) -> Tensor:
        size = gate_up.shape[-1] // 2
        return act(gate_up[..., :size]).mul_(gate_up[..., size:])

    return run


def plain(activation: Activation) -> Callable[[Tensor], Tensor]:
    """act(x)."""
    return _FUNCTIONS[activation]


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {Activation.SILU: F.silu}
