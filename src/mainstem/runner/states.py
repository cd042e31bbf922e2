"""States of recurrent layers on a device: slots, each with the state of one sequence after one
token.

    [recurrent layer]  inputs of the convolution  [slots, kernel - 1, channels]  the model's dtype
                       matrices                   [slots, heads, keys, values]   fp32

The last slot is written by rows that only pad a step. The control plane (kv/states.py) decides what
is in the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.models.spec import ModelSpec


class LayerState(NamedTuple):
    """One layer's part of all slots."""

    conv: Tensor
    matrix: Tensor


class DeviceStates:
    """Owns the tensors."""

    def __init__(
        self, spec: ModelSpec, num_states: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_states = num_states
        self.layers = [
            LayerState(
                torch.zeros(
                    (num_states + 1, recurrent.kernel - 1, recurrent.conv_channels),
                    dtype=dtype,
                    device=device,
                ),
                torch.zeros((num_states + 1, *recurrent.matrix_shape), device=device),
            )
            for recurrent in spec.recurrences
        ]
