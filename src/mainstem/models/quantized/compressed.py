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
from mainstem.models.quantized.fp8 import read_scales
from mainstem.models.quantized.stored import (
    WantedPart,
    bits_of,
    pack_values,
    reorder_columns,
    unpack_words,
)


def read_compressed_tensors(part: WantedPart) -> PackedWeight:
    packing = part.packing
    part.drop(".input_scale", ".input_zero_point", ".output_scale", ".weight_shape")
    if packing.kind is PackedKind.MXFP4:
        return _read_mxfp4(part)
    is_in_words = part.has(".weight_packed")
    values = _words(part, 32 // bits_of(packing.kind)) if is_in_words else _bytes(part)
    scales, group, block_rows = read_scales(part)
    if packing.kind is PackedKind.FP8:
        return PackedWeight(PackedKind.FP8, values, scales.float(), None, group, block_rows)
    order = part.order(".weight_g_idx")
    return PackedWeight(
        kind=packing.kind,
        values=values if order is None else reorder_columns(values, order.long(), packing.kind),
        scales=scales.to(part.files.dtype),
        zeros=_zeros(part, is_in_words) if packing.has_zeros else None,
        group=group,
        order=order,
    )


def _words(part: WantedPart, per_word: int) -> Tensor:
    at = (part.rows, part.column_words(per_word))
    words = part.stored(".weight_packed", (part.out, part.width // per_word), at)
    return words.contiguous().view(torch.uint8)


def _bytes(part: WantedPart) -> Tensor:
    kind, values = part.packing.kind, part.stored(".weight", part.shape, (part.rows, part.columns))
    expected = torch.float8_e4m3fn if kind is PackedKind.FP8 else torch.int8
    if values.dtype != expected:
        name = f"{part.name}.weight"
        raise UnsupportedModel(f"tensor {name} is of {values.dtype}, expected {expected}")
    if expected is torch.float8_e4m3fn:
        return values
    return pack_values(_positive(values, kind), kind)


def _positive(signed: Tensor, kind: PackedKind) -> Tensor:
    """int8 -> uint8, with half of the range added."""
    return signed.view(torch.uint8) + kind.middle  # wraps around, as two's complement does


def _zeros(part: WantedPart, is_in_words: bool) -> Tensor:
    """uint8 [out, groups]"""
    name, groups = ".weight_zero_point", part.width // part.group
    columns, bits = part.column_words(part.group), bits_of(part.packing.kind)
    if not is_in_words:
        found = part.stored(name, (part.out, groups), (part.rows, columns))
        return _positive(found, part.packing.kind)
    per_word = 32 // bits
    at = (part.row_words(per_word), columns)
    words = part.stored(name, (-(-part.out // per_word), groups), at)
    zeros = unpack_words(words.t(), bits)
    return zeros.t()[: part.rows.stop - part.rows.start].contiguous()


def _read_mxfp4(part: WantedPart) -> PackedWeight:
    values = part.stored(
        ".weight_packed", (part.out, part.width // 2), (part.rows, part.column_words(2))
    )
    groups = (part.rows, part.column_words(MXFP4_GROUP))
    scales = part.stored(".weight_scale", (part.out, part.width // MXFP4_GROUP), groups)
    return PackedWeight(PackedKind.MXFP4, values, scales.view(torch.uint8), None, MXFP4_GROUP)
