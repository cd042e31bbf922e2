"""Span attention under the interpreter, compared with the reference: tiny shapes, every edge
case."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.core.step import Spans  # noqa: E402
from mainstem.kernels import AttentionLimits, LayoutError, PlanTooLarge, SpanAttention  # noqa: E402
from mainstem.kernels.attention import ops, reference  # noqa: E402
from mainstem.kernels.attention.plan import KernelPlan, Launches, make_plan  # noqa: E402
from mainstem.kernels.attention.tuning import INTERPRETER, Tiles  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # The interpreter computes both sides of a select with numpy.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
# Bounds of (largest error) / (largest value). In fp32 sums of a few hundred terms are rounded. The
# 16-bit types round the output (2^-9 and 2^-12); the interpreter computes in wider types before
# that.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}

Run = tuple[list[int], int, bool]  # query tokens, keys, causal


def make_spans(runs: list[Run], page_size: int, seed: int = 0) -> Spans:
    pages = [-(-keys // page_size) for _, keys, _ in runs]
    rows = [np.array(tokens, np.int32) for tokens, _, _ in runs]
    return Spans(
        query_starts=np.cumsum([0] + [len(r) for r in rows]).astype(np.int32),
        query_rows=np.concatenate(rows),
        page_starts=np.cumsum([0, *pages]).astype(np.int32),
        page_ids=np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32),
        key_tokens=np.array([keys for _, keys, _ in runs], np.int32),
        is_causal=np.array([causal for _, _, causal in runs]),
        key_positions=np.zeros(len(runs), np.int32),
    )


def make_pages(spans: Spans, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """K and V with NaN in every slot that no span uses."""
    kv_heads, page_size, dim = shape
    count = int(spans.page_ids.max(initial=0)) + 2
    pages = torch.full((2, count, kv_heads, page_size, dim), float("nan"))
    for index in range(len(spans)):
        ids = spans.page_ids[spans.page_starts[index] : spans.page_starts[index + 1]]
        for key in range(spans.key_tokens[index]):
            pages[:, ids[key // page_size], :, key % page_size] = torch.randn(2, kv_heads, dim)
    return tuple(pages.to(dtype))


def make_attention(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    deterministic_keys: int | None = None,
    limits: AttentionLimits | None = None,
    tiles: Tiles | None = None,
) -> SpanAttention:
    heads, kv_heads, dim, page_size = shape
    return SpanAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=dtype,
        device=CPU,
        limits=limits if limits is not None else AttentionLimits(max_tokens=64, max_pages=512),
        deterministic_keys=deterministic_keys,
        tiles=tiles,
    )


def check(
    runs: list[Run],
    shape: tuple[int, int, int, int] = (4, 2, 64, 16),
    dtype: torch.dtype = torch.float32,
    deterministic_keys: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """The kernel agrees with the reference, touches no other row and changes no input."""
    torch.manual_seed(0)
    heads, kv_heads, dim, page_size = shape
    spans = make_spans(runs, page_size)
    k_pages, v_pages = make_pages(spans, (kv_heads, page_size, dim), dtype)
    num_tokens = int(spans.query_rows.max()) + 1
    q = torch.randn(num_tokens + 1, heads, dim).to(dtype)  # the last token is in no span
    out = torch.full_like(q, 7.0)
    lse = torch.full((num_tokens + 1, heads), 7.0)
    before = [x.clone() for x in (q, k_pages, v_pages)]
    attention = make_attention(shape, dtype, deterministic_keys, tiles=tiles)
    launches = attention.plan(spans)
    attention.run(q, k_pages, v_pages, out=out, lse=lse, launches=launches)
    right, right_lse = reference.span_attention(
        q.float(), k_pages.nan_to_num(0.0), v_pages.nan_to_num(0.0), spans, dim**-0.5
    )
    used = torch.from_numpy(np.unique(spans.query_rows).astype(np.int64))
    error = (out[used].float() - right[used]).abs().max() / right.abs().max().clamp_min(1e-6)
    assert float(error) < TOLERANCE[dtype]
    seen = right_lse[used].isfinite()
    assert torch.equal(seen, lse[used].isfinite())
    assert torch.allclose(lse[used][seen], right_lse[used][seen], atol=1e-4)
    assert (out[-1] == 7.0).all()
    for tensor, old in zip((q, k_pages, v_pages), before, strict=True):
        assert torch.equal(tensor.nan_to_num(0.5), old.nan_to_num(0.5))


CASES: dict[str, list[Run]] = {
    "one token": [([0], 1, True)],
    "page not full": [([0, 1, 2], 33, False), ([0], 5, True), ([1], 16, True), ([2], 17, True)],
    "empty own part": [([0, 1], 20, False), ([0], 0, False), ([1], 3, True)],
    "no keys at all": [([0], 0, False), ([1], 4, True)],
    "group of 1": [([0], 40, False), ([0], 7, True), ([1], 9, True)],
    "span of 1 token": [([0, 1, 2, 3], 1, False), *(([t], 2, True) for t in range(4))],
    "depth 5": [
        (list(range(6)), 18, False), (list(range(4)), 9, False), ([0, 1, 2], 33, False),
        ([0, 1], 4, False), ([0], 1, False), *(([t], 3, True) for t in range(6)),
    ],
    "prefill beside decode": [(list(range(2, 22)), 50, True), ([0, 1], 30, False), ([0], 2, True),
                              ([1], 40, True)],
    "prefill over a shared prefix": [(list(range(20)), 16, False), (list(range(9)), 9, True),
                                     (list(range(9, 20)), 11, True)],
    "only some have a part of their own": [([0, 1, 2], 30, False), ([1], 5, True)],
    "tokens out of order": [([5, 0, 3], 21, False), ([3], 4, True), ([0], 8, True), ([5], 1, True)],
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_named_cases_agree_with_the_reference(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8, 8, 64, 16), torch.float16),
        ((9, 3, 64, 16), torch.float32),
        ((4, 1, 80, 16), torch.bfloat16),
        ((14, 2, 96, 32), torch.float32),
        ((4, 4, 128, 64), torch.float32),
        ((40, 1, 64, 16), torch.float32),
    ],
    ids=str,
)
def test_heads_dims_and_page_sizes_agree(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    check(CASES["page not full"], shape, dtype)


@pytest.mark.parametrize("name", ["depth 5", "prefill beside decode"])
def test_the_deterministic_setting_agrees(name: str) -> None:
    check(CASES[name], deterministic_keys=32)


@pytest.mark.parametrize("name", ["depth 5", "prefill beside decode"])
def test_plans_with_multiprocessors_for_large_units_agree(name: str) -> None:
    check(CASES[name], tiles=replace(INTERPRETER, is_split=True, programs_per_sm=3))


def test_a_costly_launch_does_not_change_the_tiles_of_a_single_kernel() -> None:
    """The rows of a small unit are one tile, even if launching a second kernel would be slow."""
    pace = replace(INTERPRETER.pace, launch_us=1e6)
    tiles = replace(INTERPRETER, is_split=True, programs_per_sm=3, pace=pace)
    check([(list(range(10)), 48, False)], tiles=tiles)


@st.composite
def plans(draw: st.DrawFn) -> list[Run]:
    """Runs that any of a few sequences share, then their own runs, some of them prompts."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))  # tokens of each sequence
    starts = np.cumsum([0, *sizes])
    tokens = [list(range(starts[i], starts[i + 1])) for i in range(len(sizes))]
    runs: list[Run] = []
    for _ in range(draw(st.integers(0, 3))):
        members = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
        rows = [t for member in sorted(members) for t in tokens[member]]
        runs.append((rows, draw(st.integers(0, 70)), False))
    for rows in tokens:
        runs.append((rows, len(rows) + draw(st.integers(0, 40)), True))
    return runs


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs=plans(), shape=st.sampled_from([(4, 2, 64, 16), (4, 4, 64, 32), (6, 2, 64, 16)]))
def test_any_plan_agrees_with_the_reference(
    runs: list[Run], shape: tuple[int, int, int, int]
) -> None:
    check(runs, shape)


