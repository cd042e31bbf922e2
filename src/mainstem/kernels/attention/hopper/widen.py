# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: large units over pages in fp8. Four more warps convert each tile to fp16
before the tensor cores read it from shared memory.

    producer  | copies pages in fp8, and their scales
    these     | fp8 -> fp16, both in shared memory; each tile once for the 128 rows of a unit
    consumers | as for 16 bits, but K and V of a tile arrive together, at one barrier

A tile has keys of several pages, with a scale each. It gets one *unit*, the largest of them, and
numbers are multiplied by scale / unit: at most 1, so fp16 neither overflows nor loses what counts
beside the other pages. Consumers apply the units: that of K to scores, that of V when they shrink
sums. Pages that no row sees may have any scale; their numbers become 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mainstem.kernels.attention.hopper.codes import (
    LEAST_SCALE,
    MOST_SCALE,
    PANEL,
    ROW,
    SCALE_LANES,
    SCALE_STEP,
    bring_scales,
    codes_of,
)
from mainstem.kernels.attention.triton.layout import (
    HEADER_LARGE_ORDER,
    HEADER_LARGE_PIECES,
    HEADER_PAGE_IDS,
    PIECE_FIRST_LIMIT,
    PIECE_INTS,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_PAGES_AT,
    PIECE_ROW_END,
)
from mainstem.kernels.hopper import barrier, load_box, reshaped

SAME = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # all threads have the same number


