"""Span attention as a caller sees it: plan once per step, run once per layer.

    attention = SpanAttention(heads=32, kv_heads=8, head_dim=128, page_size=16,
                              dtype=torch.bfloat16, device=torch.device("cuda"),
                              limits=AttentionLimits(max_tokens=1024, max_pages=65536))
    attention.plan(spans)                       # host side, one copy to the device
    for k_pages, v_pages in layers:             # [pages, kv_heads, page_size, head_dim] each
        out = attention.run(q, k_pages, v_pages)

The buffers are made once, at the size of the limits, and the launch does not depend on the plan: a
CUDA graph that captured `run` may be replayed after another `plan`. A step that needs fewer kernels
skips the others with `run(..., launches=attention.plan(spans))`.

Windows (spans come from `window.py: clip_spans`) and softcaps are chosen at construction, and
kernels are compiled for them. Each kind of layer has a SpanAttention of its own. They may share the
memory for Partials (`partial_bytes`), since they run one after the other.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mainstem.core.step import Spans
from mainstem.kernels.attention import layout
from mainstem.kernels.attention.plan import ALL_LAUNCHES, KernelPlan, Launches, make_plan
from mainstem.kernels.attention.plan_staging import PlanStaging
from mainstem.kernels.attention.shape import Shape, tiles_for_rounded
from mainstem.kernels.attention.triton.merge_partials import _merge_partials_kernel
from mainstem.kernels.attention.triton.sinks import _sinks_kernel
from mainstem.kernels.attention.triton.span import _span_kernel
from mainstem.kernels.attention.tuning import (
    Tiles,
    choose_tiles,
    hopper_tiles,
    with_fitted_pace,
)
from mainstem.kernels.attention.unshare import unshare
from mainstem.kernels.errors import LayoutError, PlanTooLarge
from mainstem.kernels.overlap import can_overlap, overlap_options

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
PAGE_SIZES = (16, 32, 64)
NUM_STAGING = 3  # plans that may be on their way to the device
PROMPT_QUERIES = 16  # at least this many of one sequence are a prompt, not a decode
INTERPRETER_PROGRAMS = 3
MERGES_PER_SM = 4
SINK_ROWS = 16  # rows of one program of the sink kernel
# A page's keys are read at once. If its K and V had more bytes in a head, shared memory would be
# full: pages of wide heads have at most 32 tokens, or 16.
MOST_PAGE_BYTES = 2 * 32 * 256 * 4

log = logging.getLogger("mainstem.kernels")


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """How large a step may be; the buffers are made for it."""

    max_tokens: int  # packed tokens of a step
    max_pages: int  # page ids over all spans
    max_entries: int | None = None  # pairs of a token and a span it lies in; None: 8 per token
    max_partials: int | None = None  # None: 2 per token, at least 2,048

    def entries(self) -> int:
        return self.max_entries if self.max_entries is not None else 8 * self.max_tokens

    def partials(self) -> int:
        return (
            self.max_partials if self.max_partials is not None else max(2 * self.max_tokens, 2048)
        )


def partial_bytes(heads: int, head_dim: int, limits: AttentionLimits) -> int:
    """Memory for Partials that is enough for every SpanAttention of these limits."""
    return limits.partials() * heads * 4 * (_padded(head_dim) + 1)


def _padded(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Hopper:
    """The kernels that only Hopper has."""

    large: ModuleType
    small: ModuleType
    codes: ModuleType
    boxes_of: Callable[[Tensor, int], Any]
    rows_of_box: Callable[[int, int], int]  # of a small unit


@cache
def _hopper() -> _Hopper | None:
    """The kernels that only Hopper has; None if this Triton's Gluon cannot compile them."""
    try:
        from mainstem.kernels.attention.hopper import (  # noqa: PLC0415
            codes,
            large,
            rows,
            small,
            small_reads,
        )
    except (ImportError, AttributeError) as error:
        log.warning(
            "using slower attention kernels: this Triton's Gluon is unsupported (%s)", error
        )
        return None
    return _Hopper(large, small, codes, rows.boxes_of, small_reads.rows_of_box)


