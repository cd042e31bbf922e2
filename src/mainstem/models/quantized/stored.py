"""The input of the readers of formats, and functions that they share."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mainstem.models.packed import PackedKind
from mainstem.models.quantized.act_order import column_order
from mainstem.models.quantized.packing import Packing, QuantizedSpec

_ROWS_AT_ONCE = 1024  # rows that are unpacked at once


class Stored(Protocol):
    """The tensors of a checkpoint's files as they are stored."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none with this name."""

    def stored(self, name: str, shape: tuple[int, ...], at: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, on the device; raises UnsupportedModel if the tensor has another
        shape."""

    def drop(self, name: str) -> None:
        """Accept a tensor that is not needed, if it is there."""


@dataclass(frozen=True, slots=True)
class WantedPart:
    """The wanted part of a product's weight [.., out, in], rounded to whole words, groups and
    blocks. Its tensors have the product's name and an ending."""

    files: Stored
    spec: QuantizedSpec
    name: str
    packing: Packing
    shape: tuple[int, ...]
    lead: tuple[slice, ...]  # the part of each leading axis
    rows: slice
    columns: slice

    @property
    def out(self) -> int:
        return self.shape[-2]

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def num_columns(self) -> int:
        found: int = self.columns.stop - self.columns.start
        return found

    @property
    def group(self) -> int:
        """Columns of the weight that share a scale."""
        return self.packing.group or self.width

    def row_words(self, size: int) -> slice:
        """The wanted rows, counted in words of `size` rows."""
        return slice(self.rows.start // size, -(-self.rows.stop // size))

    def column_words(self, size: int) -> slice:
        return slice(self.columns.start // size, -(-self.columns.stop // size))

    def has(self, ending: str) -> bool:
        return self.files.shape_of(self.name + ending) is not None

    def stored(self, ending: str, shape: tuple[int, ...], at: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor: see Stored."""
        return self.files.stored(self.name + ending, shape, at)

    def drop(self, *endings: str) -> None:
        """Accept tensors that are not needed."""
        for ending in endings:
            self.files.drop(self.name + ending)

    def order(self, ending: str) -> Tensor | None:
        """The order of columns in act-order, of a tensor with the group of each; None if there is
        none, or if columns are sorted."""
        if not self.has(ending):
            return None
        groups = self.stored(ending, (self.width,), (self.columns,))
        return column_order(self.name, groups - self.columns.start // self.group, self.group)


def bits_of(kind: PackedKind) -> int:
    return 4 if kind is PackedKind.INT4 else 8


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [.., n] -> uint8 [.., n * 32 / bits], the lowest bits of a word first."""
    found = words.contiguous().view(torch.uint8)
    if bits == 8:
        return found
    return torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)


def pack_values(values: Tensor, kind: PackedKind) -> Tensor:
    """uint8 [out, in], one number in each byte -> the values of a PackedWeight."""
    if kind.columns_per_value == 1:
        return values.contiguous()
    return values[:, 0::2] | (values[:, 1::2] << 4)


def reorder_columns(values: Tensor, order: Tensor, kind: PackedKind) -> Tensor:
    """Return packed values with column order[c] at c. This unpacks the values: some rows at a time,
    to save memory."""
    out = torch.empty_like(values)
    for start in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found = values[rows]
        if kind.columns_per_value == 2:
            found = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
        out[rows] = pack_values(found[:, order], kind)
    return out
