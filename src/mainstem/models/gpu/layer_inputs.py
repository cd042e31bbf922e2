"""The layers' own inputs, and the end of a layer, on a GPU (spec.py: LayerInputSpec)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.kernels.dense.activations import Act, activate
from mainstem.kernels.dense.norms import Delta, Norm, add_, norm_rows
from mainstem.models.gpu.linears import Linear


@dataclass(frozen=True, slots=True)
class GpuLayerInputs:
    """Makes the inputs of all layers."""

    embedding: Tensor  # [vocab, layers * size]
    product: Linear
    norm: Norm  # of each layer's part

    def make(self, token_ids: Tensor, x: Tensor, out: Tensor) -> None:
        """Write [tokens, layers * size] to `out`; x is the input of the first layer."""
        size = len(self.norm.gain)
        own = torch.index_select(self.embedding, 0, token_ids).mul_(math.sqrt(size))
        found = self.product(x, out).mul_(x.shape[1] ** -0.5)
        parts = found.view(-1, size)
        norm_rows(parts, self.norm, out=parts)
        torch.mul(found.add_(own), math.sqrt(0.5), out=out)


@dataclass(frozen=True, slots=True)
class GpuLayerInputBlock:
    """Adds to x what comes from a layer's own input."""

    gate: Linear
    act: Act
    out: Linear
    norm: Norm
    rooms: tuple[Tensor, Tensor]  # for outputs of both products

    def add_to(self, x: Tensor, own: Tensor) -> None:
        """`own` is [tokens, size]."""
        room, answer = (each[: len(x)] for each in self.rooms)
        gate = self.gate(x, room)
        answer = self.out(activate(gate, self.act, gate).mul_(own), answer)
        add_(x, Delta(answer, after=self.norm))


@dataclass(frozen=True, slots=True)
class GpuLayerEnd:
    """Changes x after the MLP: adds what comes from the layer's own input, then scales x."""

    scale: float
    block: GpuLayerInputBlock | None

    def __call__(self, x: Tensor, own: Tensor | None) -> None:
        """`own` is the layer's input; None if the model has none."""
        if self.block is not None:
            assert own is not None, "the model has inputs of layers"
            self.block.add_to(x, own)
        if self.scale != 1.0:
            x.mul_(self.scale)
