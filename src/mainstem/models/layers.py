"""Linear, norm and rotary pieces of the decoder.

Speed on CPUs decides their form: at batch 1 every torch call costs several microseconds, so a
piece uses as few calls as it can.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.models.config import RopeScaling, RopeSpec

Linear = Callable[[Tensor], Tensor]  # [tokens, in] -> [tokens, out]


def has_onednn() -> bool:
    """Whether this torch has oneDNN and the CPU can use it."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class DenseLinear:
    """x @ weight.T + bias.

    `weight` is [out, in], which a single token's product reads at memory speed. Several tokens
    are faster over a second copy in the layout oneDNN likes (`pack`): twice the memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._columns = weight.t()  # made once: at one token even a view's cost shows
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Keep the second copy."""
        if has_onednn() and self.weight.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None and x.shape[0] > 1:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self.bias, "none", [], ""
            )
            return packed
        if self.bias is None:
            return torch.mm(x, self._columns)
        return torch.addmm(self.bias, x, self._columns)


class RmsNorm:
    """x / sqrt(sum(x^2) + size * eps) * scale over the last axis, in fp32 inside.

    The usual definition divides by the root of the mean and multiplies by a gain: its scale is
    `norm_scale(gain)`. None: the scale was folded into the weights that follow.
    """

    def __init__(self, scale: Tensor | None, size: int, eps: float) -> None:
        self._scale = scale
        # sqrt(sum + size * eps) = hypot(sqrt(sum), sqrt(size * eps))
        self._floor = torch.tensor(math.sqrt(size * eps))

    @property
    def has_scale(self) -> bool:
        """Whether a gain is left to apply; otherwise the next product does it."""
        return self._scale is not None

    def scaled(self, scale: Tensor) -> "RmsNorm":
        """The same norm with another scale."""
        norm = RmsNorm(scale, 1, 1.0)
        norm._floor = self._floor
        return norm

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed = wide / length.hypot_(self._floor)
        if self._scale is not None:
            normed *= self._scale
        return normed.to(x.dtype)


def norm_scale(gain: Tensor) -> Tensor:
    """The scale of an RmsNorm with this gain, or of the columns it is folded into."""
    return gain.float() * math.sqrt(len(gain))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; [tokens, 2 * size] -> [tokens, size]."""
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """[rotary_dim / 2] fp32: radians per position."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling is RopeScaling.NONE:
        return plain
    if rope.scaling is RopeScaling.LINEAR:
        return plain / rope.factor
    if rope.scaling is RopeScaling.YARN:
        kept = 1.0 - _yarn_ramp(rope)
        return kept * plain + (1.0 - kept) * plain / rope.factor
    # llama3: waves longer than the original context are stretched, short ones are not
    turns = rope.original_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return smooth * plain + (1.0 - smooth) * plain / rope.factor


def _yarn_ramp(rope: RopeSpec) -> Tensor:
    """[rotary_dim / 2]: 0 for pairs that turn often in the original context, 1 for slow ones."""

    def pair_that_turns(times: float) -> float:
        waves = math.log(rope.original_positions / (times * 2 * math.pi))
        return rope.rotary_dim * waves / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.has_whole_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def turns_by(rope: RopeSpec, distances: Tensor) -> Tensor:
    """[distances, rotary_dim / 2] complex64: what moves a rotated key by so many positions."""
    angles = distances.double()[:, None] * inverse_frequencies(rope).double()
    return torch.complex(angles.cos(), angles.sin()).to(torch.complex64)


def rotary_table(rope: RopeSpec, num_positions: int) -> Tensor:
    """[positions, rotary_dim / 2] complex64: the turn of each pair of dims at each position."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope)
    return torch.complex(angles.cos(), angles.sin())


def adjacent_pairs(head_dim: int, rotary_dim: int) -> Tensor:
    """Order of a head's dims in which the two of a rotary pair (i, i + half) lie side by side.

    Applied to the rows of the query and key weights it leaves every dot product as it was, and
    makes the rotation one complex multiplication in place.
    """
    half = rotary_dim // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half, rotary_dim)), dim=1).reshape(-1)
    return torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
