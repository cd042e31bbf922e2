"""Attention to pages, compared with a plain softmax for one query and head at a time."""

import math

import pytest
import torch

from mainstem.kernels.attention import mass
from mainstem.kernels.attention.mass import page_masses

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


def by_hand(
    q: torch.Tensor,
    keys: torch.Tensor,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """keys [kv_heads, keys, dim], in order."""
    masses = torch.zeros(-(-keys.shape[1] // PAGE), dtype=torch.float64)
    for row in range(len(q)):
        at = first + row
        seen = range(0 if window is None else max(0, at - window + 1), at + 1)
        for head in range(HEADS):
            scores = [float(q[row, head] @ keys[head // 2, key]) * scale for key in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            others = [] if sinks is None else [float(sinks[head])]
            total = sum(math.exp(score) for score in [*scores, *others])
            for key, score in zip(seen, scores, strict=True):
                masses[key // PAGE] += math.exp(score) / total
    return masses


@pytest.mark.parametrize("max_scores", [1 << 24, 100])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (6, None, False), (9, 0.7, True)]
)
def test_masses_are_those_of_softmax(
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    max_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mass, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    page_ids = torch.tensor([5, 2, 7, 0, 3])
    k_pages = torch.randn(9, KV_HEADS, PAGE, DIM)
    keys = k_pages[page_ids].transpose(0, 1).reshape(KV_HEADS, -1, DIM)[:, :18]
    k_pages[3, :, 2:] = float("nan")  # slots after the last token
    q = torch.randn(5, HEADS, DIM)
    sinks = torch.randn(HEADS) if has_sinks else None
    found = page_masses(
        q, k_pages, page_ids, 13, scale=0.4, window=window, softcap=softcap, sinks=sinks
    )
    wanted = by_hand(q, keys, 13, 0.4, window, softcap, sinks)
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    if sinks is None:
        assert float(found.sum()) == pytest.approx(5 * HEADS, rel=1e-5)
