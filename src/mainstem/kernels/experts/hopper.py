# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""The products of products.py on Hopper, for steps in which experts have many rows.

A program takes tile after tile, of up to 128 rows of one expert and 256 columns:

    producer   | copies rows and weights to shared memory, 64 columns of K in a step, up to STAGES
               | steps ahead; it goes on with the next tile while this one is written
    consumers  | two groups of four warps, 64 rows each; both read the same weights. A tile of up to
               | 64 rows leaves the second group idle, and the first has the tensor cores alone

Rows of gate_up are gathered by plain asynchronous copies (four warps), all else comes by TMA (one
warp). Barriers in shared memory say which stage has arrived (`full`) and which may be overwritten
(`empty`). Programs take tiles from a counter, since tiles differ in cost; the producer leaves a
note about each tile for the consumers.
"""

from functools import cache

import torch
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

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.experts.activate import check_activation, gated
from mainstem.kernels.experts.products import (
    HOPPER,
    check_bias,
    check_rows,
    check_weights,
    tile_of,
)
from mainstem.kernels.experts.route import Routing
from mainstem.kernels.hopper import (
    TILES,
    as_tiles,
    barrier,
    claimed_unit,
    finished,
    load_box,
    load_rows,
    release,
    reshaped,
    take_ticket,
)
from mainstem.kernels.host import cdiv

GROUP = gl.constexpr(64)  # rows of a consumer
ROWS = gl.constexpr(HOPPER.rows)  # of a tile
STEP = gl.constexpr(HOPPER.gate_up.k)
BOX = gl.constexpr(HOPPER.gate_up.columns)  # rows of weights that are copied at once
STAGES = HOPPER.gate_up.stages
GROUP_ROWS = 4  # tiles of rows that pass over the same weights together, for the L2 cache
OPTIONS = {"num_warps": HOPPER.gate_up.warps, "maxnreg": 168}
# How many steps of a tile are left to copy when the next tile is claimed, and when its fields are
# read.
CLAIM_AHEAD = gl.constexpr(4)
READ_AHEAD = gl.constexpr(2)
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
    x, w_desc, x_tiles, w_tiles, full, empty, step, step_begin, step_end,
    tokens, start, end, first, second, num_in, stride_x,
    IS_GATED: gl.constexpr, STAGES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy some steps of a tile, each into a stage that has been read. step: the number of steps of
    all tiles before this one; tokens: those of the rows, -1 past the end; first, second: rows of
    weights."""
    x_boxes = as_tiles(x_tiles, 2 * STAGES, GROUP, STEP)
    w_boxes = as_tiles(w_tiles, 2 * STAGES, BOX, STEP)
    ks = gl.arange(0, STEP, gl.SliceLayout(0, COPY))
    has_second = end > start + GROUP
    for i in range(step_begin, step_end):
        k = i * STEP
        stage = (step + i) % STAGES
        arrived = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step + i) // STAGES + 1) & 1)
        if IS_GATED:
            mbarrier.expect(arrived, 2 * BOX * STEP * 2)
        else:
            mbarrier.expect(arrived, (2 * BOX + ROWS) * STEP * 2, pred=has_second)
            mbarrier.expect(arrived, (2 * BOX + GROUP) * STEP * 2, pred=end <= start + GROUP)
        load_box(w_desc, [first, k], arrived, w_boxes.index(2 * stage))
        load_box(w_desc, [second, k], arrived, w_boxes.index(2 * stage + 1))
        if IS_GATED:
            ptrs = x + (tokens * stride_x)[:, None] + (k + ks)[None, :]
            mask = (tokens >= 0)[:, None] & (k + ks < num_in)[None, :]
            load_rows(x_tiles.index(stage), ptrs, mask=mask)
            async_copy.mbarrier_arrive(arrived, increment_count=False)
        else:
            load_box(x, [start, k], arrived, x_boxes.index(2 * stage))
            second_box = x_boxes.index(2 * stage + 1)
            load_box(x, [start + GROUP, k], arrived, second_box, pred=has_second)