def test_deterministic_rows_do_not_depend_on_batch_or_sharing() -> None:
    """A row has the same bits alone, with another sequence, and with 32 keys shared with another
    one."""
    torch.manual_seed(0)
    shape = (4, 2, 64, 16)
    pages = torch.randn(2, 20, 2, 16, 64)
    q = torch.randn(4, 4, 64)
    attention = make_attention(shape, deterministic_keys=32)

    def row_of(runs: list[tuple[list[int], list[int], int, bool]]) -> Tensor:
        spans = make_spans([(rows, keys, causal) for rows, _, keys, causal in runs], 16)
        ids = np.concatenate([np.array(ids, np.int32) for _, ids, _, _ in runs])
        attention.plan(
            Spans(
                spans.query_starts, spans.query_rows, spans.page_starts, ids,
                spans.key_tokens, spans.is_causal, spans.key_positions,
            )
        )  # fmt: skip
        return attention.run(q, pages[0], pages[1])[2].clone()

    alone = row_of([([2], [1, 2, 3, 4], 50, True)])
    beside = row_of([([0], [7], 9, True), ([2], [1, 2, 3, 4], 50, True)])
    sharing = row_of([([0, 2], [1, 2], 32, False), ([0], [7], 9, True), ([2], [3, 4], 18, True)])
    assert torch.equal(alone, beside)
    assert torch.equal(alone, sharing)


