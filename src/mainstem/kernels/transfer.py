# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Whole pages between device memory and pinned host memory, by a few programs that read or write
the host's memory themselves.

K and V of one page and layer are some ten KB each: too small for the copy engine to be fast at, and
each call would cost host time. One launch moves some layers of many pages, and takes so few
programs that the rest of the card computes on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.ops import LayoutError

NUM_PROGRAMS = 48
TILE_WORDS = 2048


@triton.jit(do_not_specialize=["first_layer", "num_layers", "num_places"])  # one binary for all
def _copy_pages_kernel(
    layers_ptr, places_ptr, slab_address, first_layer, num_layers, num_places,
    slot_words, half_words, device_half_words,
    TO_DEVICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """An item is TILE words of K or of V of one page and layer; programs take turns at them."""
    tiles = tl.cdiv(half_words, TILE)
    slab = slab_address.to(tl.pointer_type(tl.int32))
    for item in range(tl.program_id(0), num_layers * num_places * 2 * tiles, tl.num_programs(0)):
        half = (item // tiles) % 2
        place = (item // (2 * tiles)) % num_places
        layer = first_layer + item // (2 * tiles * num_places)
        slot = tl.load(places_ptr + 2 * place)
        page = tl.load(places_ptr + 2 * place + 1)
        device = tl.load(layers_ptr + layer).to(tl.pointer_type(tl.int32))
        words = (item % tiles) * TILE + tl.arange(0, TILE)
        mask = words < half_words
        host_cells = slab + slot * slot_words + (2 * layer + half) * half_words + words
        device_cells = device + half * device_half_words + page * half_words + words
        if TO_DEVICE:
            tl.store(device_cells, tl.load(host_cells, mask=mask), mask=mask)
        else:
            tl.store(host_cells, tl.load(device_cells, mask=mask), mask=mask)


class PageMover:
    """Copies between page tensors [2, pages, kv_heads, page_size, head_dim], one a layer, and slots
    of pinned memory that hold [layers][2][kv_heads, page_size, head_dim]."""

    def __init__(self, layers: list[Tensor], slab_address: int, slot_bytes: int) -> None:
        for layer in layers:
            if layer.ndim != 5 or layer.shape[0] != 2 or not layer.is_contiguous():
                raise LayoutError(
                    "pages must be contiguous [2, pages, kv_heads, page_size, head_dim], got "
                    f"{tuple(layer.shape)}"
                )
        half_bytes = layers[0][0, 0].nbytes
        if half_bytes % 4 or slot_bytes % 4:
            raise LayoutError(f"pages of {half_bytes} bytes a half are not whole words")
        self._layers = layers
        self._addresses = torch.tensor(
            [layer.data_ptr() for layer in layers], dtype=torch.int64, device=layers[0].device
        )
        self._slab_address = slab_address
        self._slot_words = slot_bytes // 4
        self._half_words = half_bytes // 4
        self._device_half_words = layers[0][0].nbytes // 4

    def to_device(self, places: Tensor, first_layer: int, num_layers: int) -> None:
        """places [pages, 2] int64: slot, page; the kernel reads them, so pinned memory will do."""
        self._launch(places, first_layer, num_layers, to_device=True)

    def to_host(self, places: Tensor, first_layer: int, num_layers: int) -> None:
        self._launch(places, first_layer, num_layers, to_device=False)

    def _launch(self, places: Tensor, first_layer: int, num_layers: int, to_device: bool) -> None:
        if places.dtype != torch.int64 or places.ndim != 2 or places.shape[1] != 2:
            raise LayoutError(f"places must be int64 [pages, 2], got {tuple(places.shape)}")
        _copy_pages_kernel[(NUM_PROGRAMS,)](
            self._addresses, places, self._slab_address, first_layer, num_layers, len(places),
            self._slot_words, self._half_words, self._device_half_words,
            TO_DEVICE=to_device, TILE=TILE_WORDS, num_warps=4,
        )  # fmt: skip
