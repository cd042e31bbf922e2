"""`mainstem bench kernel`: span attention on a GPU, each case checked before it is timed.

A time is the median of CUDA graph replays of one `run`; before each replay, the L2 cache is filled
with other data. The floor is the time to read every K and V byte once at the card's copy bandwidth,
or to do the arithmetic at its sustained rate, whichever is longer.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from torch import Tensor

from mainstem.cli.parser import Parser
from mainstem.core.errors import ConfigError
from mainstem.core.step import Spans
from mainstem.kernels import AttentionLimits, SpanAttention
from mainstem.kernels.attention import reference
from mainstem.kernels.attention.window import clip_spans
from mainstem.plan.cost import H200, Card, Heads
from mainstem_bench.floors import span_floor_s, span_flops
from mainstem_bench.workloads import (
    AttentionCase,
    Run,
    kernel_cases,
    mixed_cases,
    prefill_cases,
)

DTYPE = torch.bfloat16
# Largest error / largest value: bf16 keeps 8 bits of the weights and of the output.
TOLERANCE = 0.02
FIXED_US = 8.0  # allowed in addition to the floor, for the launch and the end of a kernel
NUM_TIMED = 20  # not more, since a card lowers its clocks after many calls
WARM_UPS = 20  # calls that are not timed: the first calls of a process are slower
PLANS = 50  # plans that are timed; the first ones are slower, after the host was idle
FLUSH_BYTES = 512 << 20
CHECKED_TOKENS = 4
PREFILL_TFLOPS = 350.0  # the rate that prompts must reach
ONE_KEY = AttentionCase("one key", (Run((0,), 1),)).spans()  # planned in between: see _plan_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    us: float
    plan_us: float
    max_error: float


class Bench:
    """Owns the data on one card. Cases of a shape share a pool of pages, like the steps of an
    engine."""

    def __init__(self) -> None:
        self._device = torch.device("cuda")
        self._flush = torch.ones(FLUSH_BYTES // 4, device=self._device)
        self._pages: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def measure(self, case: AttentionCase) -> Measured:
        """Check a case against the reference on some tokens, then time it."""
        spans = seen_spans(case)
        k_pages, v_pages = self.pages_of(case, int(spans.page_ids.max()) + 1)
        q = torch.randn(case.num_tokens, case.heads, case.head_dim, dtype=DTYPE, device="cuda")
        attention = make_attention(case, spans)
        launches = attention.plan(spans)
        out = torch.full_like(q, float("nan"))
        attention.run(q, k_pages, v_pages, out=out, launches=launches)
        max_error = error_of(out, q, k_pages, v_pages, spans)
        if not max_error < TOLERANCE:
            raise AssertionError(f"{case.name}: error {max_error}, allowed {TOLERANCE}")
        plan_us = 1e6 * float(np.median([_plan_seconds(attention, spans) for _ in range(PLANS)]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention.run(q, k_pages, v_pages, out=out, launches=launches)
        return Measured(self.time_us(graph.replay), plan_us, max_error)

    def sdpa_us(self, case: AttentionCase) -> float | None:
        """Return the time of torch's own attention over contiguous K and V, for sequences of equal
        length."""
        lengths = {run.key_tokens for run in case.runs}
        if len(lengths) > 1 or any(len(run.rows) > 1 for run in case.runs):
            return None
        batch, length = len(case.runs), lengths.pop()
        shape = (batch, case.kv_heads, length, case.head_dim)
        k, v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
        q = torch.randn(batch, case.heads, 1, case.head_dim, dtype=DTYPE, device="cuda")
        return self.time_us(
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )

    def time_us(
        self, call: Callable[[], object], num_timed: int = NUM_TIMED, warm_ups: int = WARM_UPS
    ) -> float:
        """Return the median over calls with a cold L2 cache. The cache is filled by reads, so it
        has nothing to write back during the call.
        """
        events = []
        for _ in range(warm_ups + num_timed):
            self._flush.sum()
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return float(np.median([begin.elapsed_time(end) * 1e3 for begin, end in events[warm_ups:]]))

    def free_pages(self) -> None:
        self._pages.clear()

    def make_pools(self, cases: Iterable[AttentionCase]) -> None:
        """Make pages for each of these cases."""
        spans = ((case, int(case.spans().page_ids.max()) + 1) for case in cases)
        for case, count in sorted(spans, key=lambda pair: -pair[1]):
            self.pages_of(case, count)

    def pages_of(self, case: AttentionCase, count: int) -> tuple[Tensor, Tensor]:
        """K and V for a case of `count` pages."""
        key = (case.kv_heads, case.page_size, case.head_dim)
        if key not in self._pages or len(self._pages[key][0]) < count:
            self._pages.pop(key, None)
            shape = (count, *key)
            self._pages[key] = (
                torch.randn(shape, dtype=DTYPE, device="cuda"),
                torch.randn(shape, dtype=DTYPE, device="cuda"),
            )
        k_pages, v_pages = self._pages[key]
        return k_pages[:count], v_pages[:count]


def seen_spans(case: AttentionCase) -> Spans:
    """The case's spans, clipped to its window."""
    spans = case.spans()
    if case.window is None:
        return spans
    return clip_spans(spans, case.positions(), case.window, case.page_size)


