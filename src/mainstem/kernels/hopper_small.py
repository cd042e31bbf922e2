# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: small units, which are bound by memory.

A program has a producer, one warp that brings tiles, and a consumer, four warps that compute. The
producer runs ahead from unit to unit, so reading does not stop between two of them. A page holds
its KV heads one after the other, so the keys of FOLD heads of a page are one block of memory; a
tile is 64 (head, key) pairs, of one such block or of several pages. A row takes of a tile's scores
those of its own head.

A program has its share of the units, and then draws others from the pool (`pooling.py`) until there
are none; one without a share draws at once, or not at all, as the plan says. The producer draws,
while the last tiles it has asked for are on their way, and leaves a note for the consumer.

Where there are large units it runs behind their kernel, takes multiprocessors as that one leaves
them, and waits for it before it ends.
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

from mainstem.kernels.hopper_rows import (
    PANEL,
    TILES,
    as_tiles,
    await_queries,
    barrier,
    find_rows,
    find_tokens,
    load_box,
    num_tiles_of,
    read_piece,
    release,
    rows_of,
    share_of,
    shares_of,
    start_queries,
    write_rows,
)

LANES = gl.constexpr(64)  # keys x heads of a tile
NUM_WARPS = 4
MAX_REGISTERS = 128  # two programs on a multiprocessor, of two groups of warps each
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _draw(tickets_ptr, num_pooled, num_drawers):
    """The next unit of the pool, or -1 where none is left.

    Who draws does so until there is none, so the last to do so is known by its ticket, and makes
    the pool ready for the next launch.
    """
    drawn = -1
    if num_pooled > 0:
        ticket = gl.atomic_add(tickets_ptr, 1, sem="relaxed")
        if ticket == num_pooled + num_drawers - 1:
            gl.store(tickets_ptr, 0)
        if ticket < num_pooled:
            drawn = ticket
    return drawn


@gluon.jit
def _pooled_ptr(plan_ptr, drawn):
    """Where it stands what a unit of the pool is; the first one's place if it is none."""
    return plan_ptr + gl.load(plan_ptr + 10) + gl.maximum(drawn, 0) * 12


@gluon.jit
def _read_keys(unit_ptr):
    """What the producer needs of a unit: KV head, first page id; where page ids begin, keys."""
    return (
        gl.load(unit_ptr + 10), gl.load(unit_ptr + 9),
        gl.load(unit_ptr + 3), gl.load(unit_ptr + 4), gl.load(unit_ptr + 5),
    )  # fmt: skip


