# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: large units, which are shared prefixes and prompts. One warp copies pages,
and two groups of four warps compute.

The units are the large ones of `triton/span.py`. The kernel uses instructions that only Hopper has.
It is written in Gluon, because Triton itself does not expose them:

    producer   | one warp; copies the pages of tiles of keys to shared memory by TMA, ahead of need
    consumers  | two groups, 64 rows of the unit each; both read the same tile, so that L2 is read
               | once for 128 rows

A consumer starts the scores of one tile together with the V products of the tile before. It
computes the softmax while the tensor cores work for the other group. Barriers in shared memory say
which tile has arrived (`full`) and which may be overwritten (`empty`).

Special cases share the code of the common case where possible: an instruction that runs for the
first time must be fetched from memory.

Queries are in registers, since K and V keep shared memory busy. The next unit's queries are copied
to shared memory while a unit is computed. With a head_dim of 256, queries do not fit in registers
and stay in shared memory.

The kernel of the small units is launched after this one. It takes over multiprocessors as they
become free, and does not end before this one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainstem.kernels.attention.hopper.codes import (
    QUERY_FACTOR,
    ROW,
    SCALE_LANES,
    SCALES,
    codes_of,
)
from mainstem.kernels.attention.hopper.rows import (
    PANEL,
    await_queries,
    capped,
    find_first_keys,
    find_rows,
    find_tokens,
    last_seen,
    num_tiles_of,
    read_piece,
    rows_of,
    share_of,
    shares_of,
    start_queries,
    write_rows,
)
from mainstem.kernels.attention.hopper.widen import bring_codes, units_of, widen_tiles
from mainstem.kernels.attention.triton.layout import (
    HEADER_ENTRIES,
    HEADER_LARGE_ORDER,
    HEADER_LARGE_PIECES,
    HEADER_NUM_ENTRIES,
    HEADER_PAGE_IDS,
    PIECE_FIRST_TOKEN,
    PIECE_INTS,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_KV_HEAD,
    PIECE_PAGES_AT,
    SHARE_FIRST_LARGE,
    SHARE_LARGE_BEGIN,
    SHARE_LARGE_END,
)
from mainstem.kernels.hopper import TILES, as_tiles, barrier, load_box, release, tiles_of

BLOCK = gl.constexpr(16)  # keys that the producer clears in one step
NUM_WARPS = 4
NUM_WARPS_OF_CONSUMER = gl.constexpr(NUM_WARPS)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
CODES_STAGES = gl.constexpr(5)  # tiles in fp8; `num_stages` is that of tiles in 16 bits
CONSUMER_REGISTERS_ROUNDED = gl.constexpr(192)
WIDENER_REGISTERS = gl.constexpr(104)
MOST_DIMS_IN_REGISTERS = gl.constexpr(128)  # largest head_dim whose queries are in registers


def max_registers(*, is_rounded: bool) -> int:
    """Registers of a thread. Three groups of four warps share those of a multiprocessor; one more
    converts rounded pages."""
    return 128 if is_rounded else 168


@gluon.jit
def _share(plan_ptr):
    """Return this program's part of the order: begin, end, and the piece and KV head of its first
    unit."""
    share_ptr = share_of(plan_ptr)
    return (
        gl.load(share_ptr + SHARE_LARGE_BEGIN), gl.load(share_ptr + SHARE_LARGE_END),
        share_ptr + SHARE_FIRST_LARGE, gl.load(share_ptr + (SHARE_FIRST_LARGE + PIECE_KV_HEAD)),
    )  # fmt: skip


