# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: how small units are claimed and read.

The producer of a program is one warp. It copies the keys of all units to shared memory by TMA,
claims units of the work queue, and leaves a note about each unit after the first for the consumer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mainstem.kernels.attention.hopper.codes import PANEL as CODES_PANEL
from mainstem.kernels.attention.hopper.codes import SCALE_LANES, bring_scales, codes_of
from mainstem.kernels.attention.hopper.rows import PANEL, num_tiles_of
from mainstem.kernels.attention.triton.layout import (
    HEADER_PAGE_IDS,
    HEADER_QUEUE,
    HEADER_SMALL_ORDER,
    HEADER_SMALL_PIECES,
    NOTE_HAS_UNIT,
    NOTE_INTS,
    PIECE_FIRST_PAGE,
    PIECE_INTS,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_KV_HEAD,
    PIECE_PAGES_AT,
)
from mainstem.kernels.hopper import as_tiles, claimed_unit, load_box, reshaped, take_ticket

LANES = gl.constexpr(64)  # keys x heads of a tile
# How many tiles of a unit with more than CLAIM_AHEAD tiles are left to copy when the next unit is
# claimed, when its fields are read, and when it is noted for the consumer.
CLAIM_AHEAD = gl.constexpr(4)
READ_AHEAD = gl.constexpr(2)
NOTE_AHEAD = gl.constexpr(1)


