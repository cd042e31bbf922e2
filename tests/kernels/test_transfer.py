"""Distributing pages and copying slots, under the interpreter: every word arrives, and no other
memory changes."""

import pytest
import torch

from tests.kernels.interpreted import require_interpreter

require_interpreter()

from mainstem.kernels.errors import LayoutError  # noqa: E402
from mainstem.kernels.memory.copy import copy_slots  # noqa: E402
from mainstem.kernels.memory.transfer import PageSpread  # noqa: E402

SHAPES = {
    "whole tiles": (3, 9, 2, 16, 128),  # layers, pages, kv_heads, page_size, head_dim
    "one token a page": (2, 5, 1, 1, 64),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pages_arrive_where_they_belong(name: str, dtype: torch.dtype) -> None:
    num_layers, pages, *inner = SHAPES[name]
    layers = torch.randn(num_layers, 2, pages, *inner).to(dtype)
    before = layers.clone()
    given = torch.randn(2, num_layers - 1, 2, *inner).to(dtype)
    buffer = torch.cat([given.view(-1).view(torch.int32), torch.full((16,), 77).int()])
    PageSpread(layers[1:]).run(buffer, torch.tensor([4, 1], dtype=torch.int32))
    expected = before.clone()
    expected[1:, :, 4] = given[0]
    expected[1:, :, 1] = given[1]
    assert torch.equal(layers, expected)
    PageSpread(layers).run(buffer, torch.empty(0, dtype=torch.int32))
    assert torch.equal(layers, expected)


@pytest.mark.parametrize("inner", [(2, 16, 64), (3, 4, 80)], ids=str)
def test_slots_are_copied_in_all_layers(inner: tuple[int, int, int]) -> None:
    _, page_size, _ = inner
    pages = torch.randn(4, 5, *inner)  # K and V of two layers
    right = pages.clone()
    for offset in range(3):
        right[:, 4, :, offset] = pages[:, 1, :, offset]
    from_slots = torch.arange(3) + page_size
    copy_slots(pages, from_slots, torch.arange(3) + 4 * page_size)
    assert torch.equal(pages, right)
    copy_slots(pages, from_slots[:0], from_slots[:0])
    assert torch.equal(pages, right)
    with pytest.raises(LayoutError, match="target_slots"):
        copy_slots(pages, from_slots, from_slots[:1])
    with pytest.raises(LayoutError, match="pages"):
        copy_slots(pages[1:], from_slots, from_slots)


def test_odd_layouts_are_refused() -> None:
    buffer = torch.zeros(16, dtype=torch.int32)
    first = torch.zeros(1, dtype=torch.int32)
    layers = torch.zeros(1, 2, 2, 1, 4, 8)
    with pytest.raises(LayoutError, match="contiguous"):
        PageSpread(layers.transpose(4, 5))
    with pytest.raises(LayoutError, match="int32"):
        PageSpread(layers).run(buffer, first.long())
    with pytest.raises(LayoutError, match="must have at least 64 words, got 16"):
        PageSpread(layers).run(buffer, first)
    with pytest.raises(LayoutError, match="multiple of 4 bytes per layer, got 2"):
        PageSpread(torch.zeros(1, 2, 2, 1, 1, 1).half())
