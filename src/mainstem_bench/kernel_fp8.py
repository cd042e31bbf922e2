"""`mainstem bench kernel-fp8`: attention over pages in fp8 beside the same steps over 16-bit pages:
the decode cases of `kernel.py`, random ones, and steps with prompts.

Times are measured as in `kernel.py`. With fp8 pages they leave out each token's own page, which
another kernel reads in 16 bits (`own_page_us`; `with_own_page_us` is the time of both). Decodes
read the pages directly, as in the engine's graphs; prompts are read in both ways.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mainstem.cli.parser import Parser
from mainstem.kernels import AttentionLimits, SpanAttention
from mainstem.kernels.attention.expanded import (
    EXPANDED_BYTES,
    NEVER,
    ExpandingAttention,
    numbered,
    rows_x_keys,
)
from mainstem.kernels.attention.triton.open_pages import attend_open_pages
from mainstem.kernels.memory.expand import expand_rounded_pages
from mainstem.kernels.memory.record_size import SCALE_BYTES
from mainstem.kernels.memory.records import MOST
from mainstem.plan.cost import H200
from mainstem.runner.gpu_rounded import before_own_pages
from mainstem_bench.cuts import random_step
from mainstem_bench.floors import span_floor_s
from mainstem_bench.kernel import (
    DTYPE,
    TOLERANCE,
    Bench,
    error_of,
    fingerprint,
    floor_us,
    require_card,
)
from mainstem_bench.workloads import AttentionCase, Run, kernel_cases, mixed_cases, prefill_cases

NUM_RANDOM = 12
MOST_KEYS = 24_000_000  # keys x KV heads of a random step: 12 GB in 16 bits
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RoundedKv:
    """K and V in fp8, in the layout of the runner's pages (runner/gpu_rounded.py)."""

    numbers: Pair  # [pages, kv_heads, page_size, dim] e4m3
    scales: Pair  # [pages, kv_heads]

    @property
    def expanded(self) -> Pair:
        """In fp32."""
        pairs = zip(self.numbers, self.scales, strict=True)
        k, v = (codes.float() * scales[..., None, None] for codes, scales in pairs)
        return k, v