def test_a_spread_of_80_in_lse_is_merged_without_overflow() -> None:
    torch.manual_seed(0)
    spans = make_spans([([0], 20, False), ([0], 10, True)], 16)
    pages = torch.randn(2, 3, 2, 16, 64)
    pages[0, spans.page_ids[:2]] = 80 * 64**-0.5
    q = torch.ones(1, 4, 64)
    attention = make_attention((4, 2, 64, 16))
    attention.plan(spans)
    out = attention.run(q, pages[0], pages[1])
    right, lse = reference.span_attention(q, pages[0], pages[1], spans, 64**-0.5)
    assert float(lse.max()) > 70
    assert torch.allclose(out, right, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": torch.float64}, "dtype"),
        ({"head_dim": 72}, "head_dim"),
        ({"page_size": 8}, "page_size"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"deterministic_keys": 17}, "deterministic_keys"),
        ({"tiles": replace(INTERPRETER, queued_share=0.25)}, "queued_share"),
        ({"tiles": replace(INTERPRETER, divides_pages=True)}, "divides_pages"),
    ],
)
def test_the_constructor_names_the_argument_that_it_refuses(
    changes: dict[str, object], named: str
) -> None:
    arguments: dict[str, object] = {
        "heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": torch.float32,
        "device": CPU, "limits": AttentionLimits(8, 8), **changes,
    }  # fmt: skip
    with pytest.raises(LayoutError, match=named):
        SpanAttention(**arguments)  # type: ignore[arg-type]


