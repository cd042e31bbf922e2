"""`mainstem bench calibrate`: the rates of the present device, for the cost model.

Writes them to `cards.json` in the cache folder, where `plan.cost.card_for` finds them. Attention is
timed through the same code the engine runs, on Llama-8B's heads (CPU: SmolLM2's).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np
import torch

from mainstem.apps.bench.workloads import AttentionCase, Run
from mainstem.core.step import Spans
from mainstem.kernels import cpu
from mainstem.plan.cost import GENERIC_CPU, H200, Card, Heads, save_card

NUM_TIMED = 15
PAGE_SIZE = 16
UNIT_KEYS = 64  # of the short spans whose number is varied
GPU_HEADS = Heads(heads=32, kv_heads=8, head_dim=128)
CPU_HEADS = Heads(heads=9, kv_heads=3, head_dim=64, element_bytes=4)
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Bench:
    """One device: how to time a call on it, and how large a call says something."""

    device: torch.device
    name: str
    heads: Heads
    dtype: torch.dtype
    seconds: Seconds
    copy_elements: int
    product_size: int
    parallel_units: int
    tile_rows: int

    @property
    def rows(self) -> int:
        """Tokens whose query heads fill one unit."""
        return min(self.tile_rows * self.heads.kv_heads // self.heads.heads, 16)


def present_device() -> Bench:
    if not torch.cuda.is_available():
        return Bench(
            torch.device("cpu"), GENERIC_CPU.name, CPU_HEADS, torch.float32, _host_seconds,
            copy_elements=1 << 25, product_size=1024, parallel_units=GENERIC_CPU.parallel_units,
            tile_rows=GENERIC_CPU.tile_rows,
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return Bench(
        torch.device("cuda"), torch.cuda.get_device_name(), GPU_HEADS, torch.bfloat16,
        _device_seconds, copy_elements=1 << 29, product_size=8192,
        parallel_units=2 * properties.multi_processor_count, tile_rows=H200.tile_rows,
    )  # fmt: skip


def measure(bench: Bench) -> Card:
    """Five numbers; the last three are differences of attention calls."""
    bytes_per_s, flops_per_s = _copy_rate(bench), _product_rate(bench)
    launch_s = _attention_s(bench, _spans_of([Run((0,), 1)]))
    few, many = 1, 1 + 4 * max(bench.parallel_units // bench.heads.kv_heads, 8)
    more_s = _attention_s(bench, _groups(bench, many)) - _attention_s(bench, _groups(bench, few))
    keys_s = UNIT_KEYS * bench.heads.key_bytes * (many - few) / bytes_per_s
    units = (many - few) * bench.heads.kv_heads
    unit_s = max(more_s - keys_s, 0.0) * bench.parallel_units / units
    own = [Run((row,), UNIT_KEYS) for row in range(bench.rows)]
    both = [Run(tuple(range(bench.rows)), UNIT_KEYS), *own]
    merge_s = _attention_s(bench, _spans_of(both)) - _attention_s(bench, _spans_of(own)) - unit_s
    return Card(
        bench.name, bytes_per_s, flops_per_s, launch_s, unit_s,
        bench.parallel_units, bench.tile_rows, max(merge_s, 0.0),
    )  # fmt: skip


def _copy_rate(bench: Bench) -> float:
    source = torch.ones(bench.copy_elements, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source))


def _product_rate(bench: Bench) -> float:
    shape = (bench.product_size, bench.product_size)
    a, b = (torch.randn(shape, device=bench.device, dtype=bench.dtype) for _ in range(2))
    return 2.0 * bench.product_size**3 / bench.seconds(lambda: a @ b)


def _groups(bench: Bench, count: int) -> Spans:
    """Spans of as many tokens as fill a unit, over a few keys each."""
    rows = bench.rows
    return _spans_of([Run(tuple(range(g * rows, (g + 1) * rows)), UNIT_KEYS) for g in range(count)])


def _spans_of(runs: list[Run]) -> Spans:
    return AttentionCase("calibrate", tuple(runs), page_size=PAGE_SIZE).spans()


def _attention_s(bench: Bench, spans: Spans) -> float:
    heads, num_tokens = bench.heads, int(spans.query_rows.max()) + 1
    num_pages = int(spans.page_ids.max()) + 1
    q = torch.randn(num_tokens, heads.heads, heads.head_dim, device=bench.device, dtype=bench.dtype)
    if bench.device.type == "cpu":
        kv = torch.randn(2, heads.kv_heads, num_pages * PAGE_SIZE, heads.head_dim)
        shape = cpu.PageShape(heads.heads, heads.kv_heads, num_pages, PAGE_SIZE)
        plan = cpu.plan(spans, num_tokens, shape, heads.head_dim**-0.5)
        return bench.seconds(lambda: plan.run(q, kv))
    from mainstem.kernels import Limits, SpanAttention  # noqa: PLC0415  # needs Triton

    k_pages, v_pages = (
        torch.randn(
            num_pages, heads.kv_heads, PAGE_SIZE, heads.head_dim,
            device=bench.device, dtype=bench.dtype,
        )
        for _ in range(2)
    )  # fmt: skip
    attention = SpanAttention(
        heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=PAGE_SIZE,
        dtype=bench.dtype, device=bench.device,
        limits=Limits(max_tokens=num_tokens, max_pages=len(spans.page_ids)),
    )  # fmt: skip
    launches = attention.plan(spans)
    out = attention.run(q, k_pages, v_pages, launches=launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k_pages, v_pages, out=out, launches=launches)
    return bench.seconds(graph.replay)


def _host_seconds(call: Callable[[], object]) -> float:
    """The best of many: other work on the machine only ever adds."""
    call()
    took_s = []
    for _ in range(NUM_TIMED):
        begin_s = perf_counter()
        call()
        took_s.append(perf_counter() - begin_s)
    return min(took_s)


def _device_seconds(call: Callable[[], object]) -> float:
    call()
    took_ms = []
    for _ in range(NUM_TIMED):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        took_ms.append(begin.elapsed_time(end))
    return float(np.median(took_ms)) / 1e3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("mainstem bench calibrate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--dry-run", action="store_true", help="measure, but keep nothing")
    chosen = parser.parse_args(argv)
    card = measure(present_device())
    path = None if chosen.dry_run else save_card(card)
    if chosen.json:
        print(json.dumps(asdict(card)))
        return 0
    for name, value in asdict(card).items():
        print(f"{name:<15} {value if isinstance(value, (str, int)) else f'{value:.3g}'}")
    if path is not None:
        print(f"kept in {path}")
    return 0
