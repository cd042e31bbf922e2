"""compressed-tensors, as LLM Compressor writes it.

    weight_packed      int32 [out, in / n]  n = 8 columns of 4 bits (4 of 8 bits) in a word, the
                                            first lowest; uint8 [out, in / 2] for MXFP4
    weight             int8 (also for 4 bits) or float8_e4m3fn [out, in], if numbers are not
                       packed into words
    weight_scale       [out, groups], [out, 1] or [1]; [out / 128, in / 128] for blocks
    weight_zero_point  int32 [out / n, groups], packed along the rows; int8 [out, ..] with `weight`
    weight_g_idx       [in], the group of each column, with actorder
    weight_shape       [2]; not needed, since the config gives it

Integers in words have half of the range added, so that all are positive. Those in int8 are signed.
"""

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.packed import MXFP4_GROUP, PackedKind, PackedWeight
from mainstem.models.quantized.act_order import column_order
from mainstem.models.quantized.fp8 import read_scales
from mainstem.models.quantized.packing import Packing, QuantizedSpec
from mainstem.models.quantized.stored import (
    Stored,
    WantedPart,
    bits_of,
    pack_values,
    reorder_columns,
    unpack_words,
)


def read_compressed_tensors(
    files: Stored, spec: QuantizedSpec, name: str, packing: Packing, part: WantedPart
) -> PackedWeight:
    for unneeded in ("input_scale", "input_zero_point", "output_scale", "weight_shape"):
        files.drop(f"{name}.{unneeded}")
    if packing.kind is PackedKind.MXFP4:
        return _read_mxfp4(files, name, part)
    is_in_words = files.shape_of(f"{name}.weight_packed") is not None
    values = (_words if is_in_words else _bytes)(files, name, packing, part)
    scales, group, block_rows = read_scales(files, name, packing, part)
    if packing.kind is PackedKind.FP8:
        return PackedWeight(PackedKind.FP8, values, scales.float(), None, group, block_rows)
    order = _order(files, name, part, group)
    return PackedWeight(
        kind=packing.kind,
        values=values if order is None else reorder_columns(values, order.long(), packing.kind),
        scales=scales.to(files.dtype),
        zeros=_zeros(files, name, packing, part, is_in_words) if packing.has_zeros else None,
        group=group,
        order=order,
    )


def _words(files: Stored, name: str, packing: Packing, part: WantedPart) -> Tensor:
    per_word = 32 // bits_of(packing.kind)
    words = files.stored(
        f"{name}.weight_packed",
        (part.out, part.width // per_word),
        (part.rows, part.column_words(per_word)),
    )
    return words.contiguous().view(torch.uint8)


def _bytes(files: Stored, name: str, packing: Packing, part: WantedPart) -> Tensor:
    values = files.stored(f"{name}.weight", part.shape, (part.rows, part.columns))
    expected = torch.float8_e4m3fn if packing.kind is PackedKind.FP8 else torch.int8
    if values.dtype != expected:
        raise UnsupportedModel(f"tensor {name}.weight is of {values.dtype}, expected {expected}")
    if expected is torch.float8_e4m3fn:
        return values
    return pack_values(_positive(values, packing.kind), packing.kind)


def _positive(signed: Tensor, kind: PackedKind) -> Tensor:
    """int8 -> uint8, with half of the range added."""
    return signed.view(torch.uint8) + kind.middle  # wraps around, as two's complement does


def _zeros(
    files: Stored, name: str, packing: Packing, part: WantedPart, is_in_words: bool
) -> Tensor:
    """uint8 [out, groups]"""
    full, groups = f"{name}.weight_zero_point", part.width // (packing.group or part.width)
    columns = part.column_words(packing.group or part.width)
    if not is_in_words:
        found = files.stored(full, (part.out, groups), (part.rows, columns))
        return _positive(found, packing.kind)
    bits = bits_of(packing.kind)
    per_word = 32 // bits
    words = files.stored(
        full, (-(-part.out // per_word), groups), (part.row_words(per_word), columns)
    )
    zeros = unpack_words(words.t(), bits)
    return zeros.t()[: part.rows.stop - part.rows.start].contiguous()


def _order(files: Stored, name: str, part: WantedPart, group: int) -> Tensor | None:
    full = f"{name}.weight_g_idx"
    if files.shape_of(full) is None:
        return None
    groups = files.stored(full, (part.width,), (part.columns,))
    return column_order(name, groups - part.columns.start // group, group)


def _read_mxfp4(files: Stored, name: str, part: WantedPart) -> PackedWeight:
    values = files.stored(
        f"{name}.weight_packed", (part.out, part.width // 2), (part.rows, part.column_words(2))
    )
    scales = files.stored(
        f"{name}.weight_scale",
        (part.out, part.width // MXFP4_GROUP),
        (part.rows, part.column_words(MXFP4_GROUP)),
    )
    return PackedWeight(PackedKind.MXFP4, values, scales.view(torch.uint8), None, MXFP4_GROUP)
