"""Windows, softcaps, sinks and wide heads of the span kernel, under the interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.core.step import Int32s, Spans  # noqa: E402
from mainstem.kernels import AttentionLimits, LayoutError, SpanAttention  # noqa: E402
from mainstem.kernels.attention import ops, reference  # noqa: E402
from mainstem.kernels.attention.ops import partial_bytes  # noqa: E402
from mainstem.kernels.attention.plan import KernelPlan, make_plan  # noqa: E402
from mainstem.kernels.attention.unshare import unshare  # noqa: E402
from mainstem.kernels.attention.window import clip_spans  # noqa: E402
from mainstem_bench.workloads import AttentionCase, Run  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # The interpreter computes both sides of a select with numpy.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
# As in test_span.py; with sinks the output is rounded twice, and the interpreter truncates bf16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LIMITS = AttentionLimits(max_tokens=256, max_pages=512)
Heads = tuple[int, int, int, int]  # heads, kv heads, dim, page size


def an_attention(heads: Heads, **options: Any) -> SpanAttention:
    settings: dict[str, Any] = {"dtype": torch.float32, "limits": LIMITS} | options
    return SpanAttention(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        page_size=heads[3],
        device=CPU,
        **settings,
    )


def check(
    spans: Spans,
    heads: Heads = (4, 2, 64, 16),
    *,
    softcap: float | None = None,
    has_sinks: bool = False,
    **options: Any,
) -> None:
    """The kernel agrees with the reference; slots after a span's last key are NaN."""
    num_heads, kv_heads, dim, page_size = heads
    dtype = options.get("dtype", torch.float32)
    generator = torch.Generator().manual_seed(0)
    size = (2, int(spans.page_ids.max()) + 1, kv_heads, page_size, dim)
    pages = torch.randn(size, generator=generator)
    for index in range(len(spans)):
        used = int(spans.key_tokens[index]) % page_size
        if used:
            pages[:, spans.page_ids[spans.page_starts[index + 1] - 1], :, used:] = float("nan")
    pages = pages.to(dtype)
    tokens = int(spans.query_rows.max()) + 1
    q = (3 * torch.randn(tokens, num_heads, dim, generator=generator)).to(dtype)
    sinks = torch.randn(num_heads, generator=generator) * 3 if has_sinks else None
    attention = an_attention(heads, softcap=softcap, has_window=True, **options)
    lse = torch.zeros(tokens, num_heads)
    launches = attention.plan(spans)
    out = attention.run(q, pages[0], pages[1], lse=lse, sinks=sinks, launches=launches)
    k_pages, v_pages = pages.nan_to_num(0.0)
    right, right_lse = reference.span_attention(
        q.float(), k_pages, v_pages, spans, dim**-0.5, softcap=softcap, sinks=sinks
    )
    error = (out.float() - right).abs().max() / right.abs().max()
    assert float(error) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-5)


def a_case(page_size: int = 16, prompt: int = 9) -> tuple[Spans, Int32s]:
    """Decodes of several lengths over two prefixes, together with a prompt."""
    case = AttentionCase(
        "",
        (
            Run((0, 1, 2), 32),
            Run((1, 2), 32),
            *(Run((row,), own) for row, own in enumerate((5, 17, 2))),
            Run(tuple(range(3, 3 + prompt)), 25 + prompt, is_causal=True),
        ),
        page_size=page_size,
    )
    return case.spans(), case.positions()


@pytest.mark.parametrize("window", [1, 25])
def test_windows_agree_with_the_reference(window: int) -> None:
    spans, positions = a_case()
    clipped = clip_spans(spans, positions, window, 16)
    check(clipped)


def test_a_kernel_with_windows_agrees_on_spans_without_one() -> None:
    check(a_case()[0])


