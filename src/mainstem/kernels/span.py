# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0912, PLR0917, SIM102
"""The span attention kernel: shared and own runs of keys in one launch.

A fixed grid of programs, all resident at once, reads its work from a list in device memory, so the
launch is the same whatever the step holds and a CUDA graph can be replayed over it. One unit of
work is

    (rows of one span that share a KV head) x (a stretch of the span's keys) x (that KV head)

where the rows are the span's query tokens times the query heads of the KV head, packed:

    row r of a span  ->  token query_rows[r // GROUP],  head kv_head * GROUP + r % GROUP

Units with few rows (own tokens of a decoding sequence) are bound by memory and short: the small
tile takes the same keys of several KV heads at once, which are one block of a page. Units with many
rows (shared prefixes, prompt chunks) use the large tile.

A row that lies in one unit only is written to `out` at once. Every other row leaves a Partial (fp32
output and base-2 lse) in its slot; when all programs have arrived at a barrier, they merge the
Partials of each row in slot order, which is the order of the spans.

The plan buffer is int32, made by `schedule.py`, which says what lies where in it.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
BOTH = tl.constexpr(0)  # PHASE: attend, wait for all, merge
ATTEND = tl.constexpr(1)  # only the first half; MERGE is a second launch
MERGE = tl.constexpr(2)


@triton.jit
def _page_of(pages_ptr, start, key_end, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr):
    """Page ids of the keys [start, start + TILE_K) of a span; 0 past its end."""
    lanes = tl.arange(0, TILE_K)
    if TILE_K % PAGE_SIZE == 0:  # then every tile begins with a page
        ptrs = pages_ptr + start // PAGE_SIZE + lanes // PAGE_SIZE
    else:
        ptrs = pages_ptr + (start + lanes) // PAGE_SIZE
    return tl.load(ptrs, mask=start + lanes < key_end, other=0)


@triton.jit
def _key_offset(
    page, start, stride_page, head_offset,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Where the keys [start, start + TILE_K) begin in K and in V, in elements."""
    lanes = tl.arange(0, TILE_K)
    if TILE_K % PAGE_SIZE == 0:
        within = (lanes % PAGE_SIZE) * HEAD_DIM
    else:
        within = ((start + lanes) % PAGE_SIZE) * HEAD_DIM
    if WIDE:
        page = page.to(tl.int64)
    return page * stride_page + (within + head_offset)


