"""Clipped spans: their queries see the same keys as with a dense mask, and few other keys are
read."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention import reference
from mainstem.kernels.attention.window import LEAST_QUERIES, clip_spans
from tests.runner.steps import make_spans
from tests.work import instructions

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Workload:
    """Spans of a step, and each token's position and pages."""

    spans: Spans
    positions: Int32s
    pages_of: list[list[int]]  # pages of each token, in order
    page_size: int


def a_workload(rng: np.random.Generator, page_size: int, most_queries: int = 12) -> Workload:
    """Two levels of shared prefixes over decodes and chunks of prompts."""
    next_page = 0

    def take(count: int) -> list[int]:
        nonlocal next_page
        next_page += count
        return list(range(next_page - count, next_page))

    runs: list[tuple[list[int], list[int], int, bool]] = []
    positions: list[int] = []
    pages_of: list[list[int]] = []
    root = take(int(rng.integers(0, 5)))
    everyone: list[int] = []
    own: list[tuple[list[int], list[int], int, bool]] = []
    for _ in range(rng.integers(1, 4)):
        stem = take(int(rng.integers(0, 5)))
        members: list[int] = []
        for _ in range(rng.integers(1, 4)):
            queries = int(rng.choice([1, 1, 1, int(rng.integers(1, most_queries + 1))]))
            keys = queries + int(rng.integers(0, 6 * page_size))
            pages = take(-(-keys // page_size))
            rows = list(range(len(positions), len(positions) + queries))
            last = (len(root) + len(stem)) * page_size + keys
            positions += range(last - queries, last)
            pages_of += [root + stem + pages] * queries
            own.append((rows, pages, keys, queries > 1))
            members += rows
        if stem:
            runs.append((members, stem, len(stem) * page_size, False))
        everyone += members
    if root:
        runs.insert(0, (everyone, root, len(root) * page_size, False))
    spans = make_spans([*runs, *own])
    return Workload(spans, np.array(positions, np.int32), pages_of, page_size)


def dense(work: Workload, q: Tensor, kv: Tensor, window: int) -> Tensor:
    """Attention of each token to its own and earlier keys of its sequence, within the window."""
    outs = []
    for row, (position, pages) in enumerate(zip(work.positions, work.pages_of, strict=True)):
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, : position + 1] for x in kv)
        first = max(0, int(position) - window + 1)
        scores = (k[:, first:] @ q[row][..., None])[..., 0] * 0.4
        outs.append((scores.softmax(-1)[:, None] @ v[:, first:])[:, 0])
    return torch.stack(outs)


def check(work: Workload, window: int, align: int | None = None) -> Spans:
    """Attention over the clipped spans is that of the dense mask."""
    generator = torch.Generator().manual_seed(0)
    num_pages = int(work.spans.page_ids.max()) + 1
    kv = torch.randn(2, num_pages, 2, work.page_size, 4, generator=generator)
    q = torch.randn(len(work.positions), 2, 4, generator=generator)
    clipped = clip_spans(work.spans, work.positions, window, work.page_size, align)
    out, _ = reference.span_attention(q, kv[0], kv[1], clipped, 0.4)
    torch.testing.assert_close(out, dense(work, q, kv, window), atol=1e-5, rtol=1e-5)
    return clipped


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([1, 2, 3, 7, 16, 17, 40, 1000]),
)
def test_over_any_tree_of_prefixes_queries_see_the_keys_of_a_dense_mask(
    seed: int, page_size: int, window: int
) -> None:
    work = a_workload(np.random.default_rng(seed), page_size)
    clipped = check(work, window)
    assert (np.diff(clipped.query_starts) > 0).all()
    pages = np.diff(clipped.page_starts)
    assert (pages == -(-clipped.key_tokens // page_size)).all()
    # each query of a span sees a key; one sees a key of the first page
    if clipped.first_keys is not None:
        lowest = np.minimum.reduceat(clipped.first_keys, clipped.query_starts[:-1])
        assert (lowest < page_size).all()
        assert (clipped.first_keys < clipped.key_tokens.repeat(np.diff(clipped.query_starts))).all()


def test_a_window_that_hides_nothing_does_not_change_spans() -> None:
    work = a_workload(np.random.default_rng(1), 4)
    assert clip_spans(work.spans, work.positions, 10_000, 4) is work.spans


@pytest.mark.parametrize("window", [5, 64, 300])
def test_a_long_prompt_reads_its_keys_in_runs(window: int) -> None:
    """Each run of queries reads its own windows and at most a page more."""
    count, before = 500, 37
    pages = list(range(-(-(count + before) // 4)))
    spans = make_spans([(list(range(count)), pages, count + before, True)])
    positions = np.arange(before, before + count, dtype=np.int32)
    clipped = check(Workload(spans, positions, [pages] * count, 4), window)
    queries = np.diff(clipped.query_starts)
    assert queries.sum() == count
    assert queries.max() <= max(LEAST_QUERIES, window // 4)
    assert clipped.is_causal.all()
    assert (clipped.key_tokens < window + queries + 4).all()


def test_spans_stay_aligned_for_rows_that_must_not_depend_on_the_batch() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        keys, queries = int(rng.integers(20, 90)), int(rng.integers(1, 10))
        pages = list(range(-(-keys // 4)))
        spans = make_spans([(list(range(queries)), pages, keys, queries > 1)])
        positions = np.arange(keys - queries, keys, dtype=np.int32)
        clipped = check(Workload(spans, positions, [pages] * queries, 4), 9, align=16)
        assert not (clipped.key_positions % 16).any()


def test_decodes_over_one_prefix_have_their_own_windows() -> None:
    """There are three sequences: one sees much of the prefix, one its end, one nothing of it."""
    spans = make_spans(
        [([0, 1, 2], [0, 1, 2, 3], 16, False), ([0], [4], 1, False), ([1], [5, 6], 7, False),
         ([2], [7, 8, 9], 12, False)]
    )  # fmt: skip
    positions = np.array([16, 22, 27], np.int32)
    clipped = clip_spans(spans, positions, 8, 4)
    assert clipped.query_rows.tolist() == [0, 1, 0, 1, 2]
    assert clipped.first_keys is not None
    assert clipped.first_keys.tolist() == [1, 7, 0, 0, 0]
    assert clipped.key_positions.tolist() == [8, 16, 16, 20]
    assert clipped.page_ids.tolist() == [2, 3, 4, 5, 6, 8, 9]
    assert clipped.key_tokens.tolist() == [8, 1, 7, 8]


def test_clipping_many_decodes_takes_no_more_python_than_clipping_few() -> None:
    """Loops over spans and pages are numpy's."""
    assert clip_work(512) < clip_work(8) + 1000


def clip_work(count: int) -> int:
    """Instructions of Python to clip the spans of `count` decodes."""
    length = 3000
    pages = -(-length // 16)
    spans = Spans(
        query_starts=np.arange(count + 1, dtype=np.int32),
        query_rows=np.arange(count, dtype=np.int32),
        page_starts=np.arange(count + 1, dtype=np.int32) * pages,
        page_ids=np.arange(count * pages, dtype=np.int32),
        key_tokens=np.full(count, length, np.int32),
        is_causal=np.zeros(count, np.bool_),
        key_positions=np.zeros(count, np.int32),
    )
    positions = np.full(count, length - 1, np.int32)
    return instructions(lambda: clip_spans(spans, positions, 1024, 16))