def make_attention(case: AttentionCase, spans: Spans) -> SpanAttention:
    """Make attention with buffers that fit the case."""
    return SpanAttention(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=DTYPE,
        device=torch.device("cuda"),
        limits=AttentionLimits(max_tokens=case.num_tokens, max_pages=len(spans.page_ids)),
        has_window=case.window is not None,
    )


def error_of(
    out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor, spans: Spans, own: int = 1
) -> float:
    """Return the largest error / the largest value on some tokens. NaN anywhere is an infinite
    error. With `own` above 1, tokens do not see their own page of that size."""
    if torch.isnan(out).any():
        return float("inf")
    tokens = np.unique(np.linspace(0, len(q) - 1, CHECKED_TOKENS).astype(np.int64))
    index = torch.from_numpy(tokens).to(q.device)
    right, _ = reference.span_attention(
        q[index].float(), k_pages, v_pages, _seen_by(spans, tokens, own), q.shape[-1] ** -0.5
    )
    return float((out[index].float() - right).abs().max() / right.abs().max())


def _seen_by(spans: Spans, tokens: np.ndarray, own: int) -> Spans:
    """Return plain spans of the keys that some tokens see; the tokens are numbered from 0."""
    span_of = np.repeat(np.arange(len(spans)), np.diff(spans.query_starts))
    entries = np.flatnonzero(np.isin(spans.query_rows, tokens))
    span = span_of[entries]
    place = entries - spans.query_starts[span]
    num_queries = np.diff(spans.query_starts)[span]
    hidden = np.where(spans.is_causal[span], num_queries - 1 - place, 0)
    seen = spans.key_tokens[span] - hidden
    if own > 1:
        seen = np.where(spans.is_causal[span], (seen - 1) // own * own, seen)
    runs = [spans.page_ids[spans.page_starts[s] : spans.page_starts[s + 1]] for s in span]
    return Spans(
        query_starts=np.arange(len(entries) + 1, dtype=np.int32),
        query_rows=np.searchsorted(tokens, spans.query_rows[entries]).astype(np.int32),
        page_starts=np.cumsum([0] + [len(run) for run in runs]).astype(np.int32),
        page_ids=np.concatenate(runs),
        key_tokens=seen.astype(np.int32),
        is_causal=np.zeros(len(entries), np.bool_),
        key_positions=spans.key_positions[span],
        first_keys=None if spans.first_keys is None else spans.first_keys[entries],
    )


def _plan_seconds(attention: SpanAttention, spans: Spans) -> float:
    """Return the host time of one plan. Another step is planned before, so that no earlier plan of
    these spans is reused. The device is idle, so that the host need not wait for a staging buffer.
    """
    attention.plan(ONE_KEY)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    attention.plan(spans)
    return time.perf_counter() - begin


def floor_us(case: AttentionCase, card: Card = H200) -> float:
    """Return the time to read, once, every key that some token sees, or the time of the arithmetic
    of all tokens if that is longer."""
    spans, heads = seen_spans(case), Heads(case.heads, case.kv_heads, case.head_dim)
    if spans.first_keys is None:
        return 1e6 * span_floor_s(
            card, spans, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim
        )
    hidden = int(spans.first_keys.astype(np.int64).sum())
    flops = span_flops(spans, heads=case.heads, head_dim=case.head_dim)
    flops -= hidden * heads.pair_flops
    moved = _num_seen(spans, case.page_size) * heads.key_bytes
    moved += 2 * case.num_tokens * case.heads * case.head_dim * heads.element_bytes
    return 1e6 * max(moved / card.bytes_per_s, flops / card.flops_per_s)


def _num_seen(spans: Spans, page_size: int) -> int:
    """Return the number of keys that some query sees. Keys of pages in several spans count once."""
    assert spans.first_keys is not None
    pages = np.diff(spans.page_starts)
    place = np.arange(len(spans.page_ids)) - spans.page_starts[:-1].repeat(pages)
    low = np.minimum.reduceat(spans.first_keys, spans.query_starts[:-1]).repeat(pages)
    end = spans.key_tokens.repeat(pages)
    begins = np.maximum(place * page_size, low)
    seen = np.maximum(np.minimum((place + 1) * page_size, end) - begins, 0)
    most = np.zeros(int(spans.page_ids.max()) + 1, np.int64)
    np.maximum.at(most, spans.page_ids, seen)
    return int(most.sum())


def about(case: AttentionCase, measured: Measured, card: Card = H200) -> dict[str, object]:
    """What every line has: the times beside the floor, and the error."""
    floor = floor_us(case, card)
    return {
        "case": case.name,
        "floor_us": round(floor, 1),
        "us": round(measured.us, 1),
        "over_floor": round(measured.us / floor, 2),
        "plan_us": round(measured.plan_us),
        "max_error": float(f"{measured.max_error:.2g}"),
    }


def case_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """One case as a JSON line."""
    measured, floor = bench.measure(case), floor_us(case)
    bar_us = case.allowed_over_floor * floor + FIXED_US
    line = about(case, measured) | {
        "bar_us": round(bar_us, 1),
        "is_within_bar": measured.us <= bar_us,
    }
    if case.rival_us is not None:
        line["rival_us"] = case.rival_us
        line["times_faster"] = round(case.rival_us / measured.us, 2)
    sdpa_us = bench.sdpa_us(case)
    torch.cuda.empty_cache()  # otherwise the next case would get the memory of torch's K and V
    if sdpa_us is not None:
        line["sdpa_us"] = round(sdpa_us, 1)
    return line


def mixed_line(bench: Bench) -> dict[str, object]:
    """Compare prefill chunks and decodes in one launch with one launch for each.

    Each is timed twice, in turns, and the shorter time counts, since a hot card is slower.
    """
    turns = [[bench.measure(case) for case in mixed_cases()] for _ in range(2)]
    mixed, prefill, decode = (min(pair, key=lambda m: m.us) for pair in zip(*turns, strict=True))
    return about(mixed_cases()[0], mixed) | {
        "apart_us": round(prefill.us + decode.us, 1),
        "is_within_bar": mixed.us < prefill.us + decode.us,
    }


def prefill_line(bench: Bench, case: AttentionCase) -> dict[str, object]:
    """Measure a step of prompts, which is limited by arithmetic."""
    measured = bench.measure(case)
    flops = span_flops(case.spans(), heads=case.heads, head_dim=case.head_dim)
    tflops = flops / measured.us / 1e6
    return about(case, measured) | {
        "tflops": round(tflops),
        "is_within_bar": tflops >= PREFILL_TFLOPS,
    }


def fingerprint() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
    }