def rows_of_box(fold: int, page_size: int) -> int:
    """The rows of K or V that one copy moves: of all heads of a unit if one page of these heads
    fills a tile, otherwise of one head.
    """
    lanes: int = LANES.value
    return lanes if fold * page_size == lanes else min(page_size, lanes // fold)


@gluon.jit
def read_keys(unit_ptr):
    """Return what the producer must know about a unit: first page id, start of its page ids, key
    range."""
    return (
        gl.load(unit_ptr + PIECE_FIRST_PAGE), gl.load(unit_ptr + PIECE_PAGES_AT),
        gl.load(unit_ptr + PIECE_KEY_BEGIN), gl.load(unit_ptr + PIECE_KEY_END),
    )  # fmt: skip


@gluon.jit
def _bring_block(
    desc, tail_desc, boxes, tail_boxes, arrived, stage, j, first_row,
    PAGE_SIZE: gl.constexpr, PAGES: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Copy keys of a page into the tile: all heads of the unit at once if HEADS is 1, otherwise
    head by head."""
    ACROSS: gl.constexpr = HEAD_DIM // PANEL
    HAS_TAIL: gl.constexpr = HEAD_DIM % PANEL > 0
    for head in gl.static_range(HEADS):
        for panel in gl.static_range(ACROSS):
            box = boxes.index(((stage * ACROSS + panel) * HEADS + head) * PAGES + j)
            load_box(desc, [first_row + head * PAGE_SIZE, panel * PANEL], arrived, box)
        if HAS_TAIL:
            box = tail_boxes.index((stage * HEADS + head) * PAGES + j)
            load_box(tail_desc, [first_row + head * PAGE_SIZE, ACROSS * PANEL], arrived, box)


@gluon.jit
def _bring_codes(
    desc, scales_desc, boxes, scales, arrived, stage, j, page, kv_head, first_row,
    PAGE_SIZE: gl.constexpr, PAGES: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """The same for a page in fp8, and its scales. `first_row` counts from the page's start."""
    ACROSS: gl.constexpr = max(HEAD_DIM // CODES_PANEL, 1)
    for head in gl.static_range(HEADS):
        for panel in gl.static_range(ACROSS):
            box = boxes.index(((stage * ACROSS + panel) * HEADS + head) * PAGES + j)
            row = first_row + head * PAGE_SIZE
            load_box(desc, [page, row, panel * CODES_PANEL], arrived, box)
    bring_scales(scales_desc, page, kv_head, scales, stage * PAGES + j, arrived)


@gluon.jit
def _bring(
    k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
    k_boxes, v_boxes, k_tail_boxes, v_tail_boxes, k_scales, v_scales,
    full, empty, step, count, page, pages_ptr, at, last_page, kv_head,
    KV_HEADS: gl.constexpr, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """Copy some tiles of a unit, each into a stage that has been read already. Past the unit's last
    page, the last page is copied again. `at` is a tile's first key / min(PAGE_SIZE, KEYS).
    """
    KEYS: gl.constexpr = LANES // FOLD
    PAGES: gl.constexpr = max(KEYS // PAGE_SIZE, 1)  # pages in a tile
    PARTS: gl.constexpr = max(PAGE_SIZE // KEYS, 1)  # parts of a page, each in its own tile
    HEADS: gl.constexpr = 1 if KEYS == PAGE_SIZE else FOLD
    for _ in range(0, count):
        next_page = gl.load(pages_ptr + gl.minimum((at + PAGES) // PARTS, last_page))
        stage = step % STAGES
        arrived = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
        if ROUNDED:
            mbarrier.expect(arrived, 2 * LANES * HEAD_DIM + 2 * PAGES * SCALE_LANES * 4)
        else:
            mbarrier.expect(arrived, 2 * LANES * HEAD_DIM * 2)
        for j in gl.static_range(PAGES):
            if j > 0:
                page = gl.load(pages_ptr + gl.minimum(at + j, last_page))
            if ROUNDED:
                row = kv_head * PAGE_SIZE + at % PARTS * KEYS
                _bring_codes(
                    k_desc, k_scales_desc, k_boxes, k_scales, arrived, stage, j, page, kv_head, row,
                    PAGE_SIZE, PAGES, HEADS, HEAD_DIM,
                )  # fmt: skip
                _bring_codes(
                    v_desc, v_scales_desc, v_boxes, v_scales, arrived, stage, j, page, kv_head, row,
                    PAGE_SIZE, PAGES, HEADS, HEAD_DIM,
                )  # fmt: skip
            else:
                row = (page * KV_HEADS + kv_head) * PAGE_SIZE + at % PARTS * KEYS
                _bring_block(
                    k_desc, k_tail_desc, k_boxes, k_tail_boxes, arrived, stage, j, row,
                    PAGE_SIZE, PAGES, HEADS, HEAD_DIM,
                )  # fmt: skip
                _bring_block(
                    v_desc, v_tail_desc, v_boxes, v_tail_boxes, arrived, stage, j, row,
                    PAGE_SIZE, PAGES, HEADS, HEAD_DIM,
                )  # fmt: skip
        page = next_page
        at += PAGES
        step += 1
    return step, page, at


@gluon.jit
def produce(
    k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
    k_tiles, v_tiles, k_tails, v_tails, k_scales, v_scales,
    full, empty, notes, noted, plan_ptr,
    index, end, next_unit, kv_head, page, page_at, key_begin, key_end,
    num_queued, tickets_ptr,
    KV_HEADS: gl.constexpr, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """Copy K and V of all units of this program; claim units after its share, and leave a note
    about each unit after the first for the consumer.
    """
    UNITS: gl.constexpr = KV_HEADS // FOLD  # units in a piece
    KEYS: gl.constexpr = LANES // FOLD
    BLOCK: gl.constexpr = min(PAGE_SIZE, KEYS)  # keys of a head that are copied at once
    ROWS: gl.constexpr = LANES if KEYS == PAGE_SIZE else BLOCK
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    NOTES: gl.constexpr = 2 * STAGES
    gl.static_assert(k_desc.block_shape[len(k_desc.block_shape) - 2] == ROWS)
    BOXES: gl.constexpr = STAGES * LANES // ROWS
    TAIL: gl.constexpr = HEAD_DIM % PANEL
    if ROUNDED:
        WIDTH: gl.constexpr = min(HEAD_DIM, CODES_PANEL)
        SHAPE: gl.constexpr = [BOXES * (HEAD_DIM // WIDTH), 1, ROWS, WIDTH]
        k_boxes = reshaped(k_tiles, SHAPE, codes_of(WIDTH))
        v_boxes = reshaped(v_tiles, SHAPE, codes_of(WIDTH))
    else:
        k_boxes = as_tiles(k_tiles, BOXES * (HEAD_DIM // PANEL), ROWS, PANEL)
        v_boxes = as_tiles(v_tiles, BOXES * (HEAD_DIM // PANEL), ROWS, PANEL)
    k_tail_boxes, v_tail_boxes = k_boxes, v_boxes
    if TAIL > 0:
        k_tail_boxes = as_tiles(k_tails, BOXES, ROWS, TAIL)
        v_tail_boxes = as_tiles(v_tails, BOXES, ROWS, TAIL)
    pieces_at = gl.load(plan_ptr + HEADER_SMALL_PIECES)
    order_ptr = plan_ptr + gl.load(plan_ptr + HEADER_SMALL_ORDER)
    page_ids_ptr = plan_ptr + gl.load(plan_ptr + HEADER_PAGE_IDS)
    queue_at = gl.load(plan_ptr + HEADER_QUEUE)
    columns = gl.arange(0, NOTE_INTS, NOTE)
    step = 0
    num_noted = 0
    is_there = True
    while is_there:
        pages_ptr = page_ids_ptr + page_at
        last_page = gl.maximum(key_end - 1, 0) // PAGE_SIZE
        at = key_begin // BLOCK
        num_tiles = num_tiles_of(key_begin, key_end, KEYS)
        is_long = num_tiles > CLAIM_AHEAD
        step, page, at = _bring(
            k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
            k_boxes, v_boxes, k_tail_boxes, v_tail_boxes, k_scales, v_scales,
            full, empty, step,
            gl.where(is_long, num_tiles - CLAIM_AHEAD, 0),
            page, pages_ptr, at, last_page, kv_head,
            KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, ROUNDED,
        )  # fmt: skip
        index += 1
        does_claim = (index >= end) & (num_queued > 0)
        tickets = take_ticket(tickets_ptr, num_queued, gl.num_programs(0), does_claim, 1)
        step, page, at = _bring(
            k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
            k_boxes, v_boxes, k_tail_boxes, v_tail_boxes, k_scales, v_scales,
            full, empty, step,
            gl.where(is_long, CLAIM_AHEAD - READ_AHEAD, num_tiles),
            page, pages_ptr, at, last_page, kv_head,
            KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, ROUNDED,
        )  # fmt: skip
        claimed = claimed_unit(tickets, num_queued)
        is_there = (index < end) | (claimed >= 0)
        piece = next_unit // UNITS
        next_ptr = plan_ptr + gl.where(
            index < end,
            pieces_at + piece * PIECE_INTS,
            queue_at + gl.maximum(claimed, 0) * PIECE_INTS,
        )
        note = gl.load(next_ptr + columns, mask=columns < PIECE_INTS, other=0)
        next_kv_head = gl.load(next_ptr + PIECE_KV_HEAD)
        next_page, next_page_at, next_key_begin, next_key_end = read_keys(next_ptr)
        if index < end:
            next_kv_head = (next_unit - piece * UNITS) * FOLD
        next_unit = gl.load(order_ptr + gl.maximum(gl.minimum(index + 1, end - 1), 0))
        step, page, at = _bring(
            k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
            k_boxes, v_boxes, k_tail_boxes, v_tail_boxes, k_scales, v_scales,
            full, empty, step,
            gl.where(is_long, READ_AHEAD - NOTE_AHEAD, 0),
            page, pages_ptr, at, last_page, kv_head,
            KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, ROUNDED,
        )  # fmt: skip
        note = gl.where(columns == PIECE_KV_HEAD, next_kv_head, note)
        note = gl.where(columns == NOTE_HAS_UNIT, is_there.to(gl.int32), note)
        slot = num_noted % NOTES
        notes.index(slot).store(note)
        mbarrier.arrive(noted.index(slot), count=1)
        num_noted += 1
        step, page, at = _bring(
            k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
            k_boxes, v_boxes, k_tail_boxes, v_tail_boxes, k_scales, v_scales,
            full, empty, step,
            gl.where(is_long, NOTE_AHEAD, 0),
            page, pages_ptr, at, last_page, kv_head,
            KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, ROUNDED,
        )  # fmt: skip
        kv_head = next_kv_head
        page = next_page
        page_at = next_page_at
        key_begin = next_key_begin
        key_end = next_key_end
