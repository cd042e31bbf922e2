"""The layers' own inputs, and the end of a layer, on a CPU (spec.py: LayerInputSpec)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from mainstem.models.cpu.layers import Linear, Norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Makes the inputs of all layers."""

    size: int
    embedding: Tensor  # [vocab, layers * size]
    product: Linear
    norm: Norm  # of each layer's part

    def make(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """[tokens, layers, size]; x is the input of the first layer."""
        shape = (len(x), -1, self.size)
        found = self.norm(self.product(x).mul_(x.shape[1] ** -0.5).view(shape))
        own = F.embedding(token_ids, self.embedding).view(shape)
        return found.add_(own.mul_(math.sqrt(self.size))).mul_(math.sqrt(0.5))


@dataclass(frozen=True, slots=True)
class LayerInputBlock:
    """What a layer adds to x from its own input."""

    gate: Linear
    activate: Callable[[Tensor], Tensor]
    out: Linear
    norm: Norm

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        return self.norm(self.out(self.activate(self.gate(x)).mul_(own)))


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Changes x after the MLP: adds what comes from the layer's own input, then scales x."""

    scale: float
    block: LayerInputBlock | None

    def __call__(self, x: Tensor, own: Tensor | None) -> None:
        """`own` is the layer's input, [tokens, size]; None if the model has none."""
        if self.block is not None:
            assert own is not None, "the model has inputs of layers"
            x.add_(self.block(x, own))
        if self.scale != 1.0:
            x.mul_(self.scale)
