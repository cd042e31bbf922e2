"""Pages on a CPU: K and V of every layer, head by head.

    [layer][K or V][kv_heads, pages, page_size, head_dim]

Neighbouring pages are one run of a head's slots, which attention reads in place. K and V of a layer
lie in one block of memory, so that one write serves both. Memory is not initialised: a page costs
nothing until it is written, and unwritten slots may hold anything.
"""

import torch
from torch import Tensor

from mainstem.models.spec import ModelSpec


class DevicePages:
    """Owns the page tensors; the control plane decides which sequence uses which page."""

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (len(spec.attentions), 2, spec.num_kv_heads, num_pages * page_size, spec.head_dim)
        self.all_slots = torch.empty(shape, dtype=dtype)
        self._layers = self.all_slots.unbind()
        self._rows = [layer.view(-1, spec.head_dim) for layer in self._layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        return self.all_slots.nbytes // self.num_pages

    def slots(self, layer: int) -> Tensor:
        """[2, kv_heads, pages * page_size, head_dim], K first; the order in memory."""
        return self._layers[layer]

    def joint(self, layer: int) -> Tensor:
        """The same memory as a view page by page: [2, pages, kv_heads, page_size, head_dim]."""
        both, kv_heads, _, dim = self._layers[layer].shape
        shape = (both, kv_heads, self.num_pages, self.page_size, dim)
        return self._layers[layer].view(shape).transpose(1, 2)

    def keys(self, layer: int) -> Tensor:
        return self.joint(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self.joint(layer)[1]

    def write_rows(self, slots: Tensor) -> Tensor:
        """Return the rows to which `append` writes a layer's new K and V. They are the same for all
        layers.

        `slots` [tokens] are page * page_size + offset.
        """
        both, kv_heads, num_slots, _ = self._layers[0].shape
        heads = torch.arange(both * kv_heads) * num_slots
        return (slots[:, None] + heads).reshape(-1)

    def copy(self, layer: int, source_rows: Tensor, target_rows: Tensor) -> None:
        """Copy K and V of some slots, given as rows of `write_rows`."""
        flat = self._rows[layer]
        flat.index_copy_(0, target_rows, flat.index_select(0, source_rows))

    def append(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Write kv [tokens, 2 * kv_heads, dim], key heads first."""
        target = self._rows[layer]
        target.index_copy_(0, rows, kv.reshape(-1, target.shape[1]))
