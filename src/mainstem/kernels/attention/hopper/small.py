# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: small units, which are bound by memory.

A program has a producer, one warp that copies tiles, and a consumer, four warps that compute. The
producer runs ahead from unit to unit, so reading does not stop between two units. A tile is 64
(head, key) pairs: 64 / FOLD keys of each of FOLD heads. A page holds its KV heads one after the
other. If a page has 64 / FOLD slots, a tile is one block of memory; otherwise it has one block per
head, which is a part of a page or several pages. Each warp takes the rows of one head, or some of
them, and only that head's keys, so no query is multiplied with keys of another head. If there are
fewer heads than warps, and the other warps are not needed for rows, a head's keys are split into
SPLITS parts. Each part has its own softmax; parts are merged when the unit ends.

A program computes its share of the units, then claims others from the work queue (`assign.py`)
until the queue is empty. A program without a share claims at once. The producer claims a unit some
tiles in advance, since a claim takes a microsecond. It leaves a note about every unit after the
first for the consumer, which requests the unit's queries before the previous unit ends.

In a step with large units this kernel runs after their kernel, takes over multiprocessors as they
become free, and does not end before their kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainstem.kernels.attention.hopper.codes import (
    QUERY_FACTOR,
    SCALE_LANES,
    SCALES,
    codes_of,
    key_operand,
    natural_rows,
    query_operand,
    rows_by_dims,
    section_scales,
    unit_of,
    value_operand,
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
    share_of,
    shares_of,
    start_queries,
    write_rows,
)
from mainstem.kernels.attention.hopper.small_reads import LANES, produce, read_keys
from mainstem.kernels.attention.hopper.splits import finish_sums, sums_of
from mainstem.kernels.attention.triton.layout import (
    HEADER_ENTRIES,
    HEADER_NUM_ENTRIES,
    HEADER_NUM_QUEUED,
    HEADER_QUEUE,
    NOTE_HAS_UNIT,
    NOTE_INTS,
    PIECE_ENTRY,
    PIECE_FIRST_LIMIT,
    PIECE_FIRST_TOKEN,
    PIECE_INTS,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_KV_HEAD,
    PIECE_ROW_BEGIN,
    PIECE_ROW_END,
    PIECE_STRETCH,
    SHARE_FIRST_SMALL,
    SHARE_SECOND_SMALL,
    SHARE_SMALL_BEGIN,
    SHARE_SMALL_END,
)
from mainstem.kernels.hopper import (
    TILES,
    barrier,
    claimed_unit,
    finished,
    release,
    reshaped,
    take_ticket,
    tiles_of,
)

ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
NUM_WARPS = 4
PRODUCER_REGISTERS = gl.constexpr(40)


def max_registers(programs_per_sm: int) -> int:
    """Registers of a thread. A program takes those of eight warps: the producer counts as four."""
    return 256 // programs_per_sm - (programs_per_sm == 1)


@gluon.jit
def _noted(fields, slot, column):
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.index(slot * NOTE_INTS + column).load(NOTE), 0)


@gluon.jit
def _add_scores(scores, q, k_tile, LAYOUT: gl.constexpr):
    return mma_v2(q, k_tile.permute((0, 2, 1)).load(LAYOUT), scores)


