"""Measures this device's rates for the cost model (`mainstem calibrate`), and the costs that the
planner of attention needs.

Attention is timed through the same code the engine runs, on Llama-8B's heads (CPU: SmolLM2's).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu
from mainstem.kernels.attention.tuning import FITTED, TUNED_CARD, Tiles, choose_tiles, fitted_name
from mainstem.plan.cost import GENERIC_CPU, H200, Card, Heads

if TYPE_CHECKING:
    from mainstem.kernels import SpanAttention

NUM_TIMED = 15
PAGE_SIZE = 16
UNIT_KEYS = 64  # keys of a span in steps with many short spans
GPU_HEADS = Heads(heads=32, kv_heads=8, head_dim=128)
CPU_HEADS = Heads(heads=9, kv_heads=3, head_dim=64, element_bytes=4)
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Probe:
    """A device, how to time a call on it, and how large calls must be."""

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
        """The number of tokens whose query heads fill one unit."""
        return min(self.tile_rows * self.heads.kv_heads // self.heads.heads, 16)


def present_device() -> Probe:
    if not torch.cuda.is_available():
        return Probe(
            torch.device("cpu"), GENERIC_CPU.name, CPU_HEADS, torch.float32, _host_seconds,
            copy_elements=1 << 25, product_size=1024, parallel_units=GENERIC_CPU.parallel_units,
            tile_rows=GENERIC_CPU.tile_rows,
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return Probe(
        torch.device("cuda"), torch.cuda.get_device_name(), GPU_HEADS, torch.bfloat16,
        _device_seconds, copy_elements=1 << 29, product_size=8192,
        parallel_units=2 * properties.multi_processor_count, tile_rows=H200.tile_rows,
    )  # fmt: skip


def measure(probe: Probe) -> Card:
    """Measure the five rates; the last two are differences between attention calls."""
    bytes_per_s, flops_per_s = _copy_rate(probe), _product_rate(probe)
    launch_s = _attention_s(probe, _spans_of([range(1)], key_tokens=1))
    few, many = 1, 1 + 4 * max(probe.parallel_units // probe.heads.kv_heads, 8)
    more_s = _attention_s(probe, _groups(probe, many)) - _attention_s(probe, _groups(probe, few))
    keys_s = UNIT_KEYS * probe.heads.key_bytes * (many - few) / bytes_per_s
    units = (many - few) * probe.heads.kv_heads
    unit_s = max(more_s - keys_s, 0.0) * probe.parallel_units / units
    own = [range(row, row + 1) for row in range(probe.rows)]
    both = [range(probe.rows), *own]
    merge_s = _attention_s(probe, _spans_of(both)) - _attention_s(probe, _spans_of(own)) - unit_s
    return Card(
        probe.name, bytes_per_s, flops_per_s, launch_s, unit_s,
        probe.parallel_units, probe.tile_rows, max(merge_s, 0.0),
    )  # fmt: skip


def measure_tiles(probe: Probe) -> Iterator[tuple[str, Tiles]]:
    """For each head_dim, yield the name under which its tiles are saved, and the tiles. Their
    costs, which the attention planner uses, are fitted to times of steps. A CPU needs no costs: for
    it nothing is yielded.
    """
    if probe.device.type == "cpu":
        return
    from mainstem.kernels.attention.tuning import SPLIT_TILES  # noqa: PLC0415  # needs Triton
    from mainstem.runner.calibrate_pace import fit_pace  # noqa: PLC0415

    for head_dim in SPLIT_TILES:  # not for wider heads, which few layers have
        sized = replace(probe, heads=replace(probe.heads, head_dim=head_dim))
        shape = _make_attention(sized, num_tokens=1, num_pages=1).shape
        step_us = partial(_uncut_us, sized)
        yield fitted_name(probe.name, head_dim), replace(shape.tiles, pace=fit_pace(step_us, shape))


def keep_tiles(name: str, tiles: Tiles) -> Path:
    """Save what was fitted, for the planner of attention; returns the file."""
    return FITTED.save(name, tiles)


def is_tuned(probe: Probe) -> bool:
    """Whether the planner has tuned costs for this card. If so, it does not use fitted ones."""
    return probe.name == TUNED_CARD


def _uncut_us(probe: Probe, spans: Spans) -> float:
    return 1e6 * _attention_s(probe, spans, can_cut=False)


def _copy_rate(probe: Probe) -> float:
    source = torch.ones(probe.copy_elements, device=probe.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / probe.seconds(lambda: target.copy_(source))


def _product_rate(probe: Probe) -> float:
    shape = (probe.product_size, probe.product_size)
    a, b = (torch.randn(shape, device=probe.device, dtype=probe.dtype) for _ in range(2))
    return 2.0 * probe.product_size**3 / probe.seconds(lambda: a @ b)


def _groups(probe: Probe, count: int) -> Spans:
    """Return spans over a few keys, each with the tokens of one unit."""
    rows = probe.rows
    return _spans_of([range(group * rows, (group + 1) * rows) for group in range(count)])


def _spans_of(token_rows: Sequence[range], key_tokens: int = UNIT_KEYS) -> Spans:
    """One span for each run of tokens, each over its own `key_tokens` keys."""
    num_spans, num_pages = len(token_rows), -(-key_tokens // PAGE_SIZE)
    sizes = [len(rows) for rows in token_rows]
    return Spans(
        query_starts=np.cumsum([0, *sizes], dtype=np.int32),
        query_rows=np.concatenate([np.arange(rows.start, rows.stop) for rows in token_rows]).astype(
            np.int32
        ),
        page_starts=np.arange(num_spans + 1, dtype=np.int32) * num_pages,
        page_ids=np.arange(num_spans * num_pages, dtype=np.int32),
        key_tokens=np.full(num_spans, key_tokens, dtype=np.int32),
        is_causal=np.zeros(num_spans, dtype=np.bool_),
        key_positions=np.zeros(num_spans, dtype=np.int32),
    )


def _make_attention(probe: Probe, num_tokens: int, num_pages: int) -> "SpanAttention":
    """Make attention that plans with the built-in costs, so that an earlier calibration does not
    change this one."""
    from mainstem.kernels import AttentionLimits, SpanAttention  # noqa: PLC0415  # needs Triton

    heads = probe.heads
    return SpanAttention(
        heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=PAGE_SIZE,
        dtype=probe.dtype, device=probe.device,
        limits=AttentionLimits(max_tokens=num_tokens, max_pages=num_pages),
        tiles=choose_tiles(probe.device, probe.dtype, heads.head_dim, can_split=True),
    )  # fmt: skip


def _attention_s(probe: Probe, spans: Spans, can_cut: bool = True) -> float:
    heads, num_tokens = probe.heads, int(spans.query_rows.max()) + 1
    num_pages = int(spans.page_ids.max()) + 1
    q = torch.randn(num_tokens, heads.heads, heads.head_dim, device=probe.device, dtype=probe.dtype)
    if probe.device.type == "cpu":
        kv = torch.randn(2, heads.kv_heads, num_pages * PAGE_SIZE, heads.head_dim)
        shape = cpu.PageShape(heads.heads, heads.kv_heads, num_pages, PAGE_SIZE)
        plan = cpu.plan(spans, num_tokens, shape, heads.head_dim**-0.5)
        return probe.seconds(lambda: plan.run(q, kv))
    from mainstem.kernels.attention.plan import make_plan  # noqa: PLC0415  # needs Triton

    k_pages, v_pages = (
        torch.randn(
            num_pages, heads.kv_heads, PAGE_SIZE, heads.head_dim,
            device=probe.device, dtype=probe.dtype,
        )
        for _ in range(2)
    )  # fmt: skip
    attention = _make_attention(probe, num_tokens, len(spans.page_ids))
    planned = make_plan(spans, replace(attention.shape, can_cut=can_cut))
    launches = attention.send(planned)
    out = attention.run(q, k_pages, v_pages, launches=launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k_pages, v_pages, out=out, launches=launches)
    return probe.seconds(graph.replay)


def _host_seconds(call: Callable[[], object]) -> float:
    """Return the time of the shortest of many calls, since other work on the machine only adds
    time."""
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
