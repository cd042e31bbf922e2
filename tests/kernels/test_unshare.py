"""Joined runs give the same attention, with fewer spans per token."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

from mainstem.core.step import Spans  # noqa: E402
from mainstem.kernels.attention import reference  # noqa: E402
from mainstem.kernels.attention.unshare import unshare  # noqa: E402

pytestmark = pytest.mark.torch

PAGE = 4
Runs = list[tuple[list[int], int, bool]]  # rows, keys, causal


def make_spans(runs: Runs) -> Spans:
    pages = [-(-keys // PAGE) for _, keys, _ in runs]
    return Spans(
        query_starts=np.cumsum([0] + [len(rows) for rows, _, _ in runs]).astype(np.int32),
        query_rows=np.concatenate([np.array(rows, np.int32) for rows, _, _ in runs]),
        page_starts=np.cumsum([0, *pages]).astype(np.int32),
        page_ids=np.random.default_rng(0).permutation(sum(pages)).astype(np.int32),
        key_tokens=np.array([keys for _, keys, _ in runs], np.int32),
        is_causal=np.array([causal for _, _, causal in runs]),
        key_positions=np.zeros(len(runs), np.int32),
    )


SHARED: Runs = [
    (list(range(8)), 2 * PAGE, False),
    (list(range(4)), PAGE, False),
    ([0, 1, 2], 5, True),
    ([3], 2, True),
    ([4, 5, 6, 7], 9, True),
]


def attend(spans: Spans) -> "Tensor":
    generator = torch.Generator().manual_seed(0)
    k_pages, v_pages = torch.randn(2, 32, 2, PAGE, 8, generator=generator)
    q = torch.randn(8, 4, 8, generator=generator)
    return reference.span_attention(q, k_pages, v_pages, spans, 0.3)[0]


def test_the_answer_is_the_same_and_no_token_lies_in_two_spans() -> None:
    spans = make_spans(SHARED)
    joined = unshare(spans, PAGE, least_queries=1)
    assert len(joined) == 3
    assert sorted(joined.query_rows.tolist()) == list(range(8))
    assert torch.allclose(attend(joined), attend(spans), atol=1e-6)


def test_short_spans_can_stay_shared() -> None:
    spans = make_spans(SHARED)
    joined = unshare(spans, PAGE, least_queries=4)
    # row 3 keeps its three spans; a span of rows 0 to 2 has fewer than 4 queries
    assert np.bincount(joined.query_rows).tolist() == [3, 3, 3, 3, 1, 1, 1, 1]
    assert torch.allclose(attend(joined), attend(spans), atol=1e-6)


@pytest.mark.parametrize(
    "runs",
    [
        [([0, 1], PAGE + 1, False), ([0], 3, True), ([1], 2, True)],  # a page that is not full
        [([0], PAGE, False), ([0, 1], 3, True)],  # rows of one span have different runs before it
        [([0, 1], 2, True), ([0], PAGE, False), ([1], PAGE, False)],  # the own run is not last
    ],
)
def test_spans_that_cannot_be_joined_stay(runs: Runs) -> None:
    spans = make_spans(runs)
    joined = unshare(spans, PAGE, least_queries=1)
    assert joined.query_rows.tolist() == spans.query_rows.tolist()
    assert joined.page_ids.tolist() == spans.page_ids.tolist()