def require_card() -> None:
    """Raise ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a CUDA device")


def main(args: list[str]) -> int:
    """Print one line per case; returns 1 if a case misses its limit."""
    parser = Parser(prog="mainstem bench kernel")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON line per case")
    parser.add_argument("--page-size", type=int, default=16, choices=[16, 32, 64])
    chosen = parser.parse_args(args)
    require_card()
    status = 0
    for line in _lines(Bench(), chosen.case, chosen.page_size):
        status |= not line["is_within_bar"]
        show_case(line, chosen.json)
    return status


def _lines(bench: Bench, text: str, page_size: int) -> Iterator[dict[str, object]]:
    """Measure the cases whose names contain `text`."""
    decodes, prefills = (
        [replace(case, page_size=page_size) for case in cases if text in case.name]
        for cases in (kernel_cases(), prefill_cases())
    )
    bench.make_pools(decodes)
    for case in decodes:
        yield case_line(bench, case)
    if text in mixed_cases()[0].name:
        yield mixed_line(bench)
    for case in prefills:
        yield prefill_line(bench, case)


def show_case(line: dict[str, object], is_json: bool) -> None:
    """Print one case, as JSON or for people."""
    if is_json:
        print(json.dumps({**line, **fingerprint()}), flush=True)
        return
    mark = "ok  " if line["is_within_bar"] else "over"
    print(
        f"{mark} {line['case']:<46} {line['us']:>8} us  floor {line['floor_us']:>7}  "
        f"x{line['over_floor']}  plan {line['plan_us']} us",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
