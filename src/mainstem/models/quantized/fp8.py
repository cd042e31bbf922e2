"""FP8 (e4m3) weights, a byte each.

weight            float8_e4m3fn [out, in]
weight_scale_inv  [out / 128, in / 128]    a factor for each block (Qwen 3, DeepSeek)
weight_scale      [] or [1], [out] or [out, 1]: a factor for all, or for each channel
input_scale, activation_scale    static scales of activations; not needed
"""

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.packed import PackedKind, PackedWeight
from mainstem.models.quantized.stored import WantedPart


def read_fp8(part: WantedPart) -> PackedWeight:
    values = part.stored(".weight", part.shape, (*part.lead, part.rows, part.columns))
    if values.dtype != torch.float8_e4m3fn:
        raise UnsupportedModel(f"tensor {part.name}.weight is of {values.dtype}, expected fp8 e4m3")
    part.drop(".input_scale", ".activation_scale")
    scales, group, block_rows = read_scales(part)
    return PackedWeight(PackedKind.FP8, values, scales.float(), None, group, block_rows)


def read_scales(part: WantedPart) -> tuple[Tensor, int, int]:
    """Return the scales of blocks, groups or rows, and the number of columns and rows that share a
    scale. A single scale is repeated for each row, so that weights with different scales can be
    joined."""
    packing, width = part.packing, part.num_columns
    count = part.rows.stop - part.rows.start
    name = ".weight_scale_inv" if part.has(".weight_scale_inv") else ".weight_scale"
    shape = part.files.shape_of(part.name + name)
    if packing.group is not None:
        block_rows = packing.block_rows or 1
        blocks = (-(-part.out // block_rows), -(-part.width // packing.group))
        at = (part.row_words(block_rows), part.column_words(packing.group))
        return part.stored(name, blocks, at), min(packing.group, width), block_rows
    if shape in ((), (1,), (1, 1)):
        scale = part.stored(name, shape).reshape(1, 1)
        return scale.expand(count, 1).contiguous(), width, 1
    rows = (part.out, 1) if shape is not None and len(shape) == 2 else (part.out,)
    return part.stored(name, rows, (part.rows,)).reshape(count, 1), width, 1
