"""Rotary embeddings: frequencies and rotations."""

import math

import torch
from torch import Tensor

from mainstem.models.spec import RopeScaling, RopeSpec


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Return radians per position, [rotary_dim / 2] in fp32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling in (RopeScaling.NONE, RopeScaling.DYNAMIC):
        return plain
    if rope.scaling is RopeScaling.LINEAR:
        return plain / rope.factor
    if rope.scaling is RopeScaling.YARN:
        kept = 1.0 - _yarn_ramp(rope)
        return kept * plain + (1.0 - kept) * plain / rope.factor
    if rope.scaling is RopeScaling.PROPORTIONAL:
        is_turned = torch.arange(rope.rotary_dim // 2) < rope.turned_pairs
        return torch.where(is_turned, plain, 0.0) / rope.factor
    if rope.scaling is RopeScaling.LONGROPE:
        return plain / torch.tensor(rope.divisors)
    # llama3: wavelengths longer than the original context are stretched, short ones are not
    turns = rope.original_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return smooth * plain + (1.0 - smooth) * plain / rope.factor


def _yarn_ramp(rope: RopeSpec) -> Tensor:
    """Return [rotary_dim / 2]: 0 for pairs that turn often in the original context, 1 for slow
    pairs."""

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
    """Return the factors that move a rotated key by these distances, [distances, rotary_dim / 2] in
    complex64."""
    angles = distances.double()[:, None] * inverse_frequencies(rope).double()
    return torch.complex(angles.cos(), angles.sin()).to(torch.complex64)


def rotary_table(rope: RopeSpec, num_positions: int) -> Tensor:
    """Return each pair's rotation at each position, [positions, rotary_dim / 2] in complex64."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope)
    return torch.complex(angles.cos(), angles.sin())


def adjacent_pairs(head_dim: int, rotary_dim: int) -> Tensor:
    """Return an order of a head's dims in which the two dims of a rotary pair (i, i + half) are
    adjacent. If the rows of the query and key weights are put in this order, dot products stay the
    same, and a rotation is one complex multiplication in place.
    """
    half = rotary_dim // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half, rotary_dim)), dim=1).reshape(-1)
    return torch.cat((pairs, torch.arange(rotary_dim, head_dim)))


def split_pairs(head_dim: int, rotary_dim: int) -> Tensor:
    """The inverse of `adjacent_pairs`: an order of a head's dims in which the two dims of a pair
    that are adjacent in the checkpoint become (i, i + half)."""
    return torch.cat(
        (
            torch.arange(0, rotary_dim, 2),
            torch.arange(1, rotary_dim, 2),
            torch.arange(rotary_dim, head_dim),
        )
    )


def reordered_heads(dims: Tensor, num_turned: int, num_values: int) -> Tensor:
    """Return the row order of a fused QKV weight in which the first `num_turned` heads (queries and
    keys) have their dims in the order `dims`; values stay as they are."""
    dim = len(dims)
    starts = torch.arange(num_turned)[:, None] * dim
    values = torch.arange(num_turned * dim, (num_turned + num_values) * dim)
    return torch.cat(((starts + dims).reshape(-1), values))