def _with_kernel(
    tiles: Tiles, device: torch.device, head_dim: int, page_size: int
) -> tuple[Tiles, _Hopper | None]:
    """Return the tiles, and Hopper's kernels if the tiles are split and the device is a card. If
    this Triton cannot compile those kernels, return tiles that are not split."""
    if not tiles.is_split:
        if tiles.queued_share or tiles.divides_pages:
            raise LayoutError(
                "queued_share and divides_pages are for tiles that are split, "
                f"got {tiles.queued_share} and {tiles.divides_pages}"
            )
        return tiles, None
    if device.type == "cpu":  # one kernel computes both kinds, so no launch can be saved
        pace = replace(tiles.pace, launch_us=0.0)
        return replace(tiles, pace=pace, queued_share=0.0, divides_pages=False), None
    if tiles.large_q != 128 or tiles.large_k % page_size or tiles.small_q != 64:
        raise LayoutError(
            "tiles that are split must have large_q 128, large_k a multiple of the page size and "
            f"small_q 64, got {tiles.large_q}, {tiles.large_k} and {tiles.small_q}"
        )
    hopper = _hopper()
    if hopper is None:
        return hopper_tiles(head_dim), None
    return tiles, hopper


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """One layer's K or V as rows of head_dim, as units of either kind copy them."""

    shape: tuple[int, ...]
    small: Any  # Triton's descriptor; on Hopper two of Gluon's: for panels of 64 dims, and the tail
    large: Any  # like `small` on Hopper; None on other cards, which use pointers


