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
from mainstem.models.quantized.stored import (
    WantedPart,
    bits_of,
    reorder_columns,
    unpack_words,
)

_ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every number of a word


def read_gptq(part: WantedPart) -> PackedWeight:
    kind, group = part.packing.kind, part.group
    per_word = 32 // bits_of(kind)
    words = part.stored(
        ".qweight", (part.width // per_word, part.out), (part.column_words(per_word), part.rows)
    )
    values = words.t().contiguous().view(torch.uint8)
    groups = (part.column_words(group), part.rows)
    scales = part.stored(".scales", (part.width // group, part.out), groups)
    order = part.order(".g_idx")
    return PackedWeight(
        kind=kind,
        values=values if order is None else reorder_columns(values, order.long(), kind),
        scales=scales.t().contiguous().to(part.files.dtype),
        zeros=_zeros(part),
        group=min(group, part.num_columns),
        order=order,
    )


def _zeros(part: WantedPart) -> Tensor | None:
    """Return uint8 [out, groups]; None if the config says that weights are symmetric, and the zero
    points agree with that."""
    packing, group, bits = part.packing, part.group, bits_of(part.packing.kind)
    words = part.stored(
        ".qzeros",
        (part.width // group, part.out * bits // 32),
        (part.column_words(group), part.row_words(32 // bits)),
    )
    if part.spec.is_zero_less_one:
        words = words + _ONES[bits]
    zeros = unpack_words(words, bits).t()
    if not packing.has_zeros and bool((zeros == packing.kind.middle).all()):
        return None
    return zeros.contiguous()
