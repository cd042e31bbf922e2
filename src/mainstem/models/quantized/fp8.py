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
from mainstem.models.quantized.packing import Packing, QuantizedSpec
from mainstem.models.quantized.stored import Stored, WantedPart


def read_fp8(
    files: Stored, spec: QuantizedSpec, name: str, packing: Packing, part: WantedPart
) -> PackedWeight:
    values = files.stored(f"{name}.weight", part.shape, (*part.lead, part.rows, part.columns))
    if values.dtype != torch.float8_e4m3fn:
        raise UnsupportedModel(f"tensor {name}.weight is of {values.dtype}, expected fp8 e4m3")
    for unneeded in ("input_scale", "activation_scale"):
        files.drop(f"{name}.{unneeded}")
    scales, group, block_rows = read_scales(files, name, packing, part)
    return PackedWeight(PackedKind.FP8, values, scales.float(), None, group, block_rows)


def read_scales(
    files: Stored, name: str, packing: Packing, part: WantedPart
) -> tuple[Tensor, int, int]:
    """Return the scales of blocks, groups or rows, and the number of columns and rows that share a
    scale. A single scale is repeated for each row, so that weights with different scales can be
    joined."""
    count = part.rows.stop - part.rows.start
    width = part.columns.stop - part.columns.start
    full = f"{name}.weight_scale_inv"
    if files.shape_of(full) is None:
        full = f"{name}.weight_scale"
    shape = files.shape_of(full)
    if packing.group is not None:
        block_rows = packing.block_rows or 1
        blocks = (-(-part.out // block_rows), -(-part.width // packing.group))
        at = (part.row_words(block_rows), part.column_words(packing.group))
        return files.stored(full, blocks, at), min(packing.group, width), block_rows
    if shape in ((), (1,), (1, 1)):
        scale = files.stored(full, shape).reshape(1, 1)
        return scale.expand(count, 1).contiguous(), width, 1
    rows = (part.out, 1) if shape is not None and len(shape) == 2 else (part.out,)
    return files.stored(full, rows, (part.rows,)).reshape(count, 1), width, 1