def round_kv(k_pages: Tensor, v_pages: Tensor) -> RoundedKv:
    """Round pages [pages, kv_heads, page_size, dim] with exact scales."""
    count, heads, size, dim = k_pages.shape
    half = heads * size * dim
    memory = torch.zeros(
        (2, count, half + heads * SCALE_BYTES), dtype=torch.uint8, device=k_pages.device
    )
    numbers = memory.view(torch.float8_e4m3fn)[..., :half].unflatten(-1, (heads, size, dim))  # type: ignore[no-untyped-call]
    scales = memory.view(torch.float32)[..., half // 4 : half // 4 + heads]
    for pages, codes, scale in zip((k_pages, v_pages), numbers, scales, strict=True):
        wide = pages.float()
        scale[:] = wide.abs().amax((2, 3)) / MOST
        values = torch.where(scale[..., None, None] > 0, wide / scale[..., None, None], 0.0)
        codes[:] = values.clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return RoundedKv((numbers[0], numbers[1]), (scales[0], scales[1]))


def rounded_cases() -> tuple[AttentionCase, ...]:
    """Prompts alone, sessions that return, a document's last chunk, and prompts beside decodes."""

    def chunks(count: int, tokens: int, before: int) -> tuple[Run, ...]:
        return tuple(
            Run(tuple(range(i * tokens, (i + 1) * tokens)), before + tokens, is_causal=True)
            for i in range(count)
        )

    return (
        *prefill_cases(),
        AttentionCase("gqa32/8 24x136 over 2016", chunks(24, 136, 2016)),
        AttentionCase("gqa32/8 prefill 1x136 over 2016", chunks(1, 136, 2016)),
        AttentionCase("gqa32/8 prefill 2048 over 25984", chunks(1, 2048, 25984)),
        AttentionCase("gqa32/8 prefill 8x64 over 2048", chunks(8, 64, 2048)),
        mixed_cases()[0],
    )


def decode_cases(seed: int) -> list[AttentionCase]:
    """The decode cases of `kernel.py`, and random steps of decodes alone."""
    rng, cases = random.Random(seed), kernel_cases()
    end = len(cases) + NUM_RANDOM
    while len(cases) < end:
        case = random_step(rng)
        keys = sum(run.key_tokens for run in case.runs) * case.kv_heads
        if keys <= MOST_KEYS and not any(run.is_causal and len(run.rows) > 1 for run in case.runs):
            cases.append(replace(case, name=f"random {len(cases)}: {case.name}"))
    return cases


def make_rounded(
    shape: tuple[int, int, int, int],
    limits: AttentionLimits,
    *,
    dtype: torch.dtype = DTYPE,
    has_window: bool = False,
    softcap: float | None = None,
    memory_bytes: int = EXPANDED_BYTES,
) -> ExpandingAttention:
    """Attention over rounded pages that can read them in both ways, whatever the default is.
    `shape`: heads, kv_heads, head_dim, page_size."""
    heads, kv_heads, head_dim, page_size = shape
    device = torch.device("cuda")
    make = partial(
        SpanAttention,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
        limits=limits,
        has_window=has_window,
        softcap=softcap,
    )
    memory = torch.full((memory_bytes,), 255, dtype=torch.uint8, device=device)  # NaN
    return ExpandingAttention(make(is_rounded=True), make(before_own_page=True), memory)


class RoundedCase:
    """A case with its K and V in both forms, and what a layer needs."""

    def __init__(self, bench: Bench, case: AttentionCase) -> None:
        self.case, self._bench = case, bench
        size, all_spans = case.page_size, case.spans()
        self.spans = before_own_pages(all_spans, case.positions(), size)
        self.pages = bench.pages_of(case, int(all_spans.page_ids.max()) + 1)
        self.kv = round_kv(*self.pages)
        shape = (case.num_tokens, case.heads, case.head_dim)
        self.q = torch.randn(shape, dtype=DTYPE, device="cuda")
        self.out, self.lse = torch.zeros_like(self.q), torch.zeros(shape[:2], device="cuda")
        limits = AttentionLimits(case.num_tokens, len(self.spans.page_ids))
        heads = (case.heads, case.kv_heads, case.head_dim, size)
        self._attention = make_rounded(heads, limits)
        self._positions = torch.from_numpy(case.positions().astype(np.int64)).cuda()
        # tokens share a page if their positions follow each other in it
        is_new = torch.ones_like(self._positions)
        is_new[1:] = (self._positions[1:] % size == 0) | (self._positions.diff() != 1)
        self._slots = is_new.cumsum(0) % len(self.pages[0]) * size + self._positions % size

    def attend(self, expand_rows: float) -> Callable[[], object]:
        """Plan the step; returns a call that runs it."""
        launches = self._attention.plan(self.spans, expand_rows)
        assert self._attention.is_expanding == (expand_rows != NEVER)
        return partial(
            self._attention.run, self.q, *self.kv.numbers, self.out, self.lse,
            scales=self.kv.scales, launches=launches,
        )  # fmt: skip

    def add_own_pages(self) -> None:
        """Run the kernel that adds each token's own page."""
        attend_open_pages(
            self.q, *self.pages, self.out, self.lse, self._positions, self._slots,
            scale=self.case.head_dim**-0.5,
        )  # fmt: skip

    def measure(self, run: Callable[[], object]) -> tuple[float, float]:
        """Error and time in us of a call of `attend`."""
        self.out.zero_()
        run()
        error = error_of(self.out, self.q, *self.kv.expanded, self.spans, self.case.page_size)
        return float(f"{error:.2g}"), _graph_us(self._bench, run)


def decode_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """A step of decodes as a JSON line, in us: 16 bits, fp8, and the floors of both."""
    bits16_us, step = bench.measure(case).us, RoundedCase(bench, case)
    run = step.attend(NEVER)
    error, _ = step.measure(run)

    def layer() -> None:
        run()
        step.add_own_pages()

    # twice, in turns: the first replays after a pause are slower
    turns = [[_graph_us(bench, call) for call in (run, layer)] for _ in range(2)]
    us, with_own_page_us = map(min, zip(*turns, strict=True))
    shape = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
    return {
        "case": case.name,
        "bits16_floor_us": round(floor_us(case), 1),
        "bits16_us": round(bits16_us, 1),
        "floor_us": round(1e6 * span_floor_s(H200, step.spans, **shape, kv_bytes=1), 1),
        "us": us,
        "times_faster": round(bits16_us / us, 2),
        "with_own_page_us": with_own_page_us,
        "error": error,
        "is_right": error < TOLERANCE,
    }


def prompt_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """A step with prompts as a JSON line, in us: 16 bits, fp8 pages expanded and direct."""
    step = RoundedCase(bench, case)
    pages, _ = numbered(step.spans.page_ids)
    rows = rows_x_keys(step.spans, case.heads // case.kv_heads)
    line: dict[str, object] = {
        "case": case.name,
        "rows_per_key": round(rows / (len(pages) * case.page_size), 1),
        "bits16_us": round(bench.measure(case).us, 1),
    }
    is_right = True
    for name, expand_rows in (("expanded", 0.0), ("direct", NEVER)):
        error, line[f"{name}_us"] = step.measure(step.attend(expand_rows))
        line[f"{name}_error"] = error
        is_right &= error < TOLERANCE
    ids = torch.from_numpy(pages).cuda()
    room = torch.empty((2, len(pages), *step.pages[0].shape[1:]), dtype=DTYPE, device="cuda")
    line["expand_us"] = _graph_us(
        bench, lambda: expand_rounded_pages(step.kv.numbers, step.kv.scales, ids, len(ids), room)
    )
    line["own_page_us"] = _graph_us(bench, step.add_own_pages)
    return line | {"is_right": is_right}


def _graph_us(bench: Bench, call: Callable[[], object]) -> float:
    """The time of a call, replayed as a graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return round(bench.time_us(graph.replay), 1)


def main(args: list[str]) -> int:
    """Print a JSON line for each step; returns 1 if a result is wrong."""
    parser = Parser(prog="mainstem bench kernel-fp8")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--page-size", type=int, default=16, choices=[16, 32, 64])
    parser.add_argument("--seed", type=int, default=8, help="of the random decodes")
    chosen = parser.parse_args(args)
    require_card()
    bench, status = Bench(), 0
    for lines, cases in (
        (decode_line, decode_cases(chosen.seed)),
        (prompt_line, rounded_cases()),
    ):
        for case in cases:
            if chosen.case in case.name:
                line = lines(bench, replace(case, page_size=chosen.page_size))
                status |= not line["is_right"]
                print(json.dumps({"bench": "kernel-fp8", **line, **fingerprint()}), flush=True)
                bench.free_pages()
                torch.cuda.empty_cache()
    return status
