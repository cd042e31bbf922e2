"""PageMover under the interpreter: every word arrives, none beside it is touched."""

import pytest
import torch

from tests.kernels.interpreted import require_interpreter

require_interpreter()

from mainstem.kernels.ops import LayoutError  # noqa: E402
from mainstem.kernels.transfer import PageMover  # noqa: E402

SHAPES = {
    "a tile and a bit": (3, 9, 2, 16, 128),  # layers, pages, kv_heads, page_size, head_dim
    "one token a page": (2, 5, 1, 1, 64),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pages_come_back_as_they_went(name: str, dtype: torch.dtype) -> None:
    num_layers, pages, *inner = SHAPES[name]
    layers = [torch.randn(2, pages, *inner).to(dtype) for _ in range(num_layers)]
    before = [layer.clone() for layer in layers]
    page_bytes = num_layers * layers[0][:, 0].nbytes
    buffer = torch.full((3 * page_bytes,), 77, dtype=torch.uint8)
    mover = PageMover(layers)
    mover.collect(buffer, torch.tensor([4, 1], dtype=torch.int32), 0, num_layers)
    for place, page in enumerate((4, 1)):
        wanted = torch.stack([layer[:, page] for layer in before]).contiguous()
        found = buffer[place * page_bytes : (place + 1) * page_bytes]
        assert torch.equal(found, wanted.view(-1).view(torch.uint8))
    assert (buffer[2 * page_bytes :] == 77).all()
    mover.collect(buffer, torch.tensor([4], dtype=torch.int32), 1, num_layers - 1)
    mover.spread(buffer, torch.tensor([0], dtype=torch.int32), 1, num_layers - 1)
    for layer in range(num_layers):
        expected = before[layer].clone()
        if layer >= 1:
            expected[:, 0] = before[layer][:, 4]
        assert torch.equal(layers[layer], expected)


def test_odd_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        PageMover([torch.zeros(2, 2, 1, 4, 8).transpose(3, 4)])
    mover = PageMover([torch.zeros(2, 2, 1, 4, 8)])
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="int32"):
        mover.collect(buffer, torch.zeros(1, dtype=torch.int64), 0, 1)
    with pytest.raises(LayoutError, match="must have 256 bytes, got 64"):
        mover.spread(buffer, torch.zeros(1, dtype=torch.int32), 0, 1)
