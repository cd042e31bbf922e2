"""The last layer computes only the spans of the rows that are needed."""

import numpy as np
import torch

from mainstem.core.step import Spans
from mainstem.kernels.attention import reference
from mainstem.kernels.attention.window import clip_spans
from mainstem.runner.attention import narrow_spans
from tests.runner.steps import make_spans, positions_of

SPANS = make_spans(
    [
        ([0, 1, 2, 3, 4, 5, 6], [0, 1], 8, False),
        ([0], [2], 3, True),
        ([1, 2, 3], [3], 4, True),
        ([4, 5, 6], [4], 3, True),
    ]
)


def attend(spans: Spans, q: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 5, 2, 4, 8, generator=generator)
    return reference.span_attention(q, k, v, spans, 0.3)[0]


def test_the_needed_rows_see_the_same_keys_as_before() -> None:
    q = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(1))
    everything = attend(SPANS, q)
    for rows in ([0], [3], [0, 3, 6], [0, 2, 3, 4, 5, 6], [5, 6], list(range(7))):
        narrowed = narrow_spans(SPANS, np.array(rows), 7)
        assert narrowed is not None
        torch.testing.assert_close(attend(narrowed, q[rows]), everything[rows])


def test_the_needed_rows_keep_their_windows() -> None:
    q = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(1))
    clipped = clip_spans(SPANS, positions_of(SPANS, 7), 6, 4)
    everything = attend(clipped, q)
    for rows in ([0], [0, 3, 6], [5, 6]):
        narrowed = narrow_spans(clipped, np.array(rows), 7)
        assert narrowed is not None
        torch.testing.assert_close(attend(narrowed, q[rows]), everything[rows])


def test_rows_that_cannot_be_spans_are_refused() -> None:
    assert narrow_spans(SPANS, np.array([1, 3]), 7) is None  # row 2, of their span, is left out
    assert narrow_spans(SPANS, np.array([4, 5]), 7) is None  # row 6, of their span, is left out
    assert narrow_spans(SPANS, np.array([3, 0]), 7) is None
    assert narrow_spans(SPANS, np.array([0, 0]), 7) is None