@gluon.jit
def _bring(
    desc, boxes, full, empty, stage, was_read, page, pages_ptr, at, last_page, kv_head,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A tile of K or of V, from its first page and those that follow, into a stage that has been
    read; past the span's last page, that one again.
    """
    ACROSS: gl.constexpr = HEAD_DIM // PANEL
    arrived = full.index(stage)
    mbarrier.wait(empty.index(stage), was_read)
    mbarrier.expect(arrived, LANES * HEAD_DIM * 2)
    for j in gl.static_range(PAGES):
        if j > 0:
            page = gl.load(pages_ptr + gl.minimum(at + j, last_page))
        row = (page * KV_HEADS + kv_head) * PAGE_SIZE
        for panel in gl.static_range(ACROSS):
            box = boxes.index((stage * ACROSS + panel) * PAGES + j)
            load_box(desc, [row, panel * PANEL], arrived, box)


@gluon.jit
def _produce(
    k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, notes, noted, plan_ptr,
    index, end, next_unit, kv_head, page, page_at, key_begin, key_end,
    num_pooled, num_drawers, tickets_ptr,
    KV_HEADS: gl.constexpr, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring K and V of all units of this program; draw those that follow its share, and note them
    down for the consumer.
    """
    UNITS: gl.constexpr = KV_HEADS // FOLD  # of a piece
    BLOCK: gl.constexpr = FOLD * PAGE_SIZE
    PAGES: gl.constexpr = LANES // BLOCK
    KEYS: gl.constexpr = PAGES * PAGE_SIZE
    gl.static_assert(PAGES * BLOCK == LANES)
    ACROSS: gl.constexpr = HEAD_DIM // PANEL
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    NOTES: gl.constexpr = 2 * STAGES
    k_boxes = as_tiles(k_tiles, STAGES * ACROSS * PAGES, BLOCK, PANEL)
    v_boxes = as_tiles(v_tiles, STAGES * ACROSS * PAGES, BLOCK, PANEL)
    pieces_ptr = plan_ptr + gl.load(plan_ptr)
    order_ptr = plan_ptr + gl.load(plan_ptr + 9)
    page_ids_ptr = plan_ptr + gl.load(plan_ptr + 4)
    step = 0
    num_noted = 0
    is_there = True
    while is_there:
        # Which unit comes after the next is fetched two ahead, all else one ahead.
        next_ptr = pieces_ptr + (next_unit // UNITS) * 12
        next_kv_head = (next_unit % UNITS) * FOLD
        next_page_at = gl.load(next_ptr + 3)
        next_key_begin = gl.load(next_ptr + 4)
        next_key_end = gl.load(next_ptr + 5)
        next_first_page = gl.load(next_ptr + 9)
        next_unit = gl.load(order_ptr + gl.maximum(gl.minimum(index + 2, end - 1), 0))
        pages_ptr = page_ids_ptr + page_at
        last_page = gl.maximum(key_end - 1, 0) // PAGE_SIZE
        first_page = key_begin // PAGE_SIZE
        for i in range(0, num_tiles_of(key_begin, key_end, KEYS)):
            at = first_page + i * PAGES
            next_page = gl.load(pages_ptr + gl.minimum(at + PAGES, last_page))
            stage = step % STAGES
            was_read = (step // STAGES + 1) & 1
            _bring(
                k_desc, k_boxes, k_full, k_empty, stage, was_read, page, pages_ptr, at, last_page,
                kv_head, KV_HEADS, PAGE_SIZE, PAGES, HEAD_DIM,
            )  # fmt: skip
            _bring(
                v_desc, v_boxes, v_full, v_empty, stage, was_read, page, pages_ptr, at, last_page,
                kv_head, KV_HEADS, PAGE_SIZE, PAGES, HEAD_DIM,
            )  # fmt: skip
            page = next_page
            step += 1
        index += 1
        page = next_first_page
        if index >= end:
            drawn = _draw(tickets_ptr, num_pooled, num_drawers)
            note = num_noted % NOTES
            notes.index(note).store(gl.full([1], drawn, gl.int32, NOTE))
            mbarrier.arrive(noted.index(note), count=1)
            num_noted += 1
            is_there = drawn >= 0
            next_kv_head, page, next_page_at, next_key_begin, next_key_end = _read_keys(
                _pooled_ptr(plan_ptr, drawn)
            )
        kv_head = next_kv_head
        page_at = next_page_at
        key_begin = next_key_begin
        key_end = next_key_end


@gluon.jit
def _keys_of(FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the pairs of a tile, which key after the tile's first."""
    lanes = gl.arange(0, LANES, LAYOUT)
    return lanes // (FOLD * PAGE_SIZE) * PAGE_SIZE + lanes % PAGE_SIZE


@gluon.jit
def _clear(tile, num_keys, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Zero the rows of a tile of V past the last key. Slots there hold anything, and zero weight
    times NaN would still be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    is_key = _keys_of(FOLD, PAGE_SIZE, gl.SliceLayout(1, LAYOUT)) < num_keys
    keys = tile.load(LAYOUT)
    tile.store(gl.where(is_key[:, None], keys, 0.0).to(keys.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend(
    q_rows, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step,
    row_begin, key_begin, key_end, first_limit, scale,
    GROUP: gl.constexpr, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of a unit: acc, top and total of its 64 rows, once the last
    product is waited for.
    """
    PAGES: gl.constexpr = LANES // (FOLD * PAGE_SIZE)
    KEYS: gl.constexpr = LANES // FOLD
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    lanes = gl.arange(0, LANES, gl.SliceLayout(0, S_LAYOUT))
    rows, head_of_row = rows_of(row_begin, 0, 1, FOLD, S_ROWS)
    is_same_head = head_of_row[:, None] == (lanes // PAGE_SIZE % FOLD)[None, :]
    limit = gl.minimum(first_limit + rows // GROUP, key_end - 1)
    seen_by_all = gl.minimum(key_end, first_limit + row_begin // GROUP + 1)
    top = gl.full([64], float("-inf"), gl.float32, S_ROWS)
    total = gl.zeros([64], gl.float32, S_ROWS)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    weights = gl.zeros([64, LANES], q_rows.dtype, WEIGHTS)
    num_tiles = num_tiles_of(key_begin, key_end, KEYS)
    for i in range(0, num_tiles):
        start = key_begin + i * KEYS
        stage = (step + i) % STAGES
        mbarrier.wait(k_full.index(stage), ((step + i) // STAGES) & 1)
        k = k_tiles.index(stage).permute((1, 0))
        nothing = gl.zeros([64, LANES], gl.float32, S_LAYOUT)
        pending = warpgroup_mma(q_rows, k, nothing, use_acc=False, is_async=True)
        # The first tile has none before it: it multiplies whatever there is, which the second
        # forgets.
        v_stage = (step + i + STAGES - 1) % STAGES
        mbarrier.wait(v_full.index(v_stage), ((step + i - 1) // STAGES) & 1, pred=i > 0)
        summing = warpgroup_mma(weights, v_tiles.index(v_stage), acc, use_acc=i > 1, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        release(k_empty, stage)
        if start + KEYS > seen_by_all:
            keys = start + _keys_of(FOLD, PAGE_SIZE, gl.SliceLayout(0, S_LAYOUT))
            scores = gl.where(keys[None, :] <= limit[:, None], scores, float("-inf"))
        # Those of its own head, the others' being 0: fewer exponents to take, and NaN stays NaN.
        scores = gl.where(is_same_head, scores, 0.0)
        own = gl.sum(scores.reshape([64, PAGES, FOLD, PAGE_SIZE]), 2)
        new_top = gl.convert_layout(gl.max(gl.max(own, 2), 1), S_ROWS)
        new_top = gl.maximum(top, new_top * scale)
        # A row that has seen no key yet: keep the exponents at -inf - 0 instead of -inf + inf.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        own_base = gl.convert_layout(base, gl.SliceLayout(1, gl.SliceLayout(2, own.type.layout)))
        p = gl.exp2(own * scale - own_base[:, None, None])
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.convert_layout(gl.sum(gl.sum(p, 2), 1), S_ROWS)
        top = new_top
        all_heads = gl.expand_dims(p, 2).broadcast_to([64, PAGES, FOLD, PAGE_SIZE])
        new_weights = gl.convert_layout(all_heads.reshape([64, LANES]), S_LAYOUT)
        new_weights = gl.where(is_same_head, new_weights, 0.0).to(q_rows.dtype)
        acc, weights = warpgroup_mma_wait(0, deps=(summing, weights))
        release(v_empty, v_stage, i > 0)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(new_weights, WEIGHTS)
    last = num_tiles - 1
    stage = (step + last) % STAGES
    mbarrier.wait(v_full.index(stage), ((step + last) // STAGES) & 1)
    if key_begin + num_tiles * KEYS > key_end:
        _clear(v_tiles.index(stage), key_end - key_begin - last * KEYS, FOLD, PAGE_SIZE)
    summing = warpgroup_mma(weights, v_tiles.index(stage), acc, use_acc=last > 0, is_async=True)
    return summing, top, total


@gluon.jit
def _consume(
    q_rows, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, notes, noted, plan_ptr,
    unit_ptr, index, end, next_unit, q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, FOLD: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """All units of this program."""
    UNITS: gl.constexpr = KV_HEADS // FOLD  # of a piece
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    NOTES: gl.constexpr = 2 * STAGES
    pieces_ptr = plan_ptr + gl.load(plan_ptr)
    order_ptr = plan_ptr + gl.load(plan_ptr + 9)
    entries_ptr = plan_ptr + gl.load(plan_ptr + 2)
    num_entries = gl.load(plan_ptr + 3)
    entry, row_begin, row_end, key_begin, key_end, first_limit, stretch = read_piece(unit_ptr)
    kv_head = gl.load(unit_ptr + 10)
    tokens = find_tokens(unit_ptr, entries_ptr + entry, row_begin, row_end, GROUP, FOLD)
    start_queries(
        q_ptr, q_rows, tokens, row_begin, row_end, kv_head,
        stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM,
    )  # fmt: skip
    step = 0
    num_noted = 0
    is_there = True
    while is_there:
        # Which unit comes after the next is fetched two ahead, all else one ahead.
        next_ptr = pieces_ptr + (next_unit // UNITS) * 12
        next_kv_head = (next_unit % UNITS) * FOLD
        (
            next_entry, next_row_begin, next_row_end, next_key_begin, next_key_end, next_limit,
            next_stretch,
        ) = read_piece(next_ptr)  # fmt: skip
        next_unit = gl.load(order_ptr + gl.maximum(gl.minimum(index + 2, end - 1), 0))
        next_tokens = find_tokens(
            next_ptr, entries_ptr + next_entry, next_row_begin, next_row_end, GROUP, FOLD
        )
        token, slot, head, is_row, is_whole = find_rows(
            entries_ptr + entry, num_entries, row_begin, row_end, kv_head, GROUP, FOLD, O_ROWS
        )
        await_queries()
        summing, top, total = _attend(
            q_rows, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step,
            row_begin, key_begin, key_end, first_limit, scale,
            GROUP, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        index += 1
        if index >= end:
            note = num_noted % NOTES
            mbarrier.wait(noted.index(note), (num_noted // NOTES) & 1)
            drawn = gl.max(notes.index(note).load(NOTE), 0)
            num_noted += 1
            is_there = drawn >= 0
            unit_ptr = _pooled_ptr(plan_ptr, drawn)
            next_kv_head = gl.load(unit_ptr + 10)
            (
                next_entry, next_row_begin, next_row_end, next_key_begin, next_key_end, next_limit,
                next_stretch,
            ) = read_piece(unit_ptr)  # fmt: skip
            next_tokens = find_tokens(
                unit_ptr, entries_ptr + next_entry, next_row_begin, next_row_end, GROUP, FOLD
            )
        share, lse = shares_of(top, total, O_ROWS)
        step += num_tiles_of(key_begin, key_end, LANES // FOLD)
        acc = warpgroup_mma_wait(0, deps=(summing,))
        release(v_empty, (step - 1) % STAGES)
        if is_there:
            start_queries(
                q_ptr, q_rows, next_tokens, next_row_begin, next_row_end, next_kv_head,
                stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM,
            )  # fmt: skip
        write_rows(
            acc * share[:, None], lse, token, slot, head, is_row, is_whole, stretch,
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
            KV_HEADS * GROUP, HEAD_DIM, HAS_LSE, O_LAYOUT,
        )  # fmt: skip
        kv_head = next_kv_head
        entry = next_entry
        row_begin = next_row_begin
        row_end = next_row_end
        key_begin = next_key_begin
        key_end = next_key_end
        first_limit = next_limit
        stretch = next_stretch
    await_queries()


@gluon.jit
def _wait_for_large(IS_FIRST: gl.constexpr):
    if not IS_FIRST and gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def _small_units_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, plan_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale, tickets_ptr,
    num_barriers,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, FOLD: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr, IS_FIRST: gl.constexpr,
):  # fmt: skip
    """Attend to the small units of this program. `scale` includes log2(e).

    Behind the kernel of the large units (not IS_FIRST) it need not wait at its begin: that one lets
    it start behind its own wait. Whoever waits for this kernel must wait for that one, too, so one
    program does at its end.
    """
    if IS_FIRST:
        gdc_wait()  # the kernel ahead may have written the plan, the queries or the pages
    gdc_launch_dependents()
    # What the producer begins with; it comes while barriers are made.
    share_ptr = share_of(plan_ptr)
    unit_ptr = share_ptr + 20
    begin = gl.load(share_ptr + 2)
    end = gl.load(share_ptr + 3)
    next_unit = gl.load(share_ptr + 5)
    kv_head, page, page_at, key_begin, key_end = _read_keys(unit_ptr)
    num_pooled = gl.load(plan_ptr + 11)
    num_drawers = gl.load(plan_ptr + 12)
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, HEAD_DIM], TILES)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, HEAD_DIM], TILES)
    q_rows = gl.allocate_shared_memory(dtype, [64, HEAD_DIM], TILES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # The producer is STAGES tiles ahead at most, so as many units, and draws one more: that many
    # notes are enough, and twice STAGES is no less.
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], ROW)
    noted = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    # Not a constant number of times, or it would be unrolled: instructions that run once are
    # fetched from memory all the same.
    for i in range(0, num_barriers):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    for i in range(0, 2 * num_barriers):
        mbarrier.init(noted.index(i), count=1)
    has_units = begin < end
    if not has_units:
        drawn = -1
        if num_drawers == gl.num_programs(0):
            drawn = _draw(tickets_ptr, num_pooled, num_drawers)
        has_units = drawn >= 0
        unit_ptr = _pooled_ptr(plan_ptr, drawn)
        kv_head, page, page_at, key_begin, key_end = _read_keys(unit_ptr)
        fence_async_shared()  # drawing takes some shared memory, where copies might come to lie
    if not has_units:
        _wait_for_large(IS_FIRST)
        return
    gl.warp_specialize(
        [
            (_consume, (
                q_rows, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, notes, noted, plan_ptr,
                unit_ptr, begin, end, next_unit,
                q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                KV_HEADS, GROUP, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, HAS_LSE,
            )),
            (_produce, (
                k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, notes, noted,
                plan_ptr, begin, end, next_unit, kv_head, page, page_at, key_begin, key_end,
                num_pooled, num_drawers, tickets_ptr,
                KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
    _wait_for_large(IS_FIRST)
