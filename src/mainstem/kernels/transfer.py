# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Whole pages between where layers keep them and one buffer, in which the parts of a page lie one
after the other.

K and V of one page and layer are some ten KB each: too small for copy engines to be fast at. They
move the buffer; this kernel spreads or collects it within the device's memory, in some ten
microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.ops import LayoutError

NUM_PROGRAMS = 264
TILE_WORDS = 2048


@triton.jit(do_not_specialize=["first_layer", "num_layers", "num_pages"])  # one binary for all
def _copy_pages_kernel(
    layers_ptr, pages_ptr, buffer_ptr, first_layer, num_layers, num_pages,
    half_words, device_half_words,
    TO_PAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """An item is TILE words of K or of V of one page and layer; programs take turns at them."""
    tiles = tl.cdiv(half_words, TILE)
    for item in range(tl.program_id(0), num_layers * num_pages * 2 * tiles, tl.num_programs(0)):
        half = (item // tiles) % 2
        place = (item // (2 * tiles)) % num_pages
        layer = item // (2 * tiles * num_pages)
        page = tl.load(pages_ptr + place).to(tl.int64)
        device = tl.load(layers_ptr + first_layer + layer).to(tl.pointer_type(tl.int32))
        words = (item % tiles) * TILE + tl.arange(0, TILE)
        mask = words < half_words
        row = (place * num_layers + layer) * 2 + half
        buffer_cells = buffer_ptr + row * half_words + words
        page_cells = device + half * device_half_words + page * half_words + words
        if TO_PAGES:
            tl.store(page_cells, tl.load(buffer_cells, mask=mask), mask=mask)
        else:
            tl.store(buffer_cells, tl.load(page_cells, mask=mask), mask=mask)


class PageMover:
    """Copies between page tensors [2, pages, kv_heads, page_size, head_dim], one a layer, and
    buffers of bytes that hold [pages][layers][2][kv_heads, page_size, head_dim]."""

    def __init__(self, layers: list[Tensor]) -> None:
        for layer in layers:
            if layer.ndim != 5 or layer.shape[0] != 2 or not layer.is_contiguous():
                raise LayoutError(
                    "pages must be contiguous [2, pages, kv_heads, page_size, head_dim], got "
                    f"{tuple(layer.shape)}"
                )
        half_bytes = layers[0][0, 0].nbytes
        if half_bytes % 4:
            raise LayoutError(f"pages of {half_bytes} bytes a half are not whole words")
        self._layers = layers
        self._addresses = torch.tensor(
            [layer.data_ptr() for layer in layers], dtype=torch.int64, device=layers[0].device
        )
        self._half_words = half_bytes // 4
        self._device_half_words = layers[0][0].nbytes // 4

    def spread(self, buffer: Tensor, pages: Tensor, first_layer: int, num_layers: int) -> None:
        """From the buffer to `pages`, int32, of some layers."""
        self._launch(buffer, pages, first_layer, num_layers, to_pages=True)

    def collect(self, buffer: Tensor, pages: Tensor, first_layer: int, num_layers: int) -> None:
        self._launch(buffer, pages, first_layer, num_layers, to_pages=False)

    def _launch(
        self, buffer: Tensor, pages: Tensor, first_layer: int, num_layers: int, to_pages: bool
    ) -> None:
        if pages.dtype != torch.int32 or pages.ndim != 1:
            raise LayoutError(f"pages must be int32 [pages], got {tuple(pages.shape)}")
        needed = len(pages) * num_layers * 2 * self._half_words * 4
        if buffer.dtype != torch.uint8 or buffer.numel() < needed:
            raise LayoutError(f"buffer must have {needed} bytes, got {buffer.numel()}")
        _copy_pages_kernel[(NUM_PROGRAMS,)](
            self._addresses, pages, buffer.view(torch.int32), first_layer, num_layers, len(pages),
            self._half_words, self._device_half_words,
            TO_PAGES=to_pages, TILE=TILE_WORDS, num_warps=4,
        )  # fmt: skip