class SpanAttention:
    """Attention of one step's tokens over the spans they lie in, on one stream.

    With `deterministic_keys` every span is cut at multiples of that number, with one tile shape,
    and Partials are merged in order. A row's bits then depend on its own keys alone, provided that
    spans begin at multiples of that number in their sequences. This costs up to twice the time. For
    tokens that lie in no span, nothing is read or written.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        limits: AttentionLimits,
        scale: float | None = None,
        has_window: bool = False,
        softcap: float | None = None,
        deterministic_keys: int | None = None,
        tiles: Tiles | None = None,
        partials: Tensor | None = None,
        is_rounded: bool = False,
        before_own_page: bool = False,
    ) -> None:
        """With `has_window` the spans of plans may have first keys. With a `softcap` scores become
        softcap * tanh(score / softcap). `partials` is memory that several SpanAttentions share, of
        `partial_bytes`. With `is_rounded` pages are in fp8. With this or `before_own_page`, tokens
        see only the pages before their own one: `open_pages.py` adds that one."""
        if dtype not in DTYPES:
            raise LayoutError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        if head_dim not in HEAD_DIMS:
            raise LayoutError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
        if page_size not in PAGE_SIZES:
            raise LayoutError(f"page_size must be one of {PAGE_SIZES}, got {page_size}")
        most = MOST_PAGE_BYTES // (2 * _padded(head_dim) * dtype.itemsize)
        if page_size > most:
            raise LayoutError(
                f"page_size must be at most {most} for heads of {head_dim} in {dtype}, since a "
                f"page's keys are read at once, got {page_size}"
            )
        if kv_heads < 1 or heads % kv_heads:
            raise LayoutError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if softcap is not None and not softcap > 0:
            raise LayoutError(f"softcap must be positive, got {softcap}")
        can_split, is_given = deterministic_keys is None, tiles is not None
        self._is_rounded = is_rounded
        self._before_own_page = is_rounded or before_own_page
        tiles = tiles or choose_tiles(device, dtype, head_dim, can_split=can_split)
        if device.type != "cpu" and dtype != torch.float32 and can_split and not is_given:
            tiles = with_fitted_pace(tiles, device, head_dim)
        if is_rounded and tiles.is_split:
            tiles = tiles_for_rounded(tiles, heads // kv_heads, kv_heads, head_dim, page_size)
        tiles, self._hopper = _with_kernel(tiles, device, head_dim, page_size)
        if self._hopper is not None and deterministic_keys is not None:
            raise LayoutError("tiles that are split are for attention without deterministic_keys")
        if deterministic_keys is not None and (
            deterministic_keys < 1 or deterministic_keys % math.lcm(tiles.large_k, page_size)
        ):
            raise LayoutError(
                f"deterministic_keys must be a multiple of {math.lcm(tiles.large_k, page_size)}, "
                f"got {deterministic_keys}"
            )
        self._heads, self._head_dim, self._page_size = heads, head_dim, page_size
        self._dtype, self._device, self._tiles = dtype, device, tiles
        self._limits = limits
        self._scale = head_dim**-0.5 if scale is None else scale
        self._softcap = 0.0 if softcap is None else softcap
        self._dim = _padded(head_dim)
        self._is_interpreted = device.type == "cpu"
        if self._is_interpreted:
            num_programs = INTERPRETER_PROGRAMS
            self._merge_programs = INTERPRETER_PROGRAMS
        else:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            num_programs = num_sms * tiles.programs_per_sm
            self._merge_programs = num_sms * MERGES_PER_SM
        self._overlaps = can_overlap(device)
        self.shape = Shape(  # what plans depend on besides the spans
            group=heads // kv_heads,
            kv_heads=kv_heads,
            page_size=page_size,
            num_programs=num_programs,
            tiles=tiles,
            fixed_stretch=deterministic_keys,
            max_partials=limits.partials(),
            has_windows=has_window,
        )
        self._make_buffers(partials)
        self._last: KernelPlan | None = None  # the next step may reuse it
        self._needed = Launches(large=False, merge=False)  # what the last plan needs
        self._descriptors: dict[int, _Descriptors] = {}
        self._scale_boxes: dict[int, Any] = {}

    def _make_buffers(self, partials: Tensor | None) -> None:
        limits, shape, device = self._limits, self.shape, self._device
        # `pieces_of_token` bounds the pieces of a token in an uncut span. By cutting, each program
        # gets at most four large units and two small ones more.
        pieces_of_token = 1 + -(-shape.group // self._tiles.large_q)
        max_pieces = pieces_of_token * limits.entries() + 6 * shape.num_programs
        # A unit takes one int in an order, or PIECE_INTS in the queue.
        unit_ints = shape.kv_heads
        if self._tiles.queued_share:
            unit_ints = max(unit_ints, layout.PIECE_INTS * (shape.kv_heads // shape.fold))
        self._plan_ints = (
            layout.HEADER_INTS + layout.SHARE_INTS * shape.num_programs
            + (layout.PIECE_INTS + unit_ints) * max_pieces
            + (layout.ENTRY_ROWS + layout.MERGE_ROWS) * limits.entries()
            + limits.max_pages
            + layout.PIECE_INTS + 2
        )  # fmt: skip
        self._plan = torch.zeros(self._plan_ints, dtype=torch.int32, device=device)
        self._plan_row = self._plan[None]
        rows = limits.partials() * self._heads
        # Packed Partials are in fp16, each with a factor beside its lse.
        self._is_packed = self._hopper is not None
        dtype, scales = (torch.float16, 2) if self._is_packed else (torch.float32, 1)
        lse_bytes, out_bytes = rows * scales * 4, rows * self._dim * dtype.itemsize
        if partials is None:
            partials = torch.empty(lse_bytes + out_bytes, dtype=torch.uint8, device=device)
        elif partials.dtype != torch.uint8 or len(partials) < lse_bytes + out_bytes:
            raise LayoutError(
                f"partials must be at least {lse_bytes + out_bytes} bytes, got {len(partials)} of "
                f"{partials.dtype}"
            )
        self._partial = partials[:out_bytes].view(dtype).view(rows, self._dim)
        lses = partials[out_bytes : out_bytes + lse_bytes]
        self._partial_lse = lses.view(torch.float32).view(rows, scales)
        self._tickets = torch.zeros(1, dtype=torch.int32, device=device)  # for units of the queue
        self._staging = [
            PlanStaging(device) for _ in range(1 if self._is_interpreted else NUM_STAGING)
        ]
        self._next_staging = 0

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """Launches that steps may need: first those that are enough for any step, then fewer."""
        fewer = Launches(large=False, merge=True), Launches(large=False, merge=False)
        return fewer if self._hopper is None else (ALL_LAUNCHES, *fewer)

    def plan(self, spans: Spans) -> Launches:
        """Describe the next `run`s; returns the launches that they need. Copies the plan to the
        device on the current stream, and does not wait for the copy.

        A step like the last one with a few more keys reuses its cut and assignment, which takes a
        tenth of the time.
        """
        self._check_spans(spans)
        if self._last is not None and self._last.holds_for(spans):
            plan = self._last.of_step(spans)
        else:
            plan = make_plan(spans, self.shape)
        if not self.fits(plan) and self.shape.fixed_stretch is None:
            return self.send(self._smaller_plan(spans))
        launches = self.send(plan)
        self._last = plan
        return launches

    def _smaller_plan(self, spans: Spans) -> KernelPlan:
        """Try plans with ever fewer Partials; returns the first that fits, or the last.

        Prompts stop sharing first, since they gain least by it. Then spans are not cut, which
        leaves programs idle. Decodes gain most by sharing, so they stop last.
        """
        for least_queries, can_cut in ((PROMPT_QUERIES, True), (PROMPT_QUERIES, False), (1, False)):
            fewer = unshare(spans, self._page_size, least_queries)
            self._check_spans(fewer)
            plan = make_plan(fewer, replace(self.shape, can_cut=can_cut))
            if self.fits(plan):
                break
        return plan

    def fits(self, plan: KernelPlan) -> bool:
        """Whether the buffers are large enough for a plan."""
        return plan.num_slots <= self._limits.partials() and plan.num_ints <= self._plan_ints

    def _check_spans(self, spans: Spans) -> None:
        limits = self._limits
        if len(spans.query_rows) > limits.entries():
            raise PlanTooLarge(
                f"{len(spans.query_rows)} tokens in spans, "
                f"AttentionLimits.max_entries is {limits.entries()}"
            )
        if len(spans.page_ids) > limits.max_pages:
            raise PlanTooLarge(
                f"{len(spans.page_ids)} page ids, AttentionLimits.max_pages is {limits.max_pages}"
            )
        last_token = int(spans.query_rows.max(initial=-1))
        if last_token >= limits.max_tokens:
            raise PlanTooLarge(
                f"token {last_token}, AttentionLimits.max_tokens is {limits.max_tokens}"
            )
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        pages = spans.page_starts[1:] - spans.page_starts[:-1]
        if len(queries) != len(spans) or len(pages) != len(spans):
            raise LayoutError("query_starts, page_starts: must have one entry more than key_tokens")
        if np.count_nonzero((queries | pages | spans.key_tokens) < 0):  # if any of them is negative
            raise LayoutError("query_starts, page_starts, key_tokens: a span of negative length")
        if np.count_nonzero(spans.key_tokens > pages * self._page_size):
            raise LayoutError("a span has more key_tokens than slots in its pages")
        if np.count_nonzero(spans.is_causal & (queries > spans.key_tokens)):
            raise LayoutError("a causal span has more queries than key_tokens")
        if spans.first_keys is not None and not self.shape.has_windows:
            raise LayoutError("first_keys are for a SpanAttention that has_window")
        if spans.first_keys is not None and len(spans.first_keys) != len(spans.query_rows):
            raise LayoutError("first_keys must have one entry for each of query_rows")

    def send(self, plan: KernelPlan) -> Launches:
        """Run this plan from now on; returns the launches that it needs. The next `plan` does not
        reuse it.
        """
        if plan.num_ints > self._plan_ints:
            raise PlanTooLarge(
                f"the plan is {plan.num_ints} ints for {len(plan.pieces.span)} pieces, the buffer "
                f"has {self._plan_ints}: raise AttentionLimits.max_entries"
            )
        if plan.num_slots > self._limits.partials():
            raise PlanTooLarge(
                f"{plan.num_slots} Partials, "
                f"AttentionLimits.max_partials is {self._limits.partials()}"
            )
        self._staging[self._next_staging].send(plan, self._plan_row)
        self._next_staging = (self._next_staging + 1) % len(self._staging)
        self._last = None
        has_kernel = self._hopper is not None
        self._needed = plan.launches._replace(large=plan.launches.large and has_kernel)
        return self._needed

    def run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        sinks: Tensor | None = None,
        launches: Launches = ALL_LAUNCHES,
    ) -> Tensor:
        """Attention of the planned step in one layer; returns `out`, [tokens, heads, head_dim].

        `lse`, if given, is [tokens, heads] fp32 and receives the log-sum-exp (natural log).
        `sinks`, [heads] fp32, are scores that count in this sum and have no value. They need an
        `lse`, and with them the rows of tokens in no span get arbitrary values. `scales` of K and
        V, [pages, kv_heads] fp32, belong to rounded pages. `launches` must include those that
        `plan` returned.
        """
        if out is None:
            out = torch.empty_like(q)
        if self._needed.large > launches.large or self._needed.merge > launches.merge:
            raise LayoutError(f"launches: the plan needs {self._needed}, got {launches}")
        self._check_tensors(q, k_pages, v_pages, out, lse)
        self._check_sinks(sinks, lse)
        if self._hopper is not None:
            self._attend_on_hopper(
                self._hopper, q, k_pages, v_pages, out, lse, scales, launches.large
            )
        else:
            self._attend(q, k_pages, v_pages, out, lse, scales)
        if launches.merge:
            self._merge(out, lse)
        if sinks is not None:
            assert lse is not None
            self._add_sinks(out, lse, sinks)
        return out

    def _attend_on_hopper(
        self,
        hopper: _Hopper,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scales: tuple[Tensor, Tensor] | None,
        has_large: bool,
    ) -> None:
        tiles, shape = self._tiles, self.shape
        large, small = hopper.large, hopper.small
        k, v = self._views_of(k_pages), self._views_of(v_pages)
        boxes_of_scales = (None, None)
        if scales is not None:
            boxes_of_scales = self._boxes_of_scales(scales[0]), self._boxes_of_scales(scales[1])
        tensors = (
            out, lse if lse is not None else self._partial_lse,
            self._plan, self._partial, self._partial_lse,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), self._scale * math.log2(math.e),
        )  # fmt: skip
        constants = {
            "KV_HEADS": shape.kv_heads, "GROUP": shape.group, "HEAD_DIM": self._head_dim,
            "PAGE_SIZE": self._page_size, "HAS_LSE": lse is not None,
            "HAS_WINDOW": shape.has_windows, "SOFTCAP": self._softcap,
            "BEFORE_OWN_PAGE": self._before_own_page, "ROUNDED": self._is_rounded,
            "launch_pdl": True,
        }  # fmt: skip
        if has_large:
            large._large_units_kernel[(shape.large.slots,)](
                q, k.large[0], v.large[0], k.large[1], v.large[1], *boxes_of_scales, *tensors,
                tiles.large_stages,
                TILE_K=tiles.large_k, STAGES=tiles.large_stages,
                num_warps=large.NUM_WARPS, maxnreg=large.max_registers(is_rounded=self._is_rounded),
                **constants,
            )  # fmt: skip
        small._small_units_kernel[(shape.num_programs,)](
            q, k.small[0], v.small[0], k.small[1], v.small[1], *boxes_of_scales, *tensors,
            self._tickets, tiles.small_stages,
            FOLD=shape.fold, SPLITS=shape.splits, STAGES=tiles.small_stages, IS_FIRST=not has_large,
            num_warps=small.NUM_WARPS, maxnreg=small.max_registers(tiles.programs_per_sm),
            **constants,
        )  # fmt: skip

    def _attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scales: tuple[Tensor, Tensor] | None,
    ) -> None:
        k_scales, v_scales = scales or (None, None)
        tiles, shape = self._tiles, self.shape
        options: dict[str, object] = {"launch_pdl": True} if self._overlaps else {}
        if tiles.max_registers is not None and torch.version.hip is None:
            options["maxnreg"] = tiles.max_registers
        _span_kernel[(shape.num_programs,)](
            q, k_pages, v_pages, self._views_of(k_pages).small, self._views_of(v_pages).small,
            k_scales, v_scales, 0 if k_scales is None else k_scales.stride(0),
            out, lse if lse is not None else self._partial_lse,
            self._plan, self._partial, self._partial_lse,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            k_pages.stride(0), k_pages.stride(1), self._scale * math.log2(math.e),
            KV_HEADS=shape.kv_heads, GROUP=shape.group, HEAD_DIM=self._head_dim, DIM=self._dim,
            PAGE_SIZE=self._page_size,
            FOLD=shape.fold, SMALL_Q=shape.small_q, SMALL_STAGES=tiles.small_stages,
            LARGE_Q=tiles.large_q, LARGE_K=tiles.large_k, LARGE_STAGES=tiles.large_stages,
            PER_SM=1 if self._is_interpreted else tiles.programs_per_sm,
            HAS_LSE=lse is not None, HAS_WINDOW=shape.has_windows, SOFTCAP=self._softcap,
            ROUNDED=self._is_rounded, BEFORE_OWN_PAGE=self._before_own_page,
            WIDE=len(k_pages) * k_pages.stride(0) >= 2**31,
            UPCAST=self._is_interpreted, OVERLAPS=self._overlaps,
            num_warps=tiles.num_warps, **options,
        )  # fmt: skip

    def _merge(self, out: Tensor, lse: Tensor | None) -> None:
        options = {"launch_pdl": True} if self._overlaps else {}
        _merge_partials_kernel[(self._merge_programs,)](
            out, lse if lse is not None else self._partial_lse,
            self._plan, self._partial, self._partial_lse, out.stride(0), out.stride(1),
            HEADS=self._heads, HEAD_DIM=self._head_dim, DIM=self._dim,
            IS_ORDERED=self.shape.fixed_stretch is not None,
            HAS_LSE=lse is not None, IS_PACKED=self._is_packed,
            LETS_IN=self._before_own_page, OVERLAPS=self._overlaps,
            num_warps=4 if self._dim <= 128 else 8, **options,
        )  # fmt: skip

    def _add_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        num_rows = lse.numel()
        if num_rows:
            _sinks_kernel[(-(-num_rows // SINK_ROWS),)](
                out, lse, sinks, num_rows, out.stride(0), out.stride(1),
                HEADS=self._heads, HEAD_DIM=self._head_dim, DIM=self._dim, TILE_ROWS=SINK_ROWS,
                num_warps=4, **overlap_options(self._device),
            )  # fmt: skip

    def pages_in(self, memory: Tensor) -> Tensor:
        """As many pages as fit into memory (uint8): [K and V, pages, kv_heads, page_size, dim]."""
        shape = (2, -1, self.shape.kv_heads, self._page_size, self._head_dim)
        page_bytes = -math.prod(shape) * self._dtype.itemsize
        return memory[: len(memory) // page_bytes * page_bytes].view(self._dtype).view(shape)

    def forget_addresses(self) -> None:
        """Pages are about to have other addresses."""
        self._descriptors.clear()
        self._scale_boxes.clear()

    def _views_of(self, pages: Tensor) -> "_Descriptors":
        """Descriptors, made once per layer, since a model keeps its pages."""
        found = self._descriptors.get(pages.data_ptr())
        if found is None or found.shape != tuple(pages.shape):
            fold, page_size, hopper = self.shape.fold, self._page_size, self._hopper
            if self._is_rounded and hopper is not None:
                rows = hopper.rows_of_box(fold, page_size)
                found = _Descriptors(
                    shape=tuple(pages.shape),
                    small=(hopper.codes.codes_boxes(pages, rows), None),
                    large=(hopper.codes.codes_boxes(pages, page_size), None),
                )
            elif self._is_rounded:
                by_page = pages.flatten(1, 2)
                block = [1, fold * page_size, self._dim]
                found = _Descriptors(
                    tuple(pages.shape), TensorDescriptor.from_tensor(by_page, block), None
                )
            else:
                lines = pages.view(-1, self._head_dim)
                found = _Descriptors(
                    shape=tuple(pages.shape),
                    small=TensorDescriptor.from_tensor(lines, [fold * page_size, self._dim])
                    if hopper is None
                    else hopper.boxes_of(lines, hopper.rows_of_box(fold, page_size)),
                    large=None if hopper is None else hopper.boxes_of(lines, self._page_size),
                )
            self._descriptors[pages.data_ptr()] = found
        return found

    def _boxes_of_scales(self, scales: Tensor) -> Any:
        """A descriptor of the scales of a layer's K or V, made once."""
        found = self._scale_boxes.get(scales.data_ptr())
        if found is None:
            assert self._hopper is not None
            found = self._hopper.codes.scale_boxes(scales)
            self._scale_boxes[scales.data_ptr()] = found
        return found

    def _check_sinks(self, sinks: Tensor | None, lse: Tensor | None) -> None:
        if sinks is None:
            return
        if lse is None:
            raise LayoutError("sinks need an lse")
        if sinks.dtype != torch.float32 or tuple(sinks.shape) != (self._heads,):
            raise LayoutError(
                f"sinks must be fp32 [{self._heads}], got {sinks.dtype} {tuple(sinks.shape)}"
            )
        if not sinks.is_contiguous():
            raise LayoutError("sinks must be contiguous")

    def _check_tensors(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        tail = (self._heads, self._head_dim)
        page = (self.shape.kv_heads, self._page_size, self._head_dim)
        for name, tensor, shape in (
            ("q", q, tail), ("out", out, tail),
            ("k_pages", k_pages, page), ("v_pages", v_pages, page),
        ):  # fmt: skip
            is_rounded = self._is_rounded and name in ("k_pages", "v_pages")
            wanted = torch.float8_e4m3fn if is_rounded else self._dtype
            if tensor.dtype != wanted:
                raise LayoutError(f"{name} must be {wanted}, got {tensor.dtype}")
            if tensor.device.type != self._device.type:
                raise LayoutError(f"{name} must be on {self._device}, got {tensor.device}")
            if tuple(tensor.shape[1:]) != shape:
                raise LayoutError(f"{name} must be [*, {shape}], got {tuple(tensor.shape)}")
            if tensor.stride(-1) != 1:
                raise LayoutError(f"{name} must have a contiguous last axis")
        if self._hopper is not None and (q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16):
            raise LayoutError(
                "q must begin at a multiple of 16 bytes and have strides that are multiples of 16 "
                f"elements, got {q.data_ptr() % 16} bytes more, and strides {q.stride()[:2]}"
            )
        for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
            if not (tensor[0] if self._is_rounded else tensor).is_contiguous():
                raise LayoutError(f"{name} must be contiguous")
            if tensor.data_ptr() % 16:
                raise LayoutError(f"{name} must begin at a multiple of 16 bytes")
        if k_pages.shape != v_pages.shape:
            raise LayoutError(f"k_pages is {tuple(k_pages.shape)}, v_pages {tuple(v_pages.shape)}")
        if out.shape != q.shape:
            raise LayoutError(f"out must be {tuple(q.shape)}, got {tuple(out.shape)}")
        if lse is not None and (
            lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous()
        ):
            raise LayoutError(f"lse must be contiguous fp32 {tuple(q.shape[:2])}")
