"""The fast CPU span attention against the fp32 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.step import Spans
from mainstem.kernels.attention import cpu, reference
from mainstem.kernels.attention.cpu.queries import find_queries
from mainstem.kernels.attention.window import clip_spans
from tests.runner.steps import make_spans, positions_of

# fp32 sums of up to a few thousand products of unit normals: 1e-5 is about 100 rounding errors
TOLERANCE = 1e-5


def spans_of(*spans: tuple[list[int], list[int], int, bool]) -> Spans:
    """(query rows, pages, key tokens, causal) per span."""
    return make_spans(spans)


def check(
    spans: Spans,
    num_tokens: int,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    page_size: int = 16,
    spread: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """Compare with the reference, with adjacent and with shuffled pages; unused slots are NaN."""
    if window is not None:
        spans = clip_spans(spans, positions_of(spans, num_tokens), window, page_size)
    sinks = torch.linspace(-2.0, 3.0, heads) if has_sinks else None
    generator = torch.Generator().manual_seed(7)
    num_pages = int(spans.page_ids.max()) + 2
    shape = (num_pages, kv_heads, page_size, dim)
    q = torch.randn(num_tokens, heads, dim, generator=generator) * spread
    k, v = (torch.full(shape, float("nan")) for _ in range(2))
    for index in range(len(spans)):
        pages = spans.page_ids[spans.page_starts[index] : spans.page_starts[index + 1]]
        for slot in range(int(spans.key_tokens[index])):
            page = int(pages[slot // page_size])
            for tensor in (k, v):
                if tensor[page, :, slot % page_size].isnan().any():
                    values = torch.randn(kv_heads, dim, generator=generator)
                    tensor[page, :, slot % page_size] = values
    expected, _ = reference.span_attention(q, k, v, spans, dim**-0.5, softcap=softcap, sinks=sinks)
    shuffled = np.random.default_rng(5).permutation(num_pages).astype(np.int32)
    for places in (np.arange(num_pages, dtype=np.int32), shuffled):
        kv = torch.empty(2, num_pages, kv_heads, page_size, dim)
        kv[:, torch.from_numpy(places).long()] = torch.stack((k, v))
        kv = kv.transpose(1, 2).flatten(2, 3).contiguous()
        before = (q.clone(), kv.clone())
        plan = cpu.plan(
            replace(spans, page_ids=places[spans.page_ids]),
            num_tokens,
            cpu.PageShape(heads, kv_heads, num_pages, page_size),
            dim**-0.5,
            softcap,
        )
        for _ in range(2):
            out = plan.run(q, kv, sinks)
            atol = TOLERANCE * max(1, spread)
            torch.testing.assert_close(out, expected, atol=atol, rtol=TOLERANCE)
        for tensor, copy in zip((q, kv), before, strict=True):
            assert torch.equal(tensor.nan_to_num(9.0), copy.nan_to_num(9.0))


def pages_for(count: int, page_size: int, first: int) -> list[int]:
    return list(range(first, first + -(-count // page_size)))


CASES = {
    "one token, one key": (spans_of(([0], [0], 1, True)), 1),
    "one token, page not full": (spans_of(([0], [3, 1], 19, True)), 1),
    "one token, plain span": (spans_of(([0], [2], 16, False)), 1),
    "triangle alone": (spans_of(([0, 1, 2, 3, 4], [0], 5, True)), 5),
    "triangle with past": (spans_of(([0, 1, 2], [4, 2, 0], 40, True)), 3),
    "past ends in a page": (spans_of(([0, 1], [4, 2], 19, True)), 2),
    "ragged decodes": (
        spans_of(([2], [0, 1], 18, True), ([0], [2], 1, True), ([1], [3, 4, 5], 47, True)),
        3,
    ),
    "shared prefix, own tails": (
        spans_of(
            ([0, 1, 2], [9, 8], 32, False),
            ([0], [0], 3, True),
            ([1], [1], 16, True),
            ([2], [2, 3], 17, True),
        ),
        3,
    ),
    "group of one": (spans_of(([0], [1, 2], 32, False), ([0], [3], 5, True)), 1),
    "tree of depth three": (
        spans_of(
            ([0, 1, 2, 3], [0], 16, False),
            ([0, 1], [1, 2], 32, False),
            ([2, 3], [3], 16, False),
            ([0], [4], 2, True),
            ([1], [5], 9, True),
            ([2], [6], 16, True),
            ([3], [7], 1, True),
        ),
        4,
    ),
    "tokens in different numbers of spans": (
        spans_of(([1, 2], [0], 16, False), ([0], [1], 4, True), ([1], [2], 4, True),
                 ([2], [3], 4, True)),
        3,
    ),
    "prefill chunks and decodes": (
        spans_of(
            ([0, 3, 4, 5, 6, 7, 8], [0, 1], 32, False),
            ([0], [2], 7, True),
            ([3, 4, 5, 6, 7, 8], [3, 4], 20, True),
            ([1, 2], [5], 2, True),
        ),
        9,
    ),
    "queries out of order": (
        spans_of(([3, 0], [0], 16, False), ([2, 1], [1], 9, True), ([0], [2], 1, True),
                 ([3], [3], 2, True)),
        4,
    ),
    "empty own part": (spans_of(([0], [0], 16, False), ([0], [1], 0, False)), 1),
    "a span without queries": (spans_of(([], [0], 16, False), ([0], [1], 3, True)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("window", [1, 5, 17])
def test_windows_match_the_reference(name: str, window: int) -> None:
    check(*CASES[name], window=window)


@pytest.mark.parametrize("name", CASES)
def test_softcaps_and_sinks_match_the_reference(name: str) -> None:
    check(*CASES[name], softcap=0.7)
    check(*CASES[name], has_sinks=True)
    check(*CASES[name], softcap=3.0, has_sinks=True, window=9, heads=5, kv_heads=1)


def test_softcaps_match_the_reference_if_few_scores_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mainstem.kernels.attention.cpu.softcap._MAX_SCORES", 500)
    check(*CASES["prefill chunks and decodes"], softcap=0.7)
    check(*CASES["ragged decodes"], softcap=0.7, window=20)


@pytest.mark.parametrize("window", [20, 100])
def test_a_long_prompt_with_a_window_matches_the_reference(window: int) -> None:
    own = pages_for(420, 16, 0)
    spans = spans_of((list(range(300)), own, 420, True), ([300], [60, 61], 32, True))
    check(spans, 301, window=window)
    check(spans, 301, window=window, softcap=0.7, heads=2)


@pytest.mark.parametrize("most", [1_000, 9_000])
def test_long_prompts_with_cut_masks_match(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.kernels.attention.cpu.parts._MAX_BUCKET_ELEMENTS", most)
    check(spans_of((list(range(200)), pages_for(320, 16, 0), 320, True)), 200, window=40)


def test_rows_that_see_none_of_the_first_keys_match_the_reference() -> None:
    """There are more keys than torch's kernel takes at once, so a row's maximum is -inf at
    first."""
    prefix = ([0, 1, 2], pages_for(1600, 16, 0), 1600, False)
    own = [([row], pages_for(keys, 16, 200 + 50 * row), keys, False)
           for row, keys in enumerate((1, 700, 3))]  # fmt: skip
    check(spans_of(prefix, *own), 3, window=1500)
    check(spans_of(prefix, *own), 3, window=1500, softcap=0.7)


@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("heads", [(71, 1), (4, 2)])
def test_wide_heads_and_many_heads_match_the_reference(dim: int, heads: tuple[int, int]) -> None:
    spans, num_tokens = CASES["prefill chunks and decodes"]
    check(spans, num_tokens, dim=dim, heads=heads[0], kv_heads=heads[1], window=12, has_sinks=True)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (8, 2), (9, 3)])
def test_any_head_ratio_matches_the_reference(heads: tuple[int, int]) -> None:
    check(*CASES["prefill chunks and decodes"], heads=heads[0], kv_heads=heads[1])


@pytest.mark.parametrize("page_size", [1, 2, 8, 64])
def test_any_page_size_matches_the_reference(page_size: int) -> None:
    prefix = pages_for(24, page_size, 0)
    first = len(prefix)
    spans = []
    rows = 0
    for queries, keys in ((1, 5), (7, 7), (3, 20), (1, 65)):
        own = list(range(rows, rows + queries))
        pages = pages_for(keys, page_size, first)
        first += len(pages)
        rows += queries
        spans.append((own, pages, keys, True))
    shared = 24 // page_size * page_size
    if shared:
        spans.append((list(range(rows)), prefix, shared, False))
    check(spans_of(*spans), rows, page_size=page_size)


def test_long_shared_run_is_split_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough work to be cut for two cores, with a remainder that ends within a page."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    group = list(range(64))
    own = [([row], [100 + row], 1 + row % 16, True) for row in group]
    check(spans_of((group, list(range(70)), 1115, False), *own), 64, heads=3, kv_heads=1)


@pytest.mark.parametrize("num_queries", [63, 64, 100, 191, 192])
def test_many_queries_over_one_run_match_the_reference(num_queries: int) -> None:
    """Sizes around the one from which the query heads of a KV head are concatenated."""
    rows = list(range(num_queries))
    shared = (rows, list(range(9)), 139, False)
    own = [([row], [20 + row], 3, True) for row in rows]
    check(spans_of(shared, *own), num_queries, heads=6, kv_heads=2, dim=8)


def test_an_lse_spread_above_80_is_merged_without_overflow() -> None:
    """One part outweighs the other by more than e^80: no overflow, no NaN."""
    check(*CASES["shared prefix, own tails"], spread=40.0)


def test_random_spans_match_the_reference() -> None:
    """Random trees of spans; the seed is fixed, so a failure repeats."""
    rng = np.random.default_rng(3)
    for _ in range(25):
        page_size = int(rng.choice([1, 2, 4, 16]))
        spans: list[tuple[list[int], list[int], int, bool]] = []
        rows = page = 0
        for _ in range(rng.integers(1, 4)):
            shared = [page + i for i in range(rng.integers(0, 5))]
            page += len(shared)
            members: list[int] = []
            for _ in range(rng.integers(1, 6)):
                queries = int(rng.choice([1, 1, 1, 2, 5, 33]))
                keys = queries + int(rng.integers(0, 40))
                own = pages_for(keys, page_size, page)
                page += len(own)
                seq = list(range(rows, rows + queries))
                rows += queries
                members += seq
                spans.append((seq, own, keys, True))
            if shared:
                spans.append((members, shared, len(shared) * page_size, False))
        check(spans_of(*spans), rows, page_size=page_size, dim=8)


def test_neighbouring_pages_are_not_copied() -> None:
    """A shared run and equally long tails, in pages as the pool returns them; nothing is
    gathered."""
    own = [([row], [4 + 2 * row, 5 + 2 * row], 20, True) for row in range(5)]
    spans = spans_of(([0, 1, 2, 3, 4], [0, 1, 2, 3], 64, False), *own)
    plan = cpu.plan(spans, 5, cpu.PageShape(6, 2, 14, 16), 0.25)
    assert plan.num_gathered_slots == 0
    check(spans, 5)
    scattered = replace(spans, page_ids=spans.page_ids[::-1].copy())
    assert cpu.plan(scattered, 5, cpu.PageShape(6, 2, 14, 16), 0.25).num_gathered_slots > 0


def test_unequal_tails_do_not_read_slots_after_their_end() -> None:
    own = [([0], [1, 2], 17, True), ([1], [3, 4], 30, True)]
    check(spans_of(([0, 1], [0], 16, False), *own), 2)


def test_many_heads_per_kv_head_and_unequal_runs_match_the_reference() -> None:
    """With many heads per KV head, the heads of even a few queries are concatenated. Unequal runs
    have masks."""
    rows = [list(range(0, 7)), list(range(7, 14))]
    own = [([row], [10 + row], 2, True) for row in range(14)]
    check(
        spans_of((rows[0], [0, 1], 20, False), (rows[1], [2, 3], 27, False), *own),
        14,
        heads=32,
        kv_heads=1,
    )


@pytest.mark.parametrize(
    ("rows", "is_copied"),
    [
        ([[0, 1, 2], [3, 4, 5]], False),
        ([[1, 2], [1, 2]], False),
        ([[4]], False),
        ([[0], [2], [4]], False),
        ([[5], [3]], True),
        ([[0, 1], [2, 2]], True),
        ([[0, 1], [2, 4]], True),
    ],
)
def test_evenly_spaced_queries_are_read_in_place(rows: list[list[int]], is_copied: bool) -> None:
    q = torch.randn(6, 5, 4)[:, :3]  # query heads are followed by those of keys and values
    found = find_queries(np.array(rows)).read(q)
    assert torch.equal(found, q[torch.tensor(rows)])
    is_own = found.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    assert is_own == is_copied
