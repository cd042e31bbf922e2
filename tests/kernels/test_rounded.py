"""Attention over pages in fp8, and the kernels that round and read open pages, against plain
PyTorch."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from mainstem.core.step import Spans
from mainstem.kernels.attention.window import clip_spans
from mainstem.runner.gpu_rounded import before_own_pages
from tests.kernels.interpreted import require_interpreter
from tests.runner.steps import Seq, Work, a_step

require_interpreter()

from mainstem.kernels.attention.expanded import NEVER, ExpandingAttention, numbered  # noqa: E402
from mainstem.kernels.attention.ops import AttentionLimits, SpanAttention  # noqa: E402
from mainstem.kernels.attention.triton import open_pages as open_pages_kernel  # noqa: E402
from mainstem.kernels.attention.triton.open_pages import attend_open_pages  # noqa: E402
from mainstem.kernels.memory.expand import expand_rounded_pages  # noqa: E402
from mainstem.kernels.memory.round import round_open_pages  # noqa: E402

NUM_PAGES = 20


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = {
    "gqa 2:1": Case(),
    "a window inside a page": Case(window=10),
    "a window over pages, and a softcap": Case(window=40, softcap=5.0),
    "sinks": Case(has_sinks=True),
    "gqa 8:1, heads of 80, pages of 32": Case(8, 1, 80, 32),
    "heads of 96": Case(6, 3, 96),
}


class Pages:
    """Pages as computed, and the same rounded, in the layout of gpu_rounded.py."""

    def __init__(self, case: Case) -> None:
        shape = (2, NUM_PAGES, case.kv_heads, case.page_size, case.dim)
        self.exact = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.exact[0, 3] = 0.0
        self.exact[1, 4, 0, 0, 0] = 900.0
        count = case.kv_heads * case.page_size * case.dim
        records = torch.zeros((2, NUM_PAGES, count + 16 * case.kv_heads), dtype=torch.uint8)
        numbers = records.view(torch.float8_e4m3fn)[..., :count].unflatten(-1, shape[2:])  # type: ignore[no-untyped-call]
        first = count // 4
        scales = records.view(torch.float32)[..., first : first + case.kv_heads]
        (k, v), (k_scales, v_scales) = numbers.unbind(), scales.unbind()
        self.numbers, self.scales = (k, v), (k_scales, v_scales)
        ends = torch.arange(NUM_PAGES) * case.page_size + case.page_size - 1
        opened = (self.exact[0].contiguous(), self.exact[1].contiguous())
        round_open_pages(*opened, self.numbers, self.scales, ends, torch.arange(NUM_PAGES))
        self.opened = opened

    @property
    def expanded(self) -> Tensor:
        pairs = zip(self.numbers, self.scales, strict=True)
        return torch.stack([codes.float() * scales[..., None, None] for codes, scales in pairs])


@pytest.mark.parametrize("name", CASES)
def test_pages_are_rounded_to_the_nearest_codes(name: str) -> None:
    pages = Pages(CASES[name])
    scales = pages.exact.abs().amax((-1, -2), keepdim=True) / 448
    codes = torch.where(scales > 0, pages.exact * (1 / scales), 0.0).clamp(-448, 448)
    right = codes.to(torch.float8_e4m3fn).float() * scales
    assert torch.allclose(pages.expanded, right, rtol=1e-6)


def test_only_pages_that_are_full_now_are_rounded() -> None:
    case = Case()
    pages = Pages(case)
    before = pages.expanded
    opened = (2 * pages.opened[0], pages.opened[1])
    slots, targets = torch.tensor([5 * 16 + 15, 6 * 16 + 3]), torch.tensor([9, -1])
    round_open_pages(*opened, pages.numbers, pages.scales, slots, targets)
    changed = (pages.expanded != before).flatten(2).any(2)
    assert changed.nonzero().tolist() == [[0, 9], [1, 9]]


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_pages_that_were_never_rounded_are_finite_when_expanded() -> None:
    """Whatever their memory held: scales that are no numbers, or too large for 16 bits."""
    pages = Pages(Case())
    ids, shape = torch.arange(4, dtype=torch.int32), (2, 4, *pages.numbers[0].shape[1:])
    pages.scales[0][:3, 0] = torch.tensor([float("nan"), float("inf"), 1e4])
    right = pages.expanded[:, :4].half()
    out = torch.full(shape, float("nan"), dtype=torch.float16)
    expand_rounded_pages(pages.numbers, pages.scales, ids, 4, out)
    assert torch.equal(out, torch.where(right.isfinite(), right, 0.0))
    assert out[0, :2, 0].count_nonzero() == 0


@pytest.mark.parametrize("is_expanded", [False, True], ids=["direct", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_read_their_own_page_as_computed_and_earlier_pages_rounded(
    name: str, monkeypatch: pytest.MonkeyPatch, *, is_expanded: bool
) -> None:
    """A decode, a prompt over several pages with shared ones before it, the first page of a
    sequence, and a prompt from its start. Own pages are read by one program for each token, or for
    several."""
    if is_expanded:
        monkeypatch.setattr(open_pages_kernel, "MANY_TOKENS", 1)
    case = CASES[name]
    pages, size = Pages(case), case.page_size
    ids = list(range(200))
    works = [
        Work(Seq(0, ids, [0, 1, 2, 3], size * 2 + 5, 2), 1),
        Work(Seq(1, ids, [0, 1, 4, 5, 6], size * 2 + 3, 2), 2 * size + 4),
        Work(Seq(2, ids, [7, 8], 3), 1),
        Work(Seq(3, ids, [9, 10, 11], 0), 2 * size + 8),
    ]
    step = a_step(works, size, 99)
    spans = before_own_pages(step.spans, step.positions, size)
    if case.window is not None:
        spans = clip_spans(spans, step.positions, case.window, size)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(step.num_tokens, case.heads, case.dim, generator=generator)
    sinks = torch.randn(case.heads, generator=generator) if case.has_sinks else None
    attention = make_attention(case)
    attention.plan(spans, 0.0 if is_expanded else NEVER)
    assert attention.is_expanding == is_expanded
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
    attention.run(q, *pages.numbers, out=out, lse=lse, scales=pages.scales)
    positions, slots = torch.from_numpy(step.positions), torch.from_numpy(step.write_slots)
    attend_open_pages(
        q, *pages.opened, out, lse, positions.long(), slots,
        scale=case.dim**-0.5, window=case.window, softcap=case.softcap, sinks=sinks,
    )  # fmt: skip
    row = 0
    for work in works:
        for position in range(work.seq.num_done, work.seq.num_done + work.num_tokens):
            right = read(case, pages, work.seq.pages, position, q[row], sinks)
            torch.testing.assert_close(out[row], right, rtol=1e-4, atol=1e-5)
            row += 1


def make_attention(case: Case, num_places: int = NUM_PAGES) -> ExpandingAttention:
    make = partial(
        SpanAttention,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        page_size=case.page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        limits=AttentionLimits(max_tokens=256, max_pages=4096),
        has_window=case.window is not None,
        softcap=case.softcap,
    )
    page_bytes = 2 * 4 * case.kv_heads * case.page_size * case.dim
    memory = torch.full((num_places * page_bytes + 100,), 255, dtype=torch.uint8)  # all NaN
    return ExpandingAttention(make(is_rounded=True), make(before_own_page=True), memory)


def read(
    case: Case, pages: Pages, page_ids: list[int], position: int, q: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attention of one token, key by key."""
    size = case.page_size
    first = 0 if case.window is None else max(0, position - case.window + 1)
    expanded, found = pages.expanded, []
    for key in range(first, position + 1):
        source = pages.exact if key // size == position // size else expanded
        found.append(source[:, page_ids[key // size], :, key % size])
    k, v = torch.stack(found, 2).repeat_interleave(case.heads // case.kv_heads, 1).unbind()
    scores = torch.einsum("hd,hkd->hk", q, k) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None]), 1)
        v = torch.cat((v, torch.zeros(case.heads, 1, case.dim)), 1)
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), v)


