"""Span attention at full shapes on a card; needs CUDA, run with `make test-gpu`."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Skip before the kernels are imported: other tests need them in Triton's interpreter.
    pytest.skip("no CUDA device", allow_module_level=True)

from mainstem.core.step import Spans
from mainstem.kernels import AttentionLimits, LayoutError, SpanAttention
from mainstem.kernels.attention import layout, reference
from mainstem.kernels.attention.cutting import ways_to_cut
from mainstem.kernels.attention.plan import plan_cut
from mainstem.kernels.attention.window import clip_spans
from mainstem.kernels.memory.append import rope_append
from mainstem.kernels.memory.reference import append, rope
from mainstem.kernels.memory.rotate import rerotate
from mainstem_bench.workloads import AttentionCase, Run, mixed_cases

pytestmark = pytest.mark.gpu

# Largest error divided by largest value. Weights and outputs are rounded to the dtype (2^-9, 2^-12
# relative), sums are fp32; fp32 itself sums up to 10^4 terms in tiles.
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 2e-5}


def _decode(own: list[int], prefixes: list[tuple[range, int]] = []) -> tuple[Run, ...]:  # noqa: B006
    runs = [Run(tuple(rows), tokens) for rows, tokens in prefixes]
    return (*runs, *(Run((row,), tokens, tokens > 0) for row, tokens in enumerate(own)))


CASES = {
    "one token": _decode([1]),
    "one key each, many": _decode([1] * 300),
    "empty own part": (*_decode([0, 0, 0], [(range(3), 77)]),),
    "page not full": _decode([17, 33, 250], [(range(3), 2001)]),
    "group of 1": _decode([40, 50], [(range(1), 300), (range(1, 2), 200)]),
    "span of 1 token": _decode([5] * 8, [(range(8), 1)]),
    "4096 sequences": _decode([20] * 4096, [(range(4096), 64)]),
    "depth 5": _decode(
        [7] * 32, [(range(32), 100), (range(16), 50), (range(8), 33), (range(4), 16), (range(2), 9)]
    ),
    "prefill alone": (Run(tuple(range(300)), 700, is_causal=True),),
    "prefill without history": (Run(tuple(range(513)), 513, is_causal=True),),
    "long and short": _decode([20000, 3, 1000]),
    # small units of several rows, without large ones
    "groups of four": _decode([100] * 64, [(range(i, i + 4), 1000 + i) for i in range(0, 64, 4)]),
    "groups of two and three": _decode(
        [17] * 10, [(range(2), 500), (range(2, 5), 333), (range(5, 7), 64), (range(7, 10), 2000)]
    ),
    "a short prefix of a few": _decode([128] * 16, [(range(16), 200)]),
    "a prompt of three tokens": (*_decode([40, 50]), Run((2, 3, 4), 300, is_causal=True)),
    "a prefix without keys": _decode([30] * 64, [(range(64), 0), (range(64), 500)]),
    # units of 20 rows, which leave one group of warps idle, between units of 128
    "few rows and many": _decode(
        [9] * 160,
        [*((range(i, i + 5), 1000 + i) for i in range(0, 80, 5)), (range(80, 160), 3001)],
    ),
    "mixed": mixed_cases()[0].runs,
}
SHAPES = [
    (32, 8, 128, 16), (32, 32, 128, 16), (32, 8, 64, 32), (8, 8, 80, 16), (12, 4, 96, 64),
    (28, 4, 128, 16), (64, 8, 128, 16), (16, 1, 128, 64), (9, 3, 64, 16), (40, 2, 128, 32),
    (6, 2, 128, 16), (9, 3, 128, 32), (128, 2, 128, 16), (130, 2, 64, 16),
    (32, 8, 128, 64), (12, 2, 128, 64), (8, 4, 256, 16), (6, 1, 256, 32),
    (13, 1, 80, 32), (40, 2, 80, 64), (12, 12, 96, 16), (26, 2, 256, 64), (8, 1, 64, 16),
    (32, 4, 512, 16), (16, 2, 512, 32), (8, 1, 512, 16),
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Options that layers may have."""

    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


