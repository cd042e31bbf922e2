# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""The span attention kernel: one launch computes shared and own runs of keys. On Hopper,
`hopper/large.py` and `hopper/small.py` do the same in two launches.

A fixed grid of programs reads its work from a list in device memory, so the launch is the same for
every step, and a CUDA graph can be replayed. One unit of work is

    (rows of one span that share a KV head) x (a stretch of the span's keys) x (that KV head)

where the rows are (query tokens of the span) x (query heads of the KV head), packed:

    row r of a span  ->  token query_rows[r // GROUP],  head kv_head * GROUP + r % GROUP

Units with few rows (own tokens of a decoding sequence) are bound by memory and short: the small
tile takes the same keys of several KV heads at once, which are one block of a page. Units with many
rows (shared prefixes, prompt chunks) use the large tile.

If every row of a span lies in only one unit, the rows are written to `out` at once. Otherwise each
unit writes a Partial (fp32 output and base-2 lse) of each of its rows to a slot, and
`merge_partials.py` merges them.

The plan buffer is int32, made by `plan.py`; `layout.py` says what lies where in it.
"""

import triton
import triton.language as tl

from mainstem.kernels.attention.triton.layout import (
    ENTRY_FIRST_KEY,
    ENTRY_SLOT,
    HEADER_ENTRIES,
    HEADER_INTS,
    HEADER_LARGE_ORDER,
    HEADER_LARGE_PIECES,
    HEADER_NUM_ENTRIES,
    HEADER_PAGE_IDS,
    HEADER_SMALL_ORDER,
    HEADER_SMALL_PIECES,
    PIECE_ENTRY,
    PIECE_FIRST_LIMIT,
    PIECE_FIRST_PAGE,
    PIECE_INTS,
    PIECE_KEY_BEGIN,
    PIECE_KEY_END,
    PIECE_KV_HEAD,
    PIECE_PAGES_AT,
    PIECE_ROW_BEGIN,
    PIECE_ROW_END,
    PIECE_STRETCH,
    SHARE_FIRST_LARGE,
    SHARE_FIRST_SMALL,
    SHARE_INTS,
    SHARE_LARGE_BEGIN,
    SHARE_LARGE_END,
    SHARE_SECOND_SMALL,
    SHARE_SMALL_BEGIN,
    SHARE_SMALL_END,
)
from mainstem.kernels.attention.triton.rows import LOG2_E, normalised, write_rows


@triton.jit
def _capped(scores, scale, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(score / SOFTCAP) in base-2 units, the units of scaled scores.

    Computed by exp2, which every target has: if it overflows to inf, tanh is 1.
    """
    doubled = tl.exp2(scores * (scale * (2.0 / SOFTCAP)))
    return (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))


@triton.jit
def _page_of(pages_ptr, start, key_end, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr):
    """Page ids of the keys [start, start + TILE_K) of a span; 0 from `key_end` on."""
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
    """Return where the keys [start, start + TILE_K) begin in K and in V, in elements."""
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
    """Rows of Q, K or V at some offsets, [rows, DIM]; zero past HEAD_DIM and, if IS_MASKED, where
    `is_key` is false."""
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
def _finish_rows(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, token, slot, stretch,
    acc, max_score, weight, is_row, head, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write a unit's rows: to `out` if they are whole, to their slots if they are Partials."""
    dims = tl.arange(0, DIM)
    acc, lse = normalised(acc, max_score, weight)
    if tl.max((is_row & (slot < 0)).to(tl.int32), 0) > 0:
        write_rows(
            out_ptr, lse_ptr, token, head, dims, acc, lse, is_row,
            stride_out_token, stride_out_head, HEADS, HEAD_DIM, HAS_LSE,
        )  # fmt: skip
    else:
        place = (slot + stretch) * HEADS + head
        part_ptrs = partial_ptr + place.to(tl.int64)[:, None] * DIM + dims[None, :]
        tl.store(part_ptrs, acc, mask=is_row[:, None])
        tl.store(partial_lse_ptr + place, lse, mask=is_row)


@triton.jit
def _limit(own, key_end, PAGE_SIZE: tl.constexpr, BEFORE_OWN_PAGE: tl.constexpr):
    """The last key that a row sees in a span. `own` is its own key's number in a causal span, and
    beyond the last key in others. Of rounded pages, a row sees those before its own page."""
    if BEFORE_OWN_PAGE:
        own = own // PAGE_SIZE * PAGE_SIZE - 1
    return tl.minimum(own, key_end - 1)


@triton.jit
def _small_queries(
    q_ptr, entries_ptr, num_entries, entry, num_rows, first_kv_head, stride_q_token, stride_q_head,
    GROUP: tl.constexpr, FOLD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE_Q: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return, for the rows of a small unit, [FOLD KV heads, TILE_Q // FOLD], their queries, where
    their output goes and, with windows, the first key that each row sees.
    """
    rows = tl.arange(0, TILE_Q)
    row = rows % (TILE_Q // FOLD)
    is_row = row < num_rows
    head = (first_kv_head + rows // (TILE_Q // FOLD)) * GROUP + row % GROUP
    entry_ptr = entries_ptr + entry + row // GROUP
    token = tl.load(entry_ptr, mask=is_row, other=0)
    slot = tl.load(entry_ptr + ENTRY_SLOT * num_entries, mask=is_row, other=0)
    q = _load_tile(
        q_ptr, token * stride_q_token + head * stride_q_head, is_row, HEAD_DIM, DIM, True
    )
    first_key = slot
    if HAS_WINDOW:
        first_key = tl.load(entry_ptr + ENTRY_FIRST_KEY * num_entries, mask=is_row, other=0)
    return q, token, slot, first_key


@triton.jit
def _small_step(
    q, k, v, k_scale, v_scale, is_seen, max_score, weight, acc, scale,
    SOFTCAP: tl.constexpr, ROUNDED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax. Weights are kept as a tile, and summed only at the end."""
    if ROUNDED:
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    elif UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if ROUNDED:
        scores *= k_scale[None, :]
    if SOFTCAP > 0:
        scores = _capped(scores, scale, SOFTCAP)
        scale = 1.0
    scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
    # Until a row has seen a key, its maximum is -inf, and -inf minus -inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(max_score - base)
    weight = weight * shrink[:, None] + p
    acc = acc * shrink[:, None]
    if ROUNDED:
        p *= v_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, weight, acc


@triton.jit
def _small_tiles(
    k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales, page, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr,
    ROUNDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """K and V of some heads of a page, and the scale of each key and value if they are rounded."""
    if ROUNDED:
        k = k_rows.load([page, kv_head * PAGE_SIZE, 0]).reshape(TILE_K, DIM)
        v = v_rows.load([page, kv_head * PAGE_SIZE, 0]).reshape(TILE_K, DIM)
        if WIDE:
            page = page.to(tl.int64)
        at = page * stride_scales + kv_head + tl.arange(0, TILE_K) // PAGE_SIZE
        return k, v, tl.load(k_scales_ptr + at), tl.load(v_scales_ptr + at)
    else:
        place = (page * KV_HEADS + kv_head) * PAGE_SIZE
        return k_rows.load([place, 0]), v_rows.load([place, 0]), 1.0, 1.0


@triton.jit
def _small_units(
    q_ptr, k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    pieces_ptr, entries_ptr, num_entries, page_ids_ptr, share_ptr, order_ptr, begin, end,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr, STAGES: tl.constexpr, HAS_LSE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ROUNDED: tl.constexpr, BEFORE_OWN_PAGE: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the small units of a program, one after the other. Queries are fetched one unit
    ahead.

    A unit has FOLD KV heads. A page holds its heads one after the other, so the keys of FOLD heads
    of one page are one block of memory and one tile, [FOLD, PAGE_SIZE] x DIM; the scores of a row
    with the keys of another head are masked. The tile is read by a tensor descriptor, without
    pointers.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    UNITS: tl.constexpr = KV_HEADS // FOLD  # units in a piece
    TILE_K: tl.constexpr = FOLD * PAGE_SIZE
    rows = tl.arange(0, TILE_Q)
    lanes = tl.arange(0, TILE_K)
    row = rows % (TILE_Q // FOLD)
    row_head = rows // (TILE_Q // FOLD)
    key_of_lane = lanes % PAGE_SIZE
    is_same_head = row_head[:, None] == (lanes // PAGE_SIZE)[None, :]

    piece_ptr = share_ptr + SHARE_FIRST_SMALL
    kv_head = tl.load(piece_ptr + PIECE_KV_HEAD)
    entry = tl.load(piece_ptr + PIECE_ENTRY)
    num_rows = tl.load(piece_ptr + PIECE_ROW_END)
    page_at = tl.load(piece_ptr + PIECE_PAGES_AT)
    key_begin = tl.load(piece_ptr + PIECE_KEY_BEGIN)
    key_end = tl.load(piece_ptr + PIECE_KEY_END)
    first_limit = tl.load(piece_ptr + PIECE_FIRST_LIMIT)
    stretch = tl.load(piece_ptr + PIECE_STRETCH)
    page = tl.load(piece_ptr + PIECE_FIRST_PAGE)
    q, token, slot, first_key = _small_queries(
        q_ptr, entries_ptr, num_entries, entry, num_rows, kv_head,
        stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM, DIM, TILE_Q, HAS_WINDOW,
    )  # fmt: skip
    next_unit = tl.load(share_ptr + SHARE_SECOND_SMALL)
    for index in range(begin, end):
        # The index of a unit is fetched two units ahead, everything else one unit ahead.
        after_next = tl.load(order_ptr + tl.minimum(index + 2, end - 1))
        next_ptr = pieces_ptr + (next_unit // UNITS) * PIECE_INTS
        next_kv_head = (next_unit % UNITS) * FOLD
        next_entry = tl.load(next_ptr + PIECE_ENTRY)
        next_num_rows = tl.load(next_ptr + PIECE_ROW_END)
        next_page_at = tl.load(next_ptr + PIECE_PAGES_AT)
        next_key_begin = tl.load(next_ptr + PIECE_KEY_BEGIN)
        next_key_end = tl.load(next_ptr + PIECE_KEY_END)
        next_first_limit = tl.load(next_ptr + PIECE_FIRST_LIMIT)
        next_stretch = tl.load(next_ptr + PIECE_STRETCH)
        # The piece has this page id, too. It is looked up, because Triton 3.6 loses `key_begin` if
        # only the start of an inner loop uses `key_begin`.
        next_first_page = tl.load(page_ids_ptr + next_page_at + next_key_begin // PAGE_SIZE)
        next_q, next_token, next_slot, next_first_key = _small_queries(
            q_ptr, entries_ptr, num_entries, next_entry, next_num_rows, next_kv_head,
            stride_q_token, stride_q_head, GROUP, FOLD, HEAD_DIM, DIM, TILE_Q, HAS_WINDOW,
        )  # fmt: skip

        pages_ptr = page_ids_ptr + page_at + 1
        limit = _limit(first_limit + row // GROUP, key_end, PAGE_SIZE, BEFORE_OWN_PAGE)
        max_score = tl.full([TILE_Q], float("-inf"), tl.float32)
        weight = tl.zeros([TILE_Q, TILE_K], tl.float32)
        acc = tl.zeros([TILE_Q, DIM], tl.float32)
        if UPCAST:
            q = q.to(tl.float32)
        full_end = key_end // PAGE_SIZE * PAGE_SIZE
        for start in tl.range(key_begin, full_end, PAGE_SIZE, num_stages=STAGES):
            # An index one past the last page is still inside the plan.
            next_page = tl.load(pages_ptr + start // PAGE_SIZE)
            k, v, k_scale, v_scale = _small_tiles(
                k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales, page, kv_head,
                KV_HEADS, DIM, PAGE_SIZE, TILE_K, ROUNDED, WIDE,
            )  # fmt: skip
            is_seen = is_same_head & ((start + key_of_lane)[None, :] <= limit[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & ((start + key_of_lane)[None, :] >= first_key[:, None])
            max_score, weight, acc = _small_step(
                q, k, v, k_scale, v_scale, is_seen, max_score, weight, acc, scale,
                SOFTCAP, ROUNDED, UPCAST,
            )  # fmt: skip
            page = next_page
        # A loop of at most one step, since a loop issues the loads of K and V together.
        for start in tl.range(full_end, key_end, PAGE_SIZE, num_stages=2):
            k, v, k_scale, v_scale = _small_tiles(
                k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales, page, kv_head,
                KV_HEADS, DIM, PAGE_SIZE, TILE_K, ROUNDED, WIDE,
            )  # fmt: skip
            # Slots past the end may hold anything; zero weight times NaN would still be NaN.
            if not ROUNDED:  # only whole pages are rounded
                v = tl.where((start + key_of_lane < key_end)[:, None], v, 0.0).to(v.dtype)
            is_seen = is_same_head & ((start + key_of_lane)[None, :] <= limit[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & ((start + key_of_lane)[None, :] >= first_key[:, None])
            max_score, weight, acc = _small_step(
                q, k, v, k_scale, v_scale, is_seen, max_score, weight, acc, scale,
                SOFTCAP, ROUNDED, UPCAST,
            )  # fmt: skip
        _finish_rows(
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
        if HAS_WINDOW:
            first_key = next_first_key
        q = next_q


@triton.jit
def _large_step(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales, page, start, key_end, first_key,
    limit, max_score, weight, acc, scale, stride_page, head_offset,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_K: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax, over the keys [start, start + TILE_K) on the given
    pages."""
    keys = start + tl.arange(0, TILE_K)
    is_key = keys < key_end
    offset = _key_offset(page, start, stride_page, head_offset, HEAD_DIM, PAGE_SIZE, TILE_K, WIDE)
    k = _load_tile(k_ptr, offset, is_key, HEAD_DIM, DIM, IS_MASKED)
    v = _load_tile(v_ptr, offset, is_key, HEAD_DIM, DIM, IS_MASKED)
    if ROUNDED:
        if WIDE:
            page = page.to(tl.int64)
        k_scale = tl.load(k_scales_ptr + page * stride_scales)
        v_scale = tl.load(v_scales_ptr + page * stride_scales)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    elif UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if ROUNDED:
        scores *= k_scale[None, :]
    if SOFTCAP > 0:
        scores = _capped(scores, scale, SOFTCAP)
        scale = 1.0
    if IS_MASKED:
        scores = tl.where(keys[None, :] <= limit[:, None], scores, float("-inf"))
        if HAS_WINDOW:
            scores = tl.where(keys[None, :] >= first_key[:, None], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
        base = new_max
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(max_score - base)
    weight = weight * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if ROUNDED:
        p *= v_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, weight, acc


@triton.jit
def _large_unit(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    piece_ptr, entries_ptr, num_entries, page_ids_ptr, kv_head,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_page, stride_kv_head,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr, BEFORE_OWN_PAGE: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one unit of many rows. With windows, the first tiles of keys are left out if no row
    sees them."""
    entry = tl.load(piece_ptr + PIECE_ENTRY)
    row_begin = tl.load(piece_ptr + PIECE_ROW_BEGIN)
    row_end = tl.load(piece_ptr + PIECE_ROW_END)
    pages_ptr = page_ids_ptr + tl.load(piece_ptr + PIECE_PAGES_AT)
    key_begin = tl.load(piece_ptr + PIECE_KEY_BEGIN)
    key_end = tl.load(piece_ptr + PIECE_KEY_END)
    first_limit = tl.load(piece_ptr + PIECE_FIRST_LIMIT)
    stretch = tl.load(piece_ptr + PIECE_STRETCH)

    # Page ids are fetched one step ahead; with two, the compiler would not pipeline the loop.
    if not HAS_WINDOW:
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
    limit = _limit(first_limit + query, key_end, PAGE_SIZE, BEFORE_OWN_PAGE)
    head_offset = kv_head * stride_kv_head
    if ROUNDED:
        k_scales_ptr += kv_head
        v_scales_ptr += kv_head
    first_key = token
    if HAS_WINDOW:
        first_key_ptr = entry_ptr + ENTRY_FIRST_KEY * num_entries
        first_key = tl.load(first_key_ptr, mask=is_row, other=key_end)
        lowest = tl.min(first_key, 0)
        key_begin += tl.maximum(lowest - key_begin, 0) // TILE_K * TILE_K
        first_key = tl.where(is_row, first_key, 0)

    max_score = tl.full([TILE_Q], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, DIM], tl.float32)
    if HAS_WINDOW:
        # First the keys that some row does not see because of its window; they need a mask.
        hidden_end = tl.minimum(tl.max(first_key, 0), key_end)
        head_end = key_begin + tl.cdiv(tl.maximum(hidden_end - key_begin, 0), TILE_K) * TILE_K
        page = _page_of(pages_ptr, key_begin, key_end, PAGE_SIZE, TILE_K)
        for start in tl.range(key_begin, head_end, TILE_K, num_stages=1):
            max_score, weight, acc = _large_step(
                q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales, page, start, key_end,
                first_key, limit, max_score, weight, acc,
                scale, stride_page, head_offset, HEAD_DIM, DIM, PAGE_SIZE, TILE_K,
                True, True, SOFTCAP, ROUNDED, WIDE, UPCAST,
            )  # fmt: skip
            page = _page_of(pages_ptr, start + TILE_K, key_end, PAGE_SIZE, TILE_K)
        key_begin = head_end
        page = _page_of(pages_ptr, key_begin, key_end, PAGE_SIZE, TILE_K)
    # Keys that every row sees need no mask.
    first_row = first_limit + row_begin // GROUP
    seen_by_all = _limit(first_row, key_end, PAGE_SIZE, BEFORE_OWN_PAGE) + 1
    clear_end = key_begin + tl.maximum(seen_by_all - key_begin, 0) // TILE_K * TILE_K
    for start in tl.range(key_begin, clear_end, TILE_K, num_stages=STAGES):
        next_page = _page_of(pages_ptr, start + TILE_K, key_end, PAGE_SIZE, TILE_K)
        max_score, weight, acc = _large_step(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales, page, start, key_end,
            first_key, limit, max_score, weight, acc,
            scale, stride_page, head_offset, HEAD_DIM, DIM, PAGE_SIZE, TILE_K,
            False, False, SOFTCAP, ROUNDED, WIDE, UPCAST,
        )  # fmt: skip
        page = next_page
    # Loaded again: carrying the ids out of the loop above would double its loads.
    page = _page_of(pages_ptr, clear_end, key_end, PAGE_SIZE, TILE_K)
    for start in tl.range(clear_end, key_end, TILE_K, num_stages=1):
        max_score, weight, acc = _large_step(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales, page, start, key_end,
            first_key, limit, max_score, weight, acc,
            scale, stride_page, head_offset, HEAD_DIM, DIM, PAGE_SIZE, TILE_K,
            True, False, SOFTCAP, ROUNDED, WIDE, UPCAST,
        )  # fmt: skip
        page = _page_of(pages_ptr, start + TILE_K, key_end, PAGE_SIZE, TILE_K)
    slot = tl.load(entry_ptr + ENTRY_SLOT * num_entries, mask=is_row, other=0)
    _finish_rows(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, token, slot, stretch,
        acc, max_score, weight, is_row, head, stride_out_token, stride_out_head,
        HEADS, HEAD_DIM, DIM, HAS_LSE,
    )  # fmt: skip


@triton.jit
def _span_kernel(
    q_ptr, k_ptr, v_ptr, k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales,
    out_ptr, lse_ptr,
    plan_ptr, partial_ptr, partial_lse_ptr,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_page, stride_kv_head,
    scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FOLD: tl.constexpr, SMALL_Q: tl.constexpr, SMALL_STAGES: tl.constexpr,
    LARGE_Q: tl.constexpr, LARGE_K: tl.constexpr, LARGE_STAGES: tl.constexpr,
    PER_SM: tl.constexpr, HAS_LSE: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr, BEFORE_OWN_PAGE: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attend to the units of this program. `scale` includes log2(e), SOFTCAP does not; a SOFTCAP of
    0 means none. ROUNDED: pages are in fp8, with scales. BEFORE_OWN_PAGE: rows of a causal span see
    the pages before their own one.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        # Wait for the previous kernel, which may have written the plan. The merge reads the plan,
        # too, so its programs may take the place of ended programs only after this wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbours in the list of shares run on one SM, so large units run beside small ones.
    sms = num_programs // PER_SM
    shares_ptr = plan_ptr + HEADER_INTS
    share_ptr = shares_ptr + ((program % sms) * PER_SM + program // sms) * SHARE_INTS
    small_begin = tl.load(share_ptr + SHARE_SMALL_BEGIN)
    small_end = tl.load(share_ptr + SHARE_SMALL_END)
    small_ptr = plan_ptr + tl.load(plan_ptr + HEADER_SMALL_PIECES)
    large_ptr = plan_ptr + tl.load(plan_ptr + HEADER_LARGE_PIECES)
    entries_ptr = plan_ptr + tl.load(plan_ptr + HEADER_ENTRIES)
    num_entries = tl.load(plan_ptr + HEADER_NUM_ENTRIES)
    page_ids_ptr = plan_ptr + tl.load(plan_ptr + HEADER_PAGE_IDS)
    small_order_ptr = plan_ptr + tl.load(plan_ptr + HEADER_SMALL_ORDER)
    large_begin = tl.load(share_ptr + SHARE_LARGE_BEGIN)
    large_end = tl.load(share_ptr + SHARE_LARGE_END)
    large_order_ptr = plan_ptr + tl.load(plan_ptr + HEADER_LARGE_ORDER)
    piece_ptr = share_ptr + SHARE_FIRST_LARGE
    kv_head = tl.load(piece_ptr + PIECE_KV_HEAD)
    for index in range(large_begin, large_end):
        next_unit = tl.load(large_order_ptr + tl.minimum(index + 1, large_end - 1))
        _large_unit(
            q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_scales,
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
            piece_ptr, entries_ptr, num_entries, page_ids_ptr, kv_head,
            stride_q_token, stride_q_head, stride_out_token, stride_out_head,
            stride_page, stride_kv_head, scale,
            HEADS, GROUP, HEAD_DIM, DIM, PAGE_SIZE, LARGE_Q, LARGE_K, LARGE_STAGES,
            HAS_LSE, HAS_WINDOW, SOFTCAP, ROUNDED, BEFORE_OWN_PAGE, WIDE, UPCAST,
        )  # fmt: skip
        piece_ptr = large_ptr + (next_unit // KV_HEADS) * PIECE_INTS
        kv_head = next_unit % KV_HEADS
    if small_begin < small_end:
        _small_units(
            q_ptr, k_rows, v_rows, k_scales_ptr, v_scales_ptr, stride_scales,
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
            small_ptr, entries_ptr, num_entries, page_ids_ptr,
            share_ptr, small_order_ptr, small_begin, small_end,
            stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
            KV_HEADS, GROUP, FOLD, HEAD_DIM, DIM, PAGE_SIZE, SMALL_Q, SMALL_STAGES,
            HAS_LSE, HAS_WINDOW, SOFTCAP, ROUNDED, BEFORE_OWN_PAGE, WIDE, UPCAST,
        )  # fmt: skip
