# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Gluon code that the kernels for Hopper share: tiles in shared memory, barriers, layouts, and
tickets of a work queue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.constexpr_function
def tiles_of(columns: int, rank: int = 2) -> gl.NVMMASharedLayout:
    """Return the layout of rows of 16-bit numbers in shared memory: of panels, 64 columns wide, or
    of tails, which are narrower."""
    width = min(2 * columns, 128)
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=rank)


TILES = gl.constexpr(tiles_of(64))


@gluon.constexpr_function
def finished(rows: int, dims: int, is_packed: bool) -> gl.DistributedLinearLayout:
    """Return the layout of finished rows over threads. If there are 64 rows, a warp has 16 of them,
    as tensor cores leave them; if there are fewer, warps divide the dims, then the rows.

    Four threads share 32 dims of a row, and take pairs of dims in turn: each has 8. In packed rows
    the 8 dims of a thread are neighbours, so that it writes 16 bytes at once. In a tail of 16 dims
    a thread has 4.
    """
    run = min(dims, 32) // 4
    bits = run.bit_length() - 1
    of_thread = [[0, 1 << i] for i in range(bits)]
    between = [[0, run], [0, 2 * run]]
    if not is_packed:
        of_thread, between = [[0, 1], *([0, 8 << i] for i in range(bits - 1))], [[0, 2], [0, 4]]
    blocks = [[0, 32 << i] for i in range((dims // 32).bit_length() - 1)]
    if rows == 64:
        of_thread, warps = [*of_thread, [8, 0], *blocks], [[16, 0], [32, 0]]
    else:
        left = [*blocks, *([8 << i, 0] for i in range((rows // 8).bit_length() - 1)), [0, 0]]
        of_thread, warps = [*of_thread, *(base for base in left[2:] if base != [0, 0])], left[:2]
    return gl.DistributedLinearLayout(
        reg_bases=of_thread,
        lane_bases=[*between, [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[rows, dims],
    )


# Names that differ between Triton 3.6 and 3.9.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reshaped(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the same shared memory with another shape."""
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def as_tiles(memory, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory as [COUNT, ROWS, COLUMNS]."""
    return reshaped(memory, [COUNT, ROWS, COLUMNS], tiles_of(COLUMNS))


@gluon.jit
def release(empty, stage, is_read=True):
    """Signal that the tile may be overwritten, after all warps of the group have read it."""
    barrier()
    mbarrier.arrive(empty.index(stage), count=1, pred=is_read)


@gluon.jit
def take_ticket(tickets_ptr, num_queued, num_claimers, does_claim, WARPS: gl.constexpr):
    """Take a ticket of the work queue, without waiting for it; `claimed_unit` waits.

    Every claimer claims until no unit is left, so the number of tickets is known: after the last
    one the counter wraps to zero, ready for the next launch. (Not `atomic_add`: it combines what
    the lanes of a warp add, and waits to give each lane its own result.)
    """
    lanes = gl.arange(0, WARPS * 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        setp.ne.s32 asks, $3, 0;
        mov.b32 $0, -1;
        @asks atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;
        }""",
        "=&r,l,r,r",
        [
            tickets_ptr + lanes * 0, lanes * 0 + (num_queued + num_claimers - 1),
            ((lanes == 0) & does_claim).to(gl.int32),
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def claimed_unit(tickets, num_queued):
    """The claimed unit of the queue, or -1 if none is left or none was requested."""
    ticket = gl.max(tickets, 0)
    return gl.where(ticket < num_queued, ticket, -1)
