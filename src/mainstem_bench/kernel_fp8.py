"""`mainstem bench kernel-fp8`: steps with prompts over pages in fp8, read in two ways, beside the
same steps over 16-bit pages.

Times are measured as in `kernel.py`. With fp8 pages they leave out each token's own page, which
another kernel reads in 16 bits (`own_page_us`).
"""

import json
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
from mainstem.runner.gpu_rounded import before_own_pages
from mainstem_bench.kernel import DTYPE, TOLERANCE, Bench, error_of, fingerprint, require_card
from mainstem_bench.workloads import AttentionCase, Run, mixed_cases, prefill_cases

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


def rounded_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """One case as a JSON line, in us: 16 bits, fp8 pages expanded and direct."""
    spans = before_own_pages(case.spans(), case.positions(), case.page_size)
    k_pages, v_pages = bench.pages_of(case, int(case.spans().page_ids.max()) + 1)
    kv = round_kv(k_pages, v_pages)
    q = torch.randn(case.num_tokens, case.heads, case.head_dim, dtype=DTYPE, device="cuda")
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device="cuda")
    limits = AttentionLimits(case.num_tokens, len(spans.page_ids))
    shape = (case.heads, case.kv_heads, case.head_dim, case.page_size)
    attention = make_rounded(shape, limits)
    pages, _ = numbered(spans.page_ids)
    num_keys = len(pages) * case.page_size
    line: dict[str, object] = {
        "case": case.name,
        "rows_per_key": round(rows_x_keys(spans, case.heads // case.kv_heads) / num_keys, 1),
        "bits16_us": round(bench.measure(case).us, 1),
    }
    errors = []
    for name, expand_rows in (("expanded", 0.0), ("direct", NEVER)):
        launches = attention.plan(spans, expand_rows)
        assert attention.is_expanding == (name == "expanded")
        run = partial(attention.run, q, *kv.numbers, out, lse, scales=kv.scales, launches=launches)
        out.zero_()
        run()
        errors.append(error_of(out, q, *kv.expanded, spans, case.page_size))
        line[f"{name}_us"] = _graph_us(bench, run)
        line[f"{name}_error"] = float(f"{errors[-1]:.2g}")
    ids = torch.from_numpy(pages).cuda()
    room = torch.empty((2, len(pages), *k_pages.shape[1:]), dtype=DTYPE, device="cuda")
    line["expand_us"] = _graph_us(
        bench, lambda: expand_rounded_pages(kv.numbers, kv.scales, ids, len(ids), room)
    )
    positions = torch.from_numpy(case.positions().astype(np.int64)).cuda()
    own_pages = (k_pages[:1], v_pages[:1])
    line["own_page_us"] = _graph_us(
        bench,
        lambda: attend_open_pages(
            q, *own_pages, out, lse, positions, positions % case.page_size,
            scale=case.head_dim**-0.5,
        ),
    )  # fmt: skip
    return line | {"is_right": all(error < TOLERANCE for error in errors)}


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
    chosen = parser.parse_args(args)
    require_card()
    bench, status = Bench(), 0
    for case in rounded_cases():
        if chosen.case in case.name:
            line = rounded_line(bench, replace(case, page_size=chosen.page_size))
            status |= not line["is_right"]
            print(json.dumps({**line, **fingerprint()}), flush=True)
    return status