@triton.jit
def _load_tile(
    ptr, offset, is_key, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, IS_MASKED: tl.constexpr
):
    """Rows of K or V at some offsets, [keys, DIM]; zero past the last key and past HEAD_DIM."""
    dims = tl.arange(0, DIM)
    ptrs = ptr + offset[:, None] + dims[None, :]
    if IS_MASKED:
        if DIM == HEAD_DIM:
            return tl.load(ptrs, mask=is_key[:, None], other=0.0)
        return tl.load(ptrs, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if DIM == HEAD_DIM:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _write_rows(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, token, slot, stretch,
    acc, max_score, weight, is_row, head, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Rows that are whole go to `out`, the others to their slots."""
    dims = tl.arange(0, DIM)
    is_whole = is_row & (slot < 0)
    is_part = is_row & (slot >= 0)
    has_keys = weight > 0
    acc = acc / tl.where(has_keys, weight, 1.0)[:, None]
    lse = tl.where(has_keys, max_score + tl.log2(tl.where(has_keys, weight, 1.0)), float("-inf"))
    if tl.max(is_whole.to(tl.int32), 0) > 0:
        out_offset = token.to(tl.int64) * stride_out_token + head * stride_out_head
        tl.store(
            out_ptr + out_offset[:, None] + dims[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=is_whole[:, None] & (dims < HEAD_DIM)[None, :],
        )
        if HAS_LSE:
            tl.store(lse_ptr + token * HEADS + head, lse * LN_2, mask=is_whole)
    else:
        place = (slot + stretch) * HEADS + head
        part_ptrs = partial_ptr + place.to(tl.int64)[:, None] * DIM + dims[None, :]
        tl.store(part_ptrs, acc, mask=is_part[:, None])
        tl.store(partial_lse_ptr + place, lse, mask=is_part)


@triton.jit
def _small_queries(
    q_ptr, entries_ptr, num_entries, entry, num_rows, first_kv_head, stride_q_token, stride_q_head,
    GROUP: tl.constexpr, FOLD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
):  # fmt: skip
    """The rows of a small unit: [FOLD KV heads, TILE_Q // FOLD], the span's rows in each."""
    rows = tl.arange(0, TILE_Q)
    row = rows % (TILE_Q // FOLD)
    is_row = row < num_rows
    head = (first_kv_head + rows // (TILE_Q // FOLD)) * GROUP + row % GROUP
    entry_ptr = entries_ptr + entry + row // GROUP
    token = tl.load(entry_ptr, mask=is_row, other=0)
    slot = tl.load(entry_ptr + num_entries, mask=is_row, other=0)
    q = _load_tile(
        q_ptr, token * stride_q_token + head * stride_q_head, is_row, HEAD_DIM, DIM, True
    )
    return q, token, slot


@triton.jit
def _small_step(q, k, v, is_seen, max_score, weight, acc, scale, UPCAST: tl.constexpr):
    """One step of the online softmax. The weights stay a tile: summing them is left to the end."""
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
    # A row that has seen no key yet: keep the exponents at -inf - 0 instead of -inf + inf.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(max_score - base)
    weight = weight * shrink[:, None] + p
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, weight, acc


@triton.jit
def _small_units(
    q_ptr, k_rows, v_rows, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    pieces_ptr, entries_ptr, num_entries, page_ids_ptr, order_ptr, begin, end,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr, STAGES: tl.constexpr, HAS_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The small units of a program, one after the other; queries are fetched a unit ahead.

    A unit has FOLD KV heads. A page holds its heads one after the other, so the keys of FOLD heads
    of one page are one block of memory and one tile, [FOLD, PAGE_SIZE] x DIM; the scores of a row
    with the keys of another head are masked. The tile is read by a tensor descriptor, without
    pointers.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    UNITS: tl.constexpr = KV_HEADS // FOLD  # of a piece
    TILE_K: tl.constexpr = FOLD * PAGE_SIZE
    rows = tl.arange(0, TILE_Q)
    lanes = tl.arange(0, TILE_K)
    row = rows % (TILE_Q // FOLD)
    row_head = rows // (TILE_Q // FOLD)
    key_of_lane = lanes % PAGE_SIZE
    is_same_head = row_head[:, None] == (lanes // PAGE_SIZE)[None, :]

    unit = tl.load(order_ptr + begin)
    piece_ptr = pieces_ptr + (unit // UNITS) * 8
    kv_head = (unit % UNITS) * FOLD
    entry = tl.load(piece_ptr)
    num_rows = tl.load(piece_ptr + 2)
    page_at = tl.load(piece_ptr + 3)
    key_begin = tl.load(piece_ptr + 4)
    key_end = tl.load(piece_ptr + 5)
    first_limit = tl.load(piece_ptr + 6)
    stretch = tl.load(piece_ptr + 7)
    page = tl.load(page_ids_ptr + page_at + key_begin // PAGE_SIZE)
    q, token, slot = _small_queries(
        q_ptr, entries_ptr, num_entries, entry, num_rows, kv_head,
        stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM, DIM, TILE_Q,
    )  # fmt: skip
    next_unit = tl.load(order_ptr + tl.minimum(begin + 1, end - 1))
    for index in range(begin, end):
        # Which unit comes after the next is fetched two ahead, all else one ahead.
        after_next = tl.load(order_ptr + tl.minimum(index + 2, end - 1))
        next_ptr = pieces_ptr + (next_unit // UNITS) * 8
        next_kv_head = (next_unit % UNITS) * FOLD
        next_entry = tl.load(next_ptr)
        next_num_rows = tl.load(next_ptr + 2)
        next_page_at = tl.load(next_ptr + 3)
        next_key_begin = tl.load(next_ptr + 4)
        next_key_end = tl.load(next_ptr + 5)
        next_first_limit = tl.load(next_ptr + 6)
        next_stretch = tl.load(next_ptr + 7)
        next_first_page = tl.load(page_ids_ptr + next_page_at + next_key_begin // PAGE_SIZE)
        next_q, next_token, next_slot = _small_queries(
            q_ptr, entries_ptr, num_entries, next_entry, next_num_rows, next_kv_head,
            stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM, DIM, TILE_Q,
        )  # fmt: skip

        pages_ptr = page_ids_ptr + page_at + 1
        limit = tl.minimum(first_limit + row // GROUP, key_end - 1)
        max_score = tl.full([TILE_Q], float("-inf"), tl.float32)
        weight = tl.zeros([TILE_Q, TILE_K], tl.float32)
        acc = tl.zeros([TILE_Q, DIM], tl.float32)
        if UPCAST:
            q = q.to(tl.float32)
        full_end = key_end // PAGE_SIZE * PAGE_SIZE
        for start in tl.range(key_begin, full_end, PAGE_SIZE, num_stages=STAGES):
            # One past the last page is still inside the plan.
            next_page = tl.load(pages_ptr + start // PAGE_SIZE)
            place = (page * KV_HEADS + kv_head) * PAGE_SIZE
            k = k_rows.load([place, 0])
            v = v_rows.load([place, 0])
            is_seen = is_same_head & ((start + key_of_lane)[None, :] <= limit[:, None])
            max_score, weight, acc = _small_step(
                q, k, v, is_seen, max_score, weight, acc, scale, UPCAST
            )
            page = next_page
        if full_end < key_end:
            place = (page * KV_HEADS + kv_head) * PAGE_SIZE
            k = k_rows.load([place, 0])
            v = v_rows.load([place, 0])
            # Slots past the end hold anything; zero weight times NaN would still be NaN.
            v = tl.where((full_end + key_of_lane < key_end)[:, None], v, 0.0).to(v.dtype)
            is_seen = is_same_head & ((full_end + key_of_lane)[None, :] <= limit[:, None])
            max_score, weight, acc = _small_step(
                q, k, v, is_seen, max_score, weight, acc, scale, UPCAST
            )
        _write_rows(
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, token, slot, stretch,
            acc, max_score, tl.sum(weight, 1), row < num_rows,
            (kv_head + row_head) * GROUP + row % GROUP,
            stride_out_token, stride_out_head, HEADS, HEAD_DIM, DIM, HAS_LSE,
        )  # fmt: skip
        next_unit = after_next
        kv_head = next_kv_head
        num_rows = next_num_rows
        page_at = next_page_at
        key_begin = next_key_begin
        key_end = next_key_end
        first_limit = next_first_limit
        stretch = next_stretch
        page = next_first_page
        token = next_token
        slot = next_slot
        q = next_q


@triton.jit
def _large_step(
    q, k_ptr, v_ptr, page, start, key_end, limit, max_score, weight, acc,
    scale, stride_page, head_offset,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr,
    IS_MASKED: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys [start, start + TILE_K), on the given pages."""
    keys = start + tl.arange(0, TILE_K)
    is_key = keys < key_end
    offset = _key_offset(page, start, stride_page, head_offset, HEAD_DIM, PAGE_SIZE, TILE_K, WIDE)
    k = _load_tile(k_ptr, offset, is_key, HEAD_DIM, DIM, IS_MASKED)
    v = _load_tile(v_ptr, offset, is_key, HEAD_DIM, DIM, IS_MASKED)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if IS_MASKED:
        scores = tl.where(keys[None, :] <= limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
        base = new_max
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(max_score - base)
    weight = weight * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, weight, acc


@triton.jit
def _large_unit(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    piece_ptr, entries_ptr, num_entries, page_ids_ptr, kv_head,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_page, stride_kv_head,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_LSE: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One unit of many rows."""
    entry = tl.load(piece_ptr)
    row_begin = tl.load(piece_ptr + 1)
    row_end = tl.load(piece_ptr + 2)
    pages_ptr = page_ids_ptr + tl.load(piece_ptr + 3)
    key_begin = tl.load(piece_ptr + 4)
    key_end = tl.load(piece_ptr + 5)
    first_limit = tl.load(piece_ptr + 6)
    stretch = tl.load(piece_ptr + 7)

    # Page ids are fetched one step ahead; two would keep the compiler from pipelining the loop.
    page = _page_of(pages_ptr, key_begin, key_end, PAGE_SIZE, TILE_K)
    rows = row_begin + tl.arange(0, TILE_Q)
    is_row = rows < row_end
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    entry_ptr = entries_ptr + entry + query
    token = tl.load(entry_ptr, mask=is_row, other=0)
    q_offset = token.to(tl.int64) * stride_q_token + head * stride_q_head
    q = _load_tile(q_ptr, q_offset, is_row, HEAD_DIM, DIM, True)
    if UPCAST:
        q = q.to(tl.float32)
    limit = tl.minimum(first_limit + query, key_end - 1)
    head_offset = kv_head * stride_kv_head

    max_score = tl.full([TILE_Q], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, DIM], tl.float32)
    # Keys that every row sees need no mask.
    seen_by_all = tl.minimum(key_end, first_limit + row_begin // GROUP + 1)
    clear_end = key_begin + tl.maximum(seen_by_all - key_begin, 0) // TILE_K * TILE_K
    for start in tl.range(key_begin, clear_end, TILE_K, num_stages=STAGES):
        next_page = _page_of(pages_ptr, start + TILE_K, key_end, PAGE_SIZE, TILE_K)
        max_score, weight, acc = _large_step(
            q, k_ptr, v_ptr, page, start, key_end, limit, max_score, weight, acc,
            scale, stride_page, head_offset, HEAD_DIM, DIM, PAGE_SIZE, TILE_K, False, WIDE, UPCAST,
        )  # fmt: skip
        page = next_page
    # Asked for anew: carrying the ids out of the loop above would double its loads.
    page = _page_of(pages_ptr, clear_end, key_end, PAGE_SIZE, TILE_K)
    for start in tl.range(clear_end, key_end, TILE_K, num_stages=1):
        max_score, weight, acc = _large_step(
            q, k_ptr, v_ptr, page, start, key_end, limit, max_score, weight, acc,
            scale, stride_page, head_offset, HEAD_DIM, DIM, PAGE_SIZE, TILE_K, True, WIDE, UPCAST,
        )  # fmt: skip
        page = _page_of(pages_ptr, start + TILE_K, key_end, PAGE_SIZE, TILE_K)
    slot = tl.load(entry_ptr + num_entries, mask=is_row, other=0)
    _write_rows(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, token, slot, stretch,
        acc, max_score, weight, is_row, head, stride_out_token, stride_out_head,
        HEADS, HEAD_DIM, DIM, HAS_LSE,
    )  # fmt: skip


@triton.jit
def _merge_rows(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges, first_row, num_rows,
    stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, first_row + ROWS) of the merge list x heads, PARTS of their Partials at a
    time.
    """
    dims = tl.arange(0, DIM)
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    merge_ptr = merges_ptr + rows // HEADS
    head = rows % HEADS
    token = tl.load(merge_ptr, mask=is_row, other=0)
    slot = tl.load(merge_ptr + num_merges, mask=is_row, other=0)
    parts = tl.load(merge_ptr + 2 * num_merges, mask=is_row, other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, tl.max(parts, 0), PARTS):
        part = first + tl.arange(0, PARTS)
        is_there = part[None, :] < parts[:, None]
        place = (slot[:, None] + part[None, :]) * HEADS + head[:, None]
        lse = tl.load(
            partial_lse_ptr + place, mask=is_there, other=float("-inf"), cache_modifier=".cg"
        )
        out = tl.load(
            partial_ptr + place.to(tl.int64)[:, :, None] * DIM + dims[None, None, :],
            mask=is_there[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old_share = tl.exp2(top - base)
        share = tl.exp2(lse - base[:, None])
        total = total * old_share + tl.sum(share, 1)
        merged = merged * old_share[:, None] + tl.sum(out * share[:, :, None], 1)
        top = new_top
    has_keys = total > 0
    merged = merged / tl.where(has_keys, total, 1.0)[:, None]
    out_offset = token.to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(
        out_ptr + out_offset[:, None] + dims[None, :],
        merged.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )
    if HAS_LSE:
        lse = tl.where(has_keys, top + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * HEADS + head, lse * LN_2, mask=is_row)


@triton.jit
def _span_kernel(
    q_ptr, k_ptr, v_ptr, k_rows, v_rows, out_ptr, lse_ptr,
    plan_ptr, partial_ptr, partial_lse_ptr, barrier_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_page, stride_kv_head,
    scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FOLD: tl.constexpr, SMALL_Q: tl.constexpr, SMALL_STAGES: tl.constexpr,
    LARGE_Q: tl.constexpr, LARGE_K: tl.constexpr, LARGE_STAGES: tl.constexpr,
    PER_SM: tl.constexpr, IS_ORDERED: tl.constexpr, HAS_LSE: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Attend to the units of this program, then merge its share of the rows. `scale` includes
    log2(e).
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_merges = tl.load(plan_ptr + 6)
    if PHASE == BOTH:
        generation = tl.load(barrier_ptr + 1, volatile=True)
    if PHASE != MERGE:
        # Neighbours in the list of shares run on one SM: large units come to lie beside small ones.
        sms = num_programs // PER_SM
        share_ptr = plan_ptr + 16 + (program % sms) * PER_SM + program // sms
        large_begin = tl.load(share_ptr)
        large_end = tl.load(share_ptr + 1)
        small_begin = tl.load(share_ptr + num_programs + 1)
        small_end = tl.load(share_ptr + num_programs + 2)
        small_ptr = plan_ptr + tl.load(plan_ptr)
        large_ptr = plan_ptr + tl.load(plan_ptr + 1)
        entries_ptr = plan_ptr + tl.load(plan_ptr + 2)
        num_entries = tl.load(plan_ptr + 3)
        page_ids_ptr = plan_ptr + tl.load(plan_ptr + 4)
        large_order_at = tl.load(plan_ptr + 8)
        order_ptr = plan_ptr + tl.load(plan_ptr + 9)
        for index in range(large_begin, large_end):
            unit = tl.load(plan_ptr + large_order_at + index)
            _large_unit(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                large_ptr + (unit // KV_HEADS) * 8, entries_ptr, num_entries, page_ids_ptr,
                unit % KV_HEADS,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_page, stride_kv_head, scale,
                HEADS, GROUP, HEAD_DIM, DIM, PAGE_SIZE, LARGE_Q, LARGE_K, LARGE_STAGES,
                HAS_LSE, WIDE, UPCAST,
            )  # fmt: skip
        if small_begin < small_end:
            _small_units(
                q_ptr, k_rows, v_rows, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                small_ptr, entries_ptr, num_entries, page_ids_ptr,
                order_ptr, small_begin, small_end,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                KV_HEADS, GROUP, FOLD, HEAD_DIM, DIM, PAGE_SIZE, SMALL_Q, SMALL_STAGES,
                HAS_LSE, UPCAST,
            )  # fmt: skip
    if PHASE == BOTH:
        if num_merges > 0:
            # Every store of this program happens before its arrival, every load below after the
            # last one.
            tl.debug_barrier()
            if tl.atomic_add(barrier_ptr, 1, sem="acq_rel") == num_programs - 1:
                tl.atomic_xchg(barrier_ptr, 0, sem="relaxed")
                tl.atomic_add(barrier_ptr + 1, 1, sem="release")
            else:
                while tl.atomic_add(barrier_ptr + 1, 0, sem="acquire") == generation:
                    pass
            tl.debug_barrier()
    if PHASE != ATTEND:
        if num_merges > 0:
            merges_ptr = plan_ptr + tl.load(plan_ptr + 5)
            num_rows = num_merges * HEADS
            # Few rows: one at a time, many Partials at once; else as many rows as have few
            # Partials.
            most_parts = tl.load(plan_ptr + 7)
            if IS_ORDERED:
                for row in range(program * 16, num_rows, num_programs * 16):
                    _merge_rows(
                        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges,
                        row, num_rows, stride_out_token, stride_out_head,
                        HEADS, HEAD_DIM, DIM, 16, 1, HAS_LSE,
                    )  # fmt: skip
            elif num_rows <= num_programs:
                for row in range(program, num_rows, num_programs):
                    _merge_rows(
                        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges,
                        row, num_rows, stride_out_token, stride_out_head,
                        HEADS, HEAD_DIM, DIM, 1, 64, HAS_LSE,
                    )  # fmt: skip
            elif most_parts > 4:
                for row in range(program * 8, num_rows, num_programs * 8):
                    _merge_rows(
                        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges,
                        row, num_rows, stride_out_token, stride_out_head,
                        HEADS, HEAD_DIM, DIM, 8, 8, HAS_LSE,
                    )  # fmt: skip
            else:
                for row in range(program * 32, num_rows, num_programs * 32):
                    _merge_rows(
                        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, merges_ptr, num_merges,
                        row, num_rows, stride_out_token, stride_out_head,
                        HEADS, HEAD_DIM, DIM, 32, 2, HAS_LSE,
                    )  # fmt: skip
