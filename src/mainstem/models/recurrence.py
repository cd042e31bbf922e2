"""Layers that keep a state of fixed size instead of keys and values of every token.

A recurrence has one product before it and one after it, like attention. Between them:

    first product   | inputs of a short convolution | gate | a few numbers per head |
    convolution     each channel over its last `kernel` inputs; the last ones are kept
    recurrence      a matrix per head, updated by every token and read by every token
    gated norm      of what was read

The state after a token is the last inputs of the convolution and the matrices. It is valid after
exactly this token.
"""

import math
from dataclasses import dataclass
from enum import Enum


class GateOrder(Enum):
    """How the output of the recurrence is normed and multiplied by silu(gate)."""

    NORM_FIRST = "norm first"  # norm(x) * silu(gate), each head by itself (Qwen)
    GATE_FIRST = "gate first"  # norm(x * silu(gate)) (Granite, Nemotron)
    NO_NORM = "no norm"  # x * silu(gate) (Falcon-H1)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The gated delta rule (Qwen3-Next, Qwen 3.5): S = g S; u = b (v - k S); S += k u; o = q S."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.out_width

    @property
    def out_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def first_width(self) -> int:
        """Rows of the product before it: the convolution's inputs, the gate, b and a."""
        return self.conv_channels + self.out_width + 2 * self.value_heads

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2: S = exp(-exp(A) dt) S + dt B x; y = C S + D x."""

    heads: int
    head_dim: int
    groups: int  # B and C are the same in all heads of a group
    state_dim: int
    kernel: int
    gate_order: GateOrder
    norm_groups: int = 1  # equal runs of columns that are normed separately
    dt_limits: tuple[float, float] = (0.0, math.inf)
    has_bias: bool = False  # of both products
    has_conv_bias: bool = True
    # Falcon-H1: factors of the first product's rows: of the gate, x, B, C and dt
    row_scales: tuple[float, ...] = ()
    out_scale: float = 1.0  # factor of what it adds to x (Falcon-H1)

    @property
    def conv_channels(self) -> int:
        """x, B and C."""
        return self.out_width + 2 * self.groups * self.state_dim

    @property
    def out_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def first_width(self) -> int:
        """Rows of the product before it: the convolution's inputs, the gate and dt."""
        return self.conv_channels + self.out_width + self.heads

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (self.heads, self.state_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution without a matrix (LFM2): y = C * convolution(B * x)."""

    channels: int
    kernel: int
    has_bias: bool = False

    @property
    def conv_channels(self) -> int:
        return self.channels

    @property
    def out_width(self) -> int:
        return self.channels

    @property
    def first_width(self) -> int:
        """Rows of the product before it: B, C and x."""
        return 3 * self.channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (0, 0, 0)


RecurrentSpec = DeltaSpec | MambaSpec | ShortConvSpec


def state_bytes(spec: RecurrentSpec, element_bytes: int) -> int:
    """The size of one layer's state: matrices in fp32, inputs of the convolution in the model's
    dtype."""
    inputs = (spec.kernel - 1) * spec.conv_channels * element_bytes
    return 4 * math.prod(spec.matrix_shape) + inputs
