"""Weights that stay quantized: one form for the formats of all checkpoints.

    kind    values                                   a number is
    INT4    two columns in a byte, the even one low  (value - zero) * scale
    INT8    a byte each                              (value - zero) * scale
    FP8     float8_e4m3fn                            value * scale
    MXFP4   two columns in a byte, the even one low  +-(0, .5, 1, 1.5, 2, 3, 4, 6) * 2^(scale - 127)

`group` columns of `block_rows` rows share a scale. If there is a leading axis, it counts experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.quantized.packing import PackedKind

__all__ = [
    "OrderedColumns",
    "PackedKind",
    "PackedStack",
    "PackedWeight",
    "Weight",
    "as_tensor",
    "joined",
    "on_top",
]

MXFP4_GROUP = 32
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_BIAS = 127
_DENSE_ROWS = 1024  # rows dequantized at once, so that intermediate tensors are small
_SCALE_DTYPES = {PackedKind.FP8: torch.float32, PackedKind.MXFP4: torch.uint8}


class OrderedColumns(UnsupportedModel):
    """The caller asked for some columns of a packed weight in act-order, which cannot be cut by
    columns."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [.., out, in] that stays quantized. The last group or block may be smaller."""

    kind: PackedKind
    values: Tensor  # INT4, MXFP4: uint8 [.., out, in / 2]; INT8: uint8, FP8: e4m3, [.., out, in]
    # [.., out / block_rows, in / group]; INT4, INT8: compute dtype; FP8: fp32; MXFP4: uint8 (e8m0)
    scales: Tensor
    zeros: Tensor | None  # INT4, INT8: uint8, shaped like the scales; None: all are kind.middle
    group: int  # columns that share a scale; if per channel, all columns
    block_rows: int = 1  # rows that share a scale
    order: Tensor | None = None  # int32 [in]: column c of this weight is column order[c] of x

    def __post_init__(self) -> None:
        kind, (out, width) = self.kind, self.shape[-2:]
        expected = (*self.shape[:-2], -(-out // self.block_rows), -(-width // self.group))
        assert self.values.dtype == (
            torch.float8_e4m3fn if kind is PackedKind.FP8 else torch.uint8
        ), f"{kind}: values of {self.values.dtype}"
        assert self.scales.shape == expected, f"scales {list(self.scales.shape)} of {expected}"
        assert self.scales.dtype == _SCALE_DTYPES.get(kind, self.scales.dtype), self.scales.dtype
        if self.zeros is not None:
            assert kind in (PackedKind.INT4, PackedKind.INT8)
            assert self.zeros.dtype == torch.uint8
            assert self.zeros.shape == expected
        assert self.block_rows == 1 or kind is PackedKind.FP8
        assert kind is not PackedKind.MXFP4 or self.group == MXFP4_GROUP
        if self.order is not None:
            assert self.order.dtype == torch.int32
            assert self.order.shape == (width,)

    @property
    def shape(self) -> torch.Size:
        """[.., out, in]"""
        *rows, width = self.values.shape
        return torch.Size((*rows, width * self.kind.columns_per_value))

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def expert(self, index: int) -> "PackedWeight":
        """One expert, [out, in]."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, values=self.values[index], scales=self.scales[index], zeros=zeros)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight dequantized, [.., out, in]. Each number is rounded once; columns are in
        the order of x."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        if self.values.dim() > 2:
            for index in range(len(out)):
                out[index] = self.expert(index).dense(dtype)
            return out
        for start in range(0, len(out), _DENSE_ROWS):
            rows = slice(start, start + _DENSE_ROWS)
            found = self.rows(rows)._numbers()
            if self.order is None:
                out[rows] = found
            else:
                out[rows, self.order.long()] = found.to(dtype)
        return out

    def rows(self, part: slice) -> "PackedWeight":
        """Return some of the rows."""
        first, end, step = part.indices(self.shape[-2])
        assert step == 1
        if first % self.block_rows or (end % self.block_rows and end != self.shape[-2]):
            return self._by_row().rows(part)
        blocks = slice(first // self.block_rows, -(-end // self.block_rows))
        return replace(
            self,
            values=self.values[..., first:end, :],
            scales=self.scales[..., blocks, :],
            zeros=None if self.zeros is None else self.zeros[..., blocks, :],
        )

    def rows_at(self, index: Tensor) -> "PackedWeight":
        """The rows with these numbers, in this order."""
        whole = self._by_row()
        return replace(
            whole,
            values=_at_rows(whole.values, index),
            scales=whole.scales[..., index, :],
            zeros=None if whole.zeros is None else whole.zeros[..., index, :],
        )

    def columns(self, part: slice) -> "PackedWeight":
        """Return some of the columns. A cut inside a group makes the groups smaller. Raises
        OrderedColumns for a weight in act-order, whose groups are not consecutive columns of x."""
        first, end, step = part.indices(self.shape[-1])
        assert step == 1
        if self.order is not None:
            raise OrderedColumns("a weight in act-order (desc_act) cannot be cut by columns")
        if self.group >= self.shape[-1]:
            return replace(self, values=self._values_at(first, end), group=end - first)
        cut = gcd(self.group, first, end if end != self.shape[-1] else self.group)
        groups = slice(first // cut, -(-end // cut))
        if cut < self.group and self.kind is PackedKind.MXFP4:
            raise UnsupportedModel(f"MXFP4 columns {first} to {end} are not whole groups of 32")
        scales, zeros = self.scales, self.zeros
        if cut < self.group:
            scales = scales.repeat_interleave(self.group // cut, dim=-1)
            zeros = None if zeros is None else zeros.repeat_interleave(self.group // cut, dim=-1)
        return replace(
            self,
            values=self._values_at(first, end),
            scales=scales[..., groups],
            zeros=None if zeros is None else zeros[..., groups],
            group=cut,
        )

    def compact(self) -> "PackedWeight":
        """Return the weight in memory of its own: a view would keep the memory of the whole."""
        zeros = None if self.zeros is None else _compact(self.zeros)
        return replace(
            self, values=_compact(self.values), scales=_compact(self.scales), zeros=zeros
        )

    def scaled_rows(self, factors: Tensor) -> "PackedWeight":
        """Multiply each row by its factor [out], by changing the scales."""
        if self.kind is PackedKind.MXFP4:
            raise UnsupportedModel("rows of MXFP4 cannot be scaled: its scales are powers of two")
        whole = self._by_row()
        scales = whole.scales.float() * factors[:, None]
        return replace(whole, scales=scales.to(whole.scales.dtype))

    def _values_at(self, first: int, end: int) -> Tensor:
        per_value = self.kind.columns_per_value
        if first % per_value or end % per_value:
            raise UnsupportedModel(f"columns {first} to {end} of {self.kind.value} split a byte")
        return self.values[..., first // per_value : end // per_value]

    def _by_row(self) -> "PackedWeight":
        """The same weight with separate scales for each row."""
        if self.block_rows == 1:
            return self
        scales = self.scales.repeat_interleave(self.block_rows, dim=-2)
        return replace(self, scales=scales[..., : self.shape[-2], :], block_rows=1)

    def _numbers(self) -> Tensor:
        """The values [out, in] in fp32, columns in stored order."""
        if self.kind is PackedKind.MXFP4:
            magnitudes = torch.tensor(_MXFP4_VALUES, device=self.device)
            table = torch.cat((magnitudes, -magnitudes))
            found = table[_nibbles(self.values).long()]
            return torch.ldexp(found, self._spread(self.scales).int() - _MXFP4_BIAS)
        if self.kind is PackedKind.FP8:
            found = self.values.float()
        else:
            is_int4 = self.kind is PackedKind.INT4
            found = (_nibbles(self.values) if is_int4 else self.values).float()
            found -= self.kind.middle if self.zeros is None else self._spread(self.zeros).float()
        return found.mul_(self._spread(self.scales).float())

    def _spread(self, per_group: Tensor) -> Tensor:
        """Expand one number per group to [out, in]."""
        out, width = self.shape
        wide = per_group.repeat_interleave(self.group, dim=1)[:, :width]
        return wide.repeat_interleave(self.block_rows, dim=0)[:out]


Weight = Tensor | PackedWeight


def as_tensor(weight: Weight) -> Tensor:
    """Return a weight that is known to be a plain tensor."""
    assert isinstance(weight, Tensor), "the weight is packed"
    return weight


class PackedStack:
    """Stacks weights [out, in] into one [count, out, in], allocated when the first weight is put.
    If the first weight is plain, all become plain; if it is packed, all must be packed alike."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count = count
        self._dtype = dtype
        self._whole: Weight | None = None

    @property
    def whole(self) -> Weight:
        assert self._whole is not None, "nothing was put here"
        return self._whole

    def put(self, index: int, weight: Weight) -> None:
        if self._whole is None:
            self._whole = self._room_for(weight)
        whole = self._whole
        if isinstance(whole, Tensor):
            dense = weight if isinstance(weight, Tensor) else weight.dense(self._dtype)
            whole[index] = dense
            return
        if not isinstance(weight, PackedWeight) or not _is_alike(weight, whole.expert(0)):
            raise UnsupportedModel("experts of one layer are packed in different ways")
        if weight.zeros is not None and whole.zeros is None:
            self._whole = whole = replace(whole, zeros=_zeros_of(whole))
        whole.values[index].view(torch.uint8).copy_(weight.values.view(torch.uint8))
        whole.scales[index] = weight.scales
        if whole.zeros is not None:
            whole.zeros[index] = _zeros_of(weight)

    def _room_for(self, weight: Weight) -> Weight:
        if isinstance(weight, Tensor):
            return weight.new_empty((self._count, *weight.shape))

        def room(tensor: Tensor) -> Tensor:
            return tensor.new_empty((self._count, *tensor.shape))

        zeros = None if weight.zeros is None else room(weight.zeros)
        return replace(weight, values=room(weight.values), scales=room(weight.scales), zeros=zeros)


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Stack packed weights by rows; None if they differ in kind, groups or order of columns."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(not _is_alike(part, first) for part in parts[1:]):
        return None
    if any(part.shape[-2] % part.block_rows for part in parts[:-1]) or any(
        part.block_rows != first.block_rows for part in parts
    ):
        parts = [part._by_row() for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros_of(part) for part in parts], dim=-2)
    return replace(
        parts[0],
        values=_cat_rows([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=-2),
        zeros=zeros,
    )


def on_top(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Stack weights by rows: packed if possible, otherwise as a tensor of `dtype`."""
    if len(weights) == 1:
        return weights[0]
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) == len(weights) and (whole := joined(packed)) is not None:
        return whole
    return torch.cat([w if isinstance(w, Tensor) else w.dense(dtype) for w in weights])


def _is_alike(one: PackedWeight, other: PackedWeight) -> bool:
    if (one.kind, one.group, one.shape[-1]) != (other.kind, other.group, other.shape[-1]):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _zeros_of(part: PackedWeight) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full_like(part.scales, part.kind.middle, dtype=torch.uint8)


def _compact(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [.., n] -> uint8 [.., 2 n], the low half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _cat_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate rows as bytes, since torch cannot concatenate fp8 on every device."""
    joined = torch.cat([part.view(torch.uint8) for part in parts], dim=-2)
    return joined.view(parts[0].dtype)


def _at_rows(values: Tensor, index: Tensor) -> Tensor:
    return values.view(torch.uint8)[..., index, :].view(values.dtype)
