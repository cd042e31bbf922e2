"""MXFP4 experts as in gpt-oss checkpoints, where all other tensors are plain.

<product>_blocks  uint8 [experts, out, in / 32, 16]  two columns in a byte, the even one low
<product>_scales  uint8 [experts, out, in / 32]      exponents plus 127
"""

from mainstem.models.packed import MXFP4_GROUP, PackedKind, PackedWeight
from mainstem.models.quantized.stored import WantedPart


def read_mxfp4(part: WantedPart) -> PackedWeight:
    shape = (*part.shape[:-1], part.width // MXFP4_GROUP)
    at = (*part.lead, part.rows, part.column_words(MXFP4_GROUP))
    blocks = part.stored("_blocks", (*shape, MXFP4_GROUP // 2), at)
    scales = part.stored("_scales", shape, at)
    return PackedWeight(PackedKind.MXFP4, blocks.flatten(-2), scales, None, MXFP4_GROUP)