@gluon.jit
def _is_cut(start, seen_by_all, hidden_end, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """Whether some row does not see all keys of a tile."""
    if HAS_WINDOW:
        return (start + KEYS > seen_by_all) | (start < hidden_end)
    else:
        return start + KEYS > seen_by_all


@gluon.jit
def _mask(
    scores, start, limit, first_key,
    SPLITS: gl.constexpr, HAS_WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """[section, row, key]: -inf where a row does not see the key."""
    SECTION_KEYS: gl.constexpr = scores.shape[2]
    lanes = gl.arange(0, SECTION_KEYS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    keys = (start + lanes)[None, None, :]
    if SPLITS > 1:
        sections = gl.arange(0, scores.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        keys = keys + (sections % SPLITS * SECTION_KEYS)[:, None, None]
    is_seen = keys <= limit[None, :, None]
    if HAS_WINDOW:
        is_seen = is_seen & (keys >= first_key[None, :, None])
    return gl.where(is_seen, scores, float("-inf"))


@gluon.jit
def _clear_tile(tile, num_keys, FOLD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    is_key = gl.arange(0, LANES, gl.SliceLayout(1, LAYOUT)) % (LANES // FOLD) < num_keys
    keys = tile.load(LAYOUT)
    tile.store(gl.where(is_key[:, None], keys, 0.0).to(keys.dtype))


@gluon.jit
def _clear(tiles, tails, stage, num_keys, FOLD: gl.constexpr, HAS_TAIL: gl.constexpr):
    """Set the rows of a tile of V past the last key to zero. Slots there may hold anything, and
    zero weight times NaN would still be NaN."""
    _clear_tile(tiles.index(stage), num_keys, FOLD)
    if HAS_TAIL:
        _clear_tile(tails.index(stage), num_keys, FOLD)
    fence_async_shared()  # before other keys are copied there
    barrier()


@gluon.jit
def _consume(  # noqa: PLR0912  # most branches are decided when compiled
    q_rows, q_tail_rows, k_tiles, v_tiles, k_tails, v_tails, k_scales, v_scales, sums, tail_sums,
    full, empty, notes, noted, plan_ptr,
    unit_ptr, q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, FOLD: gl.constexpr, SPLITS: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, PAGE_SIZE: gl.constexpr, BEFORE_OWN_PAGE: gl.constexpr,
    ROUNDED: gl.constexpr,
):  # fmt: skip
    """Compute all units of this program: the online softmax over the tiles of each."""
    NOTES: gl.constexpr = 2 * STAGES
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    KEYS: gl.constexpr = LANES // FOLD
    SECTIONS: gl.constexpr = FOLD * SPLITS
    SECTION_KEYS: gl.constexpr = LANES // SECTIONS
    ROWS: gl.constexpr = 64 // SECTIONS
    # [section, row, key or dim]; a warp has 16 rows of one section.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [SECTIONS, 4 // SECTIONS, 1], [1, 16, 8]
    )
    FIRST: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    HEAD_ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    # Finished rows: 64, and a warp has 16 of one section; fewer after splits are merged.
    COUNT: gl.constexpr = 64 // SPLITS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    OF_SUMS: gl.constexpr = natural_rows(MAIN) if ROUNDED else MMA
    O_LAYOUT: gl.constexpr = OF_SUMS if SPLITS == 1 else finished(COUNT, MAIN, False)
    TAIL_LAYOUT: gl.constexpr = MMA if SPLITS == 1 or TAIL == 0 else finished(COUNT, TAIL, False)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    entries_ptr = plan_ptr + gl.load(plan_ptr + HEADER_ENTRIES)
    num_entries = gl.load(plan_ptr + HEADER_NUM_ENTRIES)
    fields = reshaped(notes, [NOTES * NOTE_INTS, 1], ROW)
    queries = reshaped(q_rows, [SECTIONS, ROWS, MAIN], tiles_of(MAIN, 3))
    IN_TILES: gl.constexpr = codes_of(MAIN) if ROUNDED else tiles_of(MAIN, 3)
    k_folded = reshaped(k_tiles, [STAGES, SECTIONS, SECTION_KEYS, MAIN], IN_TILES)
    v_folded = reshaped(v_tiles, [STAGES, SECTIONS, SECTION_KEYS, MAIN], IN_TILES)
    OF_SECTIONS: gl.constexpr = gl.SliceLayout(1, HEAD_ROWS)
    PAGES: gl.constexpr = max(KEYS // PAGE_SIZE, 1)
    # What the products are made of: codes are multiplied in fp16.
    OPERAND: gl.constexpr = gl.float16 if ROUNDED else q_rows.dtype
    FACTOR: gl.constexpr = QUERY_FACTOR if q_rows.dtype == gl.bfloat16 else 1.0
    if TAIL > 0:
        tail_queries = reshaped(q_tail_rows, [SECTIONS, ROWS, TAIL], tiles_of(TAIL, 3))
        k_tail_folded = reshaped(k_tails, [STAGES, SECTIONS, SECTION_KEYS, TAIL], tiles_of(TAIL, 3))
        v_tail_folded = reshaped(v_tails, [STAGES, SECTIONS, SECTION_KEYS, TAIL], tiles_of(TAIL, 3))
    entry, row_begin, row_end, key_begin, key_end, first_limit, stretch = read_piece(unit_ptr)
    kv_head = gl.load(unit_ptr + PIECE_KV_HEAD)
    tokens = find_tokens(
        gl.load(unit_ptr + PIECE_FIRST_TOKEN), entries_ptr + entry, row_begin, row_end,
        GROUP, FOLD, SPLITS,
    )  # fmt: skip
    start_queries(
        q_ptr, q_rows, q_tail_rows, tokens, row_begin, row_end, kv_head,
        stride_q_token, stride_q_head, GROUP, FOLD, SPLITS, HEAD_DIM,
    )  # fmt: skip
    lanes = gl.arange(0, ROWS, gl.SliceLayout(0, HEAD_ROWS))
    first_key = lanes
    if HAS_WINDOW:
        first_key = find_first_keys(
            entries_ptr + entry, num_entries, row_begin + lanes, row_end, GROUP
        )
    step = 0
    num_noted = 0
    is_there = 1
    while is_there > 0:
        token, slot, head, is_row, is_whole = find_rows(
            entries_ptr + entry, num_entries, row_begin, row_end, kv_head,
            COUNT, GROUP, FOLD, O_ROWS,
        )  # fmt: skip
        last = last_seen(first_limit + (row_begin + lanes) // GROUP, PAGE_SIZE, BEFORE_OWN_PAGE)
        limit = gl.minimum(last, key_end - 1)
        last = last_seen(first_limit + row_begin // GROUP, PAGE_SIZE, BEFORE_OWN_PAGE)
        seen_by_all = gl.minimum(key_end, last + 1)
        hidden_end = 0
        if HAS_WINDOW:
            hidden_end = gl.max(first_key, 0)
        top = gl.full([SECTIONS, ROWS], float("-inf"), gl.float32, HEAD_ROWS)
        total = gl.zeros([SECTIONS, ROWS], gl.float32, HEAD_ROWS)
        acc = gl.zeros([SECTIONS, ROWS, MAIN], gl.float32, LAYOUT)
        tail = acc
        if TAIL > 0:
            tail = gl.zeros([SECTIONS, ROWS, TAIL], gl.float32, LAYOUT)
        next_entry = 0
        next_row_begin = 0
        next_row_end = 0
        next_key_begin = 0
        next_key_end = 0
        next_limit = 0
        next_stretch = 0
        next_kv_head = 0
        next_first_key = first_key
        num_tiles = num_tiles_of(key_begin, key_end, KEYS)
        # Once tile number `ask_behind` is released, the producer has room for all later tiles of
        # the unit, so it notes the next unit without waiting for another release.
        ask_behind = gl.where(num_tiles > STAGES, num_tiles - STAGES, num_tiles) - 1
        await_queries()
        if ROUNDED:
            OF_QUERIES: gl.constexpr = rows_by_dims(SECTIONS, ROWS, MAIN, True)
            q = query_operand(queries.load(OF_QUERIES), FIRST)
            unit = gl.full([SECTIONS], 1.0, gl.float32, OF_SECTIONS)
        else:
            q = queries.load(FIRST)
        if TAIL > 0:
            q_tail = tail_queries.load(FIRST)
        for i in range(0, num_tiles):
            start = key_begin + i * KEYS
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if not ROUNDED:  # noqa: SIM102  # known when compiled; only whole pages are rounded
                if start + KEYS > key_end:
                    _clear(v_tiles, v_tails, stage, key_end - start, FOLD, TAIL > 0)
            scores = gl.zeros([SECTIONS, ROWS, SECTION_KEYS], gl.float32, LAYOUT)
            if ROUNDED:
                scores = mma_v2(q, key_operand(k_folded.index(stage), SECOND), scores)
                k_scale = section_scales(
                    k_scales, stage, kv_head, SPLITS, PAGES, OF_SECTIONS, SECTIONS
                )
                scores = scores * (k_scale * FACTOR)[:, None, None]
            else:
                scores = _add_scores(scores, q, k_folded.index(stage), SECOND)
            if TAIL > 0:
                scores = _add_scores(scores, q_tail, k_tail_folded.index(stage), SECOND)
            scores, left = capped(scores, scale, SOFTCAP)
            if _is_cut(start, seen_by_all, hidden_end, KEYS, HAS_WINDOW):
                scores = _mask(scores, start, limit, first_key, SPLITS, HAS_WINDOW, LAYOUT)
            new_top = gl.maximum(top, gl.max(scores, 2) * left)
            # Until a row has seen a key, its maximum is -inf, and -inf minus -inf would be NaN.
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(scores * left - base[:, :, None])
            shrink = gl.exp2(top - base)
            total = total * shrink + gl.sum(p, 2)
            top = new_top
            weights = gl.convert_layout(p.to(OPERAND), FIRST)
            if ROUNDED:
                v = value_operand(v_folded.index(stage), SECOND)
                v_scale = section_scales(
                    v_scales, stage, kv_head, SPLITS, PAGES, OF_SECTIONS, SECTIONS
                )
                new_unit = unit_of(v_scale, unit)
                shrink = shrink * (unit / new_unit)[:, None]
                unit = new_unit
            else:
                v = v_folded.index(stage).load(SECOND)
            if TAIL > 0:
                v_tail = v_tail_folded.index(stage).load(SECOND)
            release(empty, stage)
            acc = mma_v2(weights, v, acc * shrink[:, :, None])
            if TAIL > 0:
                tail = mma_v2(weights, v_tail, tail * shrink[:, :, None])
            step += 1
            if i == ask_behind:
                place = num_noted % NOTES
                mbarrier.wait(noted.index(place), (num_noted // NOTES) & 1)
                is_there = _noted(fields, place, NOTE_HAS_UNIT)
                next_entry = _noted(fields, place, PIECE_ENTRY)
                next_row_begin = _noted(fields, place, PIECE_ROW_BEGIN)
                next_row_end = _noted(fields, place, PIECE_ROW_END)
                next_key_begin = _noted(fields, place, PIECE_KEY_BEGIN)
                next_key_end = _noted(fields, place, PIECE_KEY_END)
                next_limit = _noted(fields, place, PIECE_FIRST_LIMIT)
                next_stretch = _noted(fields, place, PIECE_STRETCH)
                next_kv_head = _noted(fields, place, PIECE_KV_HEAD)
                if is_there > 0:
                    next_tokens = find_tokens(
                        _noted(fields, place, PIECE_FIRST_TOKEN), entries_ptr + next_entry,
                        next_row_begin, next_row_end, GROUP, FOLD, SPLITS,
                    )  # fmt: skip
                    start_queries(
                        q_ptr, q_rows, q_tail_rows, next_tokens, next_row_begin, next_row_end,
                        next_kv_head, stride_q_token, stride_q_head, GROUP, FOLD, SPLITS, HEAD_DIM,
                    )  # fmt: skip
                    if HAS_WINDOW:
                        next_first_key = find_first_keys(
                            entries_ptr + next_entry, num_entries, next_row_begin + lanes,
                            next_row_end, GROUP,
                        )  # fmt: skip
        num_noted += 1
        if ROUNDED:
            acc = acc * unit[:, None, None]
        acc, tail, top, total = finish_sums(
            acc, tail, top, total, sums, tail_sums, FOLD, SPLITS, TAIL > 0, O_LAYOUT, TAIL_LAYOUT,
            ROUNDED,
        )  # fmt: skip
        share, lse = shares_of(top, total, O_ROWS)
        write_rows(
            acc, tail, share, lse, token, slot, head, is_row, is_whole, stretch,
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, stride_out_token, stride_out_head,
            KV_HEADS * GROUP, HEAD_DIM, HAS_LSE, O_LAYOUT, TAIL_LAYOUT, ROUNDED and SPLITS == 1,
        )  # fmt: skip
        entry = next_entry
        row_begin = next_row_begin
        row_end = next_row_end
        key_begin = next_key_begin
        key_end = next_key_end
        first_limit = next_limit
        stretch = next_stretch
        kv_head = next_kv_head
        if HAS_WINDOW:
            first_key = next_first_key
    await_queries()


@gluon.jit
def _wait_for_large(IS_FIRST: gl.constexpr):
    if not IS_FIRST and gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def _small_units_kernel(
    q_ptr, k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
    out_ptr, lse_ptr, plan_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale, tickets_ptr,
    num_barriers,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, FOLD: gl.constexpr, SPLITS: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr,
    HAS_WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, BEFORE_OWN_PAGE: gl.constexpr,
    ROUNDED: gl.constexpr, IS_FIRST: gl.constexpr,
):  # fmt: skip
    """Attend to the small units of this program. `scale` includes log2(e), SOFTCAP does not; a
    SOFTCAP of 0 means none. BEFORE_OWN_PAGE: rows of a causal span see the pages before their own
    one. ROUNDED: pages are in fp8, with scales (`codes.py`).

    After the kernel of the large units (not IS_FIRST) this kernel need not wait at its start: the
    large kernel lets it start only after its own wait for the kernel before. The next kernel
    waits only for this one. So one program of this kernel ends only after the large kernel.
    """
    if IS_FIRST:
        gdc_wait()  # the previous kernel may have written the plan, the queries or the pages
    gdc_launch_dependents()
    # The producer's first unit; loaded while barriers are set up.
    share_ptr = share_of(plan_ptr)
    unit_ptr = share_ptr + SHARE_FIRST_SMALL
    begin = gl.load(share_ptr + SHARE_SMALL_BEGIN)
    end = gl.load(share_ptr + SHARE_SMALL_END)
    next_unit = gl.load(share_ptr + SHARE_SECOND_SMALL)
    kv_head = gl.load(unit_ptr + PIECE_KV_HEAD)
    page, page_at, key_begin, key_end = read_keys(unit_ptr)
    num_queued = gl.load(plan_ptr + HEADER_NUM_QUEUED)
    dtype: gl.constexpr = k_desc.dtype
    MAIN: gl.constexpr = HEAD_DIM // PANEL * PANEL
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    IN_TILES: gl.constexpr = codes_of(MAIN, 2) if ROUNDED else TILES
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, MAIN], IN_TILES)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, MAIN], IN_TILES)
    q_rows = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [64, MAIN], TILES)
    k_scales: gl.constexpr = None
    v_scales: gl.constexpr = None
    if ROUNDED:
        PAGES: gl.constexpr = max(LANES // FOLD // PAGE_SIZE, 1)
        SCALE_ROWS: gl.constexpr = STAGES * PAGES
        k_scales = gl.allocate_shared_memory(gl.float32, [SCALE_ROWS, 1, SCALE_LANES], SCALES)
        v_scales = gl.allocate_shared_memory(gl.float32, [SCALE_ROWS, 1, SCALE_LANES], SCALES)
    k_tails: gl.constexpr = None
    v_tails: gl.constexpr = None
    q_tail_rows: gl.constexpr = None
    if TAIL > 0:
        k_tails = gl.allocate_shared_memory(dtype, [STAGES, LANES, TAIL], tiles_of(TAIL))
        v_tails = gl.allocate_shared_memory(dtype, [STAGES, LANES, TAIL], tiles_of(TAIL))
        q_tail_rows = gl.allocate_shared_memory(dtype, [64, TAIL], tiles_of(TAIL))
    sums: gl.constexpr = None
    tail_sums: gl.constexpr = None
    if SPLITS > 1:
        ROWS: gl.constexpr = 64 // SPLITS
        sums = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS, MAIN], sums_of(MAIN))
        if TAIL > 0:
            tail_sums = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS, TAIL], sums_of(TAIL))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # 2 * STAGES notes are enough: the producer is at most STAGES tiles, so at most STAGES units,
    # ahead, and claims one more.
    notes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, NOTE_INTS], ROW)
    noted = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    # `num_barriers` is not a constant, which would unroll the loops: each instruction that runs for
    # the first time must be fetched from memory.
    for i in range(0, num_barriers):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in range(0, 2 * num_barriers):
        mbarrier.init(noted.index(i), count=1)
    has_units = begin < end
    if not has_units:
        tickets = take_ticket(tickets_ptr, num_queued, gl.num_programs(0), num_queued > 0, 4)
        claimed = claimed_unit(tickets, num_queued)
        has_units = claimed >= 0
        queue_ptr = plan_ptr + gl.load(plan_ptr + HEADER_QUEUE)
        unit_ptr = queue_ptr + gl.maximum(claimed, 0) * PIECE_INTS
        kv_head = gl.load(unit_ptr + PIECE_KV_HEAD)
        page, page_at, key_begin, key_end = read_keys(unit_ptr)
        # Claiming uses shared memory. Copies may reuse it, and the producer's arguments do. The
        # compiler does not see this, so make sure here that all warps have read the claimed unit.
        fence_async_shared()
        barrier()
    if not has_units:
        _wait_for_large(IS_FIRST)
        return
    gl.warp_specialize(
        [
            (_consume, (
                q_rows, q_tail_rows, k_tiles, v_tiles, k_tails, v_tails, k_scales, v_scales,
                sums, tail_sums, full, empty, notes, noted, plan_ptr,
                unit_ptr, q_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                KV_HEADS, GROUP, FOLD, SPLITS, HEAD_DIM, STAGES, HAS_LSE, HAS_WINDOW, SOFTCAP,
                PAGE_SIZE, BEFORE_OWN_PAGE, ROUNDED,
            )),
            (produce, (
                k_desc, v_desc, k_tail_desc, v_tail_desc, k_scales_desc, v_scales_desc,
                k_tiles, v_tiles, k_tails, v_tails, k_scales, v_scales,
                full, empty, notes, noted,
                plan_ptr, begin, end, next_unit, kv_head, page, page_at, key_begin, key_end,
                num_queued, tickets_ptr,
                KV_HEADS, FOLD, PAGE_SIZE, HEAD_DIM, STAGES, ROUNDED,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
    _wait_for_large(IS_FIRST)
