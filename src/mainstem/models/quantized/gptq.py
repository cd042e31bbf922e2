"""GPTQ, as AutoGPTQ and GPTQModel write it.

    qweight  int32 [in / n, out]      n = 8 rows of 4 bits (4 of 8 bits) in a word, the first lowest
    qzeros   int32 [groups, out / n]  n zero points in a word; version 1 stores them minus 1
    scales   [groups, out]
    g_idx    int32 [in]               the group of each column, with desc_act

Tools write version 1 by subtracting, from each whole word of version 2, a number with a 1 in the
place of every zero point. A zero point of 0 then borrows from its neighbour. Adding the same number
to the word restores all zero points.
"""

import torch
from torch import Tensor

from mainstem.models.packed import PackedWeight
from mainstem.models.quantized.act_order import column_order
from mainstem.models.quantized.packing import Packing, QuantizedSpec
from mainstem.models.quantized.stored import (
    Stored,
    WantedPart,
    bits_of,
    reorder_columns,
    unpack_words,
)

_ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every number of a word


def read_gptq(
    files: Stored, spec: QuantizedSpec, name: str, packing: Packing, part: WantedPart
) -> PackedWeight:
    kind, bits = packing.kind, bits_of(packing.kind)
    per_word, group = 32 // bits, packing.group or part.width
    words = files.stored(
        f"{name}.qweight",
        (part.width // per_word, part.out),
        (part.column_words(per_word), part.rows),
    )
    values = words.t().contiguous().view(torch.uint8)
    scales = files.stored(
        f"{name}.scales",
        (part.width // group, part.out),
        (part.column_words(group), part.rows),
    )
    order = _order(files, name, part, group)
    return PackedWeight(
        kind=kind,
        values=values if order is None else reorder_columns(values, order.long(), kind),
        scales=scales.t().contiguous().to(files.dtype),
        zeros=_zeros(files, spec, name, packing, part),
        group=min(group, part.columns.stop - part.columns.start),
        order=order,
    )


def _zeros(
    files: Stored, spec: QuantizedSpec, name: str, packing: Packing, part: WantedPart
) -> Tensor | None:
    """Return uint8 [out, groups]; None if the config says that weights are symmetric, and the zero
    points agree with that."""
    bits, group = bits_of(packing.kind), packing.group or part.width
    words = files.stored(
        f"{name}.qzeros",
        (part.width // group, part.out * bits // 32),
        (part.column_words(group), part.row_words(32 // bits)),
    )
    if spec.is_zero_less_one:
        words = words + _ONES[bits]
    zeros = unpack_words(words, bits).t()
    if not packing.has_zeros and bool((zeros == packing.kind.middle).all()):
        return None
    return zeros.contiguous()


def _order(files: Stored, name: str, part: WantedPart, group: int) -> Tensor | None:
    if files.shape_of(f"{name}.g_idx") is None:
        return None
    groups = files.stored(f"{name}.g_idx", (part.width,), (part.columns,))
    return column_order(name, groups - part.columns.start // group, group)