def test_a_step_without_rounded_pages_reads_open_ones_only() -> None:
    step = a_step([Work(Seq(0, list(range(9)), [3]), 9)], 16, 99)
    spans = before_own_pages(step.spans, step.positions, 16)
    assert np.diff(spans.query_starts).tolist() == [9]  # the kernel hides the page
    lone = a_step([Work(Seq(0, list(range(9)), [3], 5), 1)], 16, 99)
    assert len(before_own_pages(lone.spans, lone.positions, 16)) == 0


def spans_of(works: list[Work]) -> Spans:
    step = a_step(works, 16, 99)
    return before_own_pages(step.spans, step.positions, 16)


def test_pages_are_expanded_if_many_rows_read_them() -> None:
    """Queries x heads of a KV head, on average over the keys of all pages, each counted once."""
    attention = make_attention(Case())  # two rows a token
    ids = list(range(200))
    prompt = Work(Seq(0, ids, [0, 1, 2, 3], 32), 32)  # 32 queries read 32 to 64 of 64 keys
    spans = spans_of([prompt])
    for rows, is_expanded in ((47.0, True), (49.0, False), (NEVER, False), (0.0, True)):
        attention.plan(spans, rows)
        assert attention.is_expanding == is_expanded
    decode = Work(Seq(1, ids, [4, 5, 6, 7, 8], 65), 1)  # its 64 keys are read by two rows
    mixed = spans_of([prompt, decode])
    for rows, is_expanded in ((24.0, True), (26.0, False)):
        attention.plan(mixed, rows)
        assert attention.is_expanding == is_expanded


