"""AWQ in AutoAWQ's layout for its GEMM kernel.

    qweight  int32 [in, out / 8]      8 columns of the transposed weight in a word
    qzeros   int32 [groups, out / 8]  the same for zero points
    scales   [groups, out]

From the lowest bits up a word holds its columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

import torch
from torch import Tensor

from mainstem.models.packed import PackedWeight
from mainstem.models.quantized.stored import WantedPart, pack_values, unpack_words

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of column 0, 1, ... in a word


def read_awq(part: WantedPart) -> PackedWeight:
    group = part.group
    num_groups, num_words = part.width // group, part.out // _PER_WORD
    groups, row_words = part.column_words(group), part.row_words(_PER_WORD)
    words = part.stored(".qweight", (part.width, num_words), (part.columns, row_words))
    values = pack_values(_numbers(words).t(), part.packing.kind)
    del words
    zeros = part.stored(".qzeros", (num_groups, num_words), (groups, row_words))
    scales = part.stored(".scales", (num_groups, part.out), (groups, part.rows))
    return PackedWeight(
        kind=part.packing.kind,
        values=values,
        scales=scales.t().contiguous().to(part.files.dtype),
        zeros=_numbers(zeros).t().contiguous(),
        group=min(group, part.num_columns),
    )


def _numbers(words: Tensor) -> Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]"""
    found = unpack_words(words, bits=4).view(len(words), -1, _PER_WORD)
    places = torch.tensor(_PLACES, device=words.device)
    return found[:, :, places].flatten(1)
