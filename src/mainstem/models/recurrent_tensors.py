"""What a recurrent layer reads besides its two products, and the order of rows in the first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.names import RecurrentOrder
from mainstem.models.recurrence import DeltaSpec, MambaSpec, RecurrentSpec


@dataclass(frozen=True, slots=True)
class RecurrentTensors:
    """The convolution is in the model's dtype, the rest in fp32; None: the layer has no such
    tensor."""

    conv: Tensor  # [channels, kernel]
    conv_bias: Tensor | None = None
    decay: Tensor | None = None  # [heads] A_log
    dt_bias: Tensor | None = None  # [heads]
    skip: Tensor | None = None  # [heads] D
    gain: Tensor | None = None  # of the gated norm


def recurrent_order(
    spec: RecurrentSpec, order: RecurrentOrder, num_tensors: int
) -> tuple[Tensor | None, list[int]]:
    """Return the order in which the checkpoint's rows become those of recurrence.py (None: they
    are so already), and the number of rows of each tensor."""
    if order is RecurrentOrder.PARTS:
        return None, _parts(spec) if num_tensors > 1 else [spec.first_width]
    if order is RecurrentOrder.GATE_FIRST and isinstance(spec, MambaSpec):
        gate, rows = spec.out_width, torch.arange(spec.first_width)
        conv_end = gate + spec.conv_channels
        moved = torch.cat((rows[gate:conv_end], rows[:gate], rows[conv_end:]))
        return moved, [spec.first_width]
    if order is RecurrentOrder.KEY_HEADS and isinstance(spec, DeltaSpec):
        return _from_key_heads(spec)
    raise UnsupportedModel(f"{type(spec).__name__} with rows in the order {order.value!r}")


def row_factors(spec: MambaSpec) -> Tensor:
    """The factor of each row of the first product, in the order of recurrence.py."""
    gate, x, b, c, dt = spec.row_scales
    shared = spec.groups * spec.state_dim
    sizes = [spec.out_width, shared, shared, spec.out_width, spec.heads]
    return torch.tensor([x, b, c, gate, dt]).repeat_interleave(torch.tensor(sizes))


def _parts(spec: RecurrentSpec) -> list[int]:
    """The rows of four tensors: convolution, gate, b and a."""
    assert isinstance(spec, DeltaSpec)
    return [spec.conv_channels, spec.out_width, spec.value_heads, spec.value_heads]


def _from_key_heads(spec: DeltaSpec) -> tuple[Tensor, list[int]]:
    """Rows of two tensors: for each key head its query, key, values and gates; for each key head
    its b and a."""
    keys, group = spec.key_heads, spec.value_heads // spec.key_heads
    values = group * spec.value_dim
    num_wide = 2 * keys * spec.key_dim + 2 * spec.out_width
    wide = torch.arange(num_wide).view(keys, -1)
    q, k, v, z = torch.split(wide, [spec.key_dim, spec.key_dim, values, values], dim=1)
    numbers = torch.arange(num_wide, spec.first_width).view(keys, -1)
    b, a = torch.split(numbers, [group, group], dim=1)
    order = torch.cat([part.reshape(-1) for part in (q, k, v, z, b, a)])
    return order, [num_wide, 2 * spec.value_heads]
