# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Attention on Hopper: tiles of pages in fp8 (e4m3) as operands of 16-bit matrix instructions.

A tile of codes lies in shared memory, [section, key, dim]. Each thread loads 16 bytes at once and
converts them to fp16. Which numbers a thread must have is fixed by the matrix instruction, but not
which of the summed ones come first, nor in which order columns of a result are. So dims are
relabelled instead of moved:

    scores   sums over dims: thread t of four has the dims [t * D / 4, (t + 1) * D / 4)
    values   sums over keys: thread g of eight has the columns [g * D / 8, (g + 1) * D / 8)

Codes are multiplied as they are. The scale of K, one for each page and head, is applied to the
scores. That of V is not applied to numbers at all: sums are kept in units of the latest page's
scale, which changes the factor by which the online softmax multiplies them anyway.

fp16 holds every code (up to 448, in steps down to 2^-9) and weights (at most 1, with three bits
more than bf16; a weight below 2^-25 is lost, of a largest one of 1). Queries in bf16 are divided by
16 before: then up to a million they do not overflow, and an error of 2^-21 is added to each, far
less than K's own rounding.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mainstem.kernels.hopper import load_box, reshaped

PANEL = gl.constexpr(128)  # dims of a row of codes that lie together in shared memory
SCALE_LANES = gl.constexpr(32)  # scales that are copied at once
SCALE_STEP = gl.constexpr(4)  # copies begin at multiples of this: of 16 bytes
QUERY_FACTOR = gl.constexpr(16.0)
LEAST_SCALE = gl.constexpr(1e-18)  # pages of V below are read as zeros
MOST_SCALE = gl.constexpr(1e18)
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def codes_of(columns: int, rank: int = 3) -> gl.NVMMASharedLayout:
    """Return the layout of rows of codes in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns, 128), element_bitwidth=8, rank=rank)


SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))


def codes_boxes(numbers: Tensor, num_rows: int) -> TensorDescriptor:
    """Describe K or V in fp8, [pages, kv_heads, page_size, head_dim], as the boxes that one copy
    moves: some rows of a page."""
    rows = numbers.flatten(1, 2)
    panel = min(int(PANEL.value), rows.shape[2])
    return TensorDescriptor.from_tensor(rows, [1, num_rows, panel], codes_of(panel))


def scale_boxes(scales: Tensor) -> TensorDescriptor:
    """Describe the scales of K or V, [pages, kv_heads]."""
    return TensorDescriptor.from_tensor(scales, [1, int(SCALE_LANES.value)], SCALES.value)


@gluon.constexpr_function
def _bits(begin: int, end: int) -> list[int]:
    """The powers of two in [begin, end)."""
    return [1 << i for i in range(32) if begin <= 1 << i < end]


@gluon.constexpr_function
def _warps(sections: int, rows: int) -> list[list[int]]:
    """Where warps are in [section, row, dim]. Those of one section differ in 16 rows each, or not
    at all if `rows` is 0."""
    warps = [[1 << i, 0, 0] for i in range(sections.bit_length() - 1)]
    return [[0, rows << i, 0] for i in range(2 - len(warps))] + warps


@gluon.constexpr_function
def rows_by_dims(sections: int, rows: int, dims: int, is_split: bool) -> gl.DistributedLinearLayout:
    """[section, row, dim] as scores need it: each of four threads has a quarter of a panel. Warps
    of a section have other rows each (`is_split`: queries), or the same (keys)."""
    run = min(dims, 128) // 4
    rows_here = rows // (4 // sections) if is_split else rows
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, i] for i in _bits(1, run)]
        + [[0, i, 0] for i in _bits(8, rows_here)]
        + [[0, 0, i] for i in _bits(128, dims)],
        lane_bases=[[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=_warps(sections, 16 if is_split else 0),
        block_bases=[],
        shape=[sections, rows, dims],
    )


@gluon.constexpr_function
def _columns_of_keys(sections: int, keys: int, dims: int) -> gl.DistributedLinearLayout:
    """[section, key, dim] as products with V need it: each of eight threads has an eighth of a
    panel, of two neighbouring keys. Four bytes of both follow each other."""
    run = min(dims, 128) // 8
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0]]
        + [[0, 0, i] for i in _bits(4, run)]
        + [[0, i, 0] for i in _bits(8, keys)]
        + [[0, 0, i] for i in _bits(128, dims)],
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 0, run], [0, 0, 2 * run], [0, 0, 4 * run]],
        warp_bases=_warps(sections, 0),
        block_bases=[],
        shape=[sections, keys, dims],
    )


@gluon.constexpr_function
def natural_rows(dims: int) -> gl.DistributedLinearLayout:
    """[64 rows, dim]: how threads have sums over V, with dims in order."""
    run = min(dims, 128) // 8
    return gl.DistributedLinearLayout(
        reg_bases=[[0, i] for i in _bits(1, 2 * run)]
        + [[8, 0]]
        + [[0, i] for i in _bits(128, dims)],
        lane_bases=[[0, 2 * run], [0, 4 * run], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dims],
    )


@gluon.constexpr_function
def packed_rows(dims: int) -> gl.DistributedLinearLayout:
    """The same rows with dims in the order of packed Partials (`rows.py`)."""
    run = min(dims, 128) // 8

    def place(dim: int) -> int:
        return dim // 32 * 32 + (dim >> 1) % 4 * 8 + (dim >> 3) % 4 * 2 + dim % 2

    own = sorted(place(i) for i in _bits(1, 2 * run) + _bits(128, dims))
    return gl.DistributedLinearLayout(
        reg_bases=[[0, i] for i in own] + [[8, 0]],
        lane_bases=[[0, place(2 * run)], [0, place(4 * run)], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dims],
    )


@gluon.jit
def _summed_dims(rows):
    """Relabel dims of [section, row, dim]: what thread t has becomes what the instruction wants."""
    S: gl.constexpr = rows.shape[0]
    R: gl.constexpr = rows.shape[1]
    D: gl.constexpr = rows.shape[2]
    RUN: gl.constexpr = min(D, 128) // 4
    rows = rows.reshape([S, R, D // (4 * RUN), 4, RUN // 4, 2, 2]).permute((0, 1, 2, 4, 5, 3, 6))
    return rows.reshape([S, R, D])


@gluon.jit
def query_operand(q, FIRST: gl.constexpr):
    """Queries, loaded in the layout `rows_by_dims`, as the first operand of scores."""
    if q.dtype == gl.bfloat16:
        q = (q.to(gl.float32) * (1.0 / QUERY_FACTOR)).to(gl.float16)
    return gl.convert_layout(_summed_dims(q), FIRST)


@gluon.jit
def key_operand(tile, SECOND: gl.constexpr):
    """K of a tile [section, key, dim] as the second operand of scores."""
    LAYOUT: gl.constexpr = rows_by_dims(tile.shape[0], tile.shape[1], tile.shape[2], False)
    codes = tile.load(LAYOUT).to(gl.int8, bitcast=True)
    keys = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return gl.convert_layout(_summed_dims(keys).permute((0, 2, 1)), SECOND)


@gluon.jit
def value_operand(tile, SECOND: gl.constexpr):
    """V of a tile [section, key, dim] as the second operand of the sums. `natural` restores the
    order of their columns."""
    S: gl.constexpr = tile.shape[0]
    K: gl.constexpr = tile.shape[1]
    D: gl.constexpr = tile.shape[2]
    RUN: gl.constexpr = min(D, 128) // 8
    codes = tile.load(_columns_of_keys(S, K, D)).to(gl.int8, bitcast=True)
    # Four dims of two keys go in; pairs of keys of each dim come out. For the compiler these are
    # still four dims of one key, then of the other: relabelled below.
    values = gl.inline_asm_elementwise(
        """{
        .reg .b32 pairs, more;
        .reg .b16 a, b, c, d;
        prmt.b32 pairs, $4, $5, 0x5140;
        prmt.b32 more, $4, $5, 0x7362;
        mov.b32 {a, b}, pairs;
        mov.b32 {c, d}, more;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }""",
        "=r,=r,=r,=r,r,r", [codes], dtype=gl.float16, is_pure=True, pack=8,
    )  # fmt: skip
    values = values.reshape([S, K // 2, 2, D // 4, 2, 2]).permute((0, 1, 5, 3, 2, 4))
    values = values.reshape([S, K, D // (8 * RUN), 8, RUN]).permute((0, 1, 2, 4, 3))
    return gl.convert_layout(values.reshape([S, K, D]), SECOND)


@gluon.jit
def natural(acc):
    """Sums [section, row, dim] with their columns in order."""
    S: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[1]
    D: gl.constexpr = acc.shape[2]
    RUN: gl.constexpr = min(D, 128) // 8
    acc = acc.reshape([S, R, D // (8 * RUN), RUN, 8]).permute((0, 1, 2, 4, 3))
    return acc.reshape([S, R, D])


@gluon.jit
def bring_scales(desc, page, kv_head, scales, at, arrived):
    """Copy the scales of a page, from one of the SCALE_STEP heads before on: that of `kv_head` is
    at kv_head % SCALE_STEP."""
    load_box(desc, [page, kv_head // SCALE_STEP * SCALE_STEP], arrived, scales.index(at))


@gluon.jit
def section_scales(
    scales, stage, kv_head, SPLITS: gl.constexpr, PAGES: gl.constexpr, LAYOUT: gl.constexpr,
    SECTIONS: gl.constexpr,
):  # fmt: skip
    """The scale of each section's keys, which are of one page and head. `scales` is [stages x
    pages, SCALE_LANES]; a section is a head, the first is `kv_head`, or one of SPLITS parts of its
    keys."""
    first = kv_head % SCALE_STEP
    COUNT: gl.constexpr = scales.shape[0] * SCALE_LANES
    if SPLITS == 1:
        RUNS: gl.constexpr = COUNT // SECTIONS
        runs = reshaped(scales, [RUNS, SECTIONS], ROW)
        return runs.index(stage * (SCALE_LANES // SECTIONS) + first // SECTIONS).load(LAYOUT)
    else:
        SAME: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        cells = reshaped(scales, [COUNT, 1], ROW)
        sections = gl.arange(0, SECTIONS, LAYOUT)
        found = gl.zeros([SECTIONS], gl.float32, LAYOUT)
        for section in gl.static_range(SECTIONS):
            page = stage * PAGES + section % SPLITS * PAGES // SPLITS
            cell = cells.index(page * SCALE_LANES + first + section // SPLITS)
            found = gl.where(sections == section, gl.max(cell.load(SAME), 0), found)
        return found


@gluon.jit
def unit_of(scale, unit):
    """The unit of sums after a page of V with this scale: the scale, or the unit as it was if the
    page has only zeros, or was never rounded."""
    return gl.where((scale > LEAST_SCALE) & (scale < MOST_SCALE), scale, unit)
