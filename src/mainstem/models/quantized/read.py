"""Makes a PackedWeight, whole or in part, from a product's tensors in the files.

Formats pack rows and columns by words, groups and blocks. To read a part, its ends are moved
outwards to whole words, groups and blocks, and the result is cut to size.
"""

from collections.abc import Callable
from math import lcm

from mainstem.core.errors import UnsupportedModel
from mainstem.models.packed import PackedWeight
from mainstem.models.quantized.awq import read_awq
from mainstem.models.quantized.compressed import read_compressed_tensors
from mainstem.models.quantized.fp8 import read_fp8
from mainstem.models.quantized.gptq import read_gptq
from mainstem.models.quantized.mxfp4 import read_mxfp4
from mainstem.models.quantized.packing import Layout, Packing, QuantizedSpec
from mainstem.models.quantized.stored import Stored, WantedPart

Read = Callable[[WantedPart], PackedWeight]

# how products are read, and the endings of tensors that only packed products have
_LAYOUTS: dict[Layout, tuple[Read, tuple[str, ...]]] = {
    Layout.GPTQ: (read_gptq, (".qweight",)),
    Layout.AWQ: (read_awq, (".qweight",)),
    Layout.COMPRESSED: (read_compressed_tensors, (".weight_scale",)),
    Layout.FP8: (read_fp8, (".weight_scale_inv", ".weight_scale")),
    Layout.MXFP4: (read_mxfp4, ("_blocks",)),
}
_WORD = 8  # 4-bit numbers in a 32-bit word, the most of any format


def read_packed(
    files: Stored,
    spec: QuantizedSpec,
    name: str,
    shape: tuple[int, ...],
    at: tuple[slice, ...] = (),
) -> PackedWeight | None:
    """Return the weight of the product `name`, of `shape` [.., out, in]; None if the files hold a
    plain tensor. `at` is the wanted part: a slice for each of the first axes."""
    # a product that the config leaves out may still be packed: the files decide
    packing, (read, endings) = spec.packing_of(name) or spec.packing, _LAYOUTS[spec.layout]
    if packing is None or all(files.shape_of(name + ending) is None for ending in endings):
        return None
    _check_groups(name, packing, shape[-1])
    slices = at + (slice(None),) * (len(shape) - len(at))
    ends = [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]
    (first_row, end_row), (first_column, end_column) = ends[-2:]
    rows = _outwards(first_row, end_row, shape[-2], lcm(_WORD, packing.block_rows or 1))
    unit = None if spec.has_order else lcm(_WORD, packing.group or 1)
    columns = _outwards(first_column, end_column, shape[-1], unit)
    lead = tuple(slice(*end) for end in ends[:-2])
    packed = read(WantedPart(files, spec, name, packing, shape, lead, rows, columns))
    if (rows.start, rows.stop) != (first_row, end_row):
        packed = packed.rows(slice(first_row - rows.start, end_row - rows.start))
    if (columns.start, columns.stop) != (first_column, end_column):
        packed = packed.columns(slice(first_column - columns.start, end_column - columns.start))
    return packed.compact()


def _outwards(first: int, end: int, size: int, unit: int | None) -> slice:
    """Round a slice outwards to multiples of the unit; without a unit, everything."""
    if unit is None:
        return slice(0, size)
    return slice(first // unit * unit, min(-(-end // unit) * unit, size))


def _check_groups(name: str, packing: Packing, width: int) -> None:
    if packing.group is not None and packing.block_rows == 1 and width % packing.group:
        raise UnsupportedModel(
            f"{name}: {width} columns are not a multiple of its groups of {packing.group}"
        )
