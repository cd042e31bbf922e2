# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Which experts a token goes to, and the tokens sorted by expert; all of it on the device.

    logits     [tokens, experts] = x @ router.T, in fp32
    ids        the top_k experts of each token, the lowest on a tie; `weights` are their softmax.
               In some models scores are sigmoids, and a bias is added to them to choose experts
    sorted     each row (a token for one of its experts) has a place: expert by expert, tokens in
               order; `positions` maps token and slot to it, `sorted_tokens` and `sorted_experts`
               map back
    tiles      rows of one expert in tiles of `tile_rows`, which the grouped products walk over

    expert      0     1  2        3                   tile_rows = 4
    sorted   | a c d | b | a b c d e | ...            tile_experts  0 1 3 3 -1 -1
    ends       3       4   4(none)   9                tile_starts   0 3 4 8

The host knows how many rows there are, but not which experts get them: grids are made for the
largest possible number of tiles, and unused tiles have expert -1.

A token's logits do not depend on other tokens: the sum over the hidden axis is always cut into
SPLITS parts that are added in order. One program computes all parts; for few logits, each part has
its own program, so that more programs share the reading.

Nothing is allocated and the host never waits for the device: safe in a CUDA graph. Kernels are not
recompiled for other numbers of tokens (`do_not_specialize`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError, PlanTooLarge
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import can_overlap, overlap_options, wait_for_ahead

SPLITS = 8
SPLIT_LOGITS = 1 << 18  # up to this many logits, each part of the sums has its own program
MAX_EXPERTS = 512
MAX_TOP_K = 16
_TILE = 64  # rows, columns and k of a router program
# tokens of a program of _route_kernel; _place_kernel adds up the counts of several programs
_BLOCK_TOKENS = 16
_MOST_PLACERS = 128  # programs of _place_kernel; each reads all counts

_LOWEST = tl.constexpr(-(1 << 62))  # less than the key of any logit
_TILES_AT_ONCE = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """A layer's router. If a shared expert has a gate, the gate is the last row of `weight`."""

    weight: Tensor  # [experts (+ 1), hidden]
    bias: Tensor | None  # [experts]
    num_experts: int
    top_k: int
    is_normalized: bool
    is_sigmoid: bool = False  # scores are sigmoids of logits
    choice_bias: Tensor | None = None  # [experts] fp32: added to scores to choose experts
    floor: float = 0.0  # added to the sum by which weights are normalized
    scale: float = 1.0  # factor of the weights

    @property
    def is_plain(self) -> bool:
        """Whether weights are a softmax, and experts are those with the largest."""
        return not self.is_sigmoid and self.choice_bias is None and self.floor == 0.0

    @property
    def has_shared_gate(self) -> bool:
        return len(self.weight) > self.num_experts


@dataclass(frozen=True, slots=True)
class Routing:
    """The outputs of `route`: buffers for up to `max_tokens`, made once for all layers."""

    max_tokens: int
    logits: Tensor  # fp32: partial sums of logits
    ids: Tensor  # [tokens, top_k] int32, best first
    weights: Tensor  # [tokens, top_k] fp32
    positions: Tensor  # [tokens, top_k] int32: the row's place in the sorted order
    sorted_tokens: Tensor  # [tokens * top_k] int32
    sorted_experts: Tensor  # [tokens * top_k] int32
    ends: Tensor  # [experts] int32: rows of all experts up to and including this one
    counts: Tensor  # [blocks, experts] int32: rows of each expert, by block of tokens
    tile_experts: Tensor  # [tiles] int32; -1: no such tile
    tile_starts: Tensor  # [tiles] int32: where a tile's rows begin in the sorted order
    tile_ends: Tensor  # [tiles] int32: where a tile's rows end
    tile_count: Tensor  # [1] int32: tiles in use
    tickets: Tensor  # [1] int32: tiles that programs of hopper.py have taken; zero between calls
    shared_weights: Tensor  # [tokens] fp32: sigmoid of the shared expert's gate

    @classmethod
    def make(cls, num_experts: int, top_k: int, max_tokens: int, device: torch.device) -> "Routing":
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        max_logits = max_tokens * (num_experts + 1)
        max_rows = max_tokens * top_k
        return cls(
            max_tokens=max_tokens,
            logits=floats(max(max_logits, SPLITS * min(max_logits, SPLIT_LOGITS))),
            ids=ints(max_tokens, top_k),
            weights=floats(max_tokens, top_k),
            positions=ints(max_tokens, top_k),
            sorted_tokens=ints(max_rows),
            sorted_experts=ints(max_rows),
            ends=ints(num_experts),
            counts=ints(cdiv(max_tokens, _BLOCK_TOKENS), num_experts),
            tile_experts=ints(max_rows),
            tile_starts=ints(max_rows),
            tile_ends=ints(max_rows),
            tile_count=ints(1),
            tickets=ints(1),
            shared_weights=floats(max_tokens),
        )


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that can be needed, for any distribution of rows over experts."""
    in_use = min(num_rows, num_experts)
    return (num_rows + in_use * (tile_rows - 1)) // tile_rows


@triton.jit(do_not_specialize=("tokens", "stride_split"))
def _router_kernel(
    x_ptr, router_ptr, logits_ptr, tokens, num_out, num_in, split_in, stride_x, stride_router,
    stride_split,
    SPLITS_HERE: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per tile of the logits and SPLITS_HERE parts of their sums."""
    wait_for_ahead(OVERLAPS)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ks = tl.arange(0, TILE)
    is_row, is_column = rows < tokens, columns < num_out
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    router_ptrs = router_ptr + columns[None, :] * stride_router
    total, part = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
    first = tl.program_id(2) * SPLITS_HERE * split_in
    for start in range(first, tl.minimum(first + SPLITS_HERE * split_in, num_in), TILE):
        # one loop over all parts, so that loads of the next part begin before this one ends
        is_new = start % split_in == 0
        total = tl.where(is_new, total + part, total)
        part = tl.where(is_new, 0.0, part)
        k = start + ks
        x = tl.load(x_ptrs + k[None, :], mask=is_row[:, None] & (k < num_in)[None, :], other=0.0)
        router = tl.load(
            router_ptrs + k[:, None], mask=is_column[None, :] & (k < num_in)[:, None], other=0.0
        )
        if UPCAST:
            x, router = x.to(tl.float32), router.to(tl.float32)
        part = tl.dot(x, router, part, input_precision="ieee")
    total += part
    out_ptrs = logits_ptr + tl.program_id(2) * stride_split + rows[:, None] * num_out
    tl.store(out_ptrs + columns[None, :], total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _summed(logits_ptr, cells, mask, stride_split, NUM_PARTS: tl.constexpr):
    """The parts of logits, added in order."""
    total = tl.load(logits_ptr + cells, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(logits_ptr + part * stride_split + cells, mask=mask, other=0.0)
    return total


@triton.jit
def _in_order(bits):
    """Turn the bits of a float32 into an int32 that sorts like the float, or turn them back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _write_tiles(
    totals, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr,
    num_tiles, tile_rows, EXPERTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Cut the rows of each expert (totals [LANES]) into tiles; each program writes some tiles."""
    lanes = tl.arange(0, LANES)
    tiles = tl.cdiv(totals, tile_rows)
    tile_ends = tl.cumsum(tiles, 0)
    ends = tl.cumsum(totals, 0)
    starts = ends - totals - (tile_ends - tiles) * tile_rows
    tl.store(tile_count_ptr, tl.sum(tiles, 0))
    stride = tl.num_programs(0) * _TILES_AT_ONCE
    for first in range(tl.program_id(0) * _TILES_AT_ONCE, num_tiles, stride):
        tile = first + tl.arange(0, _TILES_AT_ONCE)
        expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_its = lanes[None, :] == expert[:, None]
        start = tl.sum(tl.where(is_its, starts[None, :], 0), 1) + tile * tile_rows
        end = tl.minimum(tl.sum(tl.where(is_its, ends[None, :], 0), 1), start + tile_rows)
        is_tile = tile < num_tiles
        expert = tl.where(expert < EXPERTS, expert, -1)
        tl.store(tile_experts_ptr + tile, expert, mask=is_tile)
        tl.store(tile_starts_ptr + tile, start, mask=is_tile)
        tl.store(tile_ends_ptr + tile, end, mask=is_tile)


@triton.jit(do_not_specialize=("tokens", "stride_split", "num_tiles", "tile_rows"))
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, positions_ptr, counts_ptr, shared_weights_ptr,
    sorted_ptr, sorted_experts_ptr, ends_ptr, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr,
    tile_count_ptr, choice_bias_ptr, tokens, stride_split, num_tiles, tile_rows, floor, scale,
    NUM_PARTS: tl.constexpr, EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, IS_NORMALIZED: tl.constexpr, IS_PLAIN: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK tokens. IS_WHOLE: there is only one program, which also sorts the rows.
    Otherwise `positions` gets a row's number among its expert's rows in the block, for
    _place_kernel. IS_PLAIN: a softmax without a bias for the choice or a floor; then only the
    logits of chosen experts become scores."""
    wait_for_ahead(OVERLAPS)
    block = tl.program_id(0)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    lanes, slots = tl.arange(0, LANES), tl.arange(0, SLOTS)
    is_token = rows < tokens
    is_expert = (lanes < EXPERTS)[None, :]
    cells = rows[:, None] * WIDTH + lanes[None, :]
    logits = _summed(logits_ptr, cells, is_token[:, None] & is_expert, stride_split, NUM_PARTS)
    if HAS_GATE:
        gate = _summed(logits_ptr, rows * WIDTH + EXPERTS, is_token, stride_split, NUM_PARTS)
        tl.store(shared_weights_ptr + rows, tl.sigmoid(gate), mask=is_token)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + lanes, mask=lanes < EXPERTS, other=0.0).to(tl.float32)[None, :]
    # a NaN must not choose an expert that does not exist; -0.0 must equal 0.0
    logits = tl.where(is_expert & (logits == logits), logits, float("-inf"))  # noqa: PLR0124
    ranked = logits
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    elif not IS_PLAIN:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    if HAS_CHOICE_BIAS:
        ranked = scores + tl.load(choice_bias_ptr + lanes, mask=lanes < EXPERTS, other=0.0)[None, :]
        ranked = tl.where(ranked == ranked, ranked, float("-inf"))  # noqa: PLR0124
    ranked = tl.where(ranked == 0.0, 0.0, ranked)

    # a key holds a number and, in lower bits, its lane: the largest key is the best, on a tie the
    # lowest lane
    keys = _in_order(ranked.to(tl.int32, bitcast=True)).to(tl.int64) << 16
    keys = tl.where(is_expert, keys | (LANES - 1 - lanes)[None, :], _LOWEST)
    ids = tl.zeros([BLOCK, SLOTS], tl.int32)
    tops = tl.full([BLOCK, SLOTS], float("-inf") if IS_PLAIN else 0.0, tl.float32)
    chosen = tl.zeros([BLOCK, LANES], tl.int32)
    for slot in range(TOP_K):
        best = tl.max(keys, 1)
        is_best = keys == best[:, None]
        keys = tl.where(is_best, _LOWEST, keys)
        chosen = tl.where(is_best & is_token[:, None], 1, chosen)
        if IS_PLAIN:
            top = _in_order((best >> 16).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            top = tl.sum(tl.where(is_best, scores, 0.0), 1)
        expert = LANES - 1 - (best & 0xFFFF).to(tl.int32)
        is_slot = (slots == slot)[None, :]
        ids = tl.where(is_slot, expert[:, None], ids)
        tops = tl.where(is_slot, top[:, None], tops)
    if IS_PLAIN:
        peak = tl.max(tops, 1)
        weights = tl.where((slots < TOP_K)[None, :], tl.exp(tops - peak[:, None]), 0.0)
        if IS_NORMALIZED:
            weights /= tl.sum(weights, 1)[:, None]
        else:
            weights /= tl.sum(tl.exp(logits - peak[:, None]), 1)[:, None]
    elif IS_NORMALIZED:
        weights = tops / (tl.sum(tops, 1) + floor)[:, None]
    else:
        weights = tops
    places = rows[:, None] * TOP_K + slots[None, :]
    is_place = is_token[:, None] & (slots < TOP_K)[None, :]
    tl.store(ids_ptr + places, ids, mask=is_place)
    tl.store(weights_ptr + places, weights * scale, mask=is_place)

    ranks = tl.cumsum(chosen, 0) - chosen
    totals = tl.sum(chosen, 0)
    if IS_WHOLE:
        ends = tl.cumsum(totals, 0)
        tl.store(ends_ptr + lanes, ends, mask=lanes < EXPERTS)
        ranks += (ends - totals)[None, :]
        _write_tiles(
            totals, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr,
            num_tiles, tile_rows, EXPERTS, LANES,
        )  # fmt: skip
    else:
        tl.store(counts_ptr + block * EXPERTS + lanes, totals, mask=lanes < EXPERTS)
    positions = tl.gather(ranks, ids, 1)
    tl.store(positions_ptr + places, positions, mask=is_place)
    if IS_WHOLE:
        token = rows[:, None] + tl.zeros([BLOCK, SLOTS], tl.int32)
        tl.store(sorted_ptr + positions, token, mask=is_place)
        tl.store(sorted_experts_ptr + positions, ids, mask=is_place)


@triton.jit(do_not_specialize=("tokens", "num_blocks", "blocks_each", "num_tiles", "tile_rows"))
def _place_kernel(
    ids_ptr, positions_ptr, counts_ptr, sorted_ptr, sorted_experts_ptr, ends_ptr,
    tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr, tokens, num_blocks,
    blocks_each, num_tiles, tile_rows,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, CELLS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per `blocks_each` blocks of tokens. Numbers within a block become positions."""
    wait_for_ahead(OVERLAPS)
    first = tl.program_id(0) * blocks_each
    lanes = tl.arange(0, LANES)
    is_expert = lanes < EXPERTS
    sums, sums_before = tl.zeros([CHUNK, LANES], tl.int32), tl.zeros([CHUNK, LANES], tl.int32)
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        ptrs = counts_ptr + blocks[:, None] * EXPERTS + lanes[None, :]
        is_count = (blocks < num_blocks)[:, None] & is_expert[None, :]
        counts = tl.load(ptrs, mask=is_count, other=0)
        sums += counts
        sums_before += tl.where((blocks < first)[:, None], counts, 0)
    totals, before = tl.sum(sums, 0), tl.sum(sums_before, 0)
    ends = tl.cumsum(totals, 0)
    tl.store(ends_ptr + lanes, ends, mask=is_expert)  # all programs store the same values
    _write_tiles(
        totals, tile_experts_ptr, tile_starts_ptr, tile_ends_ptr, tile_count_ptr,
        num_tiles, tile_rows, EXPERTS, LANES,
    )  # fmt: skip
    starts = ends - totals + before
    cells = tl.arange(0, CELLS)
    for block in range(first, tl.minimum(first + blocks_each, num_blocks)):
        token = block * BLOCK + cells // TOP_K
        is_cell = (cells < BLOCK * TOP_K) & (token < tokens)
        places = block * BLOCK * TOP_K + cells
        ids = tl.load(ids_ptr + places, mask=is_cell, other=0)
        positions = tl.load(positions_ptr + places, mask=is_cell, other=0)
        positions += tl.gather(starts, ids, 0)
        tl.store(positions_ptr + places, positions, mask=is_cell)
        tl.store(sorted_ptr + positions, token, mask=is_cell)
        tl.store(sorted_experts_ptr + positions, ids, mask=is_cell)
        starts += tl.load(counts_ptr + block * EXPERTS + lanes, mask=is_expert, other=0)


def route(x: Tensor, router: ExpertRouter, routing: Routing, tile_rows: int) -> int:
    """Choose experts for x [tokens, hidden] and sort the rows. Returns the number of tiles,
    including unused ones."""
    _check(x, router, routing)
    tokens, num_rows = len(x), len(x) * router.top_k
    num_tiles = most_tiles(num_rows, router.num_experts, tile_rows)
    if tokens == 0:
        return num_tiles
    overlaps = overlap_options(x.device)
    stride_split, num_parts = _launch_router(x, router, routing)
    lanes = next_power_of_2(router.num_experts)
    num_blocks = cdiv(tokens, _BLOCK_TOKENS)
    sizes = {"EXPERTS": router.num_experts, "LANES": lanes, "TOP_K": router.top_k,
             "BLOCK": _BLOCK_TOKENS}  # fmt: skip
    sorting = (routing.sorted_tokens, routing.sorted_experts, routing.ends, routing.tile_experts,
               routing.tile_starts, routing.tile_ends, routing.tile_count)  # fmt: skip
    _route_kernel[(num_blocks,)](
        routing.logits, routing.logits if router.bias is None else router.bias,
        routing.ids, routing.weights, routing.positions, routing.counts, routing.shared_weights,
        *sorting, routing.logits if router.choice_bias is None else router.choice_bias,
        tokens, stride_split, num_tiles, tile_rows, router.floor, router.scale,
        NUM_PARTS=num_parts, SLOTS=next_power_of_2(router.top_k), WIDTH=len(router.weight),
        HAS_BIAS=router.bias is not None, HAS_GATE=router.has_shared_gate,
        IS_NORMALIZED=router.is_normalized, IS_PLAIN=router.is_plain, IS_SIGMOID=router.is_sigmoid,
        HAS_CHOICE_BIAS=router.choice_bias is not None, IS_WHOLE=num_blocks == 1,
        num_warps=4 if lanes <= 256 else 8, **sizes, **overlaps,
    )  # fmt: skip
    if num_blocks > 1:
        blocks_each = cdiv(num_blocks, _MOST_PLACERS)
        _place_kernel[(cdiv(num_blocks, blocks_each),)](
            routing.ids, routing.positions, routing.counts, *sorting,
            tokens, num_blocks, blocks_each, num_tiles, tile_rows,
            CELLS=next_power_of_2(_BLOCK_TOKENS * router.top_k),
            CHUNK=max(1, 8192 // lanes), num_warps=8, **sizes, **overlaps,
        )  # fmt: skip
    return num_tiles


def _launch_router(x: Tensor, router: ExpertRouter, routing: Routing) -> tuple[int, int]:
    """Compute the partial sums of logits; returns their distance in memory and their number."""
    tokens, hidden = x.shape
    num_out = len(router.weight)
    split_in = cdiv(cdiv(hidden, _TILE), SPLITS) * _TILE
    num_parts = SPLITS if tokens * num_out <= SPLIT_LOGITS else 1
    stride_split = tokens * num_out
    _router_kernel[(cdiv(tokens, _TILE), cdiv(num_out, _TILE), num_parts)](
        x, router.weight, routing.logits, tokens, num_out, hidden, split_in,
        x.stride(0), router.weight.stride(0), stride_split,
        SPLITS_HERE=SPLITS // num_parts, TILE=_TILE, UPCAST=not x.is_cuda,
        num_warps=4, num_stages=5 if can_overlap(x.device) else 3, **overlap_options(x.device),
    )  # fmt: skip
    return stride_split, num_parts


def _check(x: Tensor, router: ExpertRouter, routing: Routing) -> None:
    experts, top_k = router.num_experts, router.top_k
    if x.dim() != 2 or x.stride(1) != 1 or router.weight.stride(1) != 1:
        raise LayoutError(f"x must be [tokens, hidden] with contiguous rows, got {tuple(x.shape)}")
    if router.weight.shape[1] != x.shape[1] or len(router.weight) not in (experts, experts + 1):
        raise LayoutError(
            f"router must be [{experts}, {x.shape[1]}], or have one more row for a shared gate, "
            f"got {tuple(router.weight.shape)}"
        )
    if router.weight.dtype != x.dtype:
        raise LayoutError(f"x is {x.dtype}, the router {router.weight.dtype}")
    if not 1 <= top_k <= min(experts, MAX_TOP_K) or experts > MAX_EXPERTS:
        raise LayoutError(
            f"top_k must be at most {MAX_TOP_K} of at most {MAX_EXPERTS} experts, "
            f"got {top_k} of {experts}"
        )
    if routing.ends.shape != (experts,) or routing.ids.shape[1] != top_k:
        raise LayoutError("the buffers were made for another number of experts or another top_k")
    if len(x) > routing.max_tokens:
        raise PlanTooLarge(f"{len(x)} tokens, buffers were made for {routing.max_tokens}")
