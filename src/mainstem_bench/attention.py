"""Compares CPU decode attention over a shared prefix: spans, and torch's SDPA per sequence.

Pages are placed as in a new engine whose sequences start one after the other. `--scattered`
shuffles them, as after long use with many evictions.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser
from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention import cpu
from mainstem.kv.pool import PagePool
from mainstem_bench.report import load_average, show


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench attention", description=__doc__)
    made.add_argument("--seqs", type=positive_count, default=32)
    made.add_argument("--prefix", type=int, default=2048, help="a multiple of the page size")
    made.add_argument("--own", type=int, default=128)
    made.add_argument("--heads", type=positive_count, default=9)
    made.add_argument("--kv-heads", type=positive_count, default=3)
    made.add_argument("--head-dim", type=positive_count, default=64)
    made.add_argument("--page-size", type=positive_count, default=16)
    made.add_argument("--scattered", action="store_true", help="pages in random places")
    made.add_argument("--rounds", type=positive_count, default=15)
    made.add_argument("--json", action="store_true")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    show("attention", measure(args), args.json)
    return 0


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Return medians of interleaved rounds. Results are compared before anything is timed."""
    load = load_average()
    generator = torch.Generator().manual_seed(0)
    pages = lend_pages(args)
    shape = (2, args.kv_heads, len(pages) * args.page_size, args.head_dim)
    kv = torch.randn(shape, generator=generator)
    q = torch.randn(args.seqs, args.heads, args.head_dim, generator=generator)
    spans = shared_spans(args, pages)
    scale = args.head_dim**-0.5
    page_shape = cpu.PageShape(args.heads, args.kv_heads, len(pages), args.page_size)
    plan = cpu.plan(spans, args.seqs, page_shape, scale)
    keys, values = contexts(spans, kv[0], args.page_size), contexts(spans, kv[1], args.page_size)

    def ours() -> Tensor:
        return plan.run(q, kv)

    def per_sequence() -> Tensor:
        """Run SDPA over contiguous K and V of each sequence, as in an engine without pages."""
        out = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, scale=scale, enable_gqa=True
        )
        return out[:, :, 0]

    with torch.inference_mode():
        error = float((ours() - per_sequence()).abs().max())
        assert error < 1e-4, f"answers differ by {error}"
        ours_ms, sdpa_ms = [], []
        for _ in range(args.rounds):
            ours_ms.append(_milliseconds(ours))
            sdpa_ms.append(_milliseconds(per_sequence))
    return {
        "seqs": args.seqs,
        "prefix": args.prefix,
        "own": args.own,
        "scattered": args.scattered,
        "spans_ms": round(float(np.median(ours_ms)), 3),
        "sdpa_ms": round(float(np.median(sdpa_ms)), 3),
        "speedup": round(float(np.median(np.array(sdpa_ms) / np.array(ours_ms))), 2),
        "max_error": error,
        "load_before": load,
    }


def lend_pages(args: argparse.Namespace) -> Int32s:
    """Return the pages of the prefix, then the pages of each sequence."""
    counts = [args.prefix // args.page_size] + [-(-args.own // args.page_size)] * args.seqs
    pool = PagePool(sum(counts))
    pages = np.concatenate([pool.take(count) for count in counts])
    return np.random.default_rng(0).permutation(pages) if args.scattered else pages


def shared_spans(args: argparse.Namespace, pages: Int32s) -> Spans:
    """Spans of one prefix that all sequences read, and of each sequence's own tokens."""
    num_shared = args.prefix // args.page_size
    num_own = -(-args.own // args.page_size)
    page_counts = np.array([num_shared] + [num_own] * args.seqs)
    rows = np.arange(args.seqs, dtype=np.int32)
    return Spans(
        query_starts=np.r_[0, args.seqs, args.seqs + 1 + rows].astype(np.int32),
        query_rows=np.concatenate([rows, rows]),
        page_starts=np.r_[0, np.cumsum(page_counts)].astype(np.int32),
        page_ids=pages,
        key_tokens=np.array([args.prefix] + [args.own] * args.seqs, np.int32),
        is_causal=np.zeros(args.seqs + 1, np.bool_),
        key_positions=np.array([0] + [args.prefix] * args.seqs, np.int32),
    )


def contexts(spans: Spans, slots: Tensor, page_size: int) -> Tensor:
    """Return [seqs, kv_heads, tokens, dim], made from K or V [kv_heads, slots, dim]: every
    sequence's whole context, in the layout of SDPA."""
    pages = slots.view(len(slots), -1, page_size, slots.shape[2])
    ids = torch.from_numpy(spans.page_ids.astype(np.int64))
    starts = spans.page_starts.tolist()

    def run(index: int) -> Tensor:
        tokens = pages[:, ids[starts[index] : starts[index + 1]]].flatten(1, 2)
        return tokens[:, : int(spans.key_tokens[index])]

    return torch.stack([torch.cat([run(0), run(i)], dim=1) for i in range(1, len(spans))])


def _milliseconds(call: Callable[[], Tensor]) -> float:
    began_s = perf_counter()
    call()
    return (perf_counter() - began_s) * 1e3
