# mypy: ignore-errors
# ruff: noqa
"""Experiment, not used: large units by a warp-specialised kernel in Gluon (Triton 3.6, Hopper). One warp loads pages by TMA into
a ring of tiles, two warp groups of 64 rows each attend. Takes plans made with Tiles(large_q=128, large_k=N, programs_per_sm=1) and no
small units; keys must be whole pages of 16. docs/log/kernels.md has what it measured. num_warps=4, maxnreg=168, descriptors
[16, 64] over pages as rows of 128, NVMMASharedLayout(128, 16, 2)."""
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, mbarrier, fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init


@gluon.jit
def _producer(k_desc, v_desc, k_pages, v_pages, k_full, k_empty, v_full, v_empty, plan_ptr,
              KV_HEADS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    NP: gl.constexpr = N // 16
    program = gl.program_id(0)
    share_ptr = plan_ptr + 16 + program * 24
    begin = gl.load(share_ptr)
    end = gl.load(share_ptr + 1)
    large_ptr = plan_ptr + gl.load(plan_ptr + 1)
    page_ids_ptr = plan_ptr + gl.load(plan_ptr + 4)
    order_ptr = plan_ptr + gl.load(plan_ptr + 8)
    tile = 0
    for index in range(begin, end):
        unit = gl.load(order_ptr + index)
        piece_ptr = large_ptr + (unit // KV_HEADS) * 8
        kv_head = unit % KV_HEADS
        pages_ptr = page_ids_ptr + gl.load(piece_ptr + 3)
        key_begin = gl.load(piece_ptr + 4)
        key_end = gl.load(piece_ptr + 5)
        last_page = (key_end - 1) // 16
        for start in range(key_begin, key_end, N):
            s = tile % STAGES
            phase = (tile // STAGES) & 1
            first_page = start // 16
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), N * 128 * 2)
            for i in gl.static_range(NP):
                page = gl.load(pages_ptr + gl.minimum(first_page + i, last_page))
                row = (page * KV_HEADS + kv_head) * 16
                tma.async_copy_global_to_shared(k_desc, [row, 0], k_full.index(s), k_pages.index((s * 2) * NP + i))
                tma.async_copy_global_to_shared(k_desc, [row, 64], k_full.index(s), k_pages.index((s * 2 + 1) * NP + i))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), N * 128 * 2)
            for i in gl.static_range(NP):
                page = gl.load(pages_ptr + gl.minimum(first_page + i, last_page))
                row = (page * KV_HEADS + kv_head) * 16
                tma.async_copy_global_to_shared(v_desc, [row, 0], v_full.index(s), v_pages.index((s * 2) * NP + i))
                tma.async_copy_global_to_shared(v_desc, [row, 64], v_full.index(s), v_pages.index((s * 2 + 1) * NP + i))
            tile += 1


@gluon.jit
def _write(out_ptr, partial_ptr, acc, token, slot, stretch, head, is_row, stride_out_token, stride_out_head,
           PANEL: gl.constexpr, HEADS: gl.constexpr, O_LAYOUT: gl.constexpr):
    cols = PANEL * 64 + gl.arange(0, 64, gl.SliceLayout(0, O_LAYOUT))
    out_offset = token * stride_out_token + head * stride_out_head
    gl.store(out_ptr + out_offset[:, None] + cols[None, :], acc.to(gl.bfloat16), mask=(is_row & (slot < 0))[:, None])
    place = (slot + stretch) * HEADS + head
    gl.store(partial_ptr + place.to(gl.int64)[:, None] * 128 + cols[None, :], acc, mask=(is_row & (slot >= 0))[:, None])


