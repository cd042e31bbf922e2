# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""The products of products.py on Hopper, where an expert has many rows.

A program takes tile after tile, of up to 128 rows of one expert and 256 columns:

    producer   | copies rows and weights to shared memory, 64 of K in a step, up to STAGES steps
               | ahead, also of the next tile while this one is written
    consumers  | two groups of four warps, 64 rows each; both read the same weights. A tile of up to
               | 64 rows leaves the second group idle, and the first has the tensor cores alone

Rows of gate_up are gathered by plain asynchronous copies (four warps), all else comes by TMA (one
warp). Barriers in shared memory say which stage has arrived (`full`) and which may be overwritten
(`empty`). Programs take tiles from a counter, since tiles differ in cost; the producer leaves a
note about each tile for the consumers.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainstem.kernels.attention.hopper.rows import (
    TILES,
    as_tiles,
    barrier,
    finished,
    load_box,
    release,
    reshaped,
)
from mainstem.kernels.attention.hopper.rows import _load_rows as load_rows
from mainstem.kernels.attention.hopper.small_reads import claimed_unit, take_ticket
from mainstem.kernels.experts.activate import check_activation, gated
from mainstem.kernels.experts.products import (
    HOPPER,
    check_act,
    check_bias,
    check_rows,
    check_weights,
    tile_of,
)
from mainstem.kernels.experts.route import Routing

GROUP = gl.constexpr(HOPPER.rows)  # rows of a consumer
GROUPS = HOPPER.most_units
STAGES = HOPPER.gate_up.stages
STEP = gl.constexpr(HOPPER.gate_up.k)
BOX = gl.constexpr(HOPPER.gate_up.columns)  # rows of weights that are copied at once
CONSTANTS = {"GROUPS": GROUPS, "STAGES": STAGES, "GROUP_ROWS": 8}
OPTIONS = {"num_warps": 4, "maxnreg": 128}
CLAIM_AHEAD = gl.constexpr(4)  # steps left of a tile when the next one is claimed,
READ_AHEAD = gl.constexpr(2)  # and when its fields are read
NOTE_INTS = gl.constexpr(4)
NOTE_EXPERT = gl.constexpr(0)  # -1: there is no tile
NOTE_START = gl.constexpr(1)
NOTE_END = gl.constexpr(2)
NOTE_COLUMN = gl.constexpr(3)
NOTES = gl.constexpr(8)  # the producer is at most STAGES + 1 tiles ahead
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _note(notes, noted, count, expert, start, end, column, WARPS: gl.constexpr):
    """Leave a note for the consumers."""
    fields = gl.arange(0, NOTE_INTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    note = gl.where(fields == NOTE_EXPERT, expert, column)
    note = gl.where(fields == NOTE_START, start, note)
    note = gl.where(fields == NOTE_END, end, note)
    notes.index(count % NOTES).store(note)
    barrier()
    mbarrier.arrive(noted.index(count % NOTES), count=1)


@gluon.jit
def _noted(fields, count, field):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.index((count % NOTES) * NOTE_INTS + field).load(LAYOUT), 0)


@gluon.jit
def _bring(
    x, w_desc, x_boxes, w_boxes, full, empty, step, step_begin, step_end,
    tokens_0, tokens_1, tokens_2, start, end, first, second, num_in, stride_x,
    IS_GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy some steps of a tile, each into a stage that has been read. step: of all tiles before;
    tokens: of the groups' rows."""
    ks = gl.arange(0, STEP, gl.SliceLayout(0, COPY))
    num_groups = (end - start + GROUP - 1) // GROUP
    for i in range(step_begin, step_end):
        k = i * STEP
        stage = (step + i) % STAGES
        arrived = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step + i) // STAGES + 1) & 1)
        if IS_GATED:
            mbarrier.expect(arrived, 2 * BOX * STEP * 2)
        else:
            for n in gl.static_range(1, GROUPS + 1):
                mbarrier.expect(arrived, (2 * BOX + n * GROUP) * STEP * 2, pred=num_groups == n)
        load_box(w_desc, [first, k], arrived, w_boxes.index(2 * stage))
        load_box(w_desc, [second, k], arrived, w_boxes.index(2 * stage + 1))
        if IS_GATED:
            columns = (k + ks)[None, :]
            is_column = (k + ks < num_in)[None, :]
            for n in gl.static_range(GROUPS):
                tokens = tokens_0 if n == 0 else tokens_1 if n == 1 else tokens_2
                if n < num_groups:
                    load_rows(
                        x_boxes.index(GROUPS * stage + n),
                        x + (tokens * stride_x)[:, None] + columns,
                        mask=(tokens >= 0)[:, None] & is_column,
                    )
            async_copy.mbarrier_arrive(arrived, increment_count=False)
        else:
            for n in gl.static_range(GROUPS):
                load_box(
                    x, [start + n * GROUP, k], arrived, x_boxes.index(GROUPS * stage + n),
                    pred=n < num_groups,
                )  # fmt: skip