@gluon.jit
def _produce(
    x, sorted_ptr, w_desc, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr,
    tickets_ptr, x_tiles, w_tiles, full, empty, notes, noted,
    num_in, num_out, expert_out, column_tiles, stride_x,
    IS_GATED: gl.constexpr, STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """num_out: an expert's rows of gate, or of down, in the weights; expert_out: all its rows."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row_tiles = gl.load(tile_count_ptr)
    num_tiles = row_tiles * column_tiles
    num_claimers = gl.minimum(gl.num_programs(0), num_tiles)
    num_queued = num_tiles - num_claimers
    num_steps = (num_in + STEP - 1) // STEP
    claim_at = gl.maximum(num_steps - CLAIM_AHEAD, 0)
    read_at = gl.maximum(num_steps - READ_AHEAD, 0)
    lanes = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
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
        tokens = lanes
        if IS_GATED:
            first = expert * expert_out + column_tile * BOX
            second = first + num_out
            tokens = gl.load(sorted_ptr + start + lanes, mask=start + lanes < end, other=-1)
        else:
            first = expert * expert_out + column_tile * (2 * BOX)
            second = first + BOX
        _bring(
            x, w_desc, x_tiles, w_tiles, full, empty, step, 0, claim_at,
            tokens, start, end, first, second, num_in, stride_x, IS_GATED, STAGES, COPY,
        )  # fmt: skip
        tickets = take_ticket(tickets_ptr, num_queued, num_claimers, True, WARPS)
        _bring(
            x, w_desc, x_tiles, w_tiles, full, empty, step, claim_at, read_at,
            tokens, start, end, first, second, num_in, stride_x, IS_GATED, STAGES, COPY,
        )  # fmt: skip
        claimed = claimed_unit(tickets, num_queued)
        tile = gl.where(claimed < 0, num_tiles, num_claimers + claimed)
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, GROUP_ROWS)
        row_tile = gl.minimum(row_tile, row_tiles - 1)
        expert = gl.load(tile_experts_ptr + row_tile)
        next_start = gl.load(tile_starts_ptr + row_tile)
        next_end = gl.load(tile_ends_ptr + row_tile)
        _bring(
            x, w_desc, x_tiles, w_tiles, full, empty, step, read_at, num_steps,
            tokens, start, end, first, second, num_in, stride_x, IS_GATED, STAGES, COPY,
        )  # fmt: skip
        start = next_start
        end = next_end
        step += num_steps
        count += 1
    _note(notes, noted, count, -1, 0, 0, 0, WARPS)


@gluon.jit
def _multiply(
    x_tiles, w_tiles, full, empty, step, num_steps,
    WHICH: gl.constexpr, IS_GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's rows of a tile: [64, 256]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BOX, 16])
    x_boxes = as_tiles(x_tiles, 2 * STAGES, GROUP, STEP)
    acc = gl.zeros([GROUP, 2 * BOX], gl.float32, LAYOUT)
    for i in range(0, num_steps):
        stage = (step + i) % STAGES
        mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
        if IS_GATED:
            fence_async_shared()  # needed, since rows are not copied by TMA
        acc = warpgroup_mma(
            x_boxes.index(2 * stage + WHICH), w_tiles.index(stage).permute((1, 0)), acc,
            use_acc=i > 0, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(empty, (stage + STAGES - 1) % STAGES, i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty, (step + num_steps - 1) % STAGES)
    return acc


@gluon.jit
def _activate(acc, bias_ptr, column, num_out, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Return [64, 128], from gate and up side by side in [64, 256]."""
    gate, up = gl.split(acc.reshape([GROUP, 2, BOX]).permute((0, 2, 1)))
    if HAS_BIAS:
        columns = column + gl.arange(0, BOX, gl.SliceLayout(0, gate.type.layout))
        is_column = columns < num_out
        bias = gl.load(bias_ptr + columns, mask=is_column, other=0.0)
        gate += bias.to(gl.float32)[None, :]
        bias = gl.load(bias_ptr + num_out + columns, mask=is_column, other=0.0)
        up += bias.to(gl.float32)[None, :]
    return gated(gate, up, ACTIVATION)


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
    num_in, num_out, expert_out, stride_out,
    WHICH: gl.constexpr, IS_GATED: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = BOX if IS_GATED else 2 * BOX
    LAYOUT: gl.constexpr = finished(64, COLUMNS, True)
    fields = reshaped(notes, [NOTES * NOTE_INTS, 1], LINE)
    lanes = gl.arange(0, GROUP, gl.SliceLayout(1, LAYOUT))
    num_steps = (num_in + STEP - 1) // STEP
    step = 0
    count = 0
    mbarrier.wait(noted.index(0), 0)
    expert = _noted(fields, 0, NOTE_EXPERT)
    while expert >= 0:
        start = _noted(fields, count, NOTE_START) + WHICH * GROUP
        end = _noted(fields, count, NOTE_END)
        column = _noted(fields, count, NOTE_COLUMN) * COLUMNS
        if start < end:
            out = _multiply(x_tiles, w_tiles, full, empty, step, num_steps, WHICH, IS_GATED, STAGES)
            if IS_GATED:
                expert_bias_ptr = bias_ptr + expert * expert_out
                out = _activate(out, expert_bias_ptr, column, num_out, ACTIVATION, HAS_BIAS)
            out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
            rows = start + lanes
            columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            out_ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_out + columns[None, :]
            gl.store(out_ptrs, out, mask=(rows < end)[:, None] & (columns < num_out)[None, :])
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
    STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr,
):  # fmt: skip
    """As many programs as the device has multiprocessors."""
    PRODUCERS: gl.constexpr = 4 if IS_GATED else 1  # warps
    CONSUMER_REGISTERS: gl.constexpr = 232 if IS_GATED else 240
    PRODUCER_REGISTERS: gl.constexpr = 40 if IS_GATED else 24
    gdc_wait()
    dtype: gl.constexpr = w_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], TILES)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * BOX, STEP], TILES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES, NOTE_INTS], LINE)
    noted = gl.allocate_shared_memory(gl.int64, [NOTES, 1], BARRIER)
    for i in range(0, num_stages):  # not a constant, which would unroll the loop
        # arrivals: 128 threads that gather, and one that expects the weights
        mbarrier.init(full.index(i), count=129 if IS_GATED else 1)
        mbarrier.init(empty.index(i), count=2)
    for i in range(0, num_notes):
        mbarrier.init(noted.index(i), count=1)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                num_in, num_out, expert_out, stride_out,
                0, IS_GATED, STAGES, ACTIVATION, HAS_BIAS,
            )),
            (_consume, (
                x_tiles, w_tiles, full, empty, notes, noted, bias_ptr, out_ptr,
                num_in, num_out, expert_out, stride_out,
                1, IS_GATED, STAGES, ACTIVATION, HAS_BIAS,
            )),
            (_produce, (
                x, sorted_ptr, w_desc, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr,
                tile_count_ptr, tickets_ptr, x_tiles, w_tiles, full, empty, notes, noted,
                num_in, num_out, expert_out, column_tiles, stride_x,
                IS_GATED, STAGES, GROUP_ROWS, PRODUCERS,
            )),
        ],
        [4, PRODUCERS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class HopperProducts:
    """A layer's products; the same as those of products.py, with tiles of ROWS rows.

    gate_up: [experts, 2 * size, hidden]; down: [experts, hidden, size]; act: [rows, size], room for
    activated rows. Their TMA descriptors are made once, since making one takes as long as a
    launch.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, act: Tensor) -> None:
        self._num_experts, self._hidden, self._size = down.shape
        check_weights("gate_up", gate_up, act.dtype)
        check_weights("down", down, act.dtype)
        check_rows("act", act, self._size)
        if gate_up.shape != (self._num_experts, 2 * self._size, self._hidden):
            raise LayoutError(
                f"gate_up must be [{self._num_experts}, {2 * self._size}, {self._hidden}], "
                f"got {tuple(gate_up.shape)}"
            )
        self._gate_up = _boxes(gate_up.view(-1, self._hidden), BOX.value)
        self._down = _boxes(down.view(-1, self._size), BOX.value)
        self._act = act
        self._act_boxes = _boxes(act, GROUP.value)

    def gate_up(self, x: Tensor, routing: Routing, bias: Tensor | None, activation: str) -> None:
        """Gather rows of x, and write their activated products to `act`."""
        size, top_k = self._size, routing.ids.shape[1]
        check_rows("x", x, self._hidden)
        check_bias("gate_up", bias, self._num_experts, 2 * size)
        check_activation(activation)
        if x.dtype != self._act.dtype or x.stride(0) % 16 or len(x) * top_k > len(self._act):
            raise LayoutError(
                f"x must have at most {len(self._act) // top_k} rows of {self._act.dtype} and a "
                f"stride divisible by 16, got {len(x)} of {x.dtype} with a stride of {x.stride(0)}"
            )
        if len(x):
            self._launch(
                x, routing, self._gate_up, x if bias is None else bias, self._act,
                (self._hidden, size, 2 * size, cdiv(size, BOX.value), x.stride(0)),
                IS_GATED=True, ACTIVATION=activation, HAS_BIAS=bias is not None,
            )  # fmt: skip

    def down(self, routing: Routing, out: Tensor) -> Tensor:
        """out [rows, hidden] from the first rows of `act`."""
        hidden, size = self._hidden, self._size
        check_rows("out", out, hidden)
        if len(out):
            self._launch(
                self._act_boxes, routing, self._down, out, out,
                (size, hidden, hidden, cdiv(hidden, 2 * BOX.value), 0),
                IS_GATED=False, ACTIVATION="", HAS_BIAS=False,
            )  # fmt: skip
        return out

    def _launch(
        self,
        x: Tensor | TensorDescriptor,
        routing: Routing,
        weights: TensorDescriptor,
        bias: Tensor,
        out: Tensor,
        sizes: tuple[int, ...],
        **kind: bool | str,
    ) -> None:
        """sizes: num_in, num_out, expert_out, column_tiles, stride_x."""
        _hopper_kernel[(_num_programs(out.device),)](
            x, routing.sorted_tokens, weights, bias, out,
            routing.tile_experts, routing.tile_starts, routing.tile_ends, routing.tile_count,
            routing.tickets, *sizes, out.stride(0), STAGES, NOTES.value,
            STAGES=STAGES, GROUP_ROWS=GROUP_ROWS, launch_pdl=True, **kind, **OPTIONS,
        )  # fmt: skip


def _boxes(lines: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of [lines, K], for copies of boxes by TMA."""
    return TensorDescriptor.from_tensor(lines, [rows, STEP.value], TILES.value)


@cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
