"""Key shifts: constants that are subtracted from rotated keys where pages are rounded to fp8.

Some models (Qwen 2 and 2.5) have biases of keys of up to 354, where keys differ by a few units. fp8
rounds each number in proportion to its size, so such a bias would drown what keys differ by. But a
constant c that is subtracted from all keys changes no answer: it lowers all scores of a query by
the same number, which a softmax does not see.

    q . (R_n (W x + b) - c)  =  q . R_n (W x + b) - q . c          R_n: the rotation at position n

c is the mean of R_n b over the first positions. Large biases are in pairs that hardly turn, where
R_n b stays near c; in pairs that turn fast, c is near 0.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.rope import inverse_frequencies
from mainstem.models.shard import WHOLE, Shard
from mainstem.models.spec import ModelSpec, QkNorm, RopeSpec
from mainstem.models.tensors import TensorReader
from mainstem.models.weights import WeightSource

MOST_POSITIONS = 32_768  # for the mean
# What a shift may leave of a bias. Of Qwen2.5-Coder-1.5B's biases without shifts, those of up to
# 111 (in its second layer) cost 0.2 % of perplexity; those of 354 made answers worthless.
MOST_LEFT = 128.0


@dataclass(frozen=True, slots=True)
class KeyShifts:
    """The shifts of a model's, or a rank's, layers."""

    spec: ModelSpec  # of the whole model
    shard: Shard
    # By a layer's place in a page: [kv_heads, dim] fp32 for pairs (i, i + half), whole numbers, so
    # that they are the same on all machines. Layers that are not shifted are left out.
    of_place: Mapping[int, Tensor]

    @classmethod
    def read(cls, source: WeightSource, spec: ModelSpec, shard: Shard = WHOLE) -> "KeyShifts":
        """Compute them from the biases of keys, and `check` them."""
        found = {}
        for index, place in _shifted_layers(spec).items():
            bias, rope = _key_bias(source, spec, shard, index)
            shift = _turned(bias, rope, min(spec.max_positions, MOST_POSITIONS)).round()
            if shift.any():
                found[place] = shift
        shifts = cls(spec, shard, found)
        shifts.check(source)
        return shifts

    def check(self, source: WeightSource, names: Collection[str] | None = None) -> None:
        """Raise UnsupportedModel if they leave too much of a bias at some position. `names`: the
        tensors that have changed (None: all). Other weights may have other biases: any shifts are
        right, but those that are far from a bias are of no use."""
        spec = self.spec
        for index, place in enumerate(spec.page_layers):
            prefix = spec.names.layer.format(index) + "."
            is_changed = names is None or any(
                name.startswith(prefix) and name.endswith(".bias") for name in names
            )
            if place is None or not _has_key_bias(spec) or not is_changed:
                continue
            bias, rope = _key_bias(source, spec, self.shard, index)
            left = _most_left(bias, self.of_place.get(place), rope, spec.max_positions)
            if left > MOST_LEFT:
                raise UnsupportedModel(
                    "kv_dtype=fp8 is not supported for this model: the keys of layer "
                    f"{index} have biases of which no constant shift leaves less than {left:.0f}, "
                    "and rounding these would make its answers worthless. Use kv_dtype=auto, or "
                    "bf16 if the checkpoint declares K and V in fp8"
                )

    @property
    def layout(self) -> bytes:
        """What they add to the model's identity: pages with other shifts cannot be read."""
        if not self.of_place:
            return b""
        digest = sha256()
        for place, shift in sorted(self.of_place.items()):
            digest.update(str((place, shift.int().tolist())).encode())
        return b":shifted " + digest.digest()


def _has_key_bias(spec: ModelSpec) -> bool:
    """Whether keys have biases that no norm removes."""
    return spec.has_qkv_bias and spec.qk_norm is QkNorm.NONE


def _shifted_layers(spec: ModelSpec) -> dict[int, int]:
    """The layers whose keys may be shifted, with their places in a page. Softcaps and sinks see
    scores as they are."""
    if not _has_key_bias(spec):
        return {}
    readers = zip(spec.kv_places, spec.attentions, strict=True)
    exact = {place for place, kind in readers if kind.softcap is not None or kind.has_sinks}
    return {
        index: place
        for index, place in enumerate(spec.page_layers)
        if place is not None and place not in exact
    }


def _key_bias(
    source: WeightSource, spec: ModelSpec, shard: Shard, index: int
) -> tuple[Tensor, RopeSpec | None]:
    attention = spec.layers[index].attention
    assert attention is not None, "a recurrent layer has no keys"
    return TensorReader(source, spec, shard).key_bias(index), attention.rope


def _pairs(heads: Tensor, rope: RopeSpec) -> Tensor:
    """The rotated dims of [kv_heads, dim] as complex numbers."""
    half = rope.rotary_dim // 2
    return torch.complex(heads[:, :half], heads[:, half : 2 * half])


def _turned(bias: Tensor, rope: RopeSpec | None, num_positions: int) -> Tensor:
    """The mean of a bias that is rotated to each of the first positions."""
    if rope is None:
        return bias
    angles = torch.arange(num_positions).double()[:, None] * inverse_frequencies(rope).double()
    turn = torch.complex(angles.cos().mean(0), angles.sin().mean(0)).to(torch.complex64)
    pairs = _pairs(bias, rope) * turn
    return torch.cat((pairs.real, pairs.imag, bias[:, rope.rotary_dim :]), 1)


def _most_left(
    bias: Tensor, shift: Tensor | None, rope: RopeSpec | None, max_positions: int
) -> float:
    """The largest number of the rotated bias less the shift, about: at 1,024 positions."""
    shift = torch.zeros_like(bias) if shift is None else shift
    left, rotary_dim = bias - shift, 0
    if rope is not None:
        rotary_dim = rope.rotary_dim
        positions = torch.linspace(0, max_positions - 1, 1024).round().double()
        angles = positions[:, None, None] * inverse_frequencies(rope).double()
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        pairs = _pairs(bias, rope) * turns - _pairs(shift, rope)
        left = torch.cat((left[:, rotary_dim:].flatten(), torch.view_as_real(pairs).flatten()))
    return float(left.abs().max())