@gluon.jit
def _consumer(q_smem, k_pages, v_pages, k_full, k_empty, v_full, v_empty, turns, plan_ptr,
              q_ptr, out_ptr, partial_ptr, partial_lse_ptr, stride_q_token, stride_q_head,
              stride_out_token, stride_out_head, scale,
              WHICH: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
              PINGPONG: gl.constexpr, K_LAYOUT: gl.constexpr):
    HEADS: gl.constexpr = KV_HEADS * GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k_tiles = k_pages._reinterpret(gl.bfloat16, [STAGES * 2, N, 64], K_LAYOUT)
    v_tiles = v_pages._reinterpret(gl.bfloat16, [STAGES * 2, N, 64], K_LAYOUT)
    program = gl.program_id(0)
    share_ptr = plan_ptr + 16 + program * 24
    begin = gl.load(share_ptr)
    end = gl.load(share_ptr + 1)
    large_ptr = plan_ptr + gl.load(plan_ptr + 1)
    entries_ptr = plan_ptr + gl.load(plan_ptr + 2)
    num_entries = gl.load(plan_ptr + 3)
    order_ptr = plan_ptr + gl.load(plan_ptr + 8)
    tile = 0
    turn = 1 - WHICH
    for index in range(begin, end):
        unit = gl.load(order_ptr + index)
        piece_ptr = large_ptr + (unit // KV_HEADS) * 8
        kv_head = unit % KV_HEADS
        entry = gl.load(piece_ptr)
        row_begin = gl.load(piece_ptr + 1) + WHICH * 64
        row_end = gl.load(piece_ptr + 2)
        key_begin = gl.load(piece_ptr + 4)
        key_end = gl.load(piece_ptr + 5)
        first_limit = gl.load(piece_ptr + 6)
        stretch = gl.load(piece_ptr + 7)
        q_rows = row_begin + gl.arange(0, 64, gl.SliceLayout(1, Q_LAYOUT))
        q_cols = gl.arange(0, 64, gl.SliceLayout(0, Q_LAYOUT))
        is_q = q_rows < row_end
        q_token = gl.load(entries_ptr + entry + q_rows // GROUP, mask=is_q, other=0)
        q_offset = q_token * stride_q_token + (kv_head * GROUP + q_rows % GROUP) * stride_q_head
        gl.thread_barrier()
        for panel in gl.static_range(2):
            q = gl.load(q_ptr + q_offset[:, None] + (panel * 64 + q_cols)[None, :], mask=is_q[:, None], other=0.0)
            q_smem.index(WHICH * 2 + panel).store(q)
        fence_async_shared()
        gl.thread_barrier()

        s_rows = row_begin + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        limit = gl.minimum(first_limit + s_rows // GROUP, key_end - 1)
        lanes = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
        seen_by_all = gl.minimum(key_end, first_limit + row_begin // GROUP + 1)
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc0 = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, O_LAYOUT))
        acc1 = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, O_LAYOUT))
        if PINGPONG:
            mbarrier.wait(turns.index(WHICH), turn & 1)
            turn += 1
        for start in range(key_begin, key_end, N):
            s = tile % STAGES
            phase = (tile // STAGES) & 1
            mbarrier.wait(k_full.index(s), phase)
            scores = gl.zeros([64, N], gl.float32, S_LAYOUT)
            pending = warpgroup_mma(q_smem.index(WHICH * 2), k_tiles.index(s * 2).permute((1, 0)), scores, use_acc=False, is_async=True)
            pending = warpgroup_mma(q_smem.index(WHICH * 2 + 1), k_tiles.index(s * 2 + 1).permute((1, 0)), pending, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
            done0, done1, scores = warpgroup_mma_wait(0, deps=(acc0, acc1, pending))
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index((tile - 1) % STAGES), count=1, pred=start > key_begin)
            mbarrier.arrive(k_empty.index(s), count=1)
            if start + N > seen_by_all:
                scores = gl.where((start + lanes)[None, :] <= limit[:, None], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1) * scale)
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(scores * scale - base[:, None])
            shrink = gl.exp2(top - base)
            total = total * shrink + gl.sum(p, 1)
            top = new_top
            by = gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))
            done0 = done0 * by[:, None]
            done1 = done1 * by[:, None]
            weights = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
            mbarrier.wait(v_full.index(s), phase)
            if PINGPONG:
                mbarrier.wait(turns.index(WHICH), turn & 1)
                turn += 1
            acc0 = warpgroup_mma(weights, v_tiles.index(s * 2), done0, is_async=True)
            acc1 = warpgroup_mma(weights, v_tiles.index(s * 2 + 1), done1, is_async=True)
            tile += 1
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        done0, done1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index((tile - 1) % STAGES), count=1, pred=key_end > key_begin)
        has_keys = total > 0
        total = gl.where(has_keys, total, 1.0)
        lse = gl.convert_layout(gl.where(has_keys, top + gl.log2(total), float("-inf")), gl.SliceLayout(1, O_LAYOUT))
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))
        rows = row_begin + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        is_row = rows < row_end
        token = gl.load(entries_ptr + entry + rows // GROUP, mask=is_row, other=0)
        slot = gl.load(entries_ptr + num_entries + entry + rows // GROUP, mask=is_row, other=0)
        head = kv_head * GROUP + rows % GROUP
        _write(out_ptr, partial_ptr, done0 * inverse[:, None], token, slot, stretch, head, is_row, stride_out_token, stride_out_head, 0, HEADS, O_LAYOUT)
        _write(out_ptr, partial_ptr, done1 * inverse[:, None], token, slot, stretch, head, is_row, stride_out_token, stride_out_head, 1, HEADS, O_LAYOUT)
        gl.store(partial_lse_ptr + (slot + stretch) * HEADS + head, lse, mask=is_row & (slot >= 0))


@gluon.jit
def _wide_kernel(q_ptr, k_desc, v_desc, out_ptr, plan_ptr, partial_ptr, partial_lse_ptr,
                 stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale,
                 KV_HEADS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr):
    NP: gl.constexpr = N // 16
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_pages = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * NP, 16, 64], LAYOUT)
    v_pages = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * NP, 16, 64], LAYOUT)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (_consumer, (q_smem, k_pages, v_pages, k_full, k_empty, v_full, v_empty, turns, plan_ptr, q_ptr, out_ptr, partial_ptr, partial_lse_ptr,
                     stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale, 0, KV_HEADS, GROUP, N, STAGES, PINGPONG, LAYOUT)),
        (_consumer, (q_smem, k_pages, v_pages, k_full, k_empty, v_full, v_empty, turns, plan_ptr, q_ptr, out_ptr, partial_ptr, partial_lse_ptr,
                     stride_q_token, stride_q_head, stride_out_token, stride_out_head, scale, 1, KV_HEADS, GROUP, N, STAGES, PINGPONG, LAYOUT)),
        (_producer, (k_desc, v_desc, k_pages, v_pages, k_full, k_empty, v_full, v_empty, plan_ptr, KV_HEADS, N, STAGES)),
    ], [4, 1], [240, 24])