@gluon.jit
def _tokens_of(sorted_ptr, start, end, LAYOUT: gl.constexpr):
    """Of a group's rows; -1 past the end."""
    rows = start + gl.arange(0, GROUP, LAYOUT)
    return gl.load(sorted_ptr + rows, mask=rows < end, other=-1)


@gluon.jit
def _produce(
    x, sorted_ptr, w_desc, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr,
    tickets_ptr, x_tiles, w_tiles, full, empty, notes, noted,
    num_in, num_out, expert_out, column_tiles, stride_x,
    IS_GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """num_out: rows of gate, or of down, in the weights; expert_out: all rows of an expert."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.SliceLayout(1, COPY)
    w_boxes = as_tiles(w_tiles, 2 * STAGES, BOX, STEP)
    row_tiles = gl.load(tile_count_ptr)
    num_tiles = row_tiles * column_tiles
    num_claimers = gl.minimum(gl.num_programs(0), num_tiles)
    num_queued = num_tiles - num_claimers
    num_steps = (num_in + STEP - 1) // STEP
    claim_at = gl.maximum(num_steps - CLAIM_AHEAD, 0)
    read_at = gl.maximum(num_steps - READ_AHEAD, 0)
    tile = gl.program_id(0)
    row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, GROUP_ROWS)
    row_tile = gl.minimum(row_tile, row_tiles - 1)
    expert = gl.load(tile_experts_ptr + row_tile)
    start = gl.load(tile_starts_ptr + row_tile)
    end = gl.load(tile_ends_ptr + row_tile)
    step = 0
    count = 0
    while tile < num_tiles:
        _note(notes, noted, count, expert, start, end, column_tile, WARPS)
        tokens_0 = 0
        tokens_1 = 0
        tokens_2 = 0
        if IS_GATED:
            first = expert * expert_out + column_tile * BOX
            second = first + num_out
            tokens_0 = _tokens_of(sorted_ptr, start, end, LANES)
            tokens_1 = _tokens_of(sorted_ptr, start + GROUP, end, LANES)
            if GROUPS > 2:
                tokens_2 = _tokens_of(sorted_ptr, start + 2 * GROUP, end, LANES)
        else:
            first = expert * expert_out + column_tile * (2 * BOX)
            second = first + BOX
        _bring(
            x, w_desc, x_tiles, w_boxes, full, empty, step, 0, claim_at,
            tokens_0, tokens_1, tokens_2, start, end, first, second, num_in, stride_x,
            IS_GATED, GROUPS, STAGES, COPY,
        )  # fmt: skip
        tickets = take_ticket(tickets_ptr, num_queued, num_claimers, True, WARPS)
        _bring(
            x, w_desc, x_tiles, w_boxes, full, empty, step, claim_at, read_at,
            tokens_0, tokens_1, tokens_2, start, end, first, second, num_in, stride_x,
            IS_GATED, GROUPS, STAGES, COPY,
        )  # fmt: skip
        claimed = claimed_unit(tickets, num_queued)
        tile = gl.where(claimed < 0, num_tiles, num_claimers + claimed)
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, GROUP_ROWS)
        row_tile = gl.minimum(row_tile, row_tiles - 1)
        expert = gl.load(tile_experts_ptr + row_tile)
        next_start = gl.load(tile_starts_ptr + row_tile)
        next_end = gl.load(tile_ends_ptr + row_tile)
        _bring(
            x, w_desc, x_tiles, w_boxes, full, empty, step, read_at, num_steps,
            tokens_0, tokens_1, tokens_2, start, end, first, second, num_in, stride_x,
            IS_GATED, GROUPS, STAGES, COPY,
        )  # fmt: skip
        start = next_start
        end = next_end
        step += num_steps
        count += 1
    _note(notes, noted, count, -1, 0, 0, 0, WARPS)


@gluon.jit
def _multiply(
    x_tiles, w_boxes, full, empty, step, num_steps,
    WHICH: gl.constexpr, IS_GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's rows of a tile: [64, 128] of the first weights and of the second."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 16])
    left = gl.zeros([GROUP, BOX], gl.float32, LAYOUT)
    right = gl.zeros([GROUP, BOX], gl.float32, LAYOUT)
    for i in range(0, num_steps):
        stage = (step + i) % STAGES
        mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
        if IS_GATED:
            fence_async_shared()  # rows are not copied by TMA
        x = x_tiles.index(GROUPS * stage + WHICH)
        w_left = w_boxes.index(2 * stage).permute((1, 0))
        w_right = w_boxes.index(2 * stage + 1).permute((1, 0))
        left = warpgroup_mma(x, w_left, left, use_acc=i > 0, is_async=True)
        right = warpgroup_mma(x, w_right, right, use_acc=i > 0, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=(left, right))
        release(empty, (stage + STAGES - 1) % STAGES, i > 0)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    release(empty, (step + num_steps - 1) % STAGES)
    return left, right


@gluon.jit
def _write(rows, start, end, column, num_out, out_ptr, stride_out):
    """[64, 128] of the output."""
    LAYOUT: gl.constexpr = finished(64, 128, True)
    lines = start + gl.arange(0, GROUP, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, BOX, gl.SliceLayout(0, LAYOUT))
    rows = gl.convert_layout(rows.to(out_ptr.dtype.element_ty), LAYOUT)
    out_ptrs = out_ptr + lines.to(gl.int64)[:, None] * stride_out + columns[None, :]
    gl.store(out_ptrs, rows, mask=(lines < end)[:, None] & (columns < num_out)[None, :])


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
    num_in, num_out, expert_out, stride_out,
    WHICH: gl.constexpr, IS_GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    w_boxes = as_tiles(w_tiles, 2 * STAGES, BOX, STEP)
    fields = reshaped(notes, [NOTES * NOTE_INTS, 1], LINE)
    num_steps = (num_in + STEP - 1) // STEP
    step = 0
    count = 0
    mbarrier.wait(noted.index(0), 0)
    expert = _noted(fields, 0, NOTE_EXPERT)
    while expert >= 0:
        start = _noted(fields, count, NOTE_START) + WHICH * GROUP
        end = _noted(fields, count, NOTE_END)
        column_tile = _noted(fields, count, NOTE_COLUMN)
        if start < end:
            left, right = _multiply(
                x_tiles, w_boxes, full, empty, step, num_steps, WHICH, IS_GATED, GROUPS, STAGES
            )
            if IS_GATED:
                column = column_tile * BOX
                if HAS_BIAS:
                    columns = column + gl.arange(0, BOX, gl.SliceLayout(0, left.type.layout))
                    bias_ptrs = bias_ptr + expert * expert_out + columns
                    is_column = columns < num_out
                    bias = gl.load(bias_ptrs, mask=is_column, other=0.0)
                    left += bias.to(gl.float32)[None, :]
                    bias = gl.load(bias_ptrs + num_out, mask=is_column, other=0.0)
                    right += bias.to(gl.float32)[None, :]
                act = gated(left, right, ACTIVATION)
                _write(act, start, end, column, num_out, out_ptr, stride_out)
            else:
                column = column_tile * (2 * BOX)
                _write(left, start, end, column, num_out, out_ptr, stride_out)
                _write(right, start, end, column + BOX, num_out, out_ptr, stride_out)
        else:
            for i in range(step, step + num_steps):
                mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
                release(empty, i % STAGES)
        step += num_steps
        count += 1
        mbarrier.wait(noted.index(count % NOTES), (count // NOTES) & 1)
        expert = _noted(fields, count, NOTE_EXPERT)


@gluon.jit
def _hopper_kernel(
    x, sorted_ptr, w_desc, bias_ptr, out_ptr,
    tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr, tickets_ptr,
    num_in, num_out, expert_out, column_tiles, stride_x, stride_out, num_stages, num_notes,
    IS_GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr,
):  # fmt: skip
    """As many programs as the device has multiprocessors."""
    PRODUCERS: gl.constexpr = 4 if IS_GATED else 1
    PRODUCER_REGISTERS: gl.constexpr = 32 if GROUPS == 3 else 40 if IS_GATED else 24
    CONSUMER_REGISTERS: gl.constexpr = 160 if GROUPS == 3 else 232 if IS_GATED else 240
    gdc_wait()
    dtype: gl.constexpr = w_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, GROUP, STEP], TILES)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * BOX, STEP], TILES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES, NOTE_INTS], LINE)
    noted = gl.allocate_shared_memory(gl.int64, [NOTES, 1], BARRIER)
    for i in range(0, num_stages):  # not a constant, or it would be unrolled
        # by gathering, each of 128 threads arrives
        mbarrier.init(full.index(i), count=129 if IS_GATED else 1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in range(0, num_notes):
        mbarrier.init(noted.index(i), count=1)
    gdc_launch_dependents()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                    num_in, num_out, expert_out, stride_out,
                    0, IS_GATED, GROUPS, STAGES, ACTIVATION, HAS_BIAS,
                )),
                (_consume, (
                    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                    num_in, num_out, expert_out, stride_out,
                    1, IS_GATED, GROUPS, STAGES, ACTIVATION, HAS_BIAS,
                )),
                (_produce, (
                    x, sorted_ptr, w_desc, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr,
                    tile_count_ptr, tickets_ptr, x_tiles, w_tiles, full, empty, notes, noted,
                    num_in, num_out, expert_out, column_tiles, stride_x,
                    IS_GATED, GROUPS, STAGES, GROUP_ROWS, PRODUCERS,
                )),
            ],
            [4, PRODUCERS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                    num_in, num_out, expert_out, stride_out,
                    0, IS_GATED, GROUPS, STAGES, ACTIVATION, HAS_BIAS,
                )),
                (_consume, (
                    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                    num_in, num_out, expert_out, stride_out,
                    1, IS_GATED, GROUPS, STAGES, ACTIVATION, HAS_BIAS,
                )),
                (_consume, (
                    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                    num_in, num_out, expert_out, stride_out,
                    2, IS_GATED, GROUPS, STAGES, ACTIVATION, HAS_BIAS,
                )),
                (_produce, (
                    x, sorted_ptr, w_desc, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr,
                    tile_count_ptr, tickets_ptr, x_tiles, w_tiles, full, empty, notes, noted,
                    num_in, num_out, expert_out, column_tiles, stride_x,
                    IS_GATED, GROUPS, STAGES, GROUP_ROWS, PRODUCERS,
                )),
            ],
            [4, 4, PRODUCERS],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def hopper_gate_up(
    x: Tensor,
    routing: Routing,
    weights: Tensor,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
) -> Tensor:
    """As products.gate_up, with tiles of ROWS."""
    experts, both, hidden = weights.shape
    size = both // 2
    check_rows("x", x, hidden)
    check_rows("out", out, size)
    check_weights("gate_up", weights, x.dtype)
    check_bias("gate_up", bias, experts, both)
    check_activation(activation)
    if len(out):
        _hopper_kernel[(_num_programs(x.device),)](
            x, routing.sorted_tokens, _boxes(weights, BOX.value), x if bias is None else bias, out,
            *_lists(routing), hidden, size, both, triton.cdiv(size, BOX.value),
            x.stride(0), out.stride(0), CONSTANTS["STAGES"], NOTES.value,
            IS_GATED=True, ACTIVATION=activation, HAS_BIAS=bias is not None,
            launch_pdl=True, **CONSTANTS, **OPTIONS,
        )  # fmt: skip
    return out


def hopper_down(act: Tensor, routing: Routing, weights: Tensor, out: Tensor) -> Tensor:
    """As products.down, with tiles of ROWS."""
    _, hidden, size = weights.shape
    check_act(act, out, size, hidden)
    check_weights("down", weights, act.dtype)
    if len(out):
        _hopper_kernel[(_num_programs(act.device),)](
            _boxes(act, GROUP.value), routing.sorted_tokens, _boxes(weights, BOX.value), out, out,
            *_lists(routing), size, hidden, hidden, triton.cdiv(hidden, 2 * BOX.value),
            act.stride(0), out.stride(0), CONSTANTS["STAGES"], NOTES.value,
            IS_GATED=False, ACTIVATION="", HAS_BIAS=False, launch_pdl=True, **CONSTANTS, **OPTIONS,
        )  # fmt: skip
    return out


def _lists(routing: Routing) -> tuple[Tensor, ...]:
    return (routing.tile_experts, routing.tile_starts, routing.tile_ends, routing.tile_count,
            routing.tickets)  # fmt: skip


def _boxes(source: Tensor, rows: int) -> TensorDescriptor:
    """A tensor as what is copied at once: rows of its last axis, STEP of each."""
    lines = source.view(-1, source.shape[-1])
    return TensorDescriptor.from_tensor(lines, [rows, STEP.value], TILES.value)


@cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