@gluon.jit
def _bring(
    rows_desc, tail_desc, tiles, tails, stage, pages_ptr, first_page, last_page, kv_head, barrier,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Copy a tile's pages into shared memory. Past the unit's last page, the last page is copied
    again."""
    PAGES: gl.constexpr = TILE_K // PAGE_SIZE
    ACROSS: gl.constexpr = HEAD_DIM // PANEL
    TAIL: gl.constexpr = HEAD_DIM % PANEL
    boxes = as_tiles(tiles, tiles.shape[0] * ACROSS * PAGES, PAGE_SIZE, PANEL)
    mbarrier.expect(barrier, TILE_K * HEAD_DIM * 2)
    for i in gl.static_range(PAGES):
        page = gl.load(pages_ptr + gl.minimum(first_page + i, last_page))
        row = (page * KV_HEADS + kv_head) * PAGE_SIZE
        for panel in gl.static_range(ACROSS):
            box = boxes.index((stage * ACROSS + panel) * PAGES + i)
            load_box(rows_desc, [row, panel * PANEL], barrier, box)
        if TAIL > 0:
            tail_boxes = as_tiles(tails, tails.shape[0] * PAGES, PAGE_SIZE, TAIL)
            load_box(tail_desc, [row, ACROSS * PANEL], barrier, tail_boxes.index(stage * PAGES + i))


@gluon.jit
def _clear_panels(
    tiles, stage, num_keys, TILE_K: gl.constexpr, ACROSS: gl.constexpr, COLUMNS: gl.constexpr
):
    BLOCKS: gl.constexpr = TILE_K // BLOCK
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    blocks = as_tiles(tiles, tiles.shape[0] * ACROSS * BLOCKS, BLOCK, COLUMNS)
    lanes = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    for i in range(gl.maximum(num_keys, 0) // BLOCK, BLOCKS):
        for panel in gl.static_range(ACROSS):
            block = blocks.index((stage * ACROSS + panel) * BLOCKS + i)
            keys = block.load(LAYOUT)
            block.store(gl.where((i * BLOCK + lanes < num_keys)[:, None], keys, 0.0).to(keys.dtype))


@gluon.jit
def _clear(tiles, tails, stage, num_keys, TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Set the rows of a tile from `num_keys` on to zero. Slots past the end may hold anything, and
    zero weight times NaN would still be NaN."""
    TAIL: gl.constexpr = HEAD_DIM % PANEL
    _clear_panels(tiles, stage, num_keys, TILE_K, HEAD_DIM // PANEL, PANEL)
    if TAIL > 0:
        _clear_panels(tails, stage, num_keys, TILE_K, 1, TAIL)


@gluon.jit
def _produce(
    k_desc, v_desc, k_tail_desc, v_tail_desc, k_tiles, v_tiles, k_tails, v_tails,
    k_full, k_empty, v_full, v_empty, plan_ptr, begin, end, kv_head,
    page_at, key_begin, key_end, pieces_at, pages_at, order_at,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all units of this program, one after the other."""
    tile = 0
    num_cleared = 0
    for index in range(begin, end):
        pages_ptr = plan_ptr + pages_at + page_at
        last_page = gl.maximum(key_end - 1, 0) // PAGE_SIZE
        for i in range(0, num_tiles_of(key_begin, key_end, TILE_K)):
            start = key_begin + i * TILE_K
            stage = tile % STAGES
            was_read = (tile // STAGES + 1) & 1
            first_page = start // PAGE_SIZE
            mbarrier.wait(k_empty.index(stage), was_read)
            _bring(
                k_desc, k_tail_desc, k_tiles, k_tails, stage, pages_ptr, first_page, last_page,
                kv_head, k_full.index(stage), KV_HEADS, PAGE_SIZE, TILE_K, HEAD_DIM,
            )  # fmt: skip
            # A tile of V that has rows to clear arrives at an extra barrier. Once they are cleared,
            # it is full.
            is_cut = start + TILE_K > key_end
            mbarrier.wait(v_empty.index(stage), was_read)
            _bring(
                v_desc, v_tail_desc, v_tiles, v_tails, stage, pages_ptr, first_page, last_page,
                kv_head, v_full.index(gl.where(is_cut, STAGES, stage)),
                KV_HEADS, PAGE_SIZE, TILE_K, HEAD_DIM,
            )  # fmt: skip
            if is_cut:
                mbarrier.wait(v_full.index(STAGES), num_cleared & 1)
                num_cleared += 1
                _clear(v_tiles, v_tails, stage, key_end - start, TILE_K, HEAD_DIM)
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage), count=1)
            tile += 1
        unit = gl.load(plan_ptr + order_at + gl.minimum(index + 1, end - 1))
        kv_head = unit % KV_HEADS
        piece_ptr = plan_ptr + pieces_at + (unit // KV_HEADS) * PIECE_INTS
        page_at = gl.load(piece_ptr + PIECE_PAGES_AT)
        key_begin = gl.load(piece_ptr + PIECE_KEY_BEGIN)
        key_end = gl.load(piece_ptr + PIECE_KEY_END)


@gluon.jit
def _start_scores(
    q, q_tail, k_tiles, k_tails, stage,
    LAYOUT: gl.constexpr, TILE_K: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    k = k_tiles.index(stage).permute((1, 0))
    nothing = gl.zeros([64, TILE_K], gl.float32, LAYOUT)
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    if HAS_TAIL:
        k = k_tails.index(stage).permute((1, 0))
        scores = warpgroup_mma(q_tail, k, scores, is_async=True)
    return scores


@gluon.jit
def _mask(
    scores, start, seen_by_all, limit, hidden_end, first_key,
    TILE_K: gl.constexpr, HAS_WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    lanes = gl.arange(0, TILE_K, gl.SliceLayout(0, LAYOUT))
    if start + TILE_K > seen_by_all:
        # A thread's lanes are 8 apart: only their last three bits depend on the thread.
        is_seen = (lanes & -8)[None, :] <= (limit - start)[:, None] - (lanes & 7)[None, :]
        scores = gl.where(is_seen, scores, float("-inf"))
    if HAS_WINDOW:  # noqa: SIM102  # known when compiled; the next condition is not
        if start < hidden_end:
            is_seen = (lanes & -8)[None, :] >= (first_key - start)[:, None] - (lanes & 7)[None, :]
            scores = gl.where(is_seen, scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(scores, top, scale):
    """Return the weights of scores relative to the base, the new maximum (the larger of `top` and
    the largest score), and the base: the new maximum, or 0 if that is -inf.
    """
    top = gl.maximum(top, gl.max(scores, 1) * scale)
    # Until a row has seen a key, its maximum is -inf, and -inf minus -inf would be NaN.
    base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(scores * scale - base[:, None]), top, base


@gluon.jit
def _attend(
    q, q_tail, k_tiles, v_tiles, k_tails, v_tails, units, k_full, k_empty, v_full, v_empty,
    tile_begin, num_tiles, key_begin, seen_by_all, limit, hidden_end, first_key, scale,
    TILE_K: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, ROUNDED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Run the online softmax over the tiles of a unit. Returns acc, acc of the tail, weights, top,
    total and factor of 64 rows. acc must still be multiplied by the factor. The caller must wait
    for the last products, which still read the weights.
    """
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    PRODUCTS: gl.constexpr = 2 if TAIL > 0 else 1  # V products that run beside the scores
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    top = gl.full([64], float("-inf"), gl.float32, S_ROWS)
    total = gl.zeros([64], gl.float32, S_ROWS)
    acc = gl.zeros([64, MAIN], gl.float32, O_LAYOUT)
    tail = acc
    if TAIL > 0:
        tail = gl.zeros([64, TAIL], gl.float32, TAIL_LAYOUT)
    weights = gl.zeros([64, TILE_K], q.dtype, WEIGHTS)
    factor = total  # not used without rounded pages
    if ROUNDED:
        factor = gl.full([64], 1.0, gl.float32, S_ROWS)
    for i in range(tile_begin, tile_begin + num_tiles):
        stage = i % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        pending = _start_scores(q, q_tail, k_tiles, k_tails, stage, S_LAYOUT, TILE_K, TAIL > 0)
        # The first tile has no tile before it, but a special case would double the instructions.
        # So weights of zero are multiplied with whatever V is there, and the next product discards
        # the result.
        v_stage = (i + STAGES - 1) % STAGES
        if not ROUNDED:
            mbarrier.wait(v_full.index(v_stage), ((i - 1) // STAGES) & 1, pred=i > tile_begin)
        summing = warpgroup_mma(
            weights, v_tiles.index(v_stage), acc, use_acc=i > tile_begin + 1, is_async=True
        )
        if TAIL > 0:
            summing_tail = warpgroup_mma(
                weights, v_tails.index(v_stage), tail, use_acc=i > tile_begin + 1, is_async=True
            )
        if ROUNDED:
            k_unit, v_unit = units_of(units, stage, STAGES)
        scores = warpgroup_mma_wait(PRODUCTS, deps=(pending,))
        release(k_empty, stage)
        start = key_begin + (i - tile_begin) * TILE_K
        if ROUNDED:
            scores, left = capped(scores, scale * k_unit, SOFTCAP)
        else:
            scores, left = capped(scores, scale, SOFTCAP)
        scores = _mask(
            scores, start, seen_by_all, limit, hidden_end, first_key, TILE_K, HAS_WINDOW, S_LAYOUT
        )
        p, new_top, base = _weigh(scores, top, left)
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        if ROUNDED:
            # V is there since K is. But a wait is a loop, and the compiler does not move the wait
            # for products to before a loop; otherwise it would be before the softmax.
            mbarrier.wait(v_full.index(stage), (i // STAGES) & 1)
        if TAIL > 0:
            acc, tail, weights = warpgroup_mma_wait(0, deps=(summing, summing_tail, weights))
            tail = tail * gl.convert_layout(shrink, gl.SliceLayout(1, TAIL_LAYOUT))[:, None]
        else:
            acc, weights = warpgroup_mma_wait(0, deps=(summing, weights))
        release(v_empty, v_stage, i > tile_begin)
        if ROUNDED:
            shrink = shrink * (factor * (1.0 / v_unit))
            factor = gl.full([64], v_unit, gl.float32, S_ROWS)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(p.to(q.dtype), WEIGHTS)
    last = tile_begin + num_tiles - 1
    if not ROUNDED:
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(
        weights, v_tiles.index(last % STAGES), acc, use_acc=num_tiles > 1, is_async=True
    )
    if TAIL > 0:
        tail = warpgroup_mma(
            weights, v_tails.index(last % STAGES), tail, use_acc=num_tiles > 1, is_async=True
        )
    return acc, tail, weights, top, total, factor


@gluon.jit
def _ask(
    is_there, piece_ptr, entries_ptr, row_begin, row_end, kv_head, q_ptr, q_rows, q_tail,
    stride_q_token, stride_q_head, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Begin to copy the queries of a unit, if there is one."""
    if is_there:
        tokens = find_tokens(
            gl.load(piece_ptr + PIECE_FIRST_TOKEN), entries_ptr, row_begin, row_end, GROUP, 1, 1
        )
        start_queries(
            q_ptr, q_rows, q_tail, tokens, row_begin, row_end, kv_head,
            stride_q_token, stride_q_head, GROUP, 1, 1, HEAD_DIM,
        )  # fmt: skip


@gluon.jit
def _consume(
    q_tiles, q_tails, k_tiles, v_tiles, k_tails, v_tails, units, k_full, k_empty, v_full, v_empty,
    plan_ptr, q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    WHICH: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_K: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, PAGE_SIZE: gl.constexpr, BEFORE_OWN_PAGE: gl.constexpr,
    ROUNDED: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of every unit of this program. The next unit's fields and queries
    are fetched while this unit is computed; the first iteration only fetches.
    """
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    IS_WIDE: gl.constexpr = HEAD_DIM > MOST_DIMS_IN_REGISTERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TAIL if TAIL > 0 else 16, 16]
    )
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    if ROUNDED and q_tiles.dtype == gl.bfloat16:
        scale = scale * QUERY_FACTOR
    begin, end, next_ptr, next_kv_head = _share(plan_ptr)
    pieces_ptr = plan_ptr + gl.load(plan_ptr + HEADER_LARGE_PIECES)
    order_ptr = plan_ptr + gl.load(plan_ptr + HEADER_LARGE_ORDER)
    entries_ptr = plan_ptr + gl.load(plan_ptr + HEADER_ENTRIES)
    num_entries = gl.load(plan_ptr + HEADER_NUM_ENTRIES)
    q_rows = q_tiles.index(WHICH)
    q_tail_rows = q_rows
    if TAIL > 0:
        q_tail_rows = q_tails.index(WHICH)
    kv_head = 0
    entry = 0
    row_begin = 0
    row_end = 0
    key_begin = 0
    key_end = 0
    first_limit = 0
    stretch = 0
    tile = 0
    for index in range(begin - 1, end):
        (
            next_entry, next_row_begin, next_row_end, next_key_begin, next_key_end, next_limit,
            next_stretch,
        ) = read_piece(next_ptr)  # fmt: skip
        unit = gl.load(order_ptr + gl.minimum(index + 2, end - 1))
        first_row = next_row_begin + WHICH * 64
        await_queries()
        if IS_WIDE:
            fence_async_shared()  # before tensor cores read the queries
            barrier()
            q = q_rows
            q_tail = q_rows
        else:
            q = q_rows.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            if ROUNDED and q.dtype == gl.bfloat16:
                q = (q.to(gl.float32) * (1.0 / QUERY_FACTOR)).to(gl.float16)
            q_tail = q
            if TAIL > 0:
                q_tail = q_tail_rows.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            barrier()
            _ask(
                index + 1 < end, next_ptr, entries_ptr + next_entry, first_row, next_row_end,
                next_kv_head, q_ptr, q_rows, q_tail_rows, stride_q_token, stride_q_head,
                GROUP, HEAD_DIM,
            )  # fmt: skip
        row_begin += WHICH * 64
        num_tiles = gl.where(index < begin, 0, num_tiles_of(key_begin, key_end, TILE_K))
        if row_begin < row_end:
            rows, _ = rows_of(row_begin, kv_head, 64, GROUP, 1, 1, gl.SliceLayout(1, S_LAYOUT))
            last = last_seen(first_limit + rows // GROUP, PAGE_SIZE, BEFORE_OWN_PAGE)
            limit = gl.minimum(last, key_end - 1)
            last = last_seen(first_limit + row_begin // GROUP, PAGE_SIZE, BEFORE_OWN_PAGE)
            seen_by_all = gl.minimum(key_end, last + 1)
            first_key = limit
            hidden_end = 0
            if HAS_WINDOW:
                first_key = find_first_keys(entries_ptr + entry, num_entries, rows, row_end, GROUP)
                hidden_end = gl.max(first_key, 0)
            acc, tail, weights, top, total, factor = _attend(
                q, q_tail, k_tiles, v_tiles, k_tails, v_tails, units,
                k_full, k_empty, v_full, v_empty,
                tile, num_tiles, key_begin, seen_by_all, limit, hidden_end, first_key, scale,
                TILE_K, HEAD_DIM, STAGES, HAS_WINDOW, SOFTCAP, ROUNDED,
                S_LAYOUT, O_LAYOUT, TAIL_LAYOUT,
            )  # fmt: skip
            if IS_WIDE:
                _ask(
                    index + 1 < end, next_ptr, entries_ptr + next_entry, first_row, next_row_end,
                    next_kv_head, q_ptr, q_rows, q_tail_rows, stride_q_token, stride_q_head,
                    GROUP, HEAD_DIM,
                )  # fmt: skip
            token, slot, head, is_row, is_whole = find_rows(
                entries_ptr + entry, num_entries, row_begin, row_end, kv_head, 64, GROUP, 1, O_ROWS
            )
            share, lse = shares_of(top, total, O_ROWS)
            if ROUNDED:
                share = share * gl.convert_layout(factor, O_ROWS)
            if TAIL > 0:
                acc, tail, weights = warpgroup_mma_wait(0, deps=(acc, tail, weights))
            else:
                acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            release(v_empty, (tile + num_tiles - 1) % STAGES)
            write_rows(
                acc, tail, share, lse, token, slot, head, is_row, is_whole, stretch,
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
                KV_HEADS * GROUP, HEAD_DIM, HAS_LSE, O_LAYOUT, TAIL_LAYOUT,
            )  # fmt: skip
        else:  # the other group has all rows
            for i in range(tile, tile + num_tiles):
                mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
                release(k_empty, i % STAGES)
                mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
                release(v_empty, i % STAGES)
            if IS_WIDE:
                _ask(
                    index + 1 < end, next_ptr, entries_ptr + next_entry, first_row, next_row_end,
                    next_kv_head, q_ptr, q_rows, q_tail_rows, stride_q_token, stride_q_head,
                    GROUP, HEAD_DIM,
                )  # fmt: skip
        tile += num_tiles
        kv_head = next_kv_head
        entry = next_entry
        row_begin = next_row_begin
        row_end = next_row_end
        key_begin = next_key_begin
        key_end = next_key_end
        first_limit = next_limit
        stretch = next_stretch
        next_ptr = pieces_ptr + (unit // KV_HEADS) * PIECE_INTS
        next_kv_head = unit % KV_HEADS
    await_queries()


@gluon.jit
def _large_units_kernel(
    q_ptr, k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
    out_ptr, lse_ptr, plan_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale, num_stages,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    TILE_K: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, BEFORE_OWN_PAGE: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """Attend to the large units of this program. `scale` includes log2(e), SOFTCAP does not; a
    SOFTCAP of 0 means none. BEFORE_OWN_PAGE: rows of a causal span see the pages before their own
    one. ROUNDED: pages are in fp8, with scales (`widen.py`).
    """
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    gdc_wait()  # the previous kernel may have written the plan, the queries or the pages
    gdc_launch_dependents()
    # The producer's first unit; loaded while barriers are set up.
    share_ptr = share_of(plan_ptr)
    begin = gl.load(share_ptr + SHARE_LARGE_BEGIN)
    end = gl.load(share_ptr + SHARE_LARGE_END)
    kv_head = gl.load(share_ptr + (SHARE_FIRST_LARGE + PIECE_KV_HEAD))
    page_at = gl.load(share_ptr + (SHARE_FIRST_LARGE + PIECE_PAGES_AT))
    key_begin = gl.load(share_ptr + (SHARE_FIRST_LARGE + PIECE_KEY_BEGIN))
    key_end = gl.load(share_ptr + (SHARE_FIRST_LARGE + PIECE_KEY_END))
    pieces_at = gl.load(plan_ptr + HEADER_LARGE_PIECES)
    pages_at = gl.load(plan_ptr + HEADER_PAGE_IDS)
    order_at = gl.load(plan_ptr + HEADER_LARGE_ORDER)
    dtype: gl.constexpr = gl.float16 if ROUNDED else k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_K, MAIN], TILES)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_K, MAIN], TILES)
    q_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, 64, MAIN], TILES)
    k_tails: gl.constexpr = None
    v_tails: gl.constexpr = None
    q_tails: gl.constexpr = None
    if TAIL > 0:
        k_tails = gl.allocate_shared_memory(dtype, [STAGES, TILE_K, TAIL], tiles_of(TAIL))
        v_tails = gl.allocate_shared_memory(dtype, [STAGES, TILE_K, TAIL], tiles_of(TAIL))
        q_tails = gl.allocate_shared_memory(dtype, [2, 64, TAIL], tiles_of(TAIL))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in range(0, num_stages):  # not a constant, which would unroll the loop
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(v_full.index(STAGES), count=1)
    if begin == end:
        return  # early, since small units wait for the multiprocessor
    if ROUNDED:
        IN_CODES: gl.constexpr = codes_of(HEAD_DIM, 2)
        PAGES: gl.constexpr = TILE_K // PAGE_SIZE
        SCALE_SHAPE: gl.constexpr = [CODES_STAGES * PAGES, 1, SCALE_LANES]
        k_codes = gl.allocate_shared_memory(k_desc.dtype, [CODES_STAGES, TILE_K, MAIN], IN_CODES)
        v_codes = gl.allocate_shared_memory(k_desc.dtype, [CODES_STAGES, TILE_K, MAIN], IN_CODES)
        k_scales = gl.allocate_shared_memory(gl.float32, SCALE_SHAPE, SCALES)
        v_scales = gl.allocate_shared_memory(gl.float32, SCALE_SHAPE, SCALES)
        units = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], ROW)
        codes_full = gl.allocate_shared_memory(gl.int64, [CODES_STAGES, 1], BARRIER)
        codes_empty = gl.allocate_shared_memory(gl.int64, [CODES_STAGES, 1], BARRIER)
        for i in range(0, num_stages + (CODES_STAGES - STAGES)):
            mbarrier.init(codes_full.index(i), count=1)
            mbarrier.init(codes_empty.index(i), count=1)
        gl.warp_specialize(
            [
                (_consume, (
                    q_tiles, q_tails, k_tiles, v_tiles, k_tails, v_tails, units,
                    k_full, k_empty, k_full, v_empty, plan_ptr,
                    q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                    0, KV_HEADS, GROUP, TILE_K, HEAD_DIM, STAGES, HAS_LSE, HAS_WINDOW, SOFTCAP,
                    PAGE_SIZE, BEFORE_OWN_PAGE, ROUNDED,
                )),
                (_consume, (
                    q_tiles, q_tails, k_tiles, v_tiles, k_tails, v_tails, units,
                    k_full, k_empty, k_full, v_empty, plan_ptr,
                    q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                    1, KV_HEADS, GROUP, TILE_K, HEAD_DIM, STAGES, HAS_LSE, HAS_WINDOW, SOFTCAP,
                    PAGE_SIZE, BEFORE_OWN_PAGE, ROUNDED,
                )),
                (widen_tiles, (
                    k_codes, v_codes, k_scales, v_scales, codes_full, codes_empty,
                    k_tiles, v_tiles, units, k_full, k_empty, v_empty, plan_ptr, begin, end,
                    KV_HEADS, GROUP, PAGE_SIZE, TILE_K, HEAD_DIM, CODES_STAGES, STAGES,
                    BEFORE_OWN_PAGE,
                )),
                (bring_codes, (
                    k_desc, v_desc, k_scales_desc, v_scales_desc,
                    k_codes, v_codes, k_scales, v_scales, codes_full, codes_empty,
                    plan_ptr, begin, end, kv_head, page_at, key_begin, key_end,
                    KV_HEADS, PAGE_SIZE, TILE_K, HEAD_DIM, CODES_STAGES,
                )),
            ],
            [NUM_WARPS_OF_CONSUMER, NUM_WARPS_OF_CONSUMER, 1],
            [CONSUMER_REGISTERS_ROUNDED, WIDENER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    q_tiles, q_tails, k_tiles, v_tiles, k_tails, v_tails, None,
                    k_full, k_empty, v_full, v_empty, plan_ptr,
                    q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                    0, KV_HEADS, GROUP, TILE_K, HEAD_DIM, STAGES, HAS_LSE, HAS_WINDOW, SOFTCAP,
                    PAGE_SIZE, BEFORE_OWN_PAGE, ROUNDED,
                )),
                (_consume, (
                    q_tiles, q_tails, k_tiles, v_tiles, k_tails, v_tails, None,
                    k_full, k_empty, v_full, v_empty, plan_ptr,
                    q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                    1, KV_HEADS, GROUP, TILE_K, HEAD_DIM, STAGES, HAS_LSE, HAS_WINDOW, SOFTCAP,
                    PAGE_SIZE, BEFORE_OWN_PAGE, ROUNDED,
                )),
                (_produce, (
                    k_desc, v_desc, k_tail_desc, v_tail_desc, k_tiles, v_tiles, k_tails, v_tails,
                    k_full, k_empty, v_full, v_empty, plan_ptr,
                    begin, end, kv_head, page_at, key_begin, key_end, pieces_at, pages_at, order_at,
                    KV_HEADS, PAGE_SIZE, TILE_K, HEAD_DIM, STAGES,
                )),
            ],
            [NUM_WARPS_OF_CONSUMER, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