def test_steps_with_more_pages_than_fit_are_not_expanded() -> None:
    spans = spans_of([Work(Seq(0, list(range(200)), [9, 2, 5, 7], 0), 64)])
    for num_places, is_expanded in ((4, True), (3, False)):
        attention = make_attention(Case(), num_places)
        assert attention.num_places == num_places
        attention.plan(spans, 1.0)
        assert attention.is_expanding == is_expanded


def test_a_page_in_several_spans_is_expanded_once() -> None:
    pages, places = numbered(np.array([7, 3, 9, 3, 7], np.int32))
    assert pages.tolist() == [3, 7, 9]
    assert pages[places].tolist() == [7, 3, 9, 3, 7]
    none, no_places = numbered(np.zeros(0, np.int32))
    assert len(none) == len(no_places) == 0


def test_plans_that_expand_and_others_follow_each_other() -> None:
    """Also a plan that is like the last one, and one without pages."""
    case = Case()
    pages, attention = Pages(case), make_attention(case)
    generator = torch.Generator().manual_seed(1)
    ids = list(range(200))
    first = spans_of([Work(Seq(0, ids, [3, 8, 1, 6], 20), 40)])
    other = spans_of([Work(Seq(0, ids, [5, 8, 2, 6], 20), 40)])
    q = torch.randn(40, case.heads, case.dim, generator=generator)

    def run(spans: Spans, rows: float) -> Tensor:
        launches = attention.plan(spans, rows)
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
        return attention.run(q, *pages.numbers, out, lse, scales=pages.scales, launches=launches)

    right = [run(spans, NEVER) for spans in (first, other)]
    assert not torch.equal(right[0], right[1])
    for spans, wanted in ((first, right[0]), (other, right[1]), (first, right[0])):
        torch.testing.assert_close(run(spans, 0.0), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run(spans, NEVER), wanted, rtol=0, atol=0)
    nothing = spans_of([Work(Seq(0, ids, [5], 5), 1)])
    assert len(nothing) == 0
    assert (run(nothing, 0.0) == 0).all()
