# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Copies some layers of pages from a staging buffer, which holds them page by page, to the layers'
memory.

A few layers of a page are a row in host memory. A copy engine copies many rows with one command,
but needs one command per page to write them to their final places. So copy engines fill the staging
buffer, and this kernel distributes it within the device's memory, in about ten microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError

NUM_PROGRAMS = 264
TILE_WORDS = 2048


@triton.jit(  # one binary for all values
    do_not_specialize=["num_layers", "num_pages"], do_not_specialize_on_alignment=["pages_ptr"]
)
def _spread_kernel(
    layers_ptr, buffer_ptr, pages_ptr, num_layers, num_pages, half_words, stride_words,
    TILE: tl.constexpr,
):  # fmt: skip
    """An item is TILE words of K or V of one page and layer; each of n programs takes every n-th
    item.
    """
    tiles = tl.cdiv(half_words, TILE)
    for item in range(tl.program_id(0), num_pages * num_layers * 2 * tiles, tl.num_programs(0)):
        half = (item // tiles) % (2 * num_layers)  # K and V of a layer, then of the next
        place = item // (tiles * 2 * num_layers)
        page = tl.load(pages_ptr + place).to(tl.int64)
        words = (item % tiles) * TILE + tl.arange(0, TILE)
        mask = words < half_words
        found = tl.load(buffer_ptr + (item // tiles) * half_words + words, mask=mask)
        cells = half.to(tl.int64) * stride_words + page * half_words + words
        tl.store(layers_ptr + cells, found, mask=mask)


class PageSpread:
    """Writes buffers to some layers of pages. Made once for these layers: a load of a few pages
    takes the host longer than the link, so what does not change is not computed again."""

    def __init__(self, layers: Tensor) -> None:
        """layers: [layers, 2, all pages, kv_heads, page_size, head_dim], the layers to write,
        contiguous."""
        if layers.ndim != 6 or layers.shape[1] != 2 or not layers.is_contiguous():
            raise LayoutError(
                "layers must be contiguous [layers, 2, pages, kv_heads, page_size, head_dim], got "
                f"{tuple(layers.shape)}"
            )
        half_bytes = layers[0, 0, 0].nbytes
        if half_bytes % 4:
            raise LayoutError(
                f"a page's K must have a multiple of 4 bytes per layer, got {half_bytes}"
            )
        self._words, self._num_layers = layers.view(torch.int32), len(layers)
        self._half_words, self._stride_words = half_bytes // 4, layers[0, 0].nbytes // 4

    def run(self, buffer: Tensor, pages: Tensor) -> None:
        """Write the buffer to these pages. buffer: int32 words that hold [pages][layers][2]
        [kv_heads, page_size, head_dim]; pages: int32 ids."""
        num_pages = len(pages)
        if pages.dtype != torch.int32 or pages.ndim != 1:
            got = f"{pages.dtype} {tuple(pages.shape)}"
            raise LayoutError(f"pages must be int32 [pages], got {got}")
        needed = num_pages * self._num_layers * 2 * self._half_words
        if buffer.dtype != torch.int32 or buffer.numel() < needed:
            raise LayoutError(f"buffer must have at least {needed} words, got {buffer.numel()}")
        _spread_kernel[(NUM_PROGRAMS,)](
            self._words, buffer, pages, self._num_layers, num_pages, self._half_words,
            self._stride_words, TILE=TILE_WORDS, num_warps=4,
        )  # fmt: skip