@pytest.mark.parametrize(
    "heads",
    [
        (8, 2, 80, 16),
        (4, 2, 256, 16),
        pytest.param((2, 1, 256, 64), marks=pytest.mark.slow),
        pytest.param((4, 2, 512, 16), marks=pytest.mark.slow),
        pytest.param((71, 1, 64, 16), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_shape_of_heads_may_have_windows_softcaps_and_sinks(heads: Heads) -> None:
    spans, positions = a_case(heads[3], prompt=2)
    clipped = clip_spans(spans, positions, 25, heads[3])
    check(clipped, heads, softcap=5.0, has_sinks=True, dtype=torch.bfloat16)


def test_softcaps_agree_with_the_reference() -> None:
    check(a_case(prompt=2)[0], softcap=0.5)


def test_sinks_agree_for_merged_and_unmerged_rows() -> None:
    check(a_case(prompt=2)[0], has_sinks=True)


def test_rows_whose_window_begins_after_a_unit_agree() -> None:
    """Spans are cut, and every unit, large or small, has a row that sees none of its keys. The last
    row sees no key at all."""
    runs = (Run(tuple(range(12)), 128), Run((0, 12), 150), Run((13,), 32))
    spans = AttentionCase("", runs).spans()
    first_keys = np.r_[np.arange(12) * 11, 20, 149, 32].astype(np.int32)
    check(replace(spans, first_keys=first_keys))


def test_deterministic_rows_do_not_depend_on_other_rows_sharing_or_chunks() -> None:
    """A row has the same bits alone, with a shared prefix and in a chunk. Its window begins within
    a stretch."""
    heads, window = (4, 2, 64, 16), 50
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 40, 2, 16, 64, generator=generator)
    q = torch.randn(100, 4, 64, generator=generator)
    attention = an_attention(heads, deterministic_keys=32, has_window=True)

    def row_of(runs: list[tuple[list[int], list[int], int, bool, int]], row: int) -> torch.Tensor:
        spans = Spans(
            np.cumsum([0] + [len(r[0]) for r in runs]).astype(np.int32),
            np.concatenate([np.array(r[0], np.int32) for r in runs]),
            np.cumsum([0] + [len(r[1]) for r in runs]).astype(np.int32),
            np.concatenate([np.array(r[1], np.int32) for r in runs]),
            np.array([r[2] for r in runs], np.int32),
            np.array([r[3] for r in runs]),
            np.array([r[4] for r in runs], np.int32),
        )
        positions = np.zeros(len(q), np.int32)
        for rows, _, keys, _, depth in runs:
            last = depth + keys
            positions[rows] = np.arange(last - len(rows), last)
        attention.plan(clip_spans(spans, positions, window, 16, align_tokens=32))
        return attention.run(q, pages[0], pages[1])[row].clone()

    chain = list(range(8))  # 120 keys; the row is at position 119 and sees 70 to 119
    alone = row_of([([99], chain, 120, False, 0)], 99)
    sharing = row_of(
        [([0, 99], chain[:6], 96, False, 0), ([0], [9], 3, False, 96),
         ([99], chain[6:], 24, False, 96)], 99
    )  # fmt: skip
    chunk = row_of([(list(range(80, 100)), chain, 120, True, 0)], 99)
    assert torch.equal(alone, sharing)
    assert torch.equal(alone, chunk)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Spans]:
    """The steps for which a new plan is made."""
    spans_of_plans: list[Spans] = []

    def counted(spans: Spans, *rest: Any) -> KernelPlan:
        spans_of_plans.append(spans)
        return make_plan(spans, *rest)

    monkeypatch.setattr(ops, "make_plan", counted)
    return spans_of_plans


def test_decode_steps_with_windows_reuse_the_plan(made: list[Spans]) -> None:
    """Own spans grow by a key and sometimes lose their first page; the prefix loses pages."""
    attention = an_attention((4, 2, 64, 16), has_window=True)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 64, 2, 16, 64, generator=generator)
    for step in range(40):
        case = AttentionCase(
            "", (Run((0, 1, 2), 160), *(Run((row,), 3 + 40 * row + step) for row in range(3)))
        )
        clipped = clip_spans(case.spans(), case.positions(), 100, 16)
        launches = attention.plan(clipped)
        if step == 38:
            q = torch.randn(3, 4, 64, generator=generator)
            out = attention.run(q, *pages, launches=launches)
            right, _ = reference.span_attention(q, pages[0], pages[1], clipped, 64**-0.5)
            assert torch.allclose(out, right, atol=1e-4)
    assert len(made) <= 8


def test_unshared_spans_keep_their_first_keys() -> None:
    spans, positions = a_case()
    clipped = clip_spans(spans, positions, 60, 16)
    joined = unshare(clipped, 16, least_queries=1)
    assert len(joined.query_rows) < len(clipped.query_rows)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, int(spans.page_ids.max()) + 1, 2, 16, 8, generator=generator)
    q = torch.randn(len(positions), 2, 8, generator=generator)
    outs = [
        reference.span_attention(q, pages[0], pages[1], each, 0.3)[0] for each in (clipped, joined)
    ]
    torch.testing.assert_close(*outs)


def test_attentions_that_run_in_turn_share_memory_for_partials() -> None:
    spans, positions = a_case(prompt=2)
    room = torch.empty(partial_bytes(4, 64, LIMITS), dtype=torch.uint8)
    whole = an_attention((4, 2, 64, 16), partials=room)
    clipped = an_attention((4, 2, 64, 16), partials=room, has_window=True)
    short = clip_spans(spans, positions, 25, 16)
    assert whole.plan(spans).merge
    assert clipped.plan(short).merge
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, int(spans.page_ids.max()) + 1, 2, 16, 64, generator=generator)
    q = torch.randn(len(positions), 4, 64, generator=generator)
    for attention, seen in ((whole, spans), (clipped, short), (whole, spans)):
        right, _ = reference.span_attention(q, pages[0], pages[1], seen, 64**-0.5)
        assert torch.allclose(attention.run(q, *pages), right, atol=1e-5)
    with pytest.raises(LayoutError, match="partials"):
        an_attention((4, 2, 64, 16), partials=room[:-4])


def test_the_error_names_a_missing_or_wrong_argument() -> None:
    spans, positions = a_case()
    with pytest.raises(LayoutError, match="has_window"):
        an_attention((4, 2, 64, 16)).plan(clip_spans(spans, positions, 25, 16))
    with pytest.raises(LayoutError, match="softcap"):
        an_attention((4, 2, 64, 16), softcap=-1.0)
    attention = an_attention((4, 2, 64, 16))
    attention.plan(AttentionCase("", (Run((0,), 5),)).spans())
    q, pages, lse = torch.zeros(1, 4, 64), torch.zeros(1, 2, 16, 64), torch.zeros(1, 4)
    with pytest.raises(LayoutError, match="lse"):
        attention.run(q, pages, pages, sinks=torch.zeros(4))
    with pytest.raises(LayoutError, match="sinks"):
        attention.run(q, pages, pages, lse=lse, sinks=torch.zeros(3))