def test_run_names_the_tensor_that_it_refuses() -> None:
    attention = make_attention((4, 2, 64, 16))
    attention.plan(make_spans([([0], 5, True)], 16))
    q, pages = torch.zeros(1, 4, 64), torch.zeros(2, 2, 16, 64)
    for name, arguments in {
        "q must be torch.float32": (q.half(), pages, pages),
        "q must be .*got \\(1, 2, 64\\)": (q[:, :2], pages, pages),
        "k_pages must be .*": (q, pages[:, :, :8], pages),
        "v_pages must be contiguous": (q, pages, pages.transpose(0, 1)),
    }.items():
        with pytest.raises(LayoutError, match=name):
            attention.run(*arguments)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (AttentionLimits(1, 64), "max_tokens"),
        (AttentionLimits(8, 1), "max_pages"),
        (AttentionLimits(8, 64, max_entries=2), "max_entries"),
        (AttentionLimits(8, 64, max_partials=1), "max_partials"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_limit(limits: AttentionLimits, named: str) -> None:
    attention = make_attention((4, 2, 64, 16), limits=limits)
    with pytest.raises(PlanTooLarge, match=named):
        attention.plan(make_spans([([0, 1], 30, False), ([0], 5, True), ([1], 6, True)], 16))


def test_a_step_with_too_many_partials_reads_its_prefix_more_often() -> None:
    torch.manual_seed(0)
    runs: list[Run] = [([0, 1, 2], 32, False), ([0], 5, True), ([1, 2], 20, True)]
    spans = make_spans(runs, 16)
    pages = make_pages(spans, (2, 16, 64), torch.float32)
    q = torch.randn(3, 4, 64)
    attention = make_attention((4, 2, 64, 16), limits=AttentionLimits(8, 64, max_partials=1))
    attention.plan(spans)
    out = attention.run(q, *pages)
    k_pages, v_pages = (p.nan_to_num(0.0) for p in pages)
    right, _ = reference.span_attention(q, k_pages, v_pages, spans, 64**-0.5)
    assert float((out - right).abs().max()) < 1e-5


def test_launches_that_a_plan_needs_must_not_be_left_out() -> None:
    attention = make_attention((4, 2, 64, 16))
    q, pages = torch.zeros(2, 4, 64), torch.zeros(8, 2, 16, 64)
    none = Launches(large=False, merge=False)
    assert attention.plan(make_spans([([0], 5, False), ([1], 9, False)], 16)) == none
    attention.run(q, pages, pages, launches=none)
    needed = attention.plan(make_spans([([0, 1], 30, False), ([0], 5, False), ([1], 9, False)], 16))
    assert needed.merge
    with pytest.raises(LayoutError, match="launches"):
        attention.run(q, pages, pages, launches=none)


def test_inconsistent_spans_are_refused() -> None:
    attention = make_attention((4, 2, 64, 16))
    good = make_spans([([0, 1], 5, True)], 16)
    with pytest.raises(LayoutError, match="slots"):
        attention.plan(
            Spans(
                good.query_starts, good.query_rows, good.page_starts, good.page_ids,
                np.array([17], np.int32), good.is_causal, good.key_positions,
            )
        )  # fmt: skip
    with pytest.raises(LayoutError, match="causal"):
        attention.plan(make_spans([([0, 1, 2], 2, True)], 16))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Spans]:
    """The steps for which a new plan is made."""
    spans_of_plans: list[Spans] = []

    def counted(spans: Spans, *rest: Any) -> KernelPlan:
        spans_of_plans.append(spans)
        return make_plan(spans, *rest)

    monkeypatch.setattr(ops, "make_plan", counted)
    return spans_of_plans


def test_a_step_like_the_last_one_reuses_its_plan(made: list[Spans]) -> None:
    """Decodes over a shared prefix, up to 16 keys more; full pages are followed by new ones."""
    runs: list[Run] = [([0, 1, 2], 40, False), ([0], 14, False), ([1], 3, False), ([2], 31, False)]
    attention = make_attention((4, 2, 64, 16), torch.float32)
    for step in (0, 1, 2, 15, 16, 17, 19):
        grown = [(rows, keys + step * (len(rows) == 1), causal) for rows, keys, causal in runs]
        spans = make_spans(grown, 16, seed=step)
        k_pages, v_pages = make_pages(spans, (2, 16, 64), torch.float32)
        q = torch.randn(3, 4, 64)
        out = attention.run(q, k_pages, v_pages, launches=attention.plan(spans))
        right, _ = reference.span_attention(
            q, k_pages.nan_to_num(0.0), v_pages.nan_to_num(0.0), spans, 64**-0.5
        )
        assert torch.allclose(out, right, atol=1e-4)
    assert len(made) == 2


def test_a_plan_that_was_sent_is_not_reused(made: list[Spans]) -> None:
    spans = make_spans([([0], 300, False)], 16)
    attention = make_attention((4, 2, 64, 16))
    attention.plan(spans)
    attention.plan(spans)
    assert len(made) == 1
    attention.send(make_plan(spans, attention.shape))
    attention.plan(spans)
    assert len(made) == 2


def test_a_plan_that_had_to_share_less_is_not_reused(made: list[Spans]) -> None:
    limits = AttentionLimits(max_tokens=2, max_pages=8, max_partials=1)
    attention = make_attention((4, 2, 64, 16), limits=limits)
    spans = make_spans([([0, 1], 32, False), ([0], 5, False), ([1], 5, False)], 16)
    attention.plan(spans)
    once = len(made)
    assert once > 1
    attention.plan(spans)
    assert len(made) == 2 * once