@gluon.jit
def _num_tiles(key_begin, key_end, KEYS: gl.constexpr):
    return gl.maximum((key_end - key_begin + KEYS - 1) // KEYS, 1)


@gluon.jit
def _bring(
    desc, scales_desc, codes, scales, stage, pages_ptr, first_page, last_page, kv_head, arrived,
    PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TILE_K // PAGE_SIZE
    WIDTH: gl.constexpr = min(HEAD_DIM, PANEL)
    SHAPE: gl.constexpr = [codes.shape[0] * PAGES, 1, PAGE_SIZE, WIDTH]
    boxes = reshaped(codes, SHAPE, codes_of(WIDTH))
    for i in gl.static_range(PAGES):
        page = gl.load(pages_ptr + gl.minimum(first_page + i, last_page))
        load_box(desc, [page, kv_head * PAGE_SIZE, 0], arrived, boxes.index(stage * PAGES + i))
        bring_scales(scales_desc, page, kv_head, scales, stage * PAGES + i, arrived)


@gluon.jit
def bring_codes(
    k_desc, v_desc, k_scales_desc, v_scales_desc, k_codes, v_codes, k_scales, v_scales,
    codes_full, codes_empty, plan_ptr, begin, end, kv_head, page_at, key_begin, key_end,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all units of this program, and the scales of their pages. Past the unit's
    last page, the last page is copied again."""
    PAGES: gl.constexpr = TILE_K // PAGE_SIZE
    pieces_at = gl.load(plan_ptr + HEADER_LARGE_PIECES)
    pages_at = gl.load(plan_ptr + HEADER_PAGE_IDS)
    order_at = gl.load(plan_ptr + HEADER_LARGE_ORDER)
    tile = 0
    for index in range(begin, end):
        pages_ptr = plan_ptr + pages_at + page_at
        last_page = gl.maximum(key_end - 1, 0) // PAGE_SIZE
        for i in range(0, _num_tiles(key_begin, key_end, TILE_K)):
            first_page = (key_begin + i * TILE_K) // PAGE_SIZE
            stage = tile % STAGES
            arrived = codes_full.index(stage)
            mbarrier.wait(codes_empty.index(stage), (tile // STAGES + 1) & 1)
            mbarrier.expect(arrived, 2 * TILE_K * HEAD_DIM + 2 * PAGES * SCALE_LANES * 4)
            _bring(
                k_desc, k_scales_desc, k_codes, k_scales, stage, pages_ptr, first_page, last_page,
                kv_head, arrived, PAGE_SIZE, TILE_K, HEAD_DIM,
            )  # fmt: skip
            _bring(
                v_desc, v_scales_desc, v_codes, v_scales, stage, pages_ptr, first_page, last_page,
                kv_head, arrived, PAGE_SIZE, TILE_K, HEAD_DIM,
            )  # fmt: skip
            tile += 1
        unit = gl.load(plan_ptr + order_at + gl.minimum(index + 1, end - 1))
        kv_head = unit % KV_HEADS
        piece_ptr = plan_ptr + pieces_at + (unit // KV_HEADS) * PIECE_INTS
        page_at = gl.load(piece_ptr + PIECE_PAGES_AT)
        key_begin = gl.load(piece_ptr + PIECE_KEY_BEGIN)
        key_end = gl.load(piece_ptr + PIECE_KEY_END)


@gluon.jit
def _unit_and_ratios(
    scales, stage, kv_head, num_seen, rows, PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr
):
    """Return a tile's unit, and scale / unit of each row. Only the first `num_seen` keys count."""
    PAGES: gl.constexpr = TILE_K // PAGE_SIZE
    CELLS: gl.constexpr = scales.shape[0] * SCALE_LANES
    cells = reshaped(scales, [CELLS, 1], ROW)
    unit = 0.0
    ratios = rows.to(gl.float32) * 0.0
    for i in gl.static_range(PAGES):
        cell = cells.index((stage * PAGES + i) * SCALE_LANES + kv_head % SCALE_STEP)
        scale = gl.max(cell.load(SAME), 0)
        is_right = (i * PAGE_SIZE < num_seen) & (scale > LEAST_SCALE) & (scale < MOST_SCALE)
        scale = gl.where(is_right, scale, 0.0)
        unit = gl.maximum(unit, scale)
        ratios = gl.where(rows // PAGE_SIZE == i, scale, ratios)
    unit = gl.where(unit > 0.0, unit, 1.0)
    return unit, ratios * (1.0 / unit)


@gluon.jit
def _widened(codes, ratios):
    """Codes as fp16 numbers, multiplied by the ratio of their row."""
    numbers = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [codes.to(gl.int8, bitcast=True)], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return numbers * ratios.to(gl.float16)[:, None]


@gluon.constexpr_function
def rows_by_eights(head_dim: int) -> gl.BlockedLayout:
    """[key, dim]: a thread has 8 neighbouring dims, so that neither its 8 bytes of codes nor its 16
    bytes of numbers share a bank with those of threads that access memory with it."""
    threads = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def widen_tiles(
    k_codes, v_codes, k_scales, v_scales, codes_full, codes_empty,
    k_tiles, v_tiles, units, full, k_empty, v_empty, plan_ptr, begin, end,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr,
    HEAD_DIM: gl.constexpr, CODES_STAGES: gl.constexpr, STAGES: gl.constexpr,
    BEFORE_OWN_PAGE: gl.constexpr,
):  # fmt: skip
    """Convert the tiles of all units of this program."""
    LAYOUT: gl.constexpr = rows_by_eights(HEAD_DIM)
    rows = gl.arange(0, TILE_K, gl.SliceLayout(1, LAYOUT))
    cells = reshaped(units, [2 * STAGES, 1], ROW)
    pieces_ptr = plan_ptr + gl.load(plan_ptr + HEADER_LARGE_PIECES)
    order_ptr = plan_ptr + gl.load(plan_ptr + HEADER_LARGE_ORDER)
    one = gl.full([1], 1.0, gl.float32, SAME)
    tile = 0
    for index in range(begin, end):
        unit = gl.load(order_ptr + index)
        kv_head = unit % KV_HEADS
        piece_ptr = pieces_ptr + (unit // KV_HEADS) * PIECE_INTS
        key_begin = gl.load(piece_ptr + PIECE_KEY_BEGIN)
        key_end = gl.load(piece_ptr + PIECE_KEY_END)
        seen_end = key_end
        if BEFORE_OWN_PAGE:  # the last row's own page is not rounded yet
            row_end = gl.load(piece_ptr + PIECE_ROW_END)
            own = gl.load(piece_ptr + PIECE_FIRST_LIMIT) + (row_end - 1) // GROUP
            seen_end = gl.minimum(key_end, own // PAGE_SIZE * PAGE_SIZE)
        for i in range(0, _num_tiles(key_begin, key_end, TILE_K)):
            num_seen = seen_end - (key_begin + i * TILE_K)
            taken = tile % CODES_STAGES
            stage = tile % STAGES
            was_read = (tile // STAGES + 1) & 1
            mbarrier.wait(codes_full.index(taken), (tile // CODES_STAGES) & 1)
            k = k_codes.index(taken).load(LAYOUT)
            v = v_codes.index(taken).load(LAYOUT)
            k_unit, k_ratios = _unit_and_ratios(
                k_scales, taken, kv_head, num_seen, rows, PAGE_SIZE, TILE_K
            )
            v_unit, v_ratios = _unit_and_ratios(
                v_scales, taken, kv_head, num_seen, rows, PAGE_SIZE, TILE_K
            )
            mbarrier.wait(k_empty.index(stage), was_read)
            k_tiles.index(stage).store(_widened(k, k_ratios))
            mbarrier.wait(v_empty.index(stage), was_read)
            v_tiles.index(stage).store(_widened(v, v_ratios))
            cells.index(2 * stage).store(one * k_unit)
            cells.index(2 * stage + 1).store(one * v_unit)
            fence_async_shared()
            barrier()  # one for K and V, since waiting takes longer than converting
            mbarrier.arrive(full.index(stage), count=1)
            mbarrier.arrive(codes_empty.index(taken), count=1)
            tile += 1


@gluon.jit
def units_of(units, stage, STAGES: gl.constexpr):
    """The units of K and V of a tile."""
    cells = reshaped(units, [2 * STAGES, 1], ROW)
    return (
        gl.max(cells.index(2 * stage).load(SAME), 0),
        gl.max(cells.index(2 * stage + 1).load(SAME), 0),
    )