PLAIN = Kind()


def _run(
    case: AttentionCase,
    dtype: torch.dtype,
    deterministic_keys: int | None = None,
    kind: Kind = PLAIN,
) -> tuple[torch.Tensor, ...]:
    """Outputs of the kernel and of the reference, with every unused slot NaN."""
    torch.manual_seed(0)
    spans = case.spans()
    num_pages = int(spans.page_ids.max(initial=0)) + 3
    shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    k_pages = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    v_pages = k_pages.clone()
    for pages in (k_pages, v_pages):
        for index in range(len(spans)):
            ids = spans.page_ids[spans.page_starts[index] : spans.page_starts[index + 1]]
            slots = np.arange(spans.key_tokens[index])
            where = torch.from_numpy(ids[slots // case.page_size].astype(np.int64)).cuda()
            offset = torch.from_numpy(slots % case.page_size).cuda()
            values = torch.randn(len(slots), case.kv_heads, case.head_dim, device="cuda")
            pages[where, :, offset] = values.to(dtype)
    q = torch.randn(case.num_tokens, case.heads, case.head_dim, device="cuda").to(dtype)
    sinks = 2 * torch.randn(case.heads, device="cuda") if kind.has_sinks else None
    if kind.window is not None:
        spans = clip_spans(spans, case.positions(), kind.window, case.page_size, deterministic_keys)
    attention = SpanAttention(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=dtype,
        device=torch.device("cuda"),
        limits=AttentionLimits(
            case.num_tokens, len(spans.page_ids), max_partials=12 * case.num_tokens + 500
        ),
        deterministic_keys=deterministic_keys,
        has_window=kind.window is not None,
        softcap=kind.softcap,
    )
    if torch.cuda.get_device_capability()[0] == 9:
        has_own_kernels = dtype != torch.float32 and deterministic_keys is None
        has_own_kernels &= case.head_dim <= 256  # larger ones run in the portable kernel
        assert (attention._hopper is not None) == has_own_kernels
    launches = attention.plan(spans)
    lse = torch.full((case.num_tokens, case.heads), float("nan"), device="cuda")
    out = attention.run(q, k_pages, v_pages, lse=lse, sinks=sinks, launches=launches)
    again = attention.run(q, k_pages, v_pages, lse=torch.empty_like(lse), sinks=sinks)
    right, right_lse = reference.span_attention(
        q.float(),
        k_pages.nan_to_num(0.0),
        v_pages.nan_to_num(0.0),
        spans,
        case.head_dim**-0.5,
        softcap=kind.softcap,
        sinks=sinks,
    )
    return out, lse, right, right_lse, again


def _check(
    case: AttentionCase,
    dtype: torch.dtype,
    deterministic_keys: int | None = None,
    kind: Kind = PLAIN,
) -> None:
    out, lse, right, right_lse, again = _run(case, dtype, deterministic_keys, kind)
    assert not out.isnan().any()
    error = (out.float() - right).abs().max() / right.abs().max().clamp_min(1e-6)
    assert error < TOLERANCE[dtype], f"{case.name}: {error}"
    seen = right_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert float((lse - right_lse)[seen].abs().max()) < 0.02
    assert torch.equal(out, again), "the second run, with all launches, differs from the first"


@pytest.mark.parametrize("name", list(CASES))
def test_named_cases_agree_with_the_reference(name: str) -> None:
    _check(AttentionCase(name, CASES[name]), torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_shape_and_dtype_agrees(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, page_size = shape
    if dtype == torch.float32 and head_dim > 128:
        page_size = min(page_size, 32 if head_dim == 256 else 16)
    runs = (
        *_decode([5, 200, 64, 1, 33], [(range(5), 130), (range(2, 5), 300)]),
        Run(tuple(range(5, 45)), 100, is_causal=True),
        Run((45, 46, 47), 70, is_causal=True),
    )
    case = AttentionCase(str(shape), runs, heads, kv_heads, head_dim, page_size)
    _check(case, dtype)


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("name", list(CASES))
def test_windows_agree_with_the_reference(name: str, window: int) -> None:
    case = AttentionCase(name, CASES[name], 64, 8, 64)
    _check(case, torch.bfloat16, kind=Kind(window))


KINDS = {
    "Gemma 2": ((16, 8, 256, 16), Kind(1000, 50.0)),
    "Gemma 2, full": ((32, 16, 128, 16), Kind(None, 50.0)),
    "Gemma 3": ((8, 4, 256, 16), Kind(512)),
    "Gemma 3, full": ((4, 1, 256, 64), PLAIN),
    "Gemma 4, full": ((32, 4, 512, 16), PLAIN),
    "Gemma 4 E2B, full": ((8, 1, 512, 32), PLAIN),
    "gpt-oss": ((64, 8, 64, 16), Kind(128, has_sinks=True)),
    "gpt-oss, full": ((64, 8, 64, 16), Kind(has_sinks=True)),
    "Falcon 7B": ((71, 1, 64, 16), PLAIN),
    "Falcon 40B": ((128, 8, 64, 32), PLAIN),
    "Phi-2": ((32, 32, 80, 16), PLAIN),
    "Mistral": ((32, 8, 128, 16), Kind(300)),
    "all at once": ((71, 1, 80, 32), Kind(90, 20.0, has_sinks=True)),
}


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kinds_of_attention_agree(name: str, dtype: torch.dtype) -> None:
    (heads, kv_heads, head_dim, page_size), kind = KINDS[name]
    if dtype == torch.float32 and head_dim > 128:
        page_size = min(page_size, 32 if head_dim == 256 else 16)
    runs = (
        *_decode([5, 200, 64, 1, 33, 700], [(range(6), 130), (range(2, 5), 300)]),
        Run(tuple(range(6, 600)), 900, is_causal=True),
        Run((600, 601, 602), 70, is_causal=True),
    )
    _check(AttentionCase(name, runs, heads, kv_heads, head_dim, page_size), dtype, kind=kind)


@pytest.mark.parametrize("name", ["depth 5", "mixed", "long and short"])
def test_deterministic_windows_agree(name: str) -> None:
    _check(AttentionCase(name, CASES[name]), torch.bfloat16, 256, Kind(300))


def test_a_windowed_graph_is_replayed_over_another_plan() -> None:
    cases = [
        AttentionCase("a", _decode([50] * 16, [(range(16), 400)])),
        AttentionCase("b", _decode([270] * 16, [(range(8), 300), (range(8, 16), 500)])),
        AttentionCase("short", _decode([70] * 16)),
    ]
    k_pages, v_pages = (torch.randn(400, 8, 16, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(16, 32, 128, device="cuda").bfloat16()
    out, lse = torch.empty_like(q), torch.empty(16, 32, device="cuda")
    sinks = torch.randn(32, device="cuda")
    attention = SpanAttention(
        heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(16, 1024), has_window=True,
    )  # fmt: skip
    clipped = [clip_spans(case.spans(), case.positions(), 200, 16) for case in cases]
    attention.plan(clipped[0])
    attention.run(q, k_pages, v_pages, out=out, lse=lse, sinks=sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k_pages, v_pages, out=out, lse=lse, sinks=sinks)
    for spans in (clipped[1], clipped[2], clipped[0], clipped[1]):
        attention.plan(spans)
        graph.replay()
        right, _ = reference.span_attention(
            q.float(), k_pages, v_pages, spans, 128**-0.5, sinks=sinks
        )
        assert (out.float() - right).abs().max() < 0.02 * right.abs().max()


@pytest.mark.parametrize("name", ["depth 5", "prefill alone", "mixed", "long and short"])
def test_the_deterministic_setting_agrees(name: str) -> None:
    _check(AttentionCase(name, CASES[name]), torch.bfloat16, deterministic_keys=256)


def test_deterministic_rows_do_not_depend_on_batch_or_sharing() -> None:
    """A sequence of 700 keys has the same bits alone, in a batch, and with 512 shared keys."""
    torch.manual_seed(1)
    heads, kv_heads, dim, page = 32, 8, 128, 16
    k_pages, v_pages = (
        torch.randn(400, kv_heads, page, dim, device="cuda").bfloat16() for _ in range(2)
    )
    q = torch.randn(64, heads, dim, device="cuda").bfloat16()
    attention = SpanAttention(
        heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=page, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(64, 4096), deterministic_keys=256,
    )  # fmt: skip
    pages = np.arange(44, dtype=np.int32)

    def row(runs: list[tuple[list[int], np.ndarray, int, bool]], row: int) -> torch.Tensor:
        spans = Spans(
            np.cumsum([0] + [len(r[0]) for r in runs]).astype(np.int32),
            np.concatenate([np.array(r[0], np.int32) for r in runs]),
            np.cumsum([0] + [len(r[1]) for r in runs]).astype(np.int32),
            np.concatenate([r[1] for r in runs]).astype(np.int32),
            np.array([r[2] for r in runs], np.int32),
            np.array([r[3] for r in runs]),
            np.zeros(len(runs), np.int32),
        )
        attention.plan(spans)
        return attention.run(q, k_pages, v_pages)[row]

    alone = row([([3], pages, 700, True)], 3)
    others = [([i], np.arange(44 + i, 60 + i), 200 + i, True) for i in (0, 1, 2, 4, 5)]
    batched = row([([3], pages, 700, True), *others], 3)
    shared = row(
        [([1, 2, 3, 5], pages[:32], 512, False), ([3], pages[32:], 188, True), *others[:2]], 3
    )
    assert torch.equal(alone, batched)
    assert torch.equal(alone, shared)


def test_lse_spread_of_80_is_merged_without_overflow() -> None:
    """Scores of one span are 80 above those of the other, whose weight is then 0, not inf or
    NaN."""
    case = AttentionCase("spread", _decode([40] * 4, [(range(4), 100)]))
    spans = case.spans()
    k_pages, v_pages = (torch.randn(40, 8, 16, 128, device="cuda") for _ in range(2))
    q = torch.ones(4, 32, 128, device="cuda")
    k_pages[torch.from_numpy(spans.page_ids[:7].astype(np.int64))] = 80 * 128**-0.5
    q, k_pages, v_pages = (x.bfloat16() for x in (q, k_pages, v_pages))
    attention = SpanAttention(
        heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(4, 64),
    )  # fmt: skip
    attention.plan(spans)
    out = attention.run(q, k_pages, v_pages)
    right, _ = reference.span_attention(q.float(), k_pages, v_pages, spans, 128**-0.5)
    assert out.isfinite().all()
    assert (out.float() - right).abs().max() < 0.02 * right.abs().max()


@pytest.mark.parametrize("rise", [0.01, 0.06, -0.03])
def test_scores_that_rise_from_key_to_key_agree(rise: float) -> None:
    """Scores rise by little per tile, rise by much, or fall."""
    case = AttentionCase("rising", _decode([500] * 64, [(range(64), 4000)]))
    spans = case.spans()
    shape = (int(spans.page_ids.max()) + 1, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = (torch.randn(shape, device="cuda") for _ in range(2))
    # All spans have the same largest score, at their end or at their beginning.
    num_pages = np.diff(spans.page_starts)
    first = (
        spans.page_starts[:-1] * case.page_size + (spans.key_tokens if rise > 0 else 0)
    ).repeat(num_pages)
    begin = torch.from_numpy(np.arange(len(first)) * case.page_size - first).cuda()
    keys = begin[:, None] + torch.arange(case.page_size, device="cuda")
    page_ids = torch.from_numpy(spans.page_ids.astype(np.int64)).cuda()
    k_pages[page_ids] += (rise * keys * case.head_dim**-0.5)[:, None, :, None]
    q = torch.ones(64, case.heads, case.head_dim, device="cuda")
    q, k_pages, v_pages = (x.bfloat16() for x in (q, k_pages, v_pages))
    attention = SpanAttention(
        heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, page_size=case.page_size,
        dtype=torch.bfloat16, device=torch.device("cuda"),
        limits=AttentionLimits(64, len(page_ids)),
    )  # fmt: skip
    attention.plan(spans)
    lse = torch.empty(64, case.heads, device="cuda")
    out = attention.run(q, k_pages, v_pages, lse=lse)
    right, right_lse = reference.span_attention(
        q.float(), k_pages, v_pages, spans, case.head_dim**-0.5
    )
    assert (out.float() - right).abs().max() < 0.02 * right.abs().max()
    assert (lse - right_lse).abs().max() < 0.01


@pytest.mark.parametrize("magnitude", [1e9, 1e-9])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_values_far_outside_of_fp16_are_merged(magnitude: float, head_dim: int) -> None:
    """Values of the heads of a token differ by factors of up to 2^40."""
    torch.manual_seed(0)
    case = AttentionCase("far", _decode([500] * 64, [(range(64), 4000)]), head_dim=head_dim)
    spans = case.spans()
    shape = (int(spans.page_ids.max()) + 1, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = (torch.randn(shape, device="cuda") for _ in range(2))
    v_pages *= (
        magnitude * torch.logspace(0, 40, case.kv_heads, base=2.0, device="cuda")[:, None, None]
    )
    q = torch.randn(64, case.heads, case.head_dim, device="cuda")
    q, k_pages, v_pages = (x.bfloat16() for x in (q, k_pages, v_pages))
    attention = SpanAttention(
        heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, page_size=case.page_size,
        dtype=torch.bfloat16, device=torch.device("cuda"),
        limits=AttentionLimits(64, len(spans.page_ids)),
    )  # fmt: skip
    assert attention.plan(spans).merge
    out = attention.run(q, k_pages, v_pages).float()
    right, _ = reference.span_attention(q.float(), k_pages, v_pages, spans, case.head_dim**-0.5)
    error = (out - right).abs().amax(2) / right.abs().amax(2)
    assert error.max() < TOLERANCE[torch.bfloat16]


def test_a_nan_query_gives_nan() -> None:
    case = AttentionCase("nan", _decode([20, 300], [(range(2), 100)]))
    spans = case.spans()
    shape = (int(spans.page_ids.max()) + 1, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(2, case.heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    q[0] = float("nan")
    attention = SpanAttention(
        heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, page_size=case.page_size,
        dtype=torch.bfloat16, device=torch.device("cuda"), limits=AttentionLimits(2, 64),
    )  # fmt: skip
    attention.plan(spans)
    out = attention.run(q, k_pages, v_pages)
    assert torch.isnan(out[0]).all()
    assert torch.isfinite(out[1]).all()


def test_queries_that_cannot_be_copied_at_once_are_refused() -> None:
    attention = SpanAttention(
        heads=8, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(4, 64),
    )  # fmt: skip
    attention.plan(AttentionCase("a", _decode([9] * 4), heads=8, kv_heads=8).spans())
    pages = torch.zeros(8, 8, 16, 128, device="cuda").bfloat16()
    q = torch.zeros(4, 8, 136, device="cuda").bfloat16()[..., :128]
    if torch.cuda.get_device_capability()[0] == 9:
        with pytest.raises(LayoutError, match="strides"):
            attention.run(q, pages, pages, out=torch.empty(4, 8, 128, device="cuda").bfloat16())


def test_a_graph_is_replayed_over_another_plan() -> None:
    first = AttentionCase("a", _decode([50] * 16, [(range(16), 400)]))
    second = AttentionCase("b", _decode([70] * 16, [(range(8), 300), (range(8, 16), 500)]))
    third = AttentionCase("nothing shared", _decode([70] * 16))
    k_pages, v_pages = (torch.randn(300, 8, 16, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(16, 32, 128, device="cuda").bfloat16()
    out = torch.empty_like(q)
    attention = SpanAttention(
        heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(16, 512),
    )  # fmt: skip
    attention.plan(first.spans())
    attention.run(q, k_pages, v_pages, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k_pages, v_pages, out=out)
    for case in (second, third, first, third, second):
        attention.plan(case.spans())
        graph.replay()
        right, _ = reference.span_attention(q.float(), k_pages, v_pages, case.spans(), 128**-0.5)
        assert (out.float() - right).abs().max() < 0.02 * right.abs().max()


POOLS = {
    "after large units": (_decode([256] * 256, [(range(256), 2048)]), 8),
    "of unlike units": (_decode([128] * 32, [(range(32), 256)]), 32),
    "of short units": (_decode([100] * 700), 8),
    "of long ones, some cut": (_decode([600] * 300), 8),
    "ragged": (_decode([1 + 7 * i % 400 for i in range(300)], [(range(100), 500)]), 8),
    "of a few, after prompts": (
        (*_decode([70] * 8), Run((3,), 9000), Run(tuple(range(8, 2400)), 2392, is_causal=True)),
        8,
    ),
}


@pytest.mark.parametrize("name", list(POOLS))
def test_all_queued_units_are_computed_and_the_queue_is_reset(name: str) -> None:
    """Runs follow each other without a pause, and each begins with a full queue."""
    runs, kv_heads = POOLS[name]
    case = AttentionCase(name, runs, 32, kv_heads)
    spans = case.spans()
    count = int(spans.page_ids.max()) + 1
    torch.manual_seed(4)
    k_pages, v_pages = (
        torch.randn(count, kv_heads, 16, 128, device="cuda").bfloat16() for _ in range(2)
    )
    q = torch.randn(case.num_tokens, 32, 128, device="cuda").bfloat16()
    attention = SpanAttention(
        heads=32, kv_heads=kv_heads, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(case.num_tokens, len(spans.page_ids)),
    )  # fmt: skip
    launches = attention.plan(spans)
    if attention._hopper is None:
        pytest.skip("only Hopper's kernel has a work queue")
    assert int(attention._plan[layout.HEADER_NUM_QUEUED]) > 0
    first = attention.run(q, k_pages, v_pages, launches=launches)
    right, _ = reference.span_attention(q.float(), k_pages, v_pages, spans, 128**-0.5)
    assert (first.float() - right).abs().max() < 0.02 * right.abs().max()
    outs = [
        attention.run(q, k_pages, v_pages, torch.full_like(q, float("nan")), launches=launches)
        for _ in range(30)
    ]
    assert all(torch.equal(out, first) for out in outs)
    assert int(attention._tickets[0]) == 0


def test_plans_with_queues_of_different_sizes_follow_each_other() -> None:
    """Plans with and without a queue, with and without large units; the host does not wait in
    between."""
    cases = [
        AttentionCase(name, runs)
        for name, runs in (
            ("queue after large", _decode([200] * 300, [(range(300), 1000)])),
            ("queue", _decode([100] * 700)),
            ("no queue", _decode([40] * 30)),
            ("another queue", _decode([600] * 300)),
            ("large alone", (Run(tuple(range(300)), 300, is_causal=True),)),
        )
    ]
    pages = max(int(case.spans().page_ids.max()) for case in cases) + 1
    k_pages, v_pages = (torch.randn(pages, 8, 16, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(700, 32, 128, device="cuda").bfloat16()
    attention = SpanAttention(
        heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(700, pages),
    )  # fmt: skip
    outs = []
    for case in cases * 4:
        launches = attention.plan(case.spans())
        for _ in range(3):  # layers
            out = torch.full_like(q, float("nan"))
            outs.append((case, attention.run(q, k_pages, v_pages, out, launches=launches)))
    for case in cases:
        rows, spans = case.num_tokens, case.spans()
        right, _ = reference.span_attention(q[:rows].float(), k_pages, v_pages, spans, 128**-0.5)
        for out in (out for other, out in outs if other is case):
            assert (out[:rows].float() - right).abs().max() < 0.02 * right.abs().max(), case.name


def test_every_way_to_cut_a_step_agrees() -> None:
    groups = [(range(i, i + 4), 300 + i) for i in range(0, 16, 4)]
    case = AttentionCase("a", _decode([70] * 16, groups), heads=32, kv_heads=8)
    spans = case.spans()
    k_pages, v_pages = (torch.randn(300, 8, 16, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(16, 32, 128, device="cuda").bfloat16()
    attention = SpanAttention(
        heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(16, 512),
    )  # fmt: skip
    right, _ = reference.span_attention(q.float(), k_pages, v_pages, spans, 128**-0.5)
    ways = ways_to_cut(spans, attention.shape)
    assert {way.of.num_large > 0 for way in ways} == {True, False}
    for way in ways:
        launches = attention.send(plan_cut(spans, way.cut(), attention.shape))
        assert launches.large == (way.of.num_large > 0)
        out = attention.run(q, k_pages, v_pages, launches=launches)
        assert (out.float() - right).abs().max() < 0.02 * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "half"), [(128, 64), (128, 16), (80, 40), (80, 16), (96, 0)])
def test_keys_are_shifted_after_their_rotation(dim: int, half: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    qkv = torch.randn(37, 12 + 3 + 3, dim, device="cuda").to(dtype)
    q, k, v = qkv[:, :12], qkv[:, 12:15], qkv[:, 15:]
    k_pages, v_pages = (torch.zeros(20, 3, 16, dim, device="cuda", dtype=dtype) for _ in range(2))
    positions = torch.randint(0, 10_000, (37,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(320, device="cuda")[:37]
    shift = torch.randn(3, dim, device="cuda") * 300
    inv_freq = 10000.0 ** (-torch.arange(half, device="cuda").float() / half) if half else None
    keys, queries = (
        x.float() if inv_freq is None else rope(x.float(), positions, inv_freq) for x in (k, q)
    )
    right = (keys - shift).to(dtype).float()
    rope_append(q, k, v, k_pages, v_pages, positions, slots, inv_freq, shift=shift)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    pages, offsets = slots // 16, slots % 16
    assert torch.allclose(k_pages[pages, :, offsets].float(), right, rtol=tolerance, atol=0.02)
    assert torch.equal(v_pages[pages, :, offsets], v)
    assert torch.allclose(q.float(), queries, rtol=tolerance, atol=0.02)


def test_rope_append_and_rerotate_agree() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(37, h, 128, device="cuda").bfloat16() for h in (32, 8, 8))
    k_pages, v_pages = (torch.zeros(20, 8, 16, 128, device="cuda").bfloat16() for _ in range(2))
    positions = torch.randint(0, 100_000, (37,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(320, device="cuda")[:37]
    inv_freq = 500000.0 ** (-torch.arange(0, 64, device="cuda").float() / 64)
    turned_q, turned_k = (rope(x, positions, inv_freq) for x in (q, k))
    right_k, right_v = append(k_pages, v_pages, turned_k, v, slots)
    rope_append(q, k, v, k_pages, v_pages, positions, slots, inv_freq)
    assert (q.float() - turned_q.float()).abs().max() < 0.04
    assert (k_pages.float() - right_k.float()).abs().max() < 0.04
    assert torch.equal(v_pages, right_v)

    source = torch.tensor([0, 1, 2], device="cuda")
    target = torch.tensor([10, 1, 12], device="cuda")
    shifts = torch.tensor([-100, 7, 3000], device="cuda", dtype=torch.int32)
    before_k, before_v = k_pages.clone(), v_pages.clone()
    rerotate(k_pages, v_pages, source, target, shifts, inv_freq)
    for s, t, shift in zip(source, target, shifts, strict=True):
        tokens = before_k[s].transpose(0, 1)
        right = rope(tokens, shift.expand(16), inv_freq).transpose(0, 1)
        assert (k_pages[t].float() - right.float()).abs().max() < 0.04
        assert torch.equal(v_pages[t], before_v[s])
